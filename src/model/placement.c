#include "placement.h"

#include <string.h>

#include <ggml-alloc.h>

#include "cells/memory.h"

/* ---- the places there are ---- */

/* ggml's CPU lists further buffer types by this function. Only the repacked layout is ours: the
 * others (AMX) need instructions that a system may not have enabled. */
static ggml_backend_buffer_type_t repacked_type(ggml_backend_dev_t device) {
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    ggml_backend_dev_get_extra_bufts_t list = __extension__(ggml_backend_dev_get_extra_bufts_t)
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_dev_get_extra_bufts");
    ggml_backend_buffer_type_t *type = list != NULL ? list(device) : NULL;
    while (type != NULL && *type != NULL &&
           strcmp(ggml_backend_buft_name(*type), "CPU_REPACK") != 0) {
        type++;
    }
    return type != NULL ? *type : NULL;
}

static bool can_map(ggml_backend_dev_t device) {
    struct ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device, &props);
    return props.caps.buffer_from_host_ptr;
}

static size_t largest_tensor(const struct ck_source *source) {
    size_t largest = 0;
    for (int64_t i = 0; i < gguf_get_n_tensors(source->gguf); i++) {
        const size_t size = gguf_get_tensor_size(source->gguf, i);
        largest = size > largest ? size : largest;
    }
    return largest;
}

static void add_home(struct ck_homes *homes, const struct ck_home *home) {
    if (home->probe != NULL) {
        homes->homes[homes->n_homes++] = *home;
    }
}

/* A mapped home, if file and device allow one. */
static void add_mapped(struct ck_homes *homes, ggml_backend_dev_t device,
                       const struct ck_source *source) {
    const uint8_t *mapping = source->file != NULL ? ck_file_mapping(source->file) : NULL;
    if (mapping == NULL || !can_map(device)) {
        return;
    }
    struct ck_home home = {.device = device, .mapped = true};
    home.probe = ggml_backend_dev_buffer_from_host_ptr(device, (void *)(uintptr_t)mapping,
                                                       (size_t)ck_file_size(source->file),
                                                       largest_tensor(source));
    if (home.probe != NULL) {
        ggml_backend_buffer_set_usage(home.probe, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    add_home(homes, &home);
}

static void add_typed(struct ck_homes *homes, ggml_backend_dev_t device,
                      ggml_backend_buffer_type_t type, bool repacked) {
    struct ck_home home = {.device = device, .repacked = repacked, .type = type};
    /* Of a byte, not of none: while a buffer lives, so does the connection to a server. */
    home.probe = type != NULL ? ggml_backend_buft_alloc_buffer(type, 1) : NULL;
    add_home(homes, &home);
}

static bool has_homes(const struct ck_homes *homes, ggml_backend_dev_t device) {
    for (int h = 0; h < homes->n_homes; h++) {
        if (homes->homes[h].device == device) {
            return true;
        }
    }
    return false;
}

static void open_homes(struct ck_homes *homes, const struct ck_source *source,
                       ggml_backend_dev_t const *of_layer, int32_t n_layers, bool repack) {
    for (int32_t l = 0; l < n_layers; l++) {
        if (has_homes(homes, of_layer[l])) {
            continue;
        }
        if (repack) {
            add_typed(homes, of_layer[l], repacked_type(of_layer[l]), true);
        }
        add_mapped(homes, of_layer[l], source);
        add_typed(homes, of_layer[l], ggml_backend_dev_buffer_type(of_layer[l]), false);
    }
    if (!has_homes(homes, homes->cpu)) {
        add_mapped(homes, homes->cpu, source);
        add_typed(homes, homes->cpu, ggml_backend_dev_buffer_type(homes->cpu), false);
    }
}

/* ---- which place takes a weight ---- */

static bool needs_conversion(const struct ck_stored_tensor *stored, enum ck_use use) {
    return use == CK_USE_VECTOR && stored->type != GGML_TYPE_F32;
}

static enum ggml_type held_type(const struct ck_stored_tensor *stored, enum ck_use use) {
    return needs_conversion(stored, use) ? GGML_TYPE_F32 : stored->type;
}

/* The op that the graph will run on the weight, on a step of two tokens. */
static struct ggml_tensor *probe_op(struct ggml_context *context, struct ggml_tensor *weight,
                                    enum ck_use use) {
    switch (use) {
    case CK_USE_MATMUL:
        return ggml_mul_mat(context, weight,
                            ggml_new_tensor_2d(context, GGML_TYPE_F32, weight->ne[0], 2));
    case CK_USE_EXPERTS:
        return ggml_mul_mat_id(context, weight,
                               ggml_new_tensor_3d(context, GGML_TYPE_F32, weight->ne[0], 1, 2),
                               ggml_new_tensor_2d(context, GGML_TYPE_I32, 1, 2));
    case CK_USE_ROWS:
        return ggml_get_rows(context, weight, ggml_new_tensor_1d(context, GGML_TYPE_I32, 2));
    default:
        return ggml_mul(context, ggml_new_tensor_2d(context, GGML_TYPE_F32, weight->ne[0], 2),
                        weight);
    }
}

/* Whether the device can use the bytes where they lie in the file. */
static bool fits_mapping(const struct ck_home *home, const struct ggml_tensor *tensor,
                         const uint8_t *bytes) {
    ggml_backend_buffer_type_t type = ggml_backend_buffer_get_type(home->probe);
    const uint8_t *begin = ggml_backend_buffer_get_base(home->probe);
    const size_t behind = ggml_backend_buffer_get_size(home->probe) - (size_t)(bytes - begin);
    return (uintptr_t)bytes % ggml_backend_buft_get_alignment(type) == 0 &&
           ggml_backend_buft_get_alloc_size(type, tensor) <= behind;
}

/* Whether the home's device runs the weight's op with the weight in this kind of buffer. */
static bool supports_use(const struct ck_home *home, const struct ck_stored_tensor *stored,
                         enum ck_use use, const uint8_t *mapping) {
    _Alignas(16) char memory[4096];
    struct ggml_context *context = ggml_init((struct ggml_init_params){
        .mem_size = sizeof memory, .mem_buffer = memory, .no_alloc = true});
    struct ggml_tensor *weight =
        ggml_new_tensor(context, held_type(stored, use), GGML_MAX_DIMS, stored->ne);
    weight->buffer = home->probe;
    const bool supported =
        (!home->mapped || fits_mapping(home, weight, mapping)) &&
        ggml_backend_dev_supports_op(home->device, probe_op(context, weight, use));
    ggml_free(context);
    return supported;
}

static bool takes(const struct ck_home *home, const struct ck_source *source,
                  const struct ck_weight *weight, const struct ck_stored_tensor *stored) {
    const bool multiplied = weight->use == CK_USE_MATMUL || weight->use == CK_USE_EXPERTS;
    if (home->repacked && !multiplied) {
        return false;
    }
    if (home->mapped && needs_conversion(stored, weight->use)) {
        return false;
    }
    return supports_use(home, stored, weight->use, ck_source_mapping(source, weight->tensor));
}

/* The first home on the device that takes the weight; -1: none does. */
static int find_home(const struct ck_homes *homes, ggml_backend_dev_t device,
                     const struct ck_source *source, const struct ck_weight *weight) {
    const struct ck_stored_tensor stored = ck_source_tensor(source, weight->tensor);
    for (int h = 0; h < homes->n_homes; h++) {
        if (homes->homes[h].device == device && takes(&homes->homes[h], source, weight, &stored)) {
            return h;
        }
    }
    return -1;
}

static cellkv_status choose(const struct ck_homes *homes, const struct ck_source *source,
                            const struct ck_weight *weight, ggml_backend_dev_t device, int *home) {
    *home = find_home(homes, device, source, weight);
    if (*home < 0 && homes->cpu != device) {
        *home = find_home(homes, homes->cpu, source, weight);
    }
    if (*home >= 0) {
        return CELLKV_OK;
    }
    const struct ck_stored_tensor stored = ck_source_tensor(source, weight->tensor);
    return ck_fail(CELLKV_ERROR_BAD_TENSOR, "%s: no device here computes with type %s", stored.name,
                   ggml_type_name(stored.type));
}

/* chosen[i]: the home of weight i */
static cellkv_status choose_all(struct ck_homes *homes, const struct ck_weights *weights,
                                ggml_backend_dev_t const *of_layer, int *chosen) {
    cellkv_status status = CELLKV_OK;
    for (int64_t i = 0; i < weights->n && status == CELLKV_OK; i++) {
        const struct ck_weight *weight = &weights->items[i];
        status = choose(homes, weights->source, weight, of_layer[weight->layer], &chosen[i]);
        if (status == CELLKV_OK) {
            homes->homes[chosen[i]].n_tensors++;
        }
    }
    return status;
}

/* ---- moving in ---- */

static cellkv_status open_contexts(struct ck_homes *homes) {
    for (int h = 0; h < homes->n_homes; h++) {
        struct ck_home *home = &homes->homes[h];
        if (home->n_tensors == 0) {
            continue;
        }
        const size_t size = (size_t)home->n_tensors * ggml_tensor_overhead();
        home->context_memory = ck_malloc(size);
        if (home->context_memory == NULL) {
            return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "describing the weights");
        }
        home->context = ggml_init((struct ggml_init_params){
            .mem_size = size, .mem_buffer = home->context_memory, .no_alloc = true});
    }
    return CELLKV_OK;
}

/* An earlier weight that is the same tensor in the same home (a tied head): they share it. */
static struct ggml_tensor *find_twin(const struct ck_weights *weights, const int *chosen,
                                     int64_t i) {
    for (int64_t j = 0; j < i; j++) {
        if (weights->items[j].tensor == weights->items[i].tensor && chosen[j] == chosen[i]) {
            return *weights->items[j].slot;
        }
    }
    return NULL;
}

static void describe(struct ck_home *home, const struct ck_weights *weights,
                     const struct ck_weight *weight) {
    const struct ck_stored_tensor stored = ck_source_tensor(weights->source, weight->tensor);
    struct ggml_tensor *tensor =
        ggml_new_tensor(home->context, held_type(&stored, weight->use), GGML_MAX_DIMS, stored.ne);
    ggml_set_name(tensor, stored.name);
    *weight->slot = tensor;
}

static cellkv_status allocate(struct ck_homes *homes) {
    for (int h = 0; h < homes->n_homes; h++) {
        struct ck_home *home = &homes->homes[h];
        if (home->n_tensors == 0 || home->mapped) {
            continue;
        }
        if (!ck_allocation_should_fail()) {
            home->buffer = ggml_backend_alloc_ctx_tensors_from_buft(home->context, home->type);
        }
        if (home->buffer == NULL) {
            return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "a buffer of %s for %lld weights",
                           ggml_backend_buft_name(home->type), (long long)home->n_tensors);
        }
        ggml_backend_buffer_set_usage(home->buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    return CELLKV_OK;
}

/* The tensor's bytes, read into memory of their own. */
static cellkv_status read_apart(const struct ck_source *source, int64_t tensor, void **bytes) {
    const struct ck_stored_tensor stored = ck_source_tensor(source, tensor);
    *bytes = ck_malloc(stored.n_bytes);
    if (*bytes == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "reading %s", stored.name);
    }
    const cellkv_status status = ck_source_read(source, tensor, *bytes);
    if (status != CELLKV_OK) {
        ck_free(*bytes);
    }
    return status;
}

static cellkv_status convert(void *stored_bytes, const struct ck_stored_tensor *stored,
                             struct ggml_tensor *tensor) {
    float *converted = ck_malloc(ggml_nbytes(tensor));
    if (converted == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "converting %s", stored->name);
    }
    ggml_get_type_traits(stored->type)->to_float(stored_bytes, converted, ggml_nelements(tensor));
    ggml_backend_tensor_set(tensor, converted, 0, ggml_nbytes(tensor));
    ck_free(converted);
    return CELLKV_OK;
}

static cellkv_status copy(const struct ck_weights *weights, const struct ck_weight *weight) {
    struct ggml_tensor *tensor = *weight->slot;
    const struct ck_stored_tensor stored = ck_source_tensor(weights->source, weight->tensor);
    const bool as_stored = tensor->type == stored.type;
    if (as_stored && ggml_backend_buffer_is_host(tensor->buffer)) {
        return ck_source_read(weights->source, weight->tensor, tensor->data);
    }
    const uint8_t *mapping = ck_source_mapping(weights->source, weight->tensor);
    if (as_stored && mapping != NULL) {
        ggml_backend_tensor_set(tensor, mapping, 0, stored.n_bytes);
        return CELLKV_OK;
    }
    void *bytes = NULL;
    cellkv_status status = read_apart(weights->source, weight->tensor, &bytes);
    if (status != CELLKV_OK) {
        return status;
    }
    if (as_stored) {
        ggml_backend_tensor_set(tensor, bytes, 0, stored.n_bytes);
    } else {
        status = convert(bytes, &stored, tensor);
    }
    ck_free(bytes);
    return status;
}

/* Gives the described tensor its bytes. */
static cellkv_status fill(struct ck_homes *homes, int h, const struct ck_weights *weights,
                          const struct ck_weight *weight) {
    const struct ck_home *home = &homes->homes[h];
    struct ggml_tensor *tensor = *weight->slot;
    if (home->repacked) {
        homes->repacked_bytes += (int64_t)ggml_nbytes(tensor);
    }
    if (!home->mapped) {
        return copy(weights, weight);
    }
    homes->mapped_bytes += (int64_t)ggml_nbytes(tensor);
    void *bytes = (void *)(uintptr_t)ck_source_mapping(weights->source, weight->tensor);
    if (ggml_backend_tensor_alloc(home->probe, tensor, bytes) != GGML_STATUS_SUCCESS) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "%s: the device does not take its mapping",
                       tensor->name);
    }
    return CELLKV_OK;
}

static cellkv_status move_in(struct ck_homes *homes, const struct ck_weights *weights,
                             const int *chosen, bool *shared) {
    cellkv_status status = open_contexts(homes);
    for (int64_t i = 0; i < weights->n && status == CELLKV_OK; i++) {
        struct ggml_tensor *twin = find_twin(weights, chosen, i);
        shared[i] = twin != NULL;
        if (shared[i]) {
            *weights->items[i].slot = twin;
        } else {
            describe(&homes->homes[chosen[i]], weights, &weights->items[i]);
        }
    }
    if (status == CELLKV_OK) {
        status = allocate(homes);
    }
    for (int64_t i = 0; i < weights->n && status == CELLKV_OK; i++) {
        if (!shared[i]) {
            status = fill(homes, chosen[i], weights, &weights->items[i]);
        }
    }
    return status;
}

cellkv_status ck_homes_place(struct ck_homes *homes, const struct ck_weights *weights,
                             ggml_backend_dev_t const *of_layer, int32_t n_layers, bool repack) {
    *homes = (struct ck_homes){0};
    int *chosen = ck_calloc((size_t)weights->n, sizeof *chosen);
    bool *shared = ck_calloc((size_t)weights->n, sizeof *shared);
    cellkv_status status = CELLKV_OK;
    if (chosen == NULL || shared == NULL) {
        status = ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "placing the weights");
    }
    if (status == CELLKV_OK) {
        status = cellkv_devices_of_layers("CPU", 1, &homes->cpu);
    }
    if (status == CELLKV_OK) {
        open_homes(homes, weights->source, of_layer, n_layers, repack);
        status = choose_all(homes, weights, of_layer, chosen);
    }
    if (status == CELLKV_OK) {
        status = move_in(homes, weights, chosen, shared);
    }
    if (status != CELLKV_OK) {
        ck_homes_free(homes);
    }
    ck_free(chosen);
    ck_free(shared);
    return status;
}

void ck_homes_free(struct ck_homes *homes) {
    for (int h = 0; h < homes->n_homes; h++) {
        struct ck_home *home = &homes->homes[h];
        ggml_backend_buffer_free(home->buffer);
        ggml_backend_buffer_free(home->probe);
        ggml_free(home->context);
        ck_free(home->context_memory);
    }
    *homes = (struct ck_homes){0};
}
