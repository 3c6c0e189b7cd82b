/* The control plane's verbs. Each checks everything and allocates what it needs before its first
 * change, so that a refusal changes nothing. */
#include <string.h>

#include "cells_struct.h"
#include "error.h"
#include "memory.h"
#include "ring.h"

struct ck_cells *ck_cells_new(const struct ck_cells_config *config) {
    struct ck_cells *cells = ck_calloc(1, sizeof *cells);
    if (!cells) {
        return NULL;
    }
    cells->is_contiguous = config->is_contiguous;
    cells->ring = config->ring;
    cells->window = config->window;
    if (!ck_table_init(&cells->table, config->capacity) ||
        !ck_sequences_init(&cells->sequences, config->max_seqs)) {
        ck_cells_free(cells);
        return NULL;
    }
    return cells;
}

void ck_cells_free(struct ck_cells *cells) {
    if (!cells) {
        return;
    }
    ck_table_release(&cells->table);
    ck_sequences_release(&cells->sequences);
    ck_step_buffer_release(&cells->step);
    ck_step_buffer_release(&cells->before);
    ck_sight_scratch_release(&cells->sight);
    ck_free(cells);
}

struct ck_sequence *ck_cells_find(const struct ck_cells *cells, int64_t handle) {
    struct ck_sequence *sequence = ck_sequences_find(&cells->sequences, handle);
    if (!sequence) {
        ck_fail(CELLKV_ERROR_UNKNOWN_SEQUENCE, "sequence %lld is not open in this cache",
                (long long)handle);
    }
    return sequence;
}

int32_t ck_cells_let_go(struct ck_cells *cells, const struct ck_sequence *sequence, int32_t first,
                        int32_t last) {
    int32_t n_freed = 0;
    for (int32_t i = first; i < last; i++) {
        n_freed += ck_table_let_go(&cells->table, sequence->cells[i]);
    }
    return n_freed;
}

static int32_t next_pos(const struct ck_cells *cells, const struct ck_sequence *sequence) {
    return ck_sequence_next_pos(sequence, &cells->table);
}

static int32_t search(const struct ck_cells *cells, const struct ck_sequence *sequence,
                      int64_t position) {
    return ck_sequence_search(sequence, &cells->table, position);
}

/* ---- trimmed positions ----
 *
 * In the widest window a token at p sees positions > p - window. A sequence may therefore end (its
 * next token stand) at p only if p - window + 1 >= trimmed: nothing that was trimmed would be seen.
 * An empty sequence starts anew at 0, where nothing is to be seen.
 *
 * What a ring has written over is as good as trimmed, and the smallest ring's window decides. */

int32_t ck_cells_trimmed(const struct ck_cells *cells, const struct ck_sequence *sequence) {
    return cells->ring > 0 ? ck_ring_lost(cells->ring, cells->written) : sequence->trimmed;
}

/* The lowest next_pos that the sequence can be brought to, other than 0. */
static int32_t oldest_end(const struct ck_cells *cells, const struct ck_sequence *sequence) {
    int64_t lowest = (int64_t)ck_cells_trimmed(cells, sequence) + cells->window - 1;
    int32_t i = search(cells, sequence, lowest - 1);
    return ck_sequence_end(sequence, &cells->table, i + 1);
}

cellkv_status ck_cells_check_trimmed(const struct ck_cells *cells,
                                     const struct ck_sequence *sequence, int32_t n, int32_t pos) {
    int64_t end = ck_sequence_end(sequence, &cells->table, n);
    int32_t trimmed = ck_cells_trimmed(cells, sequence);
    if (trimmed == 0 || pos == 0 || end - cells->window + 1 >= trimmed) {
        return CELLKV_OK;
    }
    return ck_fail(
        CELLKV_ERROR_TRIMMED,
        "sequence %lld cannot end at position %d: positions below %d were %s, the oldest "
        "end that can be reached is %d",
        (long long)sequence->handle, pos, trimmed, cells->ring > 0 ? "written over" : "trimmed",
        oldest_end(cells, sequence));
}

void ck_cells_keep_first(struct ck_cells *cells, struct ck_sequence *sequence, int32_t n) {
    sequence->n = n;
    if (n == 0) {
        sequence->trimmed = 0;
        cells->written = 0;
    }
    ck_sequence_shrink(sequence);
}

/* The list closes up over its cells [first, last), whose claims have been dropped. */
static void close_gap(struct ck_cells *cells, struct ck_sequence *sequence, int32_t first,
                      int32_t last) {
    if (first < last) {
        memmove(sequence->cells + first, sequence->cells + last,
                (size_t)(sequence->n - last) * sizeof *sequence->cells);
    }
    ck_cells_keep_first(cells, sequence, sequence->n - (last - first));
}

/* ---- sequences ---- */

static cellkv_status check_slot(const struct ck_cells *cells) {
    if (cells->sequences.n_open == cells->sequences.max_seqs) {
        return ck_fail(CELLKV_ERROR_NO_SLOT, "all %d sequence slots are open",
                       cells->sequences.max_seqs);
    }
    return CELLKV_OK;
}

cellkv_status ck_cells_open(struct ck_cells *cells, int64_t *seq) {
    cellkv_status status = check_slot(cells);
    if (status) {
        return status;
    }
    *seq = ck_sequences_open(&cells->sequences)->handle;
    ck_cells_cancel_step(cells);
    ck_cells_check(cells);
    return CELLKV_OK;
}

/* A second owner for the source's first `n` cells. `list` has room for them and becomes the
 * clone's. */
static int64_t share_cells(struct ck_cells *cells, const struct ck_sequence *source, int32_t n,
                           struct ck_sequence list) {
    struct ck_sequence *clone = ck_sequences_open(&cells->sequences);
    clone->cells = list.cells;
    clone->room = list.room;
    clone->n = n;
    clone->trimmed = n > 0 ? source->trimmed : 0;
    for (int32_t i = 0; i < n; i++) {
        clone->cells[i] = source->cells[i];
        ck_table_share(&cells->table, source->cells[i]);
    }
    return clone->handle;
}

cellkv_status ck_cells_clone(struct ck_cells *cells, int64_t src, int32_t upto, int64_t *seq) {
    const struct ck_sequence *source = ck_cells_find(cells, src);
    if (!source) {
        return CELLKV_ERROR_UNKNOWN_SEQUENCE;
    }
    int32_t end = next_pos(cells, source);
    if (upto == CELLKV_UNSET) {
        upto = end;
    }
    if (upto < 0 || upto > end) {
        return ck_fail(CELLKV_ERROR_BAD_RANGE, "upto is %d, sequence %lld has positions [0, %d)",
                       upto, (long long)src, end);
    }
    if (cells->is_contiguous) {
        return ck_fail(CELLKV_ERROR_UNSUPPORTED,
                       "kind sequence holds one sequence: it cannot be cloned");
    }
    int32_t n = search(cells, source, upto);
    cellkv_status status = ck_cells_check_trimmed(cells, source, n, upto);
    if (!status) {
        status = check_slot(cells);
    }
    if (status) {
        return status;
    }
    struct ck_sequence list = {0};
    if (n > 0 && !ck_sequence_make_room(&list, n)) {
        return ck_fail_memory("the clone's list of cells");
    }
    *seq = share_cells(cells, source, n, list);
    ck_cells_cancel_step(cells);
    ck_cells_check(cells);
    return CELLKV_OK;
}

cellkv_status ck_cells_rewind(struct ck_cells *cells, int64_t seq, int32_t pos) {
    struct ck_sequence *sequence = ck_cells_find(cells, seq);
    if (!sequence) {
        return CELLKV_ERROR_UNKNOWN_SEQUENCE;
    }
    int32_t end = next_pos(cells, sequence);
    if (pos < 0 || pos > end) {
        return ck_fail(CELLKV_ERROR_BAD_RANGE, "pos is %d, sequence %lld has positions [0, %d)",
                       pos, (long long)seq, end);
    }
    int32_t n = search(cells, sequence, pos);
    cellkv_status status = ck_cells_check_trimmed(cells, sequence, n, pos);
    if (status) {
        return status;
    }
    ck_cells_let_go(cells, sequence, n, sequence->n);
    ck_cells_keep_first(cells, sequence, n);
    ck_cells_cancel_step(cells);
    ck_cells_check(cells);
    return CELLKV_OK;
}

cellkv_status ck_cells_remove(struct ck_cells *cells, int64_t seq, int32_t p0, int32_t p1) {
    struct ck_sequence *sequence = ck_cells_find(cells, seq);
    if (!sequence) {
        return CELLKV_ERROR_UNKNOWN_SEQUENCE;
    }
    int32_t end = next_pos(cells, sequence);
    if (p1 == CELLKV_UNSET) {
        p1 = end;
    }
    if (p0 < 0 || p0 > p1 || p1 > end) {
        return ck_fail(CELLKV_ERROR_BAD_RANGE,
                       "[%d, %d) is not a range of sequence %lld, which has positions [0, %d)", p0,
                       p1, (long long)seq, end);
    }
    int32_t first = search(cells, sequence, p0);
    int32_t last = search(cells, sequence, p1);
    if (last == sequence->n) { /* the sequence may end earlier */
        cellkv_status status = ck_cells_check_trimmed(cells, sequence, first, p0);
        if (status) {
            return status;
        }
    } else if (cells->is_contiguous && first < last) {
        return ck_fail(CELLKV_ERROR_UNSUPPORTED,
                       "kind sequence has no holes: of sequence %lld's positions [0, %d) the last "
                       "ones can be removed, [%d, %d) cannot",
                       (long long)seq, end, p0, p1);
    }
    ck_cells_let_go(cells, sequence, first, last);
    close_gap(cells, sequence, first, last);
    ck_cells_cancel_step(cells);
    ck_cells_check(cells);
    return CELLKV_OK;
}

static void close_sequence(struct ck_cells *cells, struct ck_sequence *sequence) {
    ck_cells_let_go(cells, sequence, 0, sequence->n);
    ck_sequences_close(&cells->sequences, sequence);
    cells->written = 0;
}

cellkv_status ck_cells_close(struct ck_cells *cells, int64_t seq) {
    struct ck_sequence *sequence = ck_cells_find(cells, seq);
    if (!sequence) {
        return CELLKV_ERROR_UNKNOWN_SEQUENCE;
    }
    close_sequence(cells, sequence);
    ck_cells_cancel_step(cells);
    ck_cells_check(cells);
    return CELLKV_OK;
}

void ck_cells_clear(struct ck_cells *cells) {
    for (int32_t slot = 0; slot < cells->sequences.n_touched; slot++) {
        struct ck_sequence *sequence = &cells->sequences.slots[slot];
        if (sequence->handle) {
            close_sequence(cells, sequence);
        }
    }
    ck_cells_cancel_step(cells);
    ck_cells_check(cells);
}

/* The last cell stays even where the window is 1 and no layer will see it again: it tells where the
 * sequence continues. */
static int32_t trim_sequence(struct ck_cells *cells, struct ck_sequence *sequence) {
    int64_t oldest_seen = (int64_t)next_pos(cells, sequence) - cells->window + 1;
    int32_t n = search(cells, sequence, oldest_seen);
    if (n == sequence->n) {
        n--;
    }
    if (n <= 0) {
        return 0;
    }
    sequence->trimmed = ck_sequence_end(sequence, &cells->table, n);
    int32_t n_freed = ck_cells_let_go(cells, sequence, 0, n);
    close_gap(cells, sequence, 0, n);
    return n_freed;
}

int32_t ck_cells_trim_windows(struct ck_cells *cells) {
    assert(cells->window > 0);
    int32_t n_freed = 0;
    for (int32_t slot = 0; slot < cells->sequences.n_touched; slot++) {
        struct ck_sequence *sequence = &cells->sequences.slots[slot];
        if (sequence->handle) {
            n_freed += trim_sequence(cells, sequence);
        }
    }
    ck_cells_cancel_step(cells);
    ck_cells_check(cells);
    return n_freed;
}

/* ---- read-outs ---- */

cellkv_status ck_cells_length(const struct ck_cells *cells, int64_t seq, int32_t *length) {
    const struct ck_sequence *sequence = ck_cells_find(cells, seq);
    if (!sequence) {
        return CELLKV_ERROR_UNKNOWN_SEQUENCE;
    }
    *length = sequence->n;
    return CELLKV_OK;
}

cellkv_status ck_cells_next_pos(const struct ck_cells *cells, int64_t seq, int32_t *pos) {
    const struct ck_sequence *sequence = ck_cells_find(cells, seq);
    if (!sequence) {
        return CELLKV_ERROR_UNKNOWN_SEQUENCE;
    }
    *pos = next_pos(cells, sequence);
    return CELLKV_OK;
}

cellkv_status ck_cells_read(const struct ck_cells *cells, int64_t seq, int32_t *list,
                            int32_t *positions, int32_t max, int32_t *length) {
    const struct ck_sequence *sequence = ck_cells_find(cells, seq);
    if (!sequence) {
        return CELLKV_ERROR_UNKNOWN_SEQUENCE;
    }
    for (int32_t i = 0; i < sequence->n && i < max; i++) {
        if (list) {
            list[i] = sequence->cells[i];
        }
        if (positions) {
            positions[i] = cells->table.positions[sequence->cells[i]];
        }
    }
    if (length) {
        *length = sequence->n;
    }
    return CELLKV_OK;
}

int32_t ck_cells_n_free(const struct ck_cells *cells) {
    return cells->table.free.count;
}

int32_t ck_cells_extent(const struct ck_cells *cells) {
    return ck_table_extent(&cells->table);
}

static size_t step_bytes(const struct ck_cells *cells) {
    size_t tokens = (size_t)cells->step.room + (size_t)cells->before.room;
    return tokens * 3 * sizeof(int32_t);
}

void ck_cells_stats(const struct ck_cells *cells, cellkv_cache_stats *stats) {
    const struct ck_table *table = &cells->table;
    stats->capacity = table->capacity;
    stats->free_cells = table->free.count;
    stats->used_cells = table->used.count;
    stats->extent = ck_table_extent(table);
    stats->n_seqs = cells->sequences.n_open;
    stats->max_seqs = cells->sequences.max_seqs;
    stats->declared_tokens = cells->step.state == CK_STEP_DECLARED ? cells->step.n_tokens : 0;
    stats->owned_cells = 0;
    for (int32_t slot = 0; slot < cells->sequences.n_touched; slot++) {
        stats->owned_cells += cells->sequences.slots[slot].n;
    }
    stats->table_bytes =
        (int64_t)(sizeof *cells + ck_table_bytes(table) + ck_sequences_bytes(&cells->sequences) +
                  step_bytes(cells) + ck_sight_scratch_bytes(cells));
}

/* ---- freed cells ---- */

int32_t ck_cells_take_freed(struct ck_cells *cells, const int32_t **freed) {
    struct ck_table *table = &cells->table;
    table->n_taken = 0;
    for (int32_t cell = ck_index_set_next(&table->freed, 0); cell >= 0;
         cell = ck_index_set_next(&table->freed, cell + 1)) {
        ck_index_set_remove(&table->freed, cell);
        table->taken[table->n_taken++] = cell;
    }
    *freed = table->taken;
    return table->n_taken;
}

void ck_cells_keep_written(struct ck_cells *cells, int32_t first, int32_t n) {
    assert(cells->step.state == CK_STEP_PLACED && first >= 0 && n <= cells->step.n_tokens - first);
    for (int32_t i = first; i < first + n; i++) {
        ck_index_set_remove(&cells->table.freed, cells->step.cells[i]);
    }
}

/* ---- rings ---- */

void ck_cells_begin_write(struct ck_cells *cells, int32_t first, int32_t n) {
    assert(cells->step.state == CK_STEP_PLACED && n >= 1 && n <= cells->step.n_tokens - first);
    if (cells->is_contiguous) {
        int32_t end = cells->step.positions[first + n - 1] + 1;
        cells->written = end > cells->written ? end : cells->written;
    }
}

int32_t ck_cells_written(const struct ck_cells *cells) {
    return cells->written;
}
