/* The cache: cells, the sequences that own them, and optionally the K/V rows behind them.
 *
 * A cell is one token's place: row `c` of every layer's K and V, plus a position. A sequence is an
 * ordered list of cells; several sequences may own one cell. Two halves use a cache in turn:
 *
 *   control plane:  open, clone, rewind, remove, close; declare the next step's tokens
 *   executor:       place the declared tokens, compute (executor.h does this for you)
 *
 * All calls on one cache are refused with CELLKV_ERROR_BUSY while another thread is inside it or a
 * step runs; nothing blocks. Different caches are independent. */
#ifndef CELLKV_CACHE_H
#define CELLKV_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A cache. Opaque; made by cellkv_cache_new. */
typedef struct cellkv_cache cellkv_cache;

/** "To the end", where a call takes a position that may be left out. */
#define CELLKV_UNSET INT32_MIN

/** The largest `capacity` and `max_seqs` of a cache. */
#define CELLKV_MAX_CAPACITY (1 << 30)
#define CELLKV_MAX_SEQS     65535

/** The most K/V heads of a layer, and the largest width of one. */
#define CELLKV_MAX_WIDTH 65536

/** How a cache lays out its sequences.
 *
 *  The batched kinds hold many sequences over one pool of cells; all that this header says holds
 *  for them. A token goes into the cell after its sequence's last one where that is free and in the
 *  same aligned block of 256 cells; else it starts a block that nobody is in, the following one if
 *  it can, or else the lowest; else it takes the lowest free cell. Rows do not grow for this: no
 *  cell past them is taken while the free ones below suffice for the step. A cache of cells alone
 *  goes by the rows that doubling a single one would give.
 *
 *  Kind sequence holds one: `max_seqs` is 1 whatever the configuration says. Position p is cell p,
 *  and `capacity` the most positions there can be. It extends, rewinds and clears;
 *  cellkv_cache_clone, removing anything but the end, and cellkv_cache_trim_windows are refused
 *  with CELLKV_ERROR_UNSUPPORTED.
 *
 *  Its layers of window W > 0 keep W + max_step - 1 rows, if that is less than capacity, and
 *  position p lies in row p modulo that. An executor computes at most max_step tokens of a step at
 *  once, so steps may be wider; who computes alone must do the same. What is written over in such a
 *  layer does not come back: let n be the end of all that was written since the sequence was last
 *  empty. Once n exceeds the fewest rows of a layer whose window is more than 1, the sequence may
 *  end at n - max_step and later positions, and at 0. Whatever else would end it earlier is refused
 *  with CELLKV_ERROR_TRIMMED, whose message has the oldest position that can be reached. */
typedef enum cellkv_cache_kind {
    CELLKV_CACHE_SEQUENCE = 0,    /* one sequence over contiguous rows */
    CELLKV_CACHE_BATCHED = 1,     /* the library's best layout for many sequences */
    CELLKV_CACHE_BATCHED_CELL = 2 /* many sequences over one pool of cells */
} cellkv_cache_kind;

/** Element type of stored K or V. The values are those of ggml's enum ggml_type.
 *
 *  Q8_0 and Q4_0 store 32 neighbours of a head as one block: integers of 8 or 4 bits and a half
 *  float that they share as their scale, 34 or 18 bytes. They need head widths that are multiples
 *  of 32. What is written is rounded, in proportion to the largest value of the block; one that is
 *  not finite spoils its block. */
typedef enum cellkv_type {
    CELLKV_TYPE_F32 = 0,
    CELLKV_TYPE_F16 = 1,
    CELLKV_TYPE_Q4_0 = 2,
    CELLKV_TYPE_Q8_0 = 8,
    CELLKV_TYPE_BF16 = 30
} cellkv_type;

/** One layer's shape: what a cell stores there, and how far back a query sees. */
typedef struct cellkv_layer {
    int32_t n_kv_heads; /* 1 .. CELLKV_MAX_WIDTH */
    int32_t head_dim_k; /* values per K head, 1 .. CELLKV_MAX_WIDTH, in whole blocks of type_k */
    int32_t head_dim_v; /* values per V head, likewise */
    int32_t window;     /* a query at p sees positions > p - window; 0: no window */
    cellkv_type type_k;
    cellkv_type type_v;
} cellkv_layer;

/** What cellkv_cache_new makes. Start from cellkv_cache_config_default(). */
typedef struct cellkv_cache_config {
    size_t size;         /* sizeof(cellkv_cache_config) */
    const char *backend; /* "ggml": cells and K/V rows; "cells": the cell table alone */
    cellkv_cache_kind kind;
    int32_t capacity;           /* most cells the cache may hold, 1 .. CELLKV_MAX_CAPACITY */
    int32_t max_seqs;           /* most open sequences, 1 .. CELLKV_MAX_SEQS; kind sequence: 1 */
    int32_t initial_rows;       /* rows allocated at once, 0 .. capacity; 0: on first use. Grows by
                                   doubling up to capacity, kind sequence up to its longest ring if
                                   all layers have one */
    int32_t max_step;           /* kind sequence: the most tokens computed at once where a layer has
                                   a window, 1 .. CELLKV_MAX_CAPACITY (see there) */
    int32_t n_layers;           /* >= 1; 0 is legal with "cells" */
    const cellkv_layer *layers; /* n_layers entries, copied */
    const char *device; /* "ggml": the devices of the layers' rows, as a text (device.h); NULL: the
                           best one */
} cellkv_cache_config;

/** A configuration with backend "ggml", kind batched, 4096 cells, 64 sequences, 256 rows at first,
 *  a max_step of 512 and no layers (model.h fills them from a model).
 *
 *  Threads: any.
 */
CELLKV_API cellkv_cache_config cellkv_cache_config_default(void);

/** The name of a kind: "sequence", "batched", "batched_cell".
 *
 *  @return    a static string; NULL for a value that is not a kind
 *  Threads: any.
 */
CELLKV_API const char *cellkv_cache_kind_name(cellkv_cache_kind kind);

/** Finds a kind by its name.
 *
 *  @param name   "sequence", "batched" or "batched_cell"; borrowed
 *  @param kind   receives the kind
 *  @return    CELLKV_OK; CELLKV_ERROR_INVALID_ARGUMENT: NULL, or not a kind's name
 *  On failure: *kind is unchanged.  Threads: any.
 */
CELLKV_API cellkv_status cellkv_cache_kind_by_name(const char *name, cellkv_cache_kind *kind);

/** Makes a cache.
 *
 *  @param config   what to make; borrowed, strings and layers are copied
 *  @param cache    receives the cache, the caller's to free
 *  @return    CELLKV_OK;
 *             CELLKV_ERROR_INVALID_ARGUMENT: NULL, a wrong `size`, a field outside its range, or a
 *             head width that its type's blocks do not divide (the message names layer and width);
 *             CELLKV_ERROR_NO_BUILDER: nothing builds this kind for this backend;
 *             the statuses of cellkv_devices_of_layers (device.h);
 *             CELLKV_ERROR_OUT_OF_MEMORY
 *  On failure: *cache is unchanged.  Cost: O(capacity) once.  Threads: any.
 */
CELLKV_API cellkv_status cellkv_cache_new(const cellkv_cache_config *config, cellkv_cache **cache);

/** Drops the caller's reference; NULL is fine. When it was the caller's last, the cache's published
 *  key is erased; the memory goes when no executor holds the cache either.
 *
 *  @pre       no other thread is inside a call on this reference
 *  Threads: any.
 */
CELLKV_API void cellkv_cache_free(cellkv_cache *cache);

/* ---- sequences ---- */

/** Opens a new, empty sequence. It stays open, even when emptied, until it is closed.
 *
 *  @param seq   receives its handle, > 0. No handle is ever given twice in one process, so a stale
 *               or foreign one is always refused
 *  @return    CELLKV_OK; CELLKV_ERROR_NO_SLOT: max_seqs are open; CELLKV_ERROR_OUT_OF_MEMORY;
 *             CELLKV_ERROR_INVALID_ARGUMENT: NULL; CELLKV_ERROR_BUSY
 *  Cancels a declaration and the last step's undo.
 *  On failure: nothing changed.  Cost: O(1).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_open(cellkv_cache *cache, int64_t *seq);

/** Opens a new sequence that shares the source's cells at positions < upto: nothing is copied or
 *  recomputed, no cell is used. A snapshot: cells that either gains later are its own.
 *
 *  @param src    the source; may be empty
 *  @param upto   in [0, next_pos(src)], or CELLKV_UNSET for all
 *  @param seq    receives the new handle
 *  @return    CELLKV_OK; CELLKV_ERROR_UNKNOWN_SEQUENCE: src; CELLKV_ERROR_BAD_RANGE: upto;
 *             CELLKV_ERROR_NO_SLOT; CELLKV_ERROR_OUT_OF_MEMORY;
 *             CELLKV_ERROR_TRIMMED: the clone's next token would see trimmed positions (the message
 *             has the oldest position that can be reached);
 *             CELLKV_ERROR_UNSUPPORTED: kind sequence;
 *             CELLKV_ERROR_INVALID_ARGUMENT: NULL; CELLKV_ERROR_BUSY
 *  Cancels a declaration and the last step's undo.
 *  On failure: nothing changed.  Cost: O(length) 4-byte indices.  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_clone(cellkv_cache *cache, int64_t src, int32_t upto,
                                            int64_t *seq);

/** Drops the sequence's claim on positions >= pos. Cells that no other sequence owns become free.
 *
 *  @param pos   in [0, next_pos(seq)]
 *  @return    CELLKV_OK; CELLKV_ERROR_UNKNOWN_SEQUENCE; CELLKV_ERROR_BAD_RANGE: pos;
 *             CELLKV_ERROR_TRIMMED: the next token would see positions that were trimmed, or in
 *             kind sequence written over (the message has the oldest position that can be
 *             reached);
 *             CELLKV_ERROR_INVALID_ARGUMENT: NULL; CELLKV_ERROR_BUSY
 *  Cancels a declaration and the last step's undo.
 *  On failure: nothing changed.  Cost: O(cells dropped + log length).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_rewind(cellkv_cache *cache, int64_t seq, int32_t pos);

/** Drops the sequence's claim on positions [p0, p1). The rest keeps its positions: the range is a
 *  hole that no query sees. Removing nothing is fine.
 *
 *  @param p0   0 <= p0 <= p1
 *  @param p1   at most next_pos(seq), or CELLKV_UNSET for next_pos(seq)
 *  @return    CELLKV_OK; CELLKV_ERROR_UNKNOWN_SEQUENCE; CELLKV_ERROR_BAD_RANGE: p0, p1;
 *             CELLKV_ERROR_TRIMMED: what is left would end where its next token sees positions that
 *             were trimmed, or in kind sequence written over; CELLKV_ERROR_UNSUPPORTED: kind
 *             sequence, and something is removed but not the end; CELLKV_ERROR_INVALID_ARGUMENT:
 *             NULL; CELLKV_ERROR_BUSY
 *  Cancels a declaration and the last step's undo.
 *  On failure: nothing changed.  Cost: O(length after p0).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_remove(cellkv_cache *cache, int64_t seq, int32_t p0,
                                             int32_t p1);

/** Closes the sequence: its claims are dropped, its handle is dead.
 *
 *  @return    CELLKV_OK; CELLKV_ERROR_UNKNOWN_SEQUENCE; CELLKV_ERROR_INVALID_ARGUMENT: NULL;
 *             CELLKV_ERROR_BUSY
 *  Cancels a declaration and the last step's undo.
 *  On failure: nothing changed.  Cost: O(length).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_close(cellkv_cache *cache, int64_t seq);

/** Closes every sequence and frees every cell. Rows stay allocated.
 *
 *  @return    CELLKV_OK; CELLKV_ERROR_INVALID_ARGUMENT: NULL; CELLKV_ERROR_BUSY
 *  Cancels a declaration and the last step's undo.
 *  Cost: O(max_seqs + cells owned).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_clear(cellkv_cache *cache);

/** Where every layer has a window: drops cells that no layer can see again, those at positions
 *  < next_pos - largest window + 1 of each sequence. Never done on its own. A later rewind or clone
 *  that needs them is refused.
 *
 *  @param n_freed   receives how many cells became free; may be NULL
 *  @return    CELLKV_OK; CELLKV_ERROR_NOT_WINDOWED: a layer has no window (the message names it)
 *             or there are no layers; CELLKV_ERROR_UNSUPPORTED: kind sequence, whose layers' rows
 *             are bounded anyway; CELLKV_ERROR_INVALID_ARGUMENT: NULL cache; CELLKV_ERROR_BUSY
 *  Cancels a declaration and the last step's undo.
 *  On failure: nothing changed.  Cost: O(max_seqs + cells owned).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_trim_windows(cellkv_cache *cache, int32_t *n_freed);

/* ---- the step ---- */

/** The admission gate: says which sequence each token of the next step belongs to. The whole step
 *  fits, or nothing changes. A second declaration replaces the first; any other changing call
 *  cancels it.
 *
 *  @param seqs        [n_tokens] handles, borrowed; a sequence may stand several times
 *  @param n_tokens    >= 1
 *  @param shortfall   receives how many cells are missing, 0 if none; may be NULL
 *  @return    CELLKV_OK; CELLKV_ERROR_UNKNOWN_SEQUENCE (the message names the token);
 *             CELLKV_ERROR_EMPTY_STEP: n_tokens is 0; CELLKV_ERROR_OUT_OF_CELLS: fewer than
 *             n_tokens cells are free; CELLKV_ERROR_INVALID_ARGUMENT: NULL, or n_tokens < 0;
 *             CELLKV_ERROR_OUT_OF_MEMORY; CELLKV_ERROR_BUSY
 *  Cancels the last step's undo.
 *  On failure: nothing changed, an earlier declaration included.  Cost: O(n_tokens).
 *  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_declare(cellkv_cache *cache, const int64_t *seqs,
                                              int32_t n_tokens, int32_t *shortfall);

/** The executor's half, for callers who bring their own storage and compute (cellkv_executor_run
 *  does it for you): gives each declared token a cell. Uses up the declaration.
 *
 *  @param positions   [n_tokens], borrowed: token i's position must be its sequence's next_pos,
 *                     counting that sequence's earlier tokens of the step. NULL: just that
 *  @param n_tokens    the declaration's length
 *  @param cells       [n_tokens], receives each token's cell; may be NULL
 *  @return    CELLKV_OK; CELLKV_ERROR_NOT_DECLARED: no declaration, or of another length;
 *             CELLKV_ERROR_BAD_POSITION (the message names token, sequence and the position
 *             expected); CELLKV_ERROR_INVALID_ARGUMENT: NULL cache; CELLKV_ERROR_OUT_OF_MEMORY;
 *             CELLKV_ERROR_BUSY
 *  On failure: nothing changed, the declaration included.  Cost: O(n_tokens).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_place(cellkv_cache *cache, const int32_t *positions,
                                            int32_t n_tokens, int32_t *cells);

/** cellkv_cache_declare for a step of one sequence.
 *
 *  @param seq         the sequence of all its tokens
 *  @param n_tokens    >= 1
 *  @param shortfall   receives how many cells are missing, 0 if none; may be NULL
 *  @return    CELLKV_OK; CELLKV_ERROR_UNKNOWN_SEQUENCE; CELLKV_ERROR_EMPTY_STEP: n_tokens is 0;
 *             CELLKV_ERROR_OUT_OF_CELLS: fewer than n_tokens cells are free;
 *             CELLKV_ERROR_INVALID_ARGUMENT: NULL cache, or n_tokens < 0;
 *             CELLKV_ERROR_OUT_OF_MEMORY; CELLKV_ERROR_BUSY
 *  Cancels the last step's undo.
 *  On failure: nothing changed, an earlier declaration included.  Cost: O(n_tokens).
 *  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_extend(cellkv_cache *cache, int64_t seq, int32_t n_tokens,
                                             int32_t *shortfall);

/** Gives back the last placed step's cells from its n_keep-th token on: the way to retry a failed
 *  forward, or to reject drafted tokens.
 *
 *  @param n_keep   in [0, tokens of the step]
 *  @pre       no other changing call came since that step
 *  @return    CELLKV_OK; CELLKV_ERROR_NOTHING_TO_UNDO: no step, already undone, or another changing
 *             call came between; CELLKV_ERROR_BAD_RANGE: n_keep; CELLKV_ERROR_TRIMMED: kind
 *             sequence, and the next token would see positions that were written over: of a step
 *             wider than max_step only the last max_step tokens that were computed can be undone,
 *             with those that were not, or all where the sequence was empty before;
 *             CELLKV_ERROR_INVALID_ARGUMENT: NULL; CELLKV_ERROR_BUSY
 *  On failure: nothing changed.  Cost: O(tokens of the step).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_undo_step(cellkv_cache *cache, int32_t n_keep);

/* ---- read-outs: they change nothing ---- */

/** Whether n more cells can be given now.
 *
 *  @return    CELLKV_OK; CELLKV_ERROR_INVALID_ARGUMENT: NULL or n < 0; CELLKV_ERROR_BUSY
 *  Cost: O(1).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_can_extend(cellkv_cache *cache, int32_t n, bool *fits);

/** How many cells the sequence owns (shared ones count in full).
 *
 *  @return    CELLKV_OK; CELLKV_ERROR_UNKNOWN_SEQUENCE; CELLKV_ERROR_INVALID_ARGUMENT: NULL;
 *             CELLKV_ERROR_BUSY
 *  Cost: O(1).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_length(cellkv_cache *cache, int64_t seq, int32_t *length);

/** The position the sequence's next token must have: its largest owned position + 1, or 0.
 *
 *  @return    as cellkv_cache_length
 *  Cost: O(1).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_next_pos(cellkv_cache *cache, int64_t seq, int32_t *pos);

/** Lists the sequence's cells in order of position.
 *
 *  @param cells       [max], receives cell indices; may be NULL
 *  @param positions   [max], receives positions; may be NULL
 *  @param max         room in the arrays; at most this many are written
 *  @param length      receives how many there are; may be NULL
 *  @return    CELLKV_OK; CELLKV_ERROR_UNKNOWN_SEQUENCE;
 *             CELLKV_ERROR_INVALID_ARGUMENT: NULL cache, or max < 0; CELLKV_ERROR_BUSY
 *  Cost: O(max).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_read_cells(cellkv_cache *cache, int64_t seq, int32_t *cells,
                                                 int32_t *positions, int32_t max, int32_t *length);

/** A cache's figures. */
typedef struct cellkv_cache_stats {
    size_t size;        /* set to sizeof(cellkv_cache_stats) by the caller */
    int32_t capacity;   /* cells it may hold */
    int32_t free_cells; /* cells it can still give */
    int32_t used_cells; /* capacity - free_cells */
    int32_t extent;     /* one past the highest occupied cell */
    int32_t rows;       /* rows its longest tensors have now; 0 without storage */
    int32_t n_seqs;     /* open sequences */
    int32_t max_seqs;
    int32_t declared_tokens; /* of the waiting declaration; 0: none */
    int64_t owned_cells;   /* sum of all sequences' lengths: > used_cells where cells are shared */
    int64_t table_bytes;   /* memory of the cell table, the sequences' lists and the last steps */
    int64_t storage_bytes; /* memory of the K/V rows */
    int64_t n_growths;     /* times the rows grew */
} cellkv_cache_stats;

/** Reads the cache's figures.
 *
 *  @param stats   its `size` must be set
 *  @return    CELLKV_OK; CELLKV_ERROR_INVALID_ARGUMENT: NULL or a wrong size; CELLKV_ERROR_BUSY
 *  Cost: O(max_seqs).  Threads: see above.
 */
CELLKV_API cellkv_status cellkv_cache_get_stats(cellkv_cache *cache, cellkv_cache_stats *stats);

/* ---- the registry ---- */

/** Publishes the cache under a generated key, by which an executor or another part of the program
 *  can find it. Publishing again gives the same key.
 *
 *  @param key   receives the key, > 0, never given twice
 *  @return    CELLKV_OK; CELLKV_ERROR_INVALID_ARGUMENT: NULL; CELLKV_ERROR_OUT_OF_MEMORY
 *  Cost: O(log published).  Threads: any (the registry is locked).
 */
CELLKV_API cellkv_status cellkv_cache_publish(cellkv_cache *cache, int64_t *key);

/** Erases a key. The cache lives on.
 *
 *  @return    CELLKV_OK; CELLKV_ERROR_UNKNOWN_KEY
 *  Threads: any.
 */
CELLKV_API cellkv_status cellkv_cache_unpublish(int64_t key);

/** Finds a published cache.
 *
 *  @param cache   receives a reference of the caller's own, to be freed
 *  @return    CELLKV_OK; CELLKV_ERROR_UNKNOWN_KEY; CELLKV_ERROR_INVALID_ARGUMENT: NULL
 *  On failure: *cache is unchanged.  Threads: any.
 */
CELLKV_API cellkv_status cellkv_cache_find(int64_t key, cellkv_cache **cache);

#ifdef __cplusplus
}
#endif

#endif
