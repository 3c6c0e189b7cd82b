/* The step: declaration, placement, rollback, undo.
 *
 * A new step is made in `before` while `step` stays as it is, and the two change places once
 * nothing can fail any more. That is why a refusal leaves the earlier declaration alone, and why
 * rollback has only to change them back. */
#include "cells_struct.h"
#include "error.h"
#include "memory.h"

/* ---- buffers ---- */

void ck_step_buffer_release(struct ck_step_buffer *buffer) {
    ck_free(buffer->slots);
    *buffer = (struct ck_step_buffer){0};
}

/* Rooms of one prefill are not kept through a long decode: steps are no part of what the table may
 * take for each cell. What the buffer held is lost. */
static bool make_room(struct ck_step_buffer *buffer, int32_t n_tokens) {
    enum { LEAST = 64, KEPT = 1024 };
    bool is_lavish = buffer->room > KEPT && n_tokens < buffer->room / 4;
    if (n_tokens <= buffer->room && !is_lavish) {
        return true;
    }
    int32_t room = n_tokens < LEAST ? LEAST : n_tokens;
    int32_t *words = ck_realloc_array(buffer->slots, (size_t)room, 3 * sizeof *words);
    if (!words) {
        return is_lavish;
    }
    buffer->slots = words;
    buffer->positions = words + room;
    buffer->cells = words + 2 * (size_t)room;
    buffer->room = room;
    return true;
}

static void forget(struct ck_step_buffer *buffer) {
    buffer->state = CK_STEP_NONE;
    buffer->n_tokens = 0;
}

static void swap_buffers(struct ck_cells *cells) {
    struct ck_step_buffer made = cells->before;
    cells->before = cells->step;
    cells->step = made;
}

void ck_cells_cancel_step(struct ck_cells *cells) {
    forget(&cells->step);
    forget(&cells->before);
    cells->can_roll_back = false;
}

/* ---- admission ---- */

/* Whether a step of so many tokens can be, whosever they are. */
static cellkv_status check_count(int32_t n_tokens) {
    if (n_tokens < 0) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "n_tokens is %d", n_tokens);
    }
    if (n_tokens == 0) {
        return ck_fail(CELLKV_ERROR_EMPTY_STEP, "a step needs at least one token, 0 given");
    }
    return CELLKV_OK;
}

static cellkv_status check_fits(const struct ck_cells *cells, int32_t n_tokens,
                                int32_t *shortfall) {
    int32_t n_free = cells->table.free.count;
    if (n_tokens > n_free) {
        *shortfall = n_tokens - n_free;
        return ck_fail(CELLKV_ERROR_OUT_OF_CELLS,
                       "a step of %d tokens needs %d more cells: %d of %d are free", n_tokens,
                       n_tokens - n_free, n_free, cells->table.capacity);
    }
    return CELLKV_OK;
}

static cellkv_status check_declarable(const struct ck_cells *cells, const int64_t *seqs,
                                      int32_t n_tokens, int32_t *shortfall) {
    cellkv_status status = check_count(n_tokens);
    if (status) {
        return status;
    }
    for (int32_t i = 0; i < n_tokens; i++) {
        if (!ck_sequences_find(&cells->sequences, seqs[i])) {
            return ck_fail(CELLKV_ERROR_UNKNOWN_SEQUENCE,
                           "token %d: sequence %lld is not open in this cache", i,
                           (long long)seqs[i]);
        }
    }
    return check_fits(cells, n_tokens, shortfall);
}

static int32_t slot_of(const struct ck_cells *cells, int64_t handle) {
    return (int32_t)(ck_sequences_find(&cells->sequences, handle) - cells->sequences.slots);
}

/* Token i of a step that has been admitted is of seqs[i], or all are of seqs[0]. */
static cellkv_status declare(struct ck_cells *cells, const int64_t *seqs, bool all_of_first,
                             int32_t n_tokens) {
    /* The last step's undo ends here, so that its buffer serves as well as any. */
    struct ck_step_buffer *made = &cells->step;
    if (!make_room(made, n_tokens)) {
        return ck_fail_memory("the step");
    }
    for (int32_t i = 0; i < n_tokens; i++) {
        made->slots[i] = slot_of(cells, seqs[all_of_first ? 0 : i]);
    }
    ck_cells_cancel_step(cells);
    made->state = CK_STEP_DECLARED;
    made->n_tokens = n_tokens;
    ck_cells_check(cells);
    return CELLKV_OK;
}

cellkv_status ck_cells_declare(struct ck_cells *cells, const int64_t *seqs, int32_t n_tokens,
                               int32_t *shortfall) {
    int32_t missing = 0;
    cellkv_status status = check_declarable(cells, seqs, n_tokens, &missing);
    if (shortfall) {
        *shortfall = missing;
    }
    return status ? status : declare(cells, seqs, false, n_tokens);
}

cellkv_status ck_cells_extend(struct ck_cells *cells, int64_t seq, int32_t n_tokens,
                              int32_t *shortfall) {
    int32_t missing = 0;
    cellkv_status status = check_count(n_tokens);
    if (!status && !ck_cells_find(cells, seq)) {
        status = CELLKV_ERROR_UNKNOWN_SEQUENCE;
    }
    if (!status) {
        status = check_fits(cells, n_tokens, &missing);
    }
    if (shortfall) {
        *shortfall = missing;
    }
    return status ? status : declare(cells, &seq, true, n_tokens);
}

/* ---- placement ---- */

static cellkv_status check_declared(const struct ck_cells *cells, int32_t n_tokens) {
    if (cells->step.state != CK_STEP_DECLARED) {
        return ck_fail(CELLKV_ERROR_NOT_DECLARED,
                       "a step of %d tokens needs a declaration, and none is waiting", n_tokens);
    }
    if (cells->step.n_tokens != n_tokens) {
        return ck_fail(CELLKV_ERROR_NOT_DECLARED, "%d tokens are declared, %d given",
                       cells->step.n_tokens, n_tokens);
    }
    return CELLKV_OK;
}

/* The token's position is `expected`; *given, where positions are given, must say the same. */
static cellkv_status check_position(const struct ck_sequence *sequence, int32_t token,
                                    int64_t expected, const int32_t *given) {
    if (given && *given != expected) {
        return ck_fail(CELLKV_ERROR_BAD_POSITION,
                       "token %d does not continue sequence %lld: position %lld expected, %d given",
                       token, (long long)sequence->handle, (long long)expected, *given);
    }
    if (expected > CK_LAST_POSITION) {
        return ck_fail(CELLKV_ERROR_BAD_POSITION,
                       "token %d: sequence %lld cannot grow past position %d", token,
                       (long long)sequence->handle, CK_LAST_POSITION);
    }
    return CELLKV_OK;
}

/* Finds every token's position and makes room in every list, so that claiming cannot fail. A
 * sequence's `mark` counts its tokens so far. */
static cellkv_status prepare(struct ck_cells *cells, struct ck_step_buffer *made,
                             const int32_t *positions) {
    cellkv_status status = CELLKV_OK;
    int32_t i = 0;
    for (; i < made->n_tokens && !status; i++) {
        struct ck_sequence *sequence = &cells->sequences.slots[made->slots[i]];
        int64_t expected =
            (int64_t)ck_sequence_next_pos(sequence, &cells->table) + sequence->mark++;
        status = check_position(sequence, i, expected, positions ? &positions[i] : NULL);
        made->positions[i] = (int32_t)expected;
    }
    /* Room for a sequence's whole share is asked for where its first token meets its full count. */
    for (int32_t j = 0; j < i; j++) {
        struct ck_sequence *sequence = &cells->sequences.slots[made->slots[j]];
        if (!status && !ck_sequence_make_room(sequence, (int64_t)sequence->n + sequence->mark)) {
            status = ck_fail_memory("a sequence's list of cells");
        }
        sequence->mark = 0;
    }
    return status;
}

/* What the step's cells must lie below: the rows, doubled as storage doubles them, and only where
 * the free cells below do not suffice. */
static int32_t find_limit(const struct ck_table *table, int32_t rows, int32_t n_tokens) {
    const int32_t extent = ck_table_extent(table);
    int64_t limit = rows > 0 ? rows : 1;
    while (limit < extent || limit - table->used.count < n_tokens) {
        limit *= 2;
    }
    return limit < table->capacity ? (int32_t)limit : table->capacity;
}

/* The sequence's next cell: the one after its last, within a block; else the first of a block that
 * nobody else is in; else the lowest free one. */
static int32_t find_cell(const struct ck_table *table, const struct ck_sequence *sequence,
                         int32_t limit) {
    int32_t next = sequence->n > 0 ? sequence->cells[sequence->n - 1] + 1 : 0;
    if (next % CK_BLOCK != 0 && next < limit && ck_index_set_contains(&table->free, next)) {
        return next;
    }
    int32_t after = (next + CK_BLOCK - 1) / CK_BLOCK; /* the block after the last cell's; or 0 */
    int32_t cell = ck_table_free_block(table, after, limit);
    return cell >= 0 ? cell : ck_index_set_next(&table->free, 0);
}

/* Finds and claims one token's cell after the other's, so that each sees what those before it took.
 * Nothing can fail any more: `prepare` made room in the lists, and that there are cells enough was
 * found at admission. */
static void place_cells(struct ck_cells *cells, struct ck_step_buffer *made, int32_t rows) {
    struct ck_table *table = &cells->table;
    const int32_t limit = find_limit(table, rows, made->n_tokens);
    for (int32_t i = 0; i < made->n_tokens; i++) {
        struct ck_sequence *sequence = &cells->sequences.slots[made->slots[i]];
        int32_t cell = cells->is_contiguous ? sequence->n : find_cell(table, sequence, limit);
        assert(cell >= 0 && (cells->is_contiguous || cell < limit));
        ck_table_claim(table, cell, made->positions[i]);
        made->cells[i] = cell;
        sequence->cells[sequence->n++] = cell;
    }
}

cellkv_status ck_cells_begin_step(struct ck_cells *cells, const int64_t *seqs,
                                  const int32_t *positions, int32_t n_tokens, int32_t rows) {
    int32_t missing;
    cellkv_status status =
        seqs ? check_declarable(cells, seqs, n_tokens, &missing) : check_declared(cells, n_tokens);
    if (status) {
        return status;
    }
    struct ck_step_buffer *made = &cells->before;
    if (!make_room(made, n_tokens)) {
        return ck_fail_memory("the step");
    }
    made->n_tokens = n_tokens;
    for (int32_t i = 0; i < n_tokens; i++) {
        made->slots[i] = seqs ? slot_of(cells, seqs[i]) : cells->step.slots[i];
    }
    cells->can_roll_back = false; /* what was in `before` is gone */
    status = prepare(cells, made, positions);
    if (status) {
        forget(made);
        return status;
    }
    place_cells(cells, made, rows);
    made->state = CK_STEP_PLACED;
    swap_buffers(cells);
    cells->can_roll_back = true;
    ck_cells_check(cells);
    return CELLKV_OK;
}

/* ---- taking it back ---- */

/* With a ring: may the step's tokens from n_keep on be undone? All are of one sequence. */
static cellkv_status check_undoable(const struct ck_cells *cells, int32_t n_keep) {
    if (cells->ring == 0) {
        return CELLKV_OK;
    }
    const struct ck_sequence *sequence = &cells->sequences.slots[cells->step.slots[0]];
    int32_t n = sequence->n - (cells->step.n_tokens - n_keep);
    return ck_cells_check_trimmed(cells, sequence, n, ck_sequence_end(sequence, &cells->table, n));
}

/* A step's tokens stand at the end of their sequences' lists, the last ones last. */
static int32_t pop_last_cell(struct ck_cells *cells, int32_t token) {
    const struct ck_step_buffer *step = &cells->step;
    struct ck_sequence *sequence = &cells->sequences.slots[step->slots[token]];
    int32_t cell = sequence->cells[--sequence->n];
    assert(cell == step->cells[token]);
    return cell;
}

void ck_cells_rollback_step(struct ck_cells *cells) {
    assert(cells->can_roll_back);
    for (int32_t i = cells->step.n_tokens; i-- > 0;) {
        ck_table_unclaim(&cells->table, pop_last_cell(cells, i));
    }
    swap_buffers(cells);
    forget(&cells->before);
    cells->can_roll_back = false;
    ck_cells_check(cells);
}

cellkv_status ck_cells_undo_step(struct ck_cells *cells, int32_t n_keep) {
    int32_t n_tokens = cells->step.n_tokens;
    if (cells->step.state != CK_STEP_PLACED) {
        return ck_fail(CELLKV_ERROR_NOTHING_TO_UNDO,
                       "no step was placed, or another changing call came after it");
    }
    if (n_keep < 0 || n_keep > n_tokens) {
        return ck_fail(CELLKV_ERROR_BAD_RANGE, "n_keep is %d, the step has %d tokens", n_keep,
                       n_tokens);
    }
    cellkv_status status = check_undoable(cells, n_keep);
    if (status) {
        return status;
    }
    for (int32_t i = n_tokens; i-- > n_keep;) {
        ck_table_let_go(&cells->table, pop_last_cell(cells, i));
    }
    if (cells->table.used.count == 0) { /* no sequence has anything */
        cells->written = 0;
    }
    ck_cells_cancel_step(cells);
    ck_cells_check(cells);
    return CELLKV_OK;
}

struct ck_step ck_cells_step(const struct ck_cells *cells) {
    const struct ck_step_buffer *step = &cells->step;
    if (step->state != CK_STEP_PLACED) {
        return (struct ck_step){0};
    }
    return (struct ck_step){step->n_tokens, step->slots, step->positions, step->cells};
}
