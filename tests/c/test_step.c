/* The step: declare, place, roll back, undo, and what cancels what. */
#include "cells/cache_object.h"
#include "cells/cells_struct.h"

#include "small_cache.h"

enum { N = 3 }; /* tokens of `declare_some` */

/* One token of a, one of b, another of a. */
static void declare_some(cellkv_cache *cache, int64_t a, int64_t b) {
    CHECK_OK(cellkv_cache_declare(cache, (int64_t[]){a, b, a}, N, NULL));
}

static int32_t declared(cellkv_cache *cache) {
    return stats_of(cache).declared_tokens;
}

/* ---- admission ---- */

static void test_undeclared_step_is_refused(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int32_t cells[1] = {-7};
    open_sequence(cache);
    CHECK_REFUSED(cellkv_cache_place(cache, NULL, 1, cells), CELLKV_ERROR_NOT_DECLARED,
                  "none is waiting");
    CHECK_EQUAL(cells[0], -7);
    CHECK_EQUAL(used_cells(cache), 0);
    cellkv_cache_free(cache);
}

static void test_step_of_another_length_than_declared_is_refused(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t seq = open_sequence(cache);
    declare_some(cache, seq, seq);
    const int32_t lengths[] = {-1, 0, 2, 4};
    for (int i = 0; i < 4; i++) {
        CHECK_REFUSED(cellkv_cache_place(cache, NULL, lengths[i], NULL), CELLKV_ERROR_NOT_DECLARED,
                      "3 tokens are declared");
    }
    CHECK_EQUAL(declared(cache), 3);
    CHECK_OK(cellkv_cache_place(cache, NULL, 3, NULL));
    cellkv_cache_free(cache);
}

static void test_one_declaration_gives_one_placement(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t seq = open_with(cache, 1);
    CHECK_EQUAL(declared(cache), 0);
    CHECK_REFUSED(cellkv_cache_place(cache, NULL, 1, NULL), CELLKV_ERROR_NOT_DECLARED,
                  "none is waiting");
    CHECK_EQUAL(length_of(cache, seq), 1);
    cellkv_cache_free(cache);
}

static void test_empty_or_negative_step_cannot_be_declared(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t seq = open_sequence(cache);
    int32_t shortfall = -7;
    CHECK_REFUSED(cellkv_cache_declare(cache, &seq, 0, &shortfall), CELLKV_ERROR_EMPTY_STEP,
                  "at least one token");
    CHECK_EQUAL(shortfall, 0);
    CHECK_REFUSED(cellkv_cache_declare(cache, &seq, -1, NULL), CELLKV_ERROR_INVALID_ARGUMENT,
                  "n_tokens is -1");
    cellkv_cache_free(cache);
}

static void test_declaring_more_than_is_free_reports_the_shortfall(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t seq = open_with(cache, 5), seqs[6] = {seq, seq, seq, seq, seq, seq};
    int32_t shortfall = -7;
    CHECK_REFUSED(cellkv_cache_declare(cache, seqs, 6, &shortfall), CELLKV_ERROR_OUT_OF_CELLS,
                  "needs 3 more cells: 3 of 8 are free");
    CHECK_EQUAL(shortfall, 3);
    CHECK_REFUSED(cellkv_cache_declare(cache, seqs, 4, NULL), CELLKV_ERROR_OUT_OF_CELLS,
                  "needs 1 more cells");
    CHECK_OK(cellkv_cache_declare(cache, seqs, 3, &shortfall));
    CHECK_EQUAL(shortfall, 0);
    cellkv_cache_free(cache);
}

static void test_unknown_sequence_in_a_declaration_is_named_with_its_token(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t a = open_sequence(cache), closed = open_sequence(cache);
    CHECK_OK(cellkv_cache_close(cache, closed));
    char words[80];
    snprintf(words, sizeof words, "token 2: sequence %lld is not open", (long long)closed);
    CHECK_REFUSED(cellkv_cache_declare(cache, (int64_t[]){a, a, closed}, 3, NULL),
                  CELLKV_ERROR_UNKNOWN_SEQUENCE, words);
    cellkv_cache_free(cache);
}

static void test_refused_declaration_keeps_the_earlier_one_and_a_good_one_replaces_it(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t seq = open_sequence(cache), bad[9] = {seq, -1};
    declare_some(cache, seq, seq);
    CHECK_REFUSED(cellkv_cache_declare(cache, bad, 2, NULL), CELLKV_ERROR_UNKNOWN_SEQUENCE, NULL);
    CHECK_REFUSED(cellkv_cache_declare(cache, bad, 0, NULL), CELLKV_ERROR_EMPTY_STEP, NULL);
    for (int i = 0; i < 9; i++) {
        bad[i] = seq;
    }
    CHECK_REFUSED(cellkv_cache_declare(cache, bad, 9, NULL), CELLKV_ERROR_OUT_OF_CELLS, NULL);
    CHECK_EQUAL(declared(cache), 3);
    CHECK_OK(cellkv_cache_declare(cache, bad, 2, NULL));
    CHECK_EQUAL(declared(cache), 2);
    CHECK_OK(cellkv_cache_place(cache, NULL, 2, NULL));
    cellkv_cache_free(cache);
}

/* ---- placement ---- */

static void test_tokens_continue_their_sequences_within_the_step(void) {
    cellkv_cache *cache = new_cache(16, 2);
    int64_t a = open_with(cache, 2), b = open_with(cache, 1);
    int32_t cells[4];
    CHECK_OK(cellkv_cache_declare(cache, (int64_t[]){a, b, a, b}, 4, NULL));
    CHECK_OK(cellkv_cache_place(cache, (int32_t[]){2, 1, 3, 2}, 4, cells));
    CHECK_CELLS(cache, a, {0, 0}, {1, 1}, {3, 2}, {5, 3});
    CHECK_CELLS(cache, b, {2, 0}, {4, 1}, {6, 2});
    for (int32_t i = 0; i < 4; i++) {
        CHECK_EQUAL(cells[i], 3 + i);
    }
    cellkv_cache_free(cache);
}

static void test_position_that_does_not_continue_is_refused_and_named(void) {
    cellkv_cache *cache = new_cache(16, 2);
    int64_t a = open_with(cache, 2), b = open_with(cache, 1);
    const struct {
        int32_t positions[3];
        int token;
        int32_t expected;
    } steps[] = {
        {{1, 1, 3}, 0, 2},                                    /* again */
        {{3, 1, 4}, 0, 2},                                    /* a gap */
        {{2, 5, 3}, 1, 1},                                    /* a gap in the other sequence */
        {{2, 1, 2}, 2, 3},                                    /* the same twice in a step */
        {{3, 1, 2}, 0, 2},                                    /* out of order */
        {{2, -1, 3}, 1, 1},                                   /* no position at all */
        {{2, 1, INT32_MAX}, 2, 3}, {{INT32_MIN, 1, 3}, 0, 2}, /* CELLKV_UNSET is none either */
    };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        int token = steps[i].token;
        char words[160];
        snprintf(words, sizeof words,
                 "token %d does not continue sequence %lld: position %d expected, %d given", token,
                 (long long)(token == 1 ? b : a), steps[i].expected, steps[i].positions[token]);
        declare_some(cache, a, b);
        CHECK_REFUSED(cellkv_cache_place(cache, steps[i].positions, 3, NULL),
                      CELLKV_ERROR_BAD_POSITION, words);
        CHECK_EQUAL(declared(cache), 3);
        CHECK_EQUAL(used_cells(cache), 3);
    }
    CHECK_OK(cellkv_cache_place(cache, (int32_t[]){2, 1, 3}, 3, NULL)); /* the declaration waited */
    cellkv_cache_free(cache);
}

static void test_where_no_block_is_free_the_lowest_free_cells_are_given(void) {
    cellkv_cache *cache = new_cache(16, 3);
    int64_t a = open_with(cache, 4), b = open_with(cache, 3);
    CHECK_OK(cellkv_cache_remove(cache, a, 1, 3));
    CHECK_OK(cellkv_cache_rewind(cache, b, 1)); /* free: 1, 2, 5, 6, 7, ... */
    CHECK_EQUAL(stats_of(cache).extent, 5);
    int64_t c = open_with(cache, 2);
    CHECK_CELLS(cache, c, {1, 0}, {2, 1});
    CHECK_EQUAL(stats_of(cache).extent, 5); /* the free cells below sufficed */
    extend(cache, c, 1);
    CHECK_EQUAL(stats_of(cache).extent, 6);
    cellkv_cache_free(cache);
}

static void test_every_cell_of_the_capacity_can_be_placed(void) {
    const int32_t capacities[] = {1, 63, 64, 65, 4096};
    for (int i = 0; i < 5; i++) {
        cellkv_cache *cache = new_cache(capacities[i], 1);
        int64_t seq = open_with(cache, capacities[i]);
        CHECK_EQUAL(stats_of(cache).free_cells, 0);
        CHECK_EQUAL(stats_of(cache).extent, capacities[i]);
        CHECK_REFUSED(cellkv_cache_declare(cache, &seq, 1, NULL), CELLKV_ERROR_OUT_OF_CELLS,
                      "needs 1 more cells: 0 of");
        CHECK_OK(cellkv_cache_rewind(cache, seq, 0));
        CHECK_EQUAL(stats_of(cache).extent, 0);
        cellkv_cache_free(cache);
    }
}

/* Reaching the last position takes two thousand million steps, or a look behind the header. */
static void test_sequence_cannot_grow_past_the_last_position(void) {
    cellkv_cache *cache = new_cache(8, 1);
    int64_t seq = open_with(cache, 1);
    cache->cells->table.positions[0] = CK_LAST_POSITION - 2;
    CHECK_OK(cellkv_cache_declare(cache, (int64_t[]){seq, seq, seq}, 3, NULL));
    CHECK_REFUSED(cellkv_cache_place(cache, NULL, 3, NULL), CELLKV_ERROR_BAD_POSITION,
                  "token 2: sequence ");
    CHECK_REFUSED(cellkv_cache_place(cache, NULL, 3, NULL), CELLKV_ERROR_BAD_POSITION,
                  "cannot grow past position 2147483645");
    CHECK_EQUAL(length_of(cache, seq), 1);
    extend(cache, seq, 2);
    CHECK_EQUAL(next_pos_of(cache, seq), INT32_MAX - 1);
    CHECK_OK(cellkv_cache_declare(cache, &seq, 1, NULL));
    CHECK_REFUSED(cellkv_cache_place(cache, (int32_t[]){INT32_MAX - 1}, 1, NULL),
                  CELLKV_ERROR_BAD_POSITION, "cannot grow past");
    CHECK_OK(cellkv_cache_rewind(cache, seq, INT32_MAX - 2));
    CHECK_OK(cellkv_cache_remove(cache, seq, INT32_MAX - 3, CELLKV_UNSET));
    CHECK_EQUAL(length_of(cache, seq), 1);
    cellkv_cache_free(cache);
}

/* ---- undo ---- */

static void test_undo_gives_back_the_steps_tokens_from_n_keep_on(void) {
    for (int32_t n_keep = 0; n_keep <= N; n_keep++) {
        cellkv_cache *cache = new_cache(16, 2);
        int64_t a = open_with(cache, 2), b = open_with(cache, 1);
        declare_some(cache, a, b);
        CHECK_OK(cellkv_cache_place(cache, NULL, N, NULL));
        CHECK_REFUSED(cellkv_cache_undo_step(cache, -1), CELLKV_ERROR_BAD_RANGE, "n_keep is -1");
        CHECK_REFUSED(cellkv_cache_undo_step(cache, N + 1), CELLKV_ERROR_BAD_RANGE,
                      "n_keep is 4, the step has 3 tokens");
        CHECK_OK(cellkv_cache_undo_step(cache, n_keep));
        CHECK_EQUAL(length_of(cache, a), 2 + (n_keep > 0) + (n_keep > 2));
        CHECK_EQUAL(length_of(cache, b), 1 + (n_keep > 1));
        CHECK_EQUAL(used_cells(cache), 3 + n_keep);
        CHECK_REFUSED(cellkv_cache_undo_step(cache, 0), CELLKV_ERROR_NOTHING_TO_UNDO, "no step");
        cellkv_cache_free(cache);
    }
}

static void test_undone_step_can_be_retried_in_the_same_cells(void) {
    cellkv_cache *cache = new_cache(16, 2);
    int64_t a = open_with(cache, 2), b = open_with(cache, 1);
    int32_t cells[2][N];
    for (int i = 0; i < 2; i++) {
        declare_some(cache, a, b);
        CHECK_OK(cellkv_cache_place(cache, (int32_t[]){2, 1, 3}, N, cells[i]));
        CHECK_OK(cellkv_cache_undo_step(cache, 0));
    }
    CHECK(memcmp(cells[0], cells[1], sizeof cells[0]) == 0);
    cellkv_cache_free(cache);
}

static void test_nothing_to_undo_in_a_new_cache(void) {
    cellkv_cache *cache = new_cache(4, 1);
    CHECK_REFUSED(cellkv_cache_undo_step(cache, 0), CELLKV_ERROR_NOTHING_TO_UNDO, "no step");
    cellkv_cache_free(cache);
}

/* ---- what cancels a declaration and an undo ---- */

static void do_open(cellkv_cache *cache, int64_t a) {
    (void)a;
    open_sequence(cache);
}
static void do_clone(cellkv_cache *cache, int64_t a) {
    clone(cache, a, 0);
}
static void do_rewind_nothing(cellkv_cache *cache, int64_t a) {
    CHECK_OK(cellkv_cache_rewind(cache, a, next_pos_of(cache, a)));
}
static void do_remove_nothing(cellkv_cache *cache, int64_t a) {
    CHECK_OK(cellkv_cache_remove(cache, a, 0, 0));
}
static void do_close(cellkv_cache *cache, int64_t a) {
    CHECK_OK(cellkv_cache_close(cache, a));
}
static void do_clear(cellkv_cache *cache, int64_t a) {
    (void)a;
    CHECK_OK(cellkv_cache_clear(cache));
}
static void do_trim(cellkv_cache *cache, int64_t a) {
    (void)a;
    CHECK_OK(cellkv_cache_trim_windows(cache, NULL));
}

static void (*const changing_verbs[])(cellkv_cache *, int64_t) = {
    do_open, do_clone, do_rewind_nothing, do_remove_nothing, do_close, do_clear, do_trim,
};
enum { N_CHANGING = sizeof changing_verbs / sizeof *changing_verbs };

static void test_every_changing_verb_cancels_declaration_and_undo(void) {
    for (int i = 0; i < N_CHANGING; i++) {
        for (int placed = 0; placed < 2; placed++) {
            cellkv_cache *cache = new_windowed_cache(16, 4, 4);
            int64_t a = open_with(cache, 2);
            declare_some(cache, a, a);
            if (placed) {
                CHECK_OK(cellkv_cache_place(cache, NULL, N, NULL));
            }
            changing_verbs[i](cache, a);
            CHECK_EQUAL(declared(cache), 0);
            CHECK_REFUSED(cellkv_cache_place(cache, NULL, N, NULL), CELLKV_ERROR_NOT_DECLARED,
                          "none is waiting");
            CHECK_REFUSED(cellkv_cache_undo_step(cache, 0), CELLKV_ERROR_NOTHING_TO_UNDO,
                          "another changing call");
            cellkv_cache_free(cache);
        }
    }
}

static void test_declaring_cancels_the_undo(void) {
    cellkv_cache *cache = new_cache(16, 2);
    int64_t a = open_with(cache, 2);
    CHECK_OK(cellkv_cache_declare(cache, &a, 1, NULL));
    CHECK_REFUSED(cellkv_cache_undo_step(cache, 0), CELLKV_ERROR_NOTHING_TO_UNDO, NULL);
    CHECK_EQUAL(declared(cache), 1);
    cellkv_cache_free(cache);
}

/* Read-outs, and changing verbs that are refused. */
static void read_and_be_refused(cellkv_cache *cache, int64_t a) {
    int64_t handle;
    bool fits;
    length_of(cache, a);
    next_pos_of(cache, a);
    stats_of(cache);
    CHECK_OK(cellkv_cache_can_extend(cache, 1, &fits));
    CHECK_OK(cellkv_cache_read_cells(cache, a, NULL, NULL, 0, NULL));
    CHECK_REFUSED(cellkv_cache_open(cache, &handle), CELLKV_ERROR_NO_SLOT, NULL);
    CHECK_REFUSED(cellkv_cache_clone(cache, a, 0, &handle), CELLKV_ERROR_NO_SLOT, NULL);
    CHECK_REFUSED(cellkv_cache_rewind(cache, a, -1), CELLKV_ERROR_BAD_RANGE, NULL);
    CHECK_REFUSED(cellkv_cache_remove(cache, a, -1, 0), CELLKV_ERROR_BAD_RANGE, NULL);
    CHECK_REFUSED(cellkv_cache_close(cache, -1), CELLKV_ERROR_UNKNOWN_SEQUENCE, NULL);
    CHECK_REFUSED(cellkv_cache_declare(cache, &a, 0, NULL), CELLKV_ERROR_EMPTY_STEP, NULL);
    CHECK_REFUSED(cellkv_cache_trim_windows(cache, NULL), CELLKV_ERROR_NOT_WINDOWED, NULL);
    CHECK_REFUSED(cellkv_cache_undo_step(cache, -1),
                  declared(cache) ? CELLKV_ERROR_NOTHING_TO_UNDO : CELLKV_ERROR_BAD_RANGE, NULL);
}

static void test_readouts_and_refusals_cancel_nothing(void) {
    cellkv_cache *cache = new_cache(16, 1);
    int64_t a = open_with(cache, 2);
    declare_some(cache, a, a);
    read_and_be_refused(cache, a);
    CHECK_OK(cellkv_cache_place(cache, NULL, N, NULL));
    read_and_be_refused(cache, a);
    CHECK_REFUSED(cellkv_cache_place(cache, NULL, 1, NULL), CELLKV_ERROR_NOT_DECLARED, NULL);
    CHECK_OK(cellkv_cache_undo_step(cache, 1));
    CHECK_EQUAL(length_of(cache, a), 3);
    cellkv_cache_free(cache);
}

/* ---- the executor's half ---- */

static void check_step_is(struct ck_cells *cells, int32_t n_tokens) {
    CHECK_EQUAL(ck_cells_step(cells).n_tokens, n_tokens);
}

static void test_begin_step_declares_and_places_in_one_go(void) {
    cellkv_cache *cache = new_cache(16, 2);
    int64_t a = open_with(cache, 2), b = open_with(cache, 1);
    CHECK_OK(ck_cells_begin_step(cache->cells, (int64_t[]){b, a, b}, NULL, 3, 0));
    struct ck_step step = ck_cells_step(cache->cells);
    CHECK_EQUAL(step.n_tokens, 3);
    const int32_t slots[] = {1, 0, 1}, positions[] = {1, 2, 2}, cells[] = {3, 4, 5};
    CHECK(memcmp(step.slots, slots, sizeof slots) == 0);
    CHECK(memcmp(step.positions, positions, sizeof positions) == 0);
    CHECK(memcmp(step.cells, cells, sizeof cells) == 0);
    CHECK_EQUAL(ck_cells_extent(cache->cells), 6);
    CHECK_OK(cellkv_cache_undo_step(cache, 0));
    check_step_is(cache->cells, 0);
    cellkv_cache_free(cache);
}

static void test_refused_begin_step_keeps_the_control_planes_declaration(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t a = open_with(cache, 2), b = open_with(cache, 1), seqs[6] = {a, a, a, a, a, a};
    declare_some(cache, a, b);
    struct ck_cells *cells = cache->cells;
    CHECK_REFUSED(ck_cells_begin_step(cells, seqs, NULL, 6, 0), CELLKV_ERROR_OUT_OF_CELLS, NULL);
    CHECK_REFUSED(ck_cells_begin_step(cells, seqs, NULL, 0, 0), CELLKV_ERROR_EMPTY_STEP, NULL);
    CHECK_REFUSED(ck_cells_begin_step(cells, seqs, (int32_t[]){7}, 1, 0), CELLKV_ERROR_BAD_POSITION,
                  NULL);
    seqs[1] = -1;
    CHECK_REFUSED(ck_cells_begin_step(cells, seqs, NULL, 2, 0), CELLKV_ERROR_UNKNOWN_SEQUENCE,
                  NULL);
    CHECK_EQUAL(declared(cache), 3);
    CHECK_OK(cellkv_cache_place(cache, (int32_t[]){2, 1, 3}, 3, NULL));
    cellkv_cache_free(cache);
}

static void test_rollback_restores_the_declaration_that_begin_step_used(void) {
    cellkv_cache *cache = new_cache(16, 2);
    int64_t a = open_with(cache, 2), b = open_with(cache, 1);
    declare_some(cache, a, b);
    CHECK_OK(ck_cells_begin_step(cache->cells, NULL, NULL, 3, 0));
    CHECK_EQUAL(declared(cache), 0);
    ck_cells_rollback_step(cache->cells);
    CHECK_EQUAL(declared(cache), 3);
    CHECK_EQUAL(used_cells(cache), 3);
    CHECK_EQUAL(length_of(cache, a), 2);
    CHECK_OK(cellkv_cache_place(cache, (int32_t[]){2, 1, 3}, 3, NULL));
    cellkv_cache_free(cache);
}

static void test_rollback_restores_the_declaration_that_begin_step_replaced(void) {
    cellkv_cache *cache = new_cache(16, 2);
    int64_t a = open_with(cache, 2), b = open_with(cache, 1);
    declare_some(cache, a, b);
    CHECK_OK(ck_cells_begin_step(cache->cells, (int64_t[]){b, b}, NULL, 2, 0));
    ck_cells_rollback_step(cache->cells);
    CHECK_EQUAL(declared(cache), 3);
    CHECK_OK(cellkv_cache_place(cache, (int32_t[]){2, 1, 3}, 3, NULL));
    CHECK_CELLS(cache, b, {2, 0}, {4, 1});
    cellkv_cache_free(cache);
}

static void test_rollback_restores_the_undo_of_the_step_before(void) {
    cellkv_cache *cache = new_cache(16, 2);
    int64_t a = open_with(cache, 2), b = open_with(cache, 4);
    CHECK_OK(ck_cells_begin_step(cache->cells, (int64_t[]){a, a}, NULL, 2, 0));
    ck_cells_rollback_step(cache->cells);
    check_step_is(cache->cells, 4);
    CHECK_OK(cellkv_cache_undo_step(cache, 1));
    CHECK_EQUAL(length_of(cache, b), 1);
    CHECK_EQUAL(length_of(cache, a), 2);
    cellkv_cache_free(cache);
}

static void test_rollback_restores_that_there_was_no_step(void) {
    cellkv_cache *cache = new_cache(16, 2);
    int64_t a = open_sequence(cache);
    CHECK_OK(ck_cells_begin_step(cache->cells, &a, NULL, 1, 0));
    ck_cells_rollback_step(cache->cells);
    CHECK_REFUSED(cellkv_cache_undo_step(cache, 0), CELLKV_ERROR_NOTHING_TO_UNDO, NULL);
    CHECK_REFUSED(cellkv_cache_place(cache, NULL, 1, NULL), CELLKV_ERROR_NOT_DECLARED, NULL);
    CHECK_EQUAL(ck_cells_extent(cache->cells), 0);
    cellkv_cache_free(cache);
}

/* ---- freed cells ---- */

static void check_freed(cellkv_cache *cache, const int32_t *expected, int32_t n) {
    const int32_t *freed = NULL;
    CHECK_EQUAL(ck_cells_take_freed(cache->cells, &freed), n);
    for (int32_t i = 0; i < n; i++) {
        CHECK_EQUAL(freed[i], expected[i]);
    }
}

static void test_freed_cells_are_told_once_in_ascending_order(void) {
    cellkv_cache *cache = new_cache(16, 4);
    int64_t a = open_with(cache, 6), b = clone(cache, a, 3);
    check_freed(cache, NULL, 0);
    CHECK_OK(cellkv_cache_remove(cache, a, 4, 5));
    CHECK_OK(cellkv_cache_close(cache, a)); /* frees 3 and 5: b owns 0, 1, 2 */
    int64_t c = open_with(cache, 1);        /* takes 3 again */
    CHECK_OK(cellkv_cache_close(cache, c)); /* and frees it again */
    check_freed(cache, (int32_t[]){3, 4, 5}, 3);
    check_freed(cache, NULL, 0);
    CHECK_OK(cellkv_cache_rewind(cache, b, 2));
    open_with(cache, 1); /* occupied again, but its row may still hold anything */
    check_freed(cache, (int32_t[]){2}, 1);
    CHECK_OK(cellkv_cache_clear(cache));
    check_freed(cache, (int32_t[]){0, 1, 2}, 3);
    cellkv_cache_free(cache);
}

static void test_freed_cells_that_a_step_has_written_leave_the_list(void) {
    cellkv_cache *cache = new_cache(16, 4);
    int64_t a = open_with(cache, 6);
    CHECK_OK(cellkv_cache_rewind(cache, a, 2));
    extend(cache, a, 3);                       /* into cells 2, 3 and 4 */
    ck_cells_keep_written(cache->cells, 1, 2); /* of which 3 and 4 have been computed */
    check_freed(cache, (int32_t[]){2, 5}, 2);
    CHECK_OK(cellkv_cache_rewind(cache, a, 4)); /* freed anew, told anew */
    check_freed(cache, (int32_t[]){4}, 1);
    cellkv_cache_free(cache);
}

static void test_undone_cells_are_freed_ones_and_rolled_back_ones_are_not(void) {
    cellkv_cache *cache = new_cache(16, 4);
    int64_t a = open_with(cache, 2);
    CHECK_OK(ck_cells_begin_step(cache->cells, &a, NULL, 1, 0));
    ck_cells_rollback_step(cache->cells);
    check_freed(cache, NULL, 0);
    extend(cache, a, 2);
    CHECK_OK(cellkv_cache_undo_step(cache, 1));
    check_freed(cache, (int32_t[]){3}, 1);
    cellkv_cache_free(cache);
}

int main(void) {
    RUN(test_undeclared_step_is_refused);
    RUN(test_step_of_another_length_than_declared_is_refused);
    RUN(test_one_declaration_gives_one_placement);
    RUN(test_empty_or_negative_step_cannot_be_declared);
    RUN(test_declaring_more_than_is_free_reports_the_shortfall);
    RUN(test_unknown_sequence_in_a_declaration_is_named_with_its_token);
    RUN(test_refused_declaration_keeps_the_earlier_one_and_a_good_one_replaces_it);
    RUN(test_tokens_continue_their_sequences_within_the_step);
    RUN(test_position_that_does_not_continue_is_refused_and_named);
    RUN(test_where_no_block_is_free_the_lowest_free_cells_are_given);
    RUN(test_every_cell_of_the_capacity_can_be_placed);
    RUN(test_sequence_cannot_grow_past_the_last_position);
    RUN(test_undo_gives_back_the_steps_tokens_from_n_keep_on);
    RUN(test_undone_step_can_be_retried_in_the_same_cells);
    RUN(test_nothing_to_undo_in_a_new_cache);
    RUN(test_every_changing_verb_cancels_declaration_and_undo);
    RUN(test_declaring_cancels_the_undo);
    RUN(test_readouts_and_refusals_cancel_nothing);
    RUN(test_begin_step_declares_and_places_in_one_go);
    RUN(test_refused_begin_step_keeps_the_control_planes_declaration);
    RUN(test_rollback_restores_the_declaration_that_begin_step_used);
    RUN(test_rollback_restores_the_declaration_that_begin_step_replaced);
    RUN(test_rollback_restores_the_undo_of_the_step_before);
    RUN(test_rollback_restores_that_there_was_no_step);
    RUN(test_freed_cells_are_told_once_in_ascending_order);
    RUN(test_freed_cells_that_a_step_has_written_leave_the_list);
    RUN(test_undone_cells_are_freed_ones_and_rolled_back_ones_are_not);
    return 0;
}
