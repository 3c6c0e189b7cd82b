#include "table_program.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cellkv/device.h>
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>

struct layer {
    cellkv_layer shape;
    int32_t n_heads;
    float scale;
    float soft_cap;
    struct ggml_tensor *q, *k, *v, *sinks;
    struct ggml_context *context;
    ggml_backend_buffer_t buffer; /* on the layer's device */
};

struct table_program {
    cellkv_program interface;
    struct layer *layers;
    cellkv_layer *shapes;
    enum table_fault fault;
    atomic_int n_references;
};

static atomic_int n_alive;

int32_t table_program_alive(void) {
    return atomic_load(&n_alive);
}

const cellkv_program *table_program_interface(const struct table_program *program) {
    return &program->interface;
}

void table_program_set_fault(struct table_program *program, enum table_fault fault) {
    program->fault = fault;
}

/* ---- building ---- */

/* Each token's row of the table, head by head: [width, n_heads, n_tokens]. */
static struct ggml_tensor *look_up(cellkv_graph *graph, struct ggml_tensor *table, int64_t width) {
    struct ggml_context *context = cellkv_graph_context(graph);
    struct ggml_tensor *rows = ggml_get_rows(context, table, cellkv_graph_tokens(graph));
    return ggml_reshape_3d(context, rows, width, table->ne[0] / width,
                           cellkv_graph_n_tokens(graph));
}

static struct ggml_tensor *attend_layer(const struct table_program *program, cellkv_graph *graph,
                                        int32_t index) {
    struct ggml_context *context = cellkv_graph_context(graph);
    const struct layer *layer = &program->layers[index];
    struct ggml_tensor *q = look_up(graph, layer->q, layer->shape.head_dim_k);
    struct ggml_tensor *k = look_up(graph, layer->k, layer->shape.head_dim_k);
    struct ggml_tensor *v = look_up(graph, layer->v, layer->shape.head_dim_v);
    cellkv_attend_params params = {
        .scale = layer->scale, .soft_cap = layer->soft_cap, .sinks = layer->sinks};
    switch (program->fault) {
    case TABLE_FAULT_Q_SHAPE:
        q = ggml_reshape_2d(context, q, q->ne[0] * q->ne[1], q->ne[2]);
        break;
    case TABLE_FAULT_NO_HEADS:
        q = ggml_new_tensor_3d(context, GGML_TYPE_F32, q->ne[0], 0, q->ne[2]);
        break;
    case TABLE_FAULT_NULL_K:
        k = NULL;
        break;
    case TABLE_FAULT_V_TYPE:
        v = ggml_cast(context, v, GGML_TYPE_F16);
        break;
    case TABLE_FAULT_PARAMS:
        params.scale = NAN;
        break;
    case TABLE_FAULT_SINKS:
        params.sinks = ggml_new_tensor_1d(context, GGML_TYPE_F32, layer->n_heads + 1);
        break;
    case TABLE_FAULT_NO_DATA:
        q = ggml_add(context, q, ggml_new_tensor_1d(context, GGML_TYPE_F32, 1));
        break;
    case TABLE_FAULT_LAYER_OUTSIDE:
        index = program->interface.n_layers;
        break;
    case TABLE_FAULT_TWICE:
        if (cellkv_attend(graph, 0, q, k, v, &params) == NULL) {
            return NULL;
        }
        break;
    default:
        break;
    }
    struct ggml_tensor *attention = cellkv_attend(graph, index, q, k, v, &params);
    if (attention == NULL) {
        return NULL;
    }
    return ggml_reshape_2d(context, attention, attention->ne[0] * attention->ne[1],
                           attention->ne[2]);
}

static cellkv_status build(void *context, cellkv_graph *graph) {
    const struct table_program *program = context;
    struct ggml_context *tensors = cellkv_graph_context(graph);
    struct ggml_tensor *all = NULL;
    if (program->fault == TABLE_FAULT_GIVES_UP) {
        return cellkv_graph_fail(graph, CELLKV_ERROR_UNSUPPORTED, "told to give up");
    }
    const int32_t n_layers =
        program->interface.n_layers - (program->fault == TABLE_FAULT_SKIP_LAYER);
    for (int32_t l = 0; l < n_layers; l++) {
        struct ggml_tensor *one = attend_layer(program, graph, l);
        if (one == NULL) {
            return CELLKV_ERROR_BAD_GRAPH;
        }
        if (cellkv_graph_n_outputs(graph) > 0) {
            one = ggml_get_rows(tensors, one, cellkv_graph_outputs(graph));
            all = all == NULL ? one : ggml_concat(tensors, all, one, 0);
        }
    }
    if (all == NULL || program->fault == TABLE_FAULT_NO_RESULT) {
        return CELLKV_OK;
    }
    if (program->fault == TABLE_FAULT_RESULT_SHAPE) {
        all = ggml_concat(tensors, all, all, 0);
    }
    cellkv_graph_set_result(graph, all);
    return CELLKV_OK;
}

/* ---- making ---- */

static void retain(void *context) {
    atomic_fetch_add(&((struct table_program *)context)->n_references, 1);
}

static void release(void *context) {
    struct table_program *program = context;
    if (atomic_fetch_sub(&program->n_references, 1) > 1) {
        return;
    }
    for (int32_t l = 0; l < program->interface.n_layers; l++) {
        ggml_backend_buffer_free(program->layers[l].buffer);
        ggml_free(program->layers[l].context);
    }
    free(program->layers);
    free(program->shapes);
    free(program);
    atomic_fetch_sub(&n_alive, 1);
}

void table_program_free(struct table_program *program) {
    if (program != NULL) {
        release(program);
    }
}

static void describe_layer(struct table_program *program, int32_t index,
                           const struct table_layer *from) {
    struct layer *layer = &program->layers[index];
    const int64_t n_vocab = program->interface.n_vocab;
    const int64_t kv = from->shape.n_kv_heads;
    *layer = (struct layer){.shape = from->shape,
                            .n_heads = from->n_heads,
                            .scale = from->scale,
                            .soft_cap = from->soft_cap};
    const struct ggml_init_params params = {.mem_size = 4 * ggml_tensor_overhead(),
                                            .no_alloc = true};
    layer->context = ggml_init(params);
    layer->q = ggml_new_tensor_2d(layer->context, GGML_TYPE_F32,
                                  (int64_t)from->n_heads * from->shape.head_dim_k, n_vocab);
    layer->k =
        ggml_new_tensor_2d(layer->context, GGML_TYPE_F32, kv * from->shape.head_dim_k, n_vocab);
    layer->v =
        ggml_new_tensor_2d(layer->context, GGML_TYPE_F32, kv * from->shape.head_dim_v, n_vocab);
    if (from->sinks != NULL) {
        layer->sinks = ggml_new_tensor_1d(layer->context, GGML_TYPE_F32, from->n_heads);
    }
    program->shapes[index] = from->shape;
    program->interface.n_result += from->n_heads * from->shape.head_dim_v;
}

static void upload(struct ggml_tensor *tensor, const float *data) {
    if (tensor != NULL) {
        ggml_backend_tensor_set(tensor, data, 0, ggml_nbytes(tensor));
    }
}

static void fill_layer(struct layer *layer, ggml_backend_dev_t device,
                       const struct table_layer *from) {
    layer->buffer = ggml_backend_alloc_ctx_tensors_from_buft(layer->context,
                                                             ggml_backend_dev_buffer_type(device));
    ggml_backend_buffer_set_usage(layer->buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    upload(layer->q, from->q);
    upload(layer->k, from->k);
    upload(layer->v, from->v);
    upload(layer->sinks, from->sinks);
}

struct table_program *table_program_new(const char *devices, int32_t n_vocab,
                                        const struct table_layer *layers, int32_t n_layers) {
    ggml_backend_dev_t *of_layer = calloc((size_t)n_layers, sizeof(ggml_backend_dev_t));
    if (cellkv_devices_of_layers(devices != NULL ? devices : "CPU", n_layers, of_layer) !=
        CELLKV_OK) {
        free(of_layer);
        return NULL;
    }
    struct table_program *program = calloc(1, sizeof *program);
    program->layers = calloc((size_t)n_layers, sizeof *program->layers);
    program->shapes = calloc((size_t)n_layers, sizeof *program->shapes);
    program->interface = (cellkv_program){.size = sizeof(cellkv_program),
                                          .context = program,
                                          .n_vocab = n_vocab,
                                          .n_layers = n_layers,
                                          .layers = program->shapes,
                                          .build = build,
                                          .retain = retain,
                                          .release = release};
    atomic_init(&program->n_references, 1);
    atomic_fetch_add(&n_alive, 1);
    for (int32_t l = 0; l < n_layers; l++) {
        describe_layer(program, l, &layers[l]);
        fill_layer(&program->layers[l], of_layer[l], &layers[l]);
    }
    free(of_layer);
    return program;
}
