/* The neutral core: a pool of cells, the sequences that own them, and the step.
 *
 * No locking and no public-API checks here: cache.c wraps these verbs for callers, the executor
 * calls the step's half between ck_cache_enter and ck_cache_leave. */
#ifndef CELLKV_CELLS_CELLS_H
#define CELLKV_CELLS_CELLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cellkv/cache.h>

struct ck_cells; /* fields: cells_struct.h; other rooms use the functions below */

/* The last placed step, in token order. Valid until the next changing verb. */
struct ck_step {
    int32_t n_tokens;         /* 0: there is none */
    const int32_t *slots;     /* [n_tokens] slot of each token's sequence */
    const int32_t *positions; /* [n_tokens] */
    const int32_t *cells;     /* [n_tokens] */
};

/* ---- the step's half, for the executor ---- */

/* Declares (if seqs is not NULL) and places in one go: all of it, or nothing changes, an earlier
 * declaration included. Statuses: those of cellkv_cache_declare and cellkv_cache_place. `rows`: how
 * many the storage has now, 0 without one. No cell is placed past them while the free ones below
 * suffice, and else none past the rows that doubling them as often as needed would make. */
cellkv_status ck_cells_begin_step(struct ck_cells *cells, const int64_t *seqs,
                                  const int32_t *positions, int32_t n_tokens, int32_t rows);

/* Takes begin_step back, for a failure before compute began: cells, sequences, declaration (the one
 * before begin_step) and undo are as they were. Legal once, right after begin_step (take_freed may
 * come between). */
void ck_cells_rollback_step(struct ck_cells *cells);

/* The step just placed. */
struct ck_step ck_cells_step(const struct ck_cells *cells);

/* One past the highest occupied cell. */
int32_t ck_cells_extent(const struct ck_cells *cells);

/* The rows of the placed step's tokens [first, first + n) are about to be written: what rings held
 * there is lost, whatever comes of it. Cost: O(1). */
void ck_cells_begin_write(struct ck_cells *cells, int32_t first, int32_t n);

/* The end of what was written since the sequence was last empty (ring.h); kind sequence only. */
int32_t ck_cells_written(const struct ck_cells *cells);

/* Cells that were freed since the last call (each at most once, whether or not occupied again by
 * now) and not written since, ascending: their rows may hold anything. The array lives until the
 * next call of this; the list is empty afterwards. Cost: O(n). */
int32_t ck_cells_take_freed(struct ck_cells *cells, const int32_t **freed);

/* The rows of the placed step's tokens [first, first + n) have been written: their cells leave that
 * list. Cost: O(n). */
void ck_cells_keep_written(struct ck_cells *cells, int32_t first, int32_t n);

/* ---- the control plane's half: the verbs of cache.h, with the same statuses and messages ---- */

/* What a kind of cache makes of its cells. */
struct ck_cells_config {
    int32_t capacity;
    int32_t max_seqs;
    bool is_contiguous; /* kind sequence: max_seqs is 1, and a cell's index is its position */
    int32_t ring;       /* rows of the smallest ring of a window > 1 (ring.h); 0: there is none */
    int32_t window; /* with a ring: that ring's. Else the largest, where every layer has one; else
                       0, and trim_windows must not be called */
};

/* NULL: out of memory. Cost: O(capacity). */
struct ck_cells *ck_cells_new(const struct ck_cells_config *config);
void ck_cells_free(struct ck_cells *cells); /* NULL is fine */

cellkv_status ck_cells_open(struct ck_cells *cells, int64_t *seq);
cellkv_status ck_cells_clone(struct ck_cells *cells, int64_t src, int32_t upto, int64_t *seq);
cellkv_status ck_cells_rewind(struct ck_cells *cells, int64_t seq, int32_t pos);
cellkv_status ck_cells_remove(struct ck_cells *cells, int64_t seq, int32_t p0, int32_t p1);
cellkv_status ck_cells_close(struct ck_cells *cells, int64_t seq);
void ck_cells_clear(struct ck_cells *cells);
int32_t ck_cells_trim_windows(struct ck_cells *cells); /* returns how many cells became free */

cellkv_status ck_cells_declare(struct ck_cells *cells, const int64_t *seqs, int32_t n_tokens,
                               int32_t *shortfall); /* may be NULL */
cellkv_status ck_cells_extend(struct ck_cells *cells, int64_t seq, int32_t n_tokens,
                              int32_t *shortfall); /* may be NULL */
cellkv_status ck_cells_undo_step(struct ck_cells *cells, int32_t n_keep);

cellkv_status ck_cells_length(const struct ck_cells *cells, int64_t seq, int32_t *length);
cellkv_status ck_cells_next_pos(const struct ck_cells *cells, int64_t seq, int32_t *pos);
cellkv_status ck_cells_read(const struct ck_cells *cells, int64_t seq, int32_t *list,
                            int32_t *positions, int32_t max, int32_t *length);

int32_t ck_cells_n_free(const struct ck_cells *cells);

/* Fills in what concerns cells: everything but size, rows, storage_bytes and n_growths. */
void ck_cells_stats(const struct ck_cells *cells, cellkv_cache_stats *stats);

#endif
