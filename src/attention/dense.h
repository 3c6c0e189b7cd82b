/* The dense strategy: ggml's flash attention, with a mask that renders sight. It runs wherever ggml
 * has the op. A query pays for all the rows that its piece of the layout reads: at worst for
 * everybody's cells. */
#ifndef CELLKV_ATTENTION_DENSE_H
#define CELLKV_ATTENTION_DENSE_H

#include <stddef.h>
#include <stdint.h>

#include <ggml-backend.h>
#include <ggml.h>

#include <cellkv/executor.h>

#include "attention/layout.h"
#include "storage/storage.h"

/* One update-and-attend. */
struct ck_dense_op {
    struct ggml_tensor *k_rows, *v_rows; /* as the storage has them */
    const cellkv_layer *layer;
    struct ggml_tensor *q, *k, *v; /* as cellkv_attend has checked them */
    struct ggml_tensor *rows;      /* I64 [n_tokens], the tokens' cells */
    struct ggml_tensor *mask;      /* by ck_dense_mask_at_device */
    const struct ck_layout *layout;
    const cellkv_attend_params *params;
};

/* Called with each node that must run on the layer's device, sources first. */
typedef void (*ck_take_node)(void *taker, struct ggml_tensor *node);

/* The input for ck_layout_render_mask, F16: [extent, n_queries] of a single piece, else all pieces'
 * masks one after the other. */
struct ggml_tensor *ck_dense_new_mask(struct ggml_context *context, const struct ck_layout *layout);

/* What layers of one device read of that input: a copy there, of which there can be views, or the
 * input. ggml's scheduler would send each view of an input apart, as often as there are layers. */
struct ggml_tensor *ck_dense_mask_at_device(struct ggml_context *context,
                                            const struct ck_layout *layout,
                                            struct ggml_tensor *mask, ck_take_node take,
                                            void *taker);

/* Builds the nodes; returns the attention, F32 [head_dim_v, n_heads, n_tokens]. */
struct ggml_tensor *ck_dense_attend(struct ggml_context *context, const struct ck_dense_op *op,
                                    ck_take_node take, void *taker);

/* How many tensors ck_dense_attend makes for this layout beyond those of one call. */
size_t ck_dense_extra_tensors(const struct ck_layout *layout);

/* Whether the storage's devices run exactly the ops that ck_dense_attend makes for each layer, in
 * one call; *limit: and which layouts they can run beyond that.
 * Returns CELLKV_OK, CELLKV_ERROR_UNSUPPORTED (the message names layer, device and types) or
 * CELLKV_ERROR_OUT_OF_MEMORY. */
cellkv_status ck_dense_probe(const struct ck_storage *storage, const cellkv_layer *layers,
                             int32_t n_layers, enum ck_layout_limit *limit);

#endif
