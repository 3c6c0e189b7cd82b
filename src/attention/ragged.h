/* The ragged strategy: each query reads the cells that it sees and no others, and cells that
 * several queries see are read once for all of them. Two custom ops of ggml's CPU backend: the
 * pieces of a plan, then the merging of their parts (a custom op has no barrier). */
#ifndef CELLKV_ATTENTION_RAGGED_H
#define CELLKV_ATTENTION_RAGGED_H

#include <stdatomic.h>
#include <stdint.h>

#include <ggml.h>

#include <cellkv/executor.h>

#include "attention/kernels/kernels.h"
#include "attention/plan.h"
#include "cells/sight.h"
#include "storage/storage.h"

/* What the ops of one layer know beside their tensors. It outlives the graph's runs, and what it
 * points to is set anew before each. */
struct ck_ragged_layer {
    const struct ck_kernels *kernels;
    const struct ck_sight *sight; /* of the layer's window */
    const struct ck_plan *plan;
    int32_t n_threads; /* the most that compute */
    int32_t max_parts; /* the most that the plan may have */
    int32_t n_heads;   /* of queries */
    cellkv_layer shape;
    float scale, soft_cap;
    atomic_int next_piece; /* 0 before each run */
};

/* The nodes of one update-and-attend. */
struct ck_ragged_nodes {
    struct ggml_tensor *write_k;
    struct ggml_tensor *write_v;
    struct ggml_tensor *compute;   /* F32: attention, then parts, then each thread's scratch */
    struct ggml_tensor *merge;     /* the same memory, complete */
    struct ggml_tensor *attention; /* F32 [head_dim_v, n_heads, n_tokens], a view of it */
};

/* Builds them. `layer` has kernels, sight, plan, n_threads, max_parts and shape; the rest is set
 * here. Arguments as ck_dense_attend's. */
struct ck_ragged_nodes ck_ragged_attend(struct ggml_context *context, struct ck_ragged_layer *layer,
                                        struct ggml_tensor *k_rows, struct ggml_tensor *v_rows,
                                        struct ggml_tensor *q, struct ggml_tensor *k,
                                        struct ggml_tensor *v, struct ggml_tensor *rows,
                                        const cellkv_attend_params *params);

/* Whether the ops can read such layers' rows where they are. Returns CELLKV_OK or
 * CELLKV_ERROR_UNSUPPORTED (the message names layer, device, types and widths). */
cellkv_status ck_ragged_probe(const struct ck_storage *storage, const cellkv_layer *layers,
                              int32_t n_layers);

#endif
