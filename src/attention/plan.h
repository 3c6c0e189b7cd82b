/* A plan: a slice's sight cut into pieces of work for several threads, and what has to be put
 * together again afterwards.
 *
 * A piece is a range of a segment's cells and a block of the queries that see it. A query whose
 * cells are all in one piece gets its attention there; any other gets a part from each of its
 * pieces, and the parts are merged. */
#ifndef CELLKV_ATTENTION_PLAN_H
#define CELLKV_ATTENTION_PLAN_H

#include <stdint.h>

#include <cellkv/status.h>

#include "cells/sight.h"

enum {
    CK_MAX_QUERIES = 32, /* of one piece */
    CK_NO_PART = -1,
};

struct ck_piece {
    int32_t segment;
    int32_t begin, end;  /* of the segment's cells, as its views count them */
    int32_t first_view;  /* into ck_sight.views */
    int32_t n_views;     /* 1 .. CK_MAX_QUERIES */
    int32_t first_entry; /* view first_view + i has part part_of_entry[first_entry + i] */
    int32_t first_row;   /* the first cell */
};

struct ck_plan {
    struct ck_piece *pieces; /* in the order in which threads should take them */
    int32_t n_pieces;
    int32_t *part_of_entry; /* for each view of each piece a part, or CK_NO_PART: the query is in
                               no other piece */
    int32_t n_queries;
    int32_t n_parts;
    int32_t *first_part; /* [n_queries + 1] query q's parts are [first_part[q], first_part[q + 1]),
                            in order of piece; none if it has a single piece */
    /* Scratch; all arrays are reused from step to step. */
    struct ck_block *blocks; /* [n_blocks] */
    int32_t n_blocks;
    int32_t *cursor; /* [n_queries] */
    int32_t room_blocks, room_pieces, room_entries, room_first, room_cursor;
};

/* Cuts `sight` for this many threads. Reuses the arrays of an earlier build; `plan` starts zeroed.
 * Depends on nothing else: the same sight and thread count give the same plan.
 * Returns CELLKV_OK or CELLKV_ERROR_OUT_OF_MEMORY. Cost: O(views + pieces log pieces). */
cellkv_status ck_plan_build(struct ck_plan *plan, const struct ck_sight *sight, int32_t n_threads);

void ck_plan_free(struct ck_plan *plan);

#endif
