/* The invariants, each in words and in code. */
#include <stdio.h>
#include <string.h>

#include "cells_struct.h"
#include "sight.h"

/* Says which invariant is broken, and that one is. */
static bool broken(const char *invariant, int32_t where) {
    fprintf(stderr, "cellkv: broken invariant at %d: %s\n", where, invariant);
    return false;
}

static bool set_valid(const struct ck_index_set *set) {
    int32_t count = 0, previous = -1;
    for (int32_t i = ck_index_set_next(set, 0); i >= 0; i = ck_index_set_next(set, i + 1)) {
        if (i <= previous || i >= set->n || !ck_index_set_contains(set, i)) {
            return broken("a set is walked in ascending order, within its bounds", i);
        }
        previous = i;
        count++;
    }
    if (count != set->count || previous != ck_index_set_highest(set)) {
        return broken("a set's count and highest index are those of a walk", count);
    }
    return true;
}

static bool blocks_valid(const struct ck_table *table) {
    if (!set_valid(&table->free_blocks)) {
        return false;
    }
    int32_t n_used = 0;
    for (int32_t cell = 0; cell < table->capacity; cell++) {
        int32_t block = cell / CK_BLOCK;
        n_used += ck_index_set_contains(&table->used, cell);
        if (cell < table->capacity - 1 && (cell + 1) % CK_BLOCK != 0) {
            continue;
        }
        if (n_used != table->n_used[block]) {
            return broken("a block has as many used cells as it counts", block);
        }
        if (ck_index_set_contains(&table->free_blocks, block) != (n_used == 0)) {
            return broken("a block is free iff no cell of it is used", block);
        }
        n_used = 0;
    }
    return true;
}

static bool table_valid(const struct ck_table *table) {
    if (!set_valid(&table->free) || !set_valid(&table->used) || !set_valid(&table->freed)) {
        return false;
    }
    for (int32_t cell = 0; cell < table->capacity; cell++) {
        bool is_free = ck_index_set_contains(&table->free, cell);
        if (is_free == ck_index_set_contains(&table->used, cell)) {
            return broken("each cell is either free or used", cell);
        }
        if (is_free != (table->owners[cell] == 0)) {
            return broken("a cell is free iff nobody owns it", cell);
        }
    }
    if (table->n_taken < 0 || table->n_taken > table->capacity) {
        return broken("at most every cell was taken", table->n_taken);
    }
    return blocks_valid(table);
}

static bool list_valid(const struct ck_cells *cells, const struct ck_sequence *sequence,
                       int32_t slot) {
    const struct ck_table *table = &cells->table;
    if (sequence->n < 0 || sequence->n > sequence->room) {
        return broken("a list fits its room", slot);
    }
    int32_t previous = -1;
    for (int32_t i = 0; i < sequence->n; i++) {
        int32_t cell = sequence->cells[i];
        if (cell < 0 || cell >= table->capacity || table->owners[cell] == 0) {
            return broken("a list names used cells only", slot);
        }
        if (table->positions[cell] <= previous) {
            return broken("a list ascends strictly in position, from 0", slot);
        }
        previous = table->positions[cell];
    }
    if (previous > CK_LAST_POSITION) {
        return broken("no position is past the last one", slot);
    }
    return true;
}

static bool trim_valid(const struct ck_cells *cells, const struct ck_sequence *sequence,
                       int32_t slot) {
    int32_t trimmed = ck_cells_trimmed(cells, sequence);
    if (trimmed == 0) {
        return true;
    }
    int64_t end = ck_sequence_next_pos(sequence, &cells->table);
    if (cells->window == 0 || sequence->n == 0) {
        return broken("only a sequence with cells, in a cache with windows, is trimmed", slot);
    }
    if (cells->ring == 0 && cells->table.positions[sequence->cells[0]] < trimmed) {
        return broken("what was trimmed is gone", slot);
    }
    if (end - cells->window + 1 < trimmed) {
        return broken("the next token sees nothing that was trimmed", slot);
    }
    return true;
}

static bool contiguous_valid(const struct ck_cells *cells, const struct ck_sequence *sequence,
                             int32_t slot) {
    for (int32_t i = 0; cells->is_contiguous && i < sequence->n; i++) {
        if (sequence->cells[i] != i || cells->table.positions[i] != i) {
            return broken("in kind sequence, position, cell and place in the list are one", slot);
        }
    }
    return true;
}

/* What holds of rings beside what trim_valid says. */
static bool ring_valid(const struct ck_cells *cells) {
    if (cells->ring > 0 && !(cells->is_contiguous && cells->window > 0)) {
        return broken("only kind sequence has rings, and they have windows", cells->ring);
    }
    if (cells->is_contiguous && cells->sequences.max_seqs != 1) {
        return broken("kind sequence has one sequence", cells->sequences.max_seqs);
    }
    if (cells->written < 0 || cells->written > cells->table.capacity ||
        (cells->written > 0 && (!cells->is_contiguous || cells->table.used.count == 0))) {
        return broken("only a sequence that has cells was written", cells->written);
    }
    return true;
}

static bool sequences_valid(const struct ck_cells *cells) {
    const struct ck_sequences *sequences = &cells->sequences;
    int32_t n_open = 0, n_free = 0;
    for (int32_t slot = 0; slot < sequences->n_touched; slot++) {
        const struct ck_sequence *sequence = &sequences->slots[slot];
        if (sequence->mark != 0) {
            return broken("marks are 0 between calls", slot);
        }
        if (!sequence->handle) {
            if (sequence->cells || sequence->n || sequence->room) {
                return broken("a free slot owns nothing", slot);
            }
            continue;
        }
        n_open++;
        if (ck_sequences_find(sequences, sequence->handle) != sequence) {
            return broken("a handle leads to its slot", slot);
        }
        if (!list_valid(cells, sequence, slot) || !trim_valid(cells, sequence, slot) ||
            !contiguous_valid(cells, sequence, slot)) {
            return false;
        }
    }
    for (int32_t slot = sequences->first_free; slot >= 0; n_free++) {
        if (slot >= sequences->n_touched || sequences->slots[slot].handle ||
            n_free == sequences->n_touched) {
            return broken("the list of free slots has free slots only, each once", slot);
        }
        slot = sequences->slots[slot].next_free;
    }
    if (n_open != sequences->n_open || n_open + n_free != sequences->n_touched) {
        return broken("each touched slot is open, or in the list of free slots", n_open);
    }
    return true;
}

/* `memberships`: [capacity], scratch. */
static bool owners_valid(const struct ck_cells *cells, uint16_t *memberships) {
    const struct ck_sequences *sequences = &cells->sequences;
    memset(memberships, 0, (size_t)cells->table.capacity * sizeof *memberships);
    for (int32_t slot = 0; slot < sequences->n_touched; slot++) {
        for (int32_t i = 0; i < sequences->slots[slot].n; i++) {
            memberships[sequences->slots[slot].cells[i]]++;
        }
    }
    for (int32_t cell = 0; cell < cells->table.capacity; cell++) {
        if (memberships[cell] != cells->table.owners[cell]) {
            return broken("a cell has as many owners as lists have it", cell);
        }
    }
    return true;
}

static bool step_open(const struct ck_cells *cells, const struct ck_step_buffer *step) {
    for (int32_t i = 0; i < step->n_tokens; i++) {
        if (!cells->sequences.slots[step->slots[i]].handle) {
            return broken("a step's sequences are open", i);
        }
    }
    return true;
}

static bool step_valid(const struct ck_cells *cells) {
    const struct ck_step_buffer *step = &cells->step, *before = &cells->before;
    if ((step->state == CK_STEP_NONE) != (step->n_tokens == 0) ||
        (before->state == CK_STEP_NONE) != (before->n_tokens == 0)) {
        return broken("a step has tokens", step->n_tokens);
    }
    if (step->state == CK_STEP_DECLARED && step->n_tokens > cells->table.free.count) {
        return broken("what is declared fits the free cells", step->n_tokens);
    }
    if (before->state != CK_STEP_NONE && !cells->can_roll_back) {
        return broken("an earlier step is kept for rollback only", before->n_tokens);
    }
    if (cells->can_roll_back && step->state != CK_STEP_PLACED) {
        return broken("only a placed step is rolled back", step->n_tokens);
    }
    for (int32_t i = 0; step->state == CK_STEP_PLACED && i < step->n_tokens; i++) {
        int32_t cell = step->cells[i];
        if (cells->table.owners[cell] != 1 || cells->table.positions[cell] != step->positions[i]) {
            return broken("a placed token's cell is its sequence's own", i);
        }
    }
    return step_open(cells, step) && step_open(cells, before);
}

static bool scratch_valid(const struct ck_cells *cells) {
    for (int32_t cell = 0; cells->sight.group_of_cell && cell < cells->table.capacity; cell++) {
        if (cells->sight.group_of_cell[cell] != 0) {
            return broken("no cell is in a group between calls", cell);
        }
    }
    return true;
}

enum { COUNTABLE = 4096 }; /* cells, of tables whose owners are counted */

bool ck_cells_valid(const struct ck_cells *cells) {
    uint16_t memberships[COUNTABLE];
    return table_valid(&cells->table) && ring_valid(cells) && sequences_valid(cells) &&
           (cells->table.capacity > COUNTABLE || owners_valid(cells, memberships)) &&
           step_valid(cells) && scratch_valid(cells);
}

#ifdef CELLKV_CHECKS

/* Of a small structure every mutation is checked, of a larger one fewer: the cost of a mutation
 * stays about the same. */
void ck_cells_check(const struct ck_cells *cells) {
    enum { SMALL = 512 };
    static _Thread_local uint32_t n_mutations;
    int32_t size = cells->table.capacity + cells->sequences.n_touched;
    if (n_mutations++ % (uint32_t)(1 + size / SMALL) == 0) {
        assert(ck_cells_valid(cells));
    }
}

/* ---- sight, against its definition ---- */

/* Counts a query's views and whether each shows only what it should see. Since every cell is listed
 * once, and a query has at most one view of a segment, the right number of right cells is all. */
static int64_t count_seen(const struct ck_sight *sight, const struct ck_cells *cells, int32_t query,
                          int32_t slot, int64_t low, int64_t high) {
    const struct ck_sequence *sequence = &cells->sequences.slots[slot];
    int64_t n_seen = 0;
    for (int32_t s = 0; s < sight->n_segments; s++) {
        const struct ck_segment *segment = &sight->segments[s];
        for (int32_t v = 0; v < segment->n_views; v++) {
            const struct ck_view *view = &sight->views[segment->first_view + v];
            for (int32_t i = view->begin; view->query == query && i < view->end; i++) {
                int32_t cell = sight->cells[segment->first_cell + i];
                int32_t position = cells->table.positions[cell];
                int32_t at = ck_sequence_search(sequence, &cells->table, position);
                assert(at < sequence->n && sequence->cells[at] == cell);
                assert(position >= low && position <= high);
                n_seen++;
            }
        }
    }
    return n_seen;
}

void ck_sight_check(const struct ck_sight *sight, const struct ck_cells *cells, int32_t first,
                    int32_t window) {
    if (cells->table.capacity > 512 || sight->n_queries > 64) {
        return;
    }
    for (int32_t query = 0; query < sight->n_queries; query++) {
        int32_t slot = cells->step.slots[first + query];
        const struct ck_sequence *sequence = &cells->sequences.slots[slot];
        int64_t high = cells->step.positions[first + query];
        int64_t low = window > 0 ? high - window + 1 : 0;
        int64_t n_expected = 0;
        for (int32_t i = 0; i < sequence->n; i++) {
            int32_t position = cells->table.positions[sequence->cells[i]];
            n_expected += position >= low && position <= high;
        }
        assert(count_seen(sight, cells, query, slot, low, high) == n_expected);
    }
}

#endif
