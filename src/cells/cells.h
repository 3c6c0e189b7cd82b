/* The neutral core: a pool of cells, the sequences that own them, and the step.
 *
 * No locking and no public-API checks here: cache.c wraps these verbs for callers, the executor
 * calls the step's half between ck_cache_enter and ck_cache_leave. */
#ifndef CELLKV_CELLS_CELLS_H
#define CELLKV_CELLS_CELLS_H

#include <stdbool.h>
#include <stdint.h>

#include <cellkv/cache.h>

struct ck_cells; /* fields: see cells_struct.h or cells.c; others use the functions below */

/* The last placed step, in token order. Valid until the next changing verb. */
struct ck_step {
    int32_t n_tokens;
    const int32_t *slots;     /* [n_tokens] slot of each token's sequence */
    const int32_t *positions; /* [n_tokens] */
    const int32_t *cells;     /* [n_tokens] */
};

/* ---- the step's half, for the executor ---- */

/* Declares (if seqs is not NULL) and places in one go: all of it, or nothing changes, an earlier
 * declaration included. Statuses: those of cellkv_cache_declare and cellkv_cache_place. */
cellkv_status ck_cells_begin_step(struct ck_cells *cells, const int64_t *seqs,
                                  const int32_t *positions, int32_t n_tokens);

/* Takes begin_step back, for a failure before compute began: cells, sequences, declaration (the one
 * before begin_step) and undo are as they were. Legal once, right after begin_step. */
void ck_cells_rollback_step(struct ck_cells *cells);

/* The step just placed. */
struct ck_step ck_cells_step(const struct ck_cells *cells);

/* One past the highest occupied cell. */
int32_t ck_cells_extent(const struct ck_cells *cells);

/* Cells that were freed since the last call (each at most once, whether or not occupied again by
 * now), ascending: their rows may hold anything. The array lives until the next verb; the list is
 * empty afterwards. Cost: O(n log n). */
int32_t ck_cells_take_freed(struct ck_cells *cells, const int32_t **freed);

/* Puts taken cells back on that list, for a caller that could not clean them. Cannot fail. */
void ck_cells_return_freed(struct ck_cells *cells);

#endif
