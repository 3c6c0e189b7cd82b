/* The dense strategy: ggml's flash attention over rows [0, extent), with a mask that renders sight.
 * Every query pays for everybody's cells; it runs wherever ggml has the op. */
#ifndef CELLKV_ATTENTION_DENSE_H
#define CELLKV_ATTENTION_DENSE_H

#include <stdint.h>

#include <ggml-backend.h>
#include <ggml.h>

#include <cellkv/executor.h>

#include "cells/sight.h"
#include "storage/storage.h"

/* The nodes of one update-and-attend. */
struct ck_dense_nodes {
    struct ggml_tensor *write_k;
    struct ggml_tensor *write_v;
    struct ggml_tensor *attention; /* F32 [head_dim_v, n_heads, n_tokens] */
};

/* Builds them.
 *   q, k, v   as cellkv_attend has checked them
 *   rows      I64 [n_tokens], the tokens' cells
 *   mask      F16 [extent, n_tokens], 0 where seen, else -inf
 *   extent    a multiple of CK_ROW_PADDING, at most the rows of k_rows and v_rows */
struct ck_dense_nodes ck_dense_attend(struct ggml_context *context, struct ggml_tensor *k_rows,
                                      struct ggml_tensor *v_rows, const cellkv_layer *layer,
                                      struct ggml_tensor *q, struct ggml_tensor *k,
                                      struct ggml_tensor *v, struct ggml_tensor *rows,
                                      struct ggml_tensor *mask, const cellkv_attend_params *params);

/* Renders sight as the mask: [extent, n_queries] half floats. Cost: O(extent * n_queries). */
void ck_dense_render_mask(const struct ck_sight *sight, int32_t extent, ggml_fp16_t *mask);

/* Whether the storage's device runs exactly the ops that ck_dense_attend makes for each layer.
 * Returns CELLKV_OK, CELLKV_ERROR_UNSUPPORTED (the message names layer, device and types) or
 * CELLKV_ERROR_OUT_OF_MEMORY. */
cellkv_status ck_dense_probe(const struct ck_storage *storage, const cellkv_layer *layers,
                             int32_t n_layers);

#endif
