/* The weights that an architecture wants: each looked up and checked by name, shape and type, then
 * all put where the device can use them (placement.h). */
#ifndef CELLKV_MODEL_WEIGHTS_H
#define CELLKV_MODEL_WEIGHTS_H

#include <stdbool.h>
#include <stdint.h>

#include <ggml.h>

#include "cells/error.h"
#include "source.h"

/* What the graph does with a weight. */
enum ck_use {
    CK_USE_MATMUL,  /* first operand of ggml_mul_mat */
    CK_USE_EXPERTS, /* of ggml_mul_mat_id: one matrix per expert */
    CK_USE_ROWS,    /* a table for ggml_get_rows */
    CK_USE_VECTOR /* an operand of element-wise ops: held in F32, converted if stored in F16/BF16 */
};

struct ck_weight {
    int64_t tensor; /* in the source */
    enum ck_use use;
    int32_t layer;             /* whose device it belongs on */
    struct ggml_tensor **slot; /* where the graph builder finds it once placed */
};

struct ck_weights {
    const struct ck_source *source;
    const char *architecture; /* for messages */
    int32_t layer;            /* of the weights that are wanted next */
    struct ck_weight *items;  /* [n] */
    int64_t n;
    int64_t capacity;
    bool *known;          /* [tensors of the source]: wanted or ignored */
    cellkv_status status; /* of the first failure; wishes after it do nothing */
};

/* Sets status to CELLKV_ERROR_OUT_OF_MEMORY if it cannot begin. */
void ck_weights_begin(struct ck_weights *weights, const struct ck_source *source,
                      const char *architecture);
void ck_weights_end(struct ck_weights *weights);

/* Wants a tensor of shape [ne0, ne1] (ne1 = 1: a vector), by name: "blk.%d.attn_q.weight".
 * `slot` receives it when the weights are placed. Statuses: CELLKV_ERROR_MISSING_TENSOR,
 * CELLKV_ERROR_BAD_TENSOR, CELLKV_ERROR_OUT_OF_MEMORY. */
void ck_want(struct ck_weights *weights, struct ggml_tensor **slot, enum ck_use use, int64_t ne0,
             int64_t ne1, const char *name, ...) CK_PRINTF(6, 7);

/* The same, but *slot stays NULL if there is no such tensor. Returns whether there is. */
bool ck_want_optional(struct ck_weights *weights, struct ggml_tensor **slot, enum ck_use use,
                      int64_t ne0, int64_t ne1, const char *name, ...) CK_PRINTF(6, 7);

/* Wants one matrix of shape [ne0, ne1] for each expert, all in one tensor [ne0, ne1, n_experts]. */
void ck_want_experts(struct ck_weights *weights, struct ggml_tensor **slot, int64_t ne0,
                     int64_t ne1, int64_t n_experts, const char *name, ...) CK_PRINTF(6, 7);

/* Fails with CELLKV_ERROR_MISSING_TENSOR unless there is such a tensor. */
void ck_require(struct ck_weights *weights, const char *name, ...) CK_PRINTF(2, 3);

/* A tensor that may be there and is not needed. */
void ck_ignore(struct ck_weights *weights, const char *name, ...) CK_PRINTF(2, 3);

/* Fails with CELLKV_ERROR_BAD_TENSOR if the source has a tensor that nobody wanted: a model that
 * computes something with it would be served wrongly. */
void ck_weights_refuse_unknown(struct ck_weights *weights);

/* Elements in a dimension of a tensor that must be there; 0 after a failure. */
int64_t ck_weights_length(struct ck_weights *weights, const char *name, int dimension);

#endif
