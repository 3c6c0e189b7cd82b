/* A layout: how the dense strategy reads rows for one slice and one window.
 *
 * One flash attention over rows [0, extent) makes every query pay for everybody's cells. A layout
 * cuts the queries into pieces, each with the rows that it needs: a piece is consecutive queries
 * and runs of whole blocks of CK_ROW_PADDING rows. Its attention reads the rows of a single run
 * where they are; of several runs it reads a copy that has them one after the other.
 *
 * Invariants: pieces follow each other and cover all queries; a piece's runs are disjoint,
 * ascending and not adjacent; they hold every cell that one of its queries sees; its extent is the
 * sum of its runs; its mask follows that of the piece before. */
#ifndef CELLKV_ATTENTION_LAYOUT_H
#define CELLKV_ATTENTION_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include <ggml.h>

#include <cellkv/status.h>

#include "cells/sight.h"

/* Beyond these, pieces are joined. */
enum {
    CK_MAX_LAYOUT_PIECES = 256,
    CK_MAX_LAYOUT_RUNS = 1024,
};

/* What a layout may be: it depends on the devices. */
enum ck_layout_limit {
    CK_LAYOUT_ONE_CALL, /* one piece, all rows below extent */
    CK_LAYOUT_IN_PLACE, /* pieces of one run */
    CK_LAYOUT_COPIES,   /* pieces of any runs */
};

/* Rows [first_row, first_row + n_rows), the piece's from first_column on; all are multiples of
 * CK_ROW_PADDING. */
struct ck_row_run {
    int32_t first_row;
    int32_t n_rows;
    int32_t first_column;
};

struct ck_layout_piece {
    int32_t first_query;
    int32_t n_queries;
    int32_t first_run;   /* into ck_layout.runs */
    int32_t n_runs;      /* >= 1; 1: read where they are, more: read from a copy */
    int32_t extent;      /* rows of all its runs */
    int64_t mask_offset; /* half floats; its mask is [extent, n_queries], contiguous */
};

struct ck_layout {
    int32_t n_queries;
    int32_t n_pieces;
    struct ck_layout_piece *pieces;
    int32_t n_runs;
    struct ck_row_run *runs;
    int64_t mask_size; /* half floats of all pieces' masks */
    /* Scratch; all arrays are reused from step to step. */
    uint8_t *blocks; /* [n_queries + 2][n_blocks] whether a query reads a block of rows; then what
                        the open piece reads, and what it would */
    int32_t *counts; /* [n_blocks] cells of a view in a block */
    int32_t room_pieces, room_runs, room_blocks, room_counts;
};

/* Lays a slice out by its sight, whose cells are rows below `extent`, a multiple of CK_ROW_PADDING
 * and at most the rows there are, in 1 .. CK_MAX_LAYOUT_PIECES pieces at most. Reuses the arrays of
 * an earlier build; `layout` starts zeroed. Depends on nothing else: the same arguments give the
 * same layout.
 * Returns CELLKV_OK or CELLKV_ERROR_OUT_OF_MEMORY. Cost: O(cells seen + (views + n_queries)
 * blocks), a block being CK_ROW_PADDING of the rows below `extent`. */
cellkv_status ck_layout_build(struct ck_layout *layout, const struct ck_sight *sight,
                              int32_t extent, enum ck_layout_limit limit, int32_t max_pieces);

/* Whether graphs of these layouts are the same. */
bool ck_layout_equal(const struct ck_layout *a, const struct ck_layout *b);

/* Makes `copy`, which is overwritten, equal to `layout`, without scratch.
 * Returns CELLKV_OK or CELLKV_ERROR_OUT_OF_MEMORY, then `copy` is empty. */
cellkv_status ck_layout_copy(struct ck_layout *copy, const struct ck_layout *layout);

/* Renders the sight that the layout was built from as its pieces' masks: mask_size half floats, 0
 * where seen, else -inf. Cost: O(mask_size + cells seen by each query). */
void ck_layout_render_mask(const struct ck_layout *layout, const struct ck_sight *sight,
                           ggml_fp16_t *mask);

void ck_layout_free(struct ck_layout *layout);

#endif
