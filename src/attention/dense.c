#include "dense.h"

#include <string.h>

#include "cells/error.h"
#include "cells/memory.h"
#include "storage/device.h"
#include "write.h"

/* Half-precision bit patterns. */
enum { HALF_ZERO = 0x0000, HALF_MINUS_INFINITY = 0xfc00 };

/* Rows [0, extent) seen head by head: [head_dim, extent, n_heads]. */
static struct ggml_tensor *as_heads(struct ggml_context *context, struct ggml_tensor *rows,
                                    int64_t head_dim, int64_t n_heads, int64_t extent) {
    return ggml_view_3d(context, rows, head_dim, extent, n_heads, rows->nb[1],
                        ggml_row_size(rows->type, head_dim), 0);
}

struct ck_dense_nodes ck_dense_attend(struct ggml_context *context, struct ggml_tensor *k_rows,
                                      struct ggml_tensor *v_rows, const cellkv_layer *layer,
                                      struct ggml_tensor *q, struct ggml_tensor *k,
                                      struct ggml_tensor *v, struct ggml_tensor *rows,
                                      struct ggml_tensor *mask,
                                      const cellkv_attend_params *params) {
    const int64_t extent = mask->ne[0];
    struct ck_dense_nodes nodes;
    /* Attention reads through the writes' results, so that it can only run after them. */
    nodes.write_k = ck_write_rows(context, k_rows, k, rows);
    nodes.write_v = ck_write_rows(context, v_rows, v, rows);
    nodes.attention = ggml_flash_attn_ext(
        context, ggml_permute(context, q, 0, 2, 1, 3),
        as_heads(context, nodes.write_k, layer->head_dim_k, layer->n_kv_heads, extent),
        as_heads(context, nodes.write_v, layer->head_dim_v, layer->n_kv_heads, extent), mask,
        params->scale, 0.0f, params->soft_cap);
    ggml_flash_attn_ext_set_prec(nodes.attention, GGML_PREC_F32);
    if (params->sinks != NULL) {
        ggml_flash_attn_ext_add_sinks(nodes.attention, params->sinks);
    }
    return nodes;
}

void ck_dense_render_mask(const struct ck_sight *sight, int32_t extent, ggml_fp16_t *mask) {
    const size_t n = (size_t)extent * (size_t)sight->n_queries;
    for (size_t i = 0; i < n; i++) {
        mask[i] = HALF_MINUS_INFINITY;
    }
    for (int32_t s = 0; s < sight->n_segments; s++) {
        const struct ck_segment *segment = &sight->segments[s];
        const int32_t *cells = sight->cells + segment->first_cell;
        for (int32_t i = 0; i < segment->n_views; i++) {
            const struct ck_view *view = &sight->views[segment->first_view + i];
            ggml_fp16_t *row = mask + (size_t)view->query * (size_t)extent;
            for (int32_t c = view->begin; c < view->end; c++) {
                row[cells[c]] = HALF_ZERO;
            }
        }
    }
}

/* ---- probing ---- */

/* The ops of one layer for a few tokens, on tensors shaped as the storage's. */
static struct ck_dense_nodes probe_nodes(struct ggml_context *context, const cellkv_layer *layer) {
    enum { N_TOKENS = 4 };
    const int64_t heads = layer->n_kv_heads;
    struct ggml_tensor *k_rows = ggml_new_tensor_2d(context, (enum ggml_type)layer->type_k,
                                                    heads * layer->head_dim_k, CK_ROW_PADDING);
    struct ggml_tensor *v_rows = ggml_new_tensor_2d(context, (enum ggml_type)layer->type_v,
                                                    heads * layer->head_dim_v, CK_ROW_PADDING);
    struct ggml_tensor *q =
        ggml_new_tensor_3d(context, GGML_TYPE_F32, layer->head_dim_k, heads, N_TOKENS);
    struct ggml_tensor *v =
        ggml_new_tensor_3d(context, GGML_TYPE_F32, layer->head_dim_v, heads, N_TOKENS);
    struct ggml_tensor *rows = ggml_new_tensor_1d(context, GGML_TYPE_I64, N_TOKENS);
    struct ggml_tensor *mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, CK_ROW_PADDING, N_TOKENS);
    const cellkv_attend_params params = {.scale = 1.0f};
    return ck_dense_attend(context, k_rows, v_rows, layer, q, q, v, rows, mask, &params);
}

static cellkv_status probe_layer(ggml_backend_dev_t device, const cellkv_layer *layer,
                                 int32_t index) {
    struct ggml_init_params init = {.mem_size = 32 * ggml_tensor_overhead(), .no_alloc = true};
    struct ggml_context *context = ck_allocation_should_fail() ? NULL : ggml_init(init);
    if (context == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "no memory to probe layer %d", index);
    }
    struct ck_dense_nodes nodes = probe_nodes(context, layer);
    const bool supported = ck_device_supports(device, nodes.write_k) &&
                           ck_device_supports(device, nodes.write_v) &&
                           ck_device_supports(device, nodes.attention);
    ggml_free(context);
    if (supported) {
        return CELLKV_OK;
    }
    return ck_fail(CELLKV_ERROR_UNSUPPORTED,
                   "layer %d: %s cannot attend over K of type %s, width %d, V of type %s, width %d",
                   index, ggml_backend_dev_name(device),
                   ggml_type_name((enum ggml_type)layer->type_k), layer->head_dim_k,
                   ggml_type_name((enum ggml_type)layer->type_v), layer->head_dim_v);
}

cellkv_status ck_dense_probe(const struct ck_storage *storage, const cellkv_layer *layers,
                             int32_t n_layers) {
    for (int32_t l = 0; l < n_layers; l++) {
        ggml_backend_dev_t device = ck_storage_device(storage, l);
        if (l > 0 && device == ck_storage_device(storage, l - 1) &&
            memcmp(&layers[l], &layers[l - 1], sizeof *layers) == 0) {
            continue;
        }
        cellkv_status status = probe_layer(device, &layers[l], l);
        if (status != CELLKV_OK) {
            return status;
        }
    }
    return CELLKV_OK;
}
