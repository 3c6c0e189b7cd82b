/* The public model: loading, figures, and the program that an executor runs. */
#include <cellkv/model.h>

#include <stdatomic.h>

#include <cellkv/device.h>

#include "architecture.h"
#include "blocks.h"
#include "cells/error.h"
#include "cells/memory.h"
#include "placement.h"

enum { N_OUTPUTS = CELLKV_OUTPUT_HIDDEN + 1 };

/* The context of one of the model's programs. */
struct ck_model_use {
    struct cellkv_model *model;
    cellkv_output output;
};

struct cellkv_model {
    struct ck_model_use uses[N_OUTPUTS];
    atomic_int n_references; /* the caller's, and one per executor */
    const struct ck_architecture *architecture;
    struct ck_decoder decoder;
    ggml_backend_dev_t *of_layer; /* [decoder.n_layers] */
    char *devices;                /* the same as a text (device.h) */
    struct ck_homes homes;
    struct ck_file *file; /* open while weights are mapped from it; else NULL */
    cellkv_layer *layers; /* [decoder.n_layers], for caches */
    int64_t n_parameters;
    int64_t weight_bytes;
};

cellkv_model_config cellkv_model_config_default(void) {
    return (cellkv_model_config){
        .size = sizeof(cellkv_model_config), .device = NULL, .use_mmap = true, .repack = true};
}

/* ---- references ---- */

static void destroy(struct cellkv_model *model) {
    cellkv_devices_enter(model->of_layer, model->decoder.n_layers);
    ck_homes_free(&model->homes);
    cellkv_devices_leave(model->of_layer, model->decoder.n_layers);
    ck_file_close(model->file);
    ck_decoder_free(&model->decoder);
    ck_free(model->layers);
    ck_free(model->of_layer);
    ck_free(model->devices);
    ck_free(model);
}

static void retain(void *context) {
    const struct ck_model_use *use = context;
    atomic_fetch_add(&use->model->n_references, 1);
}

static void drop(struct cellkv_model *model) {
    if (atomic_fetch_sub(&model->n_references, 1) == 1) {
        destroy(model);
    }
}

static void release(void *context) {
    const struct ck_model_use *use = context;
    drop(use->model);
}

void cellkv_model_free(cellkv_model *model) {
    if (model != NULL) {
        drop(model);
    }
}

/* ---- loading ---- */

static cellkv_status find_architecture(const struct ck_source *source,
                                       const struct ck_architecture **architecture) {
    struct ck_metadata general = {.gguf = source->gguf};
    const char *name = ck_metadata_string(&general, "general.architecture");
    if (ck_metadata_int_or(&general, "split.count", 0, INT32_MAX, 0) > 1) {
        ck_metadata_refuse(&general, "split.count", "split models are unsupported");
    }
    if (general.status != CELLKV_OK) {
        return general.status;
    }
    return ck_architecture_find(name, architecture);
}

static cellkv_status read_hyperparameters(struct cellkv_model *model,
                                          const struct ck_source *source) {
    struct ck_metadata metadata = {.gguf = source->gguf, .prefix = model->architecture->name};
    model->architecture->read(&model->decoder, &metadata);
    return metadata.status;
}

/* Which device each layer goes to, and the text that says it to others. */
static cellkv_status find_devices(struct cellkv_model *model, const char *devices) {
    const int32_t n = model->decoder.n_layers;
    model->of_layer = ck_calloc((size_t)n, sizeof *model->of_layer);
    if (model->of_layer == NULL) {
        return ck_fail_memory("the layers' devices");
    }
    cellkv_status status = cellkv_devices_of_layers(devices, n, model->of_layer);
    if (status != CELLKV_OK) {
        return status;
    }
    model->devices =
        ck_strdup(devices != NULL ? devices : ggml_backend_dev_name(model->of_layer[0]));
    return model->devices != NULL ? CELLKV_OK : ck_fail_memory("the names of devices");
}

static cellkv_status place_weights(struct cellkv_model *model, const struct ck_source *source,
                                   bool repack) {
    struct ck_weights weights;
    ck_weights_begin(&weights, source, model->architecture->name);
    model->architecture->want(&model->decoder, &weights);
    ck_weights_refuse_unknown(&weights);
    cellkv_status status = weights.status;
    if (status == CELLKV_OK) {
        const int32_t n = model->decoder.n_layers;
        cellkv_devices_enter(model->of_layer, n);
        status = ck_homes_place(&model->homes, &weights, model->of_layer, n, repack);
        cellkv_devices_leave(model->of_layer, n);
    }
    ck_weights_end(&weights);
    return status;
}

static cellkv_status describe_layers(struct cellkv_model *model) {
    const int32_t n = model->decoder.n_layers;
    model->layers = ck_calloc((size_t)n, sizeof *model->layers);
    if (model->layers == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "%d layers", n);
    }
    for (int32_t l = 0; l < n; l++) {
        const struct ck_attention *attention = &model->decoder.layers[l].attention;
        model->layers[l] = (cellkv_layer){.n_kv_heads = attention->n_kv_heads,
                                          .head_dim_k = attention->head_dim_k,
                                          .head_dim_v = attention->head_dim_v,
                                          .window = attention->window,
                                          .type_k = CELLKV_TYPE_F16,
                                          .type_v = CELLKV_TYPE_F16};
    }
    return CELLKV_OK;
}

static void count_weights(struct cellkv_model *model, const struct ck_source *source) {
    for (int64_t i = 0; i < gguf_get_n_tensors(source->gguf); i++) {
        const struct ck_stored_tensor stored = ck_source_tensor(source, i);
        model->n_parameters += stored.ne[0] * stored.ne[1] * stored.ne[2] * stored.ne[3];
        model->weight_bytes += (int64_t)stored.n_bytes;
    }
}

/* Fills a model from the source; what is half done on failure, destroy() frees. */
static cellkv_status fill(struct cellkv_model *model, struct ck_source *source,
                          const cellkv_model_config *config) {
    cellkv_status status = find_architecture(source, &model->architecture);
    if (status == CELLKV_OK) {
        status = read_hyperparameters(model, source);
    }
    if (status == CELLKV_OK) {
        status = find_devices(model, config->device);
    }
    if (status == CELLKV_OK) {
        status = place_weights(model, source, config->repack);
    }
    if (status == CELLKV_OK) {
        status = describe_layers(model);
    }
    if (status == CELLKV_OK) {
        count_weights(model, source);
    }
    if (model->homes.mapped_bytes > 0) { /* the file stays, the source goes */
        model->file = source->file;
        source->file = NULL;
    }
    return status;
}

/* Makes a model and closes the source. */
static cellkv_status make(struct ck_source *source, const cellkv_model_config *config,
                          cellkv_model **made) {
    struct cellkv_model *model = ck_calloc(1, sizeof *model);
    cellkv_status status;
    if (model == NULL) {
        status = ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "a model");
    } else {
        atomic_init(&model->n_references, 1);
        for (int i = 0; i < N_OUTPUTS; i++) {
            model->uses[i] = (struct ck_model_use){model, (cellkv_output)i};
        }
        status = fill(model, source, config);
    }
    if (status == CELLKV_OK) {
        *made = model;
    } else if (model != NULL) {
        destroy(model);
    }
    ck_source_close(source);
    return status;
}

static cellkv_status check_config(const cellkv_model_config *config) {
    if (config->size != sizeof(cellkv_model_config)) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "config->size is %zu; %zu was expected",
                       config->size, sizeof(cellkv_model_config));
    }
    return CELLKV_OK;
}

cellkv_status cellkv_model_load(const char *path, const cellkv_model_config *config,
                                cellkv_model **model) {
    const cellkv_model_config chosen = config != NULL ? *config : cellkv_model_config_default();
    if (path == NULL || model == NULL) {
        return ck_fail_null(path == NULL ? "path" : "model");
    }
    cellkv_status status = check_config(&chosen);
    if (status != CELLKV_OK) {
        return status;
    }
    struct ck_source source;
    status = ck_source_open(path, chosen.use_mmap, &source);
    return status == CELLKV_OK ? make(&source, &chosen, model) : status;
}

static cellkv_status check_counts(const void *values, int32_t n_values, const void *arrays,
                                  int32_t n_arrays) {
    if (n_values < 0 || n_arrays < 0) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "a negative count");
    }
    if (values == NULL && n_values > 0) {
        return ck_fail_null("values");
    }
    if (arrays == NULL && n_arrays > 0) {
        return ck_fail_null("arrays");
    }
    return CELLKV_OK;
}

cellkv_status cellkv_model_from_arrays(const cellkv_model_value *values, int32_t n_values,
                                       const cellkv_model_array *arrays, int32_t n_arrays,
                                       const cellkv_model_config *config, cellkv_model **model) {
    const cellkv_model_config chosen = config != NULL ? *config : cellkv_model_config_default();
    if (model == NULL) {
        return ck_fail_null("model");
    }
    cellkv_status status = check_config(&chosen);
    if (status == CELLKV_OK) {
        status = check_counts(values, n_values, arrays, n_arrays);
    }
    if (status != CELLKV_OK) {
        return status;
    }
    struct ck_source source;
    status = ck_source_from_arrays(values, n_values, arrays, n_arrays, &source);
    return status == CELLKV_OK ? make(&source, &chosen, model) : status;
}

/* ---- use ---- */

cellkv_status cellkv_model_get_info(const cellkv_model *model, cellkv_model_info *info) {
    if (model == NULL || info == NULL) {
        return ck_fail_null(model == NULL ? "model" : "info");
    }
    if (info->size != sizeof *info) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "info->size is %zu; %zu was expected",
                       info->size, sizeof *info);
    }
    const struct ck_decoder *decoder = &model->decoder;
    *info = (cellkv_model_info){
        .size = sizeof *info,
        .architecture = model->architecture->name,
        .n_vocab = decoder->n_vocab,
        .n_layers = decoder->n_layers,
        .n_embd = decoder->n_embd,
        .n_heads = decoder->layers[0].attention.n_heads,
        .n_context = decoder->n_context,
        .n_parameters = model->n_parameters,
        .weight_bytes = model->weight_bytes,
        .mapped_bytes = model->homes.mapped_bytes,
        .repacked_bytes = model->homes.repacked_bytes,
        .layers = model->layers,
        .devices = model->devices,
    };
    return CELLKV_OK;
}

static cellkv_status build(void *context, cellkv_graph *graph) {
    const struct ck_model_use *use = context;
    return use->model->architecture->build(&use->model->decoder, use->output, graph);
}

cellkv_status cellkv_model_program(cellkv_model *model, cellkv_output output,
                                   cellkv_program *program) {
    if (model == NULL || program == NULL) {
        return ck_fail_null(model == NULL ? "model" : "program");
    }
    if ((int)output < 0 || (int)output >= N_OUTPUTS) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "output %d is none", (int)output);
    }
    const struct ck_decoder *decoder = &model->decoder;
    *program = (cellkv_program){
        .size = sizeof *program,
        .context = &model->uses[output],
        .n_vocab = decoder->n_vocab,
        .n_result = output == CELLKV_OUTPUT_HIDDEN ? decoder->n_embd : decoder->n_vocab,
        .n_layers = model->decoder.n_layers,
        .layers = model->layers,
        .max_tensors = ck_max_tensors(&model->decoder),
        .build = build,
        .retain = retain,
        .release = release,
    };
    return CELLKV_OK;
}

cellkv_status cellkv_model_new_cache(const cellkv_model *model, const cellkv_cache_config *config,
                                     cellkv_type type_k, cellkv_type type_v, cellkv_cache **cache) {
    if (model == NULL || config == NULL || cache == NULL) {
        return ck_fail_null(model == NULL ? "model" : config == NULL ? "config" : "cache");
    }
    if (config->size != sizeof *config) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "config->size is %zu; %zu was expected",
                       config->size, sizeof *config);
    }
    const int32_t n = model->decoder.n_layers;
    cellkv_layer *layers = ck_malloc((size_t)n * sizeof *layers);
    if (layers == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "%d layers", n);
    }
    for (int32_t l = 0; l < n; l++) {
        layers[l] = model->layers[l];
        layers[l].type_k = type_k;
        layers[l].type_v = type_v;
    }
    cellkv_cache_config filled = *config;
    filled.n_layers = n;
    filled.layers = layers;
    if (filled.device == NULL) {
        filled.device = model->devices;
    }
    const cellkv_status status = cellkv_cache_new(&filled, cache);
    ck_free(layers);
    return status;
}
