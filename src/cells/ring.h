/* Rings: how kind sequence bounds the rows of a layer with a window.
 *
 * The row of position p in such a layer is p mod R. A slice of n <= max_step queries, the first at
 * p, sees positions in (p - W, p + n), which are W + n - 1: with R = W + max_step - 1 rows no token
 * is written over one that the slice sees.
 *
 * Let `written` be the end of what was written since the sequence was last empty; a rewind does not
 * lower it, since what was written over does not come back. Then
 *
 *     row r holds the largest position < written that is r mod R,
 *     positions < written - R are lost, those from there on are whole.
 *
 * A token at p sees positions > p - W, so a sequence may end at p only if p - W + 1 >= written - R,
 * that is p >= written - max_step; at 0 it starts anew, and with W = 1 it may end anywhere. R - W
 * is the same for every window: what the smallest ring of a window > 1 allows, all others do. */
#ifndef CELLKV_CELLS_RING_H
#define CELLKV_CELLS_RING_H

#include <stdint.h>

/* The rows R of a layer's ring; 0: none is needed, position p is row p (there is no window, or all
 * of capacity fits). */
static inline int32_t ck_ring_rows(int32_t capacity, int32_t window, int32_t max_step) {
    const int64_t rows = (int64_t)window + max_step - 1;
    return window > 0 && rows < capacity ? (int32_t)rows : 0;
}

/* The row of a position, or of a cell where there is no ring. */
static inline int32_t ck_ring_row(int32_t ring, int32_t position) {
    return ring > 0 ? position % ring : position;
}

/* Positions below this are lost. */
static inline int32_t ck_ring_lost(int32_t ring, int32_t written) {
    return ring > 0 && written > ring ? written - ring : 0;
}

#endif
