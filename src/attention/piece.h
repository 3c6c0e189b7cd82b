/* One piece of a plan computed: queries against cells, by the kernels. */
#ifndef CELLKV_ATTENTION_PIECE_H
#define CELLKV_ATTENTION_PIECE_H

#include <stddef.h>
#include <stdint.h>

#include "attention/kernels/kernels.h"
#include "attention/plan.h"
#include "cells/sight.h"

/* A layer's K or V. */
struct ck_rows {
    const char *data; /* row 0 */
    size_t stride;    /* bytes from row to row */
    enum ck_row_type type;
    int32_t width; /* of a head, in elements: see struct ck_tile */
    size_t head_bytes;
};

/* One layer's attention: what is read, how, and where it goes. */
struct ck_attention {
    const struct ck_kernels *kernels;
    struct ck_rows k, v;
    int32_t n_heads; /* of queries; head h reads K/V head h / (n_heads / n_kv_heads) */
    int32_t n_kv_heads;
    const char *queries; /* F32: head h of query i is at i * query_stride + h * head_stride bytes */
    size_t query_stride, head_stride;
    float scale;
    float soft_cap;     /* 0: none */
    const float *sinks; /* [n_heads], or NULL */
    float *out;         /* [n_queries][n_heads][v.width] */
    float *parts;       /* [n_parts][n_heads] parts of ck_part_floats(v.width) */
};

/* A part of one query head's attention: maximum, sum, and the weighted values, v.width floats. */
static inline size_t ck_part_floats(int32_t width_v) {
    return (size_t)width_v + 2;
}

/* The scratch that ck_piece_compute needs in a slice of this many queries, in floats. */
size_t ck_piece_scratch_floats(int32_t n_queries, int32_t n_heads, int32_t n_kv_heads,
                               int32_t width_k, int32_t width_v);

/* Computes piece i of the plan: parts, or attention where there is nothing to merge. `upcoming` is
 * a piece that the thread may well take next (if there is such a piece): its first rows are
 * prefetched. `scratch` is 64-byte aligned and the calling thread's own. */
void ck_piece_compute(const struct ck_attention *attention, const struct ck_sight *sight,
                      const struct ck_plan *plan, int32_t i, int32_t upcoming, float *scratch);

/* Merges the parts of one query head into its attention; the query has some. */
void ck_parts_merge(const struct ck_attention *attention, const struct ck_plan *plan, int32_t query,
                    int32_t head);

#endif
