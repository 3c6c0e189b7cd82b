#include "ragged.h"

#include "attention/piece.h"
#include "cells/error.h"
#include "storage/device.h"
#include "write.h"

enum {
    WIDTH_MULTIPLE = 8,
    ALIGNMENT = 64, /* of each thread's scratch, in bytes */
    LINE = ALIGNMENT / sizeof(float),
};

/* The kernels' name of a K/V type; CK_N_ROW_TYPES: they have none. */
static enum ck_row_type row_type(cellkv_type type) {
    switch (type) {
    case CELLKV_TYPE_F32:
        return CK_ROW_F32;
    case CELLKV_TYPE_F16:
        return CK_ROW_F16;
    case CELLKV_TYPE_BF16:
        return CK_ROW_BF16;
    case CELLKV_TYPE_Q8_0:
        return CK_ROW_Q8_0;
    case CELLKV_TYPE_Q4_0:
        return CK_ROW_Q4_0;
    }
    return CK_N_ROW_TYPES;
}

/* ---- memory: [attention | parts | scratch of each thread] ---- */

static size_t attention_floats(const struct ck_ragged_layer *layer, int64_t n_tokens) {
    return (size_t)layer->shape.head_dim_v * (size_t)layer->n_heads * (size_t)n_tokens;
}

static size_t parts_floats(const struct ck_ragged_layer *layer) {
    return ck_part_floats(layer->shape.head_dim_v) * (size_t)layer->n_heads *
           (size_t)layer->max_parts;
}

static size_t scratch_floats(const struct ck_ragged_layer *layer, int64_t n_tokens) {
    const size_t n =
        ck_piece_scratch_floats((int32_t)n_tokens, layer->n_heads, layer->shape.n_kv_heads,
                                layer->shape.head_dim_k, layer->shape.head_dim_v);
    return (n + LINE - 1) / LINE * LINE;
}

static float *scratch_of(const struct ck_ragged_layer *layer, struct ggml_tensor *memory,
                         int64_t n_tokens, int thread) {
    float *end_of_parts =
        (float *)memory->data + attention_floats(layer, n_tokens) + parts_floats(layer);
    uintptr_t address = ((uintptr_t)end_of_parts + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return (float *)address + (size_t)thread * scratch_floats(layer, n_tokens);
}

/* ---- the ops ---- */

static struct ck_rows rows_of(const struct ggml_tensor *stored, cellkv_type type, int32_t width) {
    return (struct ck_rows){
        .data = stored->data,
        .stride = stored->nb[1],
        .type = row_type(type),
        .width = width,
        .head_bytes = ggml_row_size(stored->type, width),
    };
}

static struct ck_attention attention_of(const struct ck_ragged_layer *layer,
                                        struct ggml_tensor *memory,
                                        struct ggml_tensor *const *src) {
    const struct ggml_tensor *q = src[0], *k = src[1], *v = src[2], *sinks = src[3];
    return (struct ck_attention){
        .kernels = layer->kernels,
        .k = rows_of(k, layer->shape.type_k, layer->shape.head_dim_k),
        .v = rows_of(v, layer->shape.type_v, layer->shape.head_dim_v),
        .n_heads = layer->n_heads,
        .n_kv_heads = layer->shape.n_kv_heads,
        .queries = q->data,
        .query_stride = q->nb[2],
        .head_stride = q->nb[1],
        .scale = layer->scale,
        .soft_cap = layer->soft_cap,
        .sinks = sinks != NULL ? sinks->data : NULL,
        .out = memory->data,
        .parts = (float *)memory->data + attention_floats(layer, q->ne[2]),
    };
}

/* Threads take the next piece as they finish one: what a piece gives does not depend on who
 * computes it. */
static void compute_pieces(struct ggml_tensor *memory, int thread, int n_threads, void *userdata) {
    struct ck_ragged_layer *layer = userdata;
    if (thread >= layer->n_threads) {
        return; /* it has no scratch; the others do its share */
    }
    const struct ck_attention attention = attention_of(layer, memory, memory->src);
    float *scratch = scratch_of(layer, memory, memory->src[0]->ne[2], thread);
    for (;;) {
        const int i = atomic_fetch_add_explicit(&layer->next_piece, 1, memory_order_relaxed);
        if (i >= layer->plan->n_pieces) {
            return;
        }
        ck_piece_compute(&attention, layer->sight, layer->plan, i, i + n_threads, scratch);
    }
}

static void merge_parts(struct ggml_tensor *memory, int thread, int n_threads, void *userdata) {
    const struct ck_ragged_layer *layer = userdata;
    const struct ck_plan *plan = layer->plan;
    if (plan->n_parts == 0) {
        return;
    }
    const struct ck_attention attention = attention_of(layer, memory, memory->src + 1);
    const int64_t n = (int64_t)plan->n_queries * layer->n_heads;
    for (int64_t i = thread; i < n; i += n_threads) {
        const int32_t query = (int32_t)(i / layer->n_heads);
        if (plan->first_part[query] < plan->first_part[query + 1]) {
            ck_parts_merge(&attention, plan, query, (int32_t)(i % layer->n_heads));
        }
    }
}

/* ---- the graph ---- */

struct ck_ragged_nodes ck_ragged_attend(struct ggml_context *context, struct ck_ragged_layer *layer,
                                        struct ggml_tensor *k_rows, struct ggml_tensor *v_rows,
                                        struct ggml_tensor *q, struct ggml_tensor *k,
                                        struct ggml_tensor *v, struct ggml_tensor *rows,
                                        const cellkv_attend_params *params) {
    layer->n_heads = (int32_t)q->ne[1];
    layer->scale = params->scale;
    layer->soft_cap = params->soft_cap;
    struct ck_ragged_nodes nodes;
    nodes.write_k = ck_write_rows(context, k_rows, k, rows);
    nodes.write_v = ck_write_rows(context, v_rows, v, rows);
    struct ggml_tensor *sources[4] = {q, nodes.write_k, nodes.write_v, params->sinks};
    const int n_sources = params->sinks != NULL ? 4 : 3;
    const size_t n_floats = attention_floats(layer, q->ne[2]) + parts_floats(layer) + LINE +
                            (size_t)layer->n_threads * scratch_floats(layer, q->ne[2]);
    nodes.compute = ggml_custom_4d(context, GGML_TYPE_F32, (int64_t)n_floats, 1, 1, 1, sources,
                                   n_sources, compute_pieces, GGML_N_TASKS_MAX, layer);
    nodes.merge = ggml_custom_inplace(context, nodes.compute, sources, n_sources, merge_parts,
                                      GGML_N_TASKS_MAX, layer);
    const size_t head_bytes = (size_t)layer->shape.head_dim_v * sizeof(float);
    nodes.attention = ggml_view_3d(context, nodes.merge, layer->shape.head_dim_v, layer->n_heads,
                                   q->ne[2], head_bytes, head_bytes * (size_t)layer->n_heads, 0);
    return nodes;
}

cellkv_status ck_ragged_probe(const struct ck_storage *storage, const cellkv_layer *layers,
                              int32_t n_layers) {
    for (int32_t l = 0; l < n_layers; l++) {
        const cellkv_layer *layer = &layers[l];
        ggml_backend_dev_t device = ck_storage_device(storage, l);
        if (ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            return ck_fail(CELLKV_ERROR_UNSUPPORTED,
                           "layer %d: strategy ragged runs on the CPU; here are K of type %s, V of "
                           "type %s on %s",
                           l, ggml_type_name((enum ggml_type)layer->type_k),
                           ggml_type_name((enum ggml_type)layer->type_v), ck_device_name(device));
        }
        if (row_type(layer->type_k) != CK_N_ROW_TYPES &&
            row_type(layer->type_v) != CK_N_ROW_TYPES && layer->head_dim_k % WIDTH_MULTIPLE == 0 &&
            layer->head_dim_v % WIDTH_MULTIPLE == 0) {
            continue;
        }
        return ck_fail(CELLKV_ERROR_UNSUPPORTED,
                       "layer %d: strategy ragged on %s attends over widths that are multiples of "
                       "%d; here are K of type %s, width %d, V of type %s, width %d",
                       l, ck_device_name(device), WIDTH_MULTIPLE,
                       ggml_type_name((enum ggml_type)layer->type_k), layer->head_dim_k,
                       ggml_type_name((enum ggml_type)layer->type_v), layer->head_dim_v);
    }
    return CELLKV_OK;
}
