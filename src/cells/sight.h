/* Sight: which cells each query of a step attends, as segments.
 *
 * Cell j is seen by query i iff they share a sequence, pos[j] <= pos[i], and, with a window W > 0,
 * pos[j] > pos[i] - W. A segment is a run of cells that the same of the step's sequences own. Of a
 * segment a query sees one contiguous range, since its cells are in order of position. */
#ifndef CELLKV_CELLS_SIGHT_H
#define CELLKV_CELLS_SIGHT_H

#include <stdint.h>

#include "cells.h"

/* One query's view of one segment: it sees the segment's cells [begin, end), never empty. */
struct ck_view {
    int32_t query; /* index into the slice: 0 .. n_queries - 1 */
    int32_t begin;
    int32_t end;
};

struct ck_segment {
    int32_t first_cell; /* into ck_sight.cells */
    int32_t n_cells;    /* >= 1; ascending positions */
    int32_t first_view; /* into ck_sight.views */
    int32_t n_views;    /* >= 1; ascending queries */
};

struct ck_sight {
    int32_t n_queries;
    int32_t n_segments;
    int32_t n_cells; /* of all segments: each cell seen by any query, once */
    int32_t n_views;
    struct ck_segment *segments;
    int32_t *cells;
    struct ck_view *views;
    int32_t cap_segments, cap_cells, cap_views; /* the arrays are reused from step to step */
};

/* Finds the sight of the placed step's tokens [first, first + n_queries) in a layer of this window
 * (0: none). Reuses the arrays of an earlier build; `sight` starts zeroed.
 * Returns CELLKV_OK or CELLKV_ERROR_OUT_OF_MEMORY. Cost: O(cells seen + views). */
cellkv_status ck_sight_build(struct ck_sight *sight, struct ck_cells *cells, int32_t first,
                             int32_t n_queries, int32_t window);

void ck_sight_free(struct ck_sight *sight);

#endif
