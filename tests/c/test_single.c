/* Kind sequence: one sequence, cells that are positions, and rings that bound its windows. */
#include "cells/cache_object.h"
#include "cells/ring.h"

#include "small_cache.h"

enum { WINDOW = 4, MAX_STEP = 3, CAPACITY = 40 };

/* Layers of windows 4, 0 and 7: rings of 6 and 9 rows. */
static cellkv_cache *new_single(int32_t capacity, int32_t max_step) {
    const cellkv_layer layers[3] = {{1, 1, 1, WINDOW, CELLKV_TYPE_F32, CELLKV_TYPE_F32},
                                    {1, 1, 1, 0, CELLKV_TYPE_F32, CELLKV_TYPE_F32},
                                    {1, 1, 1, 7, CELLKV_TYPE_F32, CELLKV_TYPE_F32}};
    cellkv_cache_config config = small_config(capacity, 5);
    config.kind = CELLKV_CACHE_SEQUENCE;
    config.max_step = max_step;
    config.n_layers = 3;
    config.layers = layers;
    cellkv_cache *cache = NULL;
    CHECK_OK(cellkv_cache_new(&config, &cache));
    return cache;
}

static cellkv_cache *new_small_single(void) {
    return new_single(CAPACITY, MAX_STEP);
}

/* ---- what it is ---- */

static void test_ring_is_window_and_step_or_none(void) {
    CHECK_EQUAL(ck_ring_rows(100, 0, 5), 0);
    CHECK_EQUAL(ck_ring_rows(100, 10, 5), 14);
    CHECK_EQUAL(ck_ring_rows(100, 96, 5), 0); /* 100 rows: all of capacity */
    CHECK_EQUAL(ck_ring_rows(100, 95, 5), 99);
    CHECK_EQUAL(ck_ring_rows(CELLKV_MAX_CAPACITY, INT32_MAX, CELLKV_MAX_CAPACITY), 0);
    CHECK_EQUAL(ck_ring_row(14, 14), 0);
    CHECK_EQUAL(ck_ring_row(14, 41), 13);
    CHECK_EQUAL(ck_ring_row(0, 41), 41);
}

static void test_layers_get_their_rings(void) {
    cellkv_cache *cache = new_small_single(), *batched = new_windowed_cache(40, 1, 4);
    CHECK_EQUAL(cache->rings[0], 6);
    CHECK_EQUAL(cache->rings[1], 0);
    CHECK_EQUAL(cache->rings[2], 9);
    CHECK_EQUAL(cache->max_slice, MAX_STEP);
    CHECK_EQUAL(batched->rings[0], 0);
    CHECK_EQUAL(batched->max_slice, INT32_MAX);
    cellkv_cache_free(cache);
    cellkv_cache_free(batched);
    cache = new_single(6, MAX_STEP); /* all of it fits */
    CHECK_EQUAL(cache->rings[0], 0);
    CHECK_EQUAL(cache->rings[2], 0);
    CHECK_EQUAL(cache->max_slice, INT32_MAX);
    cellkv_cache_free(cache);
}

static void test_there_is_one_sequence(void) {
    cellkv_cache *cache = new_small_single();
    CHECK_EQUAL(stats_of(cache).max_seqs, 1);
    int64_t a = open_sequence(cache), other = 7;
    CHECK_REFUSED(cellkv_cache_open(cache, &other), CELLKV_ERROR_NO_SLOT, "all 1 ");
    CHECK_EQUAL(other, 7);
    CHECK_OK(cellkv_cache_close(cache, a));
    int64_t b = open_with(cache, 5);
    CHECK(a != b);
    CHECK_CELLS(cache, b, {0, 0}, {1, 1}, {2, 2}, {3, 3}, {4, 4});
    CHECK_OK(cellkv_cache_clear(cache));
    CHECK_REFUSED(cellkv_cache_rewind(cache, b, 0), CELLKV_ERROR_UNKNOWN_SEQUENCE, NULL);
    cellkv_cache_free(cache);
}

static void test_cells_are_positions(void) {
    cellkv_cache *cache = new_small_single();
    int64_t a = open_with(cache, 4);
    CHECK_OK(cellkv_cache_rewind(cache, a, 2));
    extend(cache, a, 2);
    CHECK_OK(cellkv_cache_remove(cache, a, 3, CELLKV_UNSET));
    extend(cache, a, 1);
    CHECK_OK(cellkv_cache_undo_step(cache, 0));
    extend(cache, a, 2);
    CHECK_CELLS(cache, a, {0, 0}, {1, 1}, {2, 2}, {3, 3}, {4, 4});
    cellkv_cache_free(cache);
}

/* ---- refusals ---- */

static void test_clone_is_refused(void) {
    cellkv_cache *cache = new_small_single();
    int64_t a = open_with(cache, 4), copy = 7;
    CHECK_REFUSED(cellkv_cache_clone(cache, a, CELLKV_UNSET, &copy), CELLKV_ERROR_UNSUPPORTED,
                  "kind sequence");
    CHECK_REFUSED(cellkv_cache_clone(cache, a, 5, &copy), CELLKV_ERROR_BAD_RANGE, NULL);
    CHECK_REFUSED(cellkv_cache_clone(cache, 1, 0, &copy), CELLKV_ERROR_UNKNOWN_SEQUENCE, NULL);
    CHECK_EQUAL(copy, 7);
    CHECK_OK(cellkv_cache_undo_step(cache, 0)); /* nothing has changed */
    cellkv_cache_free(cache);
}

static void test_only_the_end_is_removed(void) {
    cellkv_cache *cache = new_small_single();
    int64_t a = open_with(cache, 5);
    CHECK_REFUSED(cellkv_cache_remove(cache, a, 1, 4), CELLKV_ERROR_UNSUPPORTED, "[1, 4) cannot");
    CHECK_REFUSED(cellkv_cache_remove(cache, a, 0, 1), CELLKV_ERROR_UNSUPPORTED, "kind sequence");
    CHECK_REFUSED(cellkv_cache_remove(cache, a, 4, 6), CELLKV_ERROR_BAD_RANGE, NULL);
    CHECK_EQUAL(length_of(cache, a), 5);
    CHECK_OK(cellkv_cache_undo_step(cache, 5)); /* nothing has changed */
    CHECK_OK(cellkv_cache_remove(cache, a, 2, 2));
    CHECK_OK(cellkv_cache_remove(cache, a, 5, 5));
    CHECK_OK(cellkv_cache_remove(cache, a, 4, 5));
    CHECK_OK(cellkv_cache_remove(cache, a, 0, CELLKV_UNSET));
    CHECK_EQUAL(length_of(cache, a), 0);
    cellkv_cache_free(cache);
}

static void test_there_is_nothing_to_trim(void) {
    cellkv_layer layer = {1, 1, 1, 4, CELLKV_TYPE_F32, CELLKV_TYPE_F32};
    cellkv_cache_config config = small_config(8, 1);
    cellkv_cache *cache = NULL;
    int32_t n_freed = -7;
    config.kind = CELLKV_CACHE_SEQUENCE;
    config.n_layers = 1;
    config.layers = &layer;
    CHECK_OK(cellkv_cache_new(&config, &cache));
    CHECK_REFUSED(cellkv_cache_trim_windows(cache, &n_freed), CELLKV_ERROR_UNSUPPORTED,
                  "kind sequence");
    CHECK_EQUAL(n_freed, -7);
    cellkv_cache_free(cache);
}

/* ---- what rings write over ---- */

static void check_reach(cellkv_cache *cache, int64_t seq, int32_t oldest) {
    char words[64];
    snprintf(words, sizeof words, "oldest end that can be reached is %d", oldest);
    for (int32_t pos = 1; pos < oldest; pos++) {
        CHECK_REFUSED(cellkv_cache_rewind(cache, seq, pos), CELLKV_ERROR_TRIMMED, words);
        CHECK_REFUSED(cellkv_cache_remove(cache, seq, pos, CELLKV_UNSET), CELLKV_ERROR_TRIMMED,
                      words);
    }
}

/* The smallest ring has 6 rows: while they last, everything can be reached. */
static void test_everything_can_be_reached_while_it_fits(void) {
    for (int32_t pos = 0; pos <= 6; pos++) {
        cellkv_cache *cache = new_small_single();
        int64_t a = open_with(cache, 3);
        extend(cache, a, 3);
        CHECK_OK(cellkv_cache_rewind(cache, a, pos));
        CHECK_EQUAL(next_pos_of(cache, a), pos);
        cellkv_cache_free(cache);
    }
}

static void test_the_last_max_step_positions_can_be_taken_back(void) {
    cellkv_cache *cache = new_small_single();
    int64_t a = open_with(cache, 3);
    for (int32_t end = 4; end <= 30; end++) {
        extend(cache, a, 1);
        check_reach(cache, a, end > 6 ? end - MAX_STEP : 1);
    }
    CHECK_REFUSED(cellkv_cache_rewind(cache, a, 26), CELLKV_ERROR_TRIMMED,
                  "cannot end at position 26: positions below 24 were written over");
    CHECK_OK(cellkv_cache_rewind(cache, a, 27));
    CHECK_OK(cellkv_cache_rewind(cache, a, 27));
    cellkv_cache_free(cache);
}

static void test_a_rewind_does_not_bring_back_what_was_written_over(void) {
    cellkv_cache *cache = new_small_single();
    int64_t a = open_with(cache, 20);
    CHECK_OK(cellkv_cache_rewind(cache, a, 18));
    check_reach(cache, a, 17);
    extend(cache, a, 1); /* over what was there: nothing else is lost */
    check_reach(cache, a, 17);
    CHECK_OK(cellkv_cache_rewind(cache, a, 17));
    extend(cache, a, 3);
    check_reach(cache, a, 17);
    extend(cache, a, 1);
    check_reach(cache, a, 18);
    cellkv_cache_free(cache);
}

static void test_an_emptied_sequence_starts_anew(void) {
    enum { REWIND, REMOVE, CLOSE, CLEAR, UNDO, N_WAYS };
    for (int way = 0; way < N_WAYS; way++) {
        cellkv_cache *cache = new_small_single();
        int64_t a = open_with(cache, 20);
        if (way == REWIND) {
            CHECK_OK(cellkv_cache_rewind(cache, a, 0));
        } else if (way == REMOVE) {
            CHECK_OK(cellkv_cache_remove(cache, a, 0, CELLKV_UNSET));
        } else if (way == UNDO) {
            CHECK_OK(cellkv_cache_undo_step(cache, 0));
        } else {
            CHECK_OK(way == CLOSE ? cellkv_cache_close(cache, a) : cellkv_cache_clear(cache));
            a = open_sequence(cache);
        }
        extend(cache, a, 5);
        CHECK_OK(cellkv_cache_rewind(cache, a, 1));
        cellkv_cache_free(cache);
    }
}

static void test_a_step_of_max_step_can_be_undone(void) {
    cellkv_cache *cache = new_small_single();
    int64_t a = open_with(cache, 20);
    for (int32_t n_keep = MAX_STEP; n_keep >= 0; n_keep--) {
        int32_t before = next_pos_of(cache, a);
        extend(cache, a, MAX_STEP);
        CHECK_OK(cellkv_cache_undo_step(cache, n_keep));
        CHECK_EQUAL(next_pos_of(cache, a), before + n_keep);
    }
    cellkv_cache_free(cache);
}

static void test_of_a_wider_step_what_was_written_over_stays(void) {
    cellkv_cache *cache = new_small_single();
    int64_t a = open_with(cache, 20);
    extend(cache, a, 8);
    for (int32_t n_keep = 0; n_keep < 8 - MAX_STEP; n_keep++) {
        CHECK_REFUSED(cellkv_cache_undo_step(cache, n_keep), CELLKV_ERROR_TRIMMED,
                      "oldest end that can be reached is 25");
    }
    CHECK_OK(cellkv_cache_undo_step(cache, 8 - MAX_STEP)); /* a refusal leaves the undo */
    CHECK_EQUAL(next_pos_of(cache, a), 25);
    cellkv_cache_free(cache);
}

/* The executor's half: what was placed and never written has harmed nothing. */
static void test_only_what_was_written_counts(void) {
    cellkv_cache *cache = new_small_single();
    int64_t a = open_with(cache, 20);
    const int64_t seqs[8] = {a, a, a, a, a, a, a, a};
    CHECK_OK(ck_cells_begin_step(cache->cells, seqs, NULL, 8, 0));
    ck_cells_rollback_step(cache->cells);
    check_reach(cache, a, 17);
    CHECK_OK(ck_cells_begin_step(cache->cells, seqs, NULL, 8, 0));
    ck_cells_begin_write(cache->cells, 0, 3); /* the first slice; then the forward fails */
    CHECK_OK(cellkv_cache_undo_step(cache, 0));
    CHECK_EQUAL(next_pos_of(cache, a), 20);
    CHECK_OK(ck_cells_begin_step(cache->cells, seqs, NULL, 8, 0));
    ck_cells_begin_write(cache->cells, 0, 3);
    ck_cells_begin_write(cache->cells, 3, 3);
    CHECK_REFUSED(cellkv_cache_undo_step(cache, 2), CELLKV_ERROR_TRIMMED, "reached is 23");
    CHECK_OK(cellkv_cache_undo_step(cache, 3)); /* what the first slice did is kept */
    CHECK_EQUAL(next_pos_of(cache, a), 23);
    cellkv_cache_free(cache);
}

static void test_without_windows_everything_can_be_reached(void) {
    cellkv_cache_config config = small_config(100, 9);
    cellkv_cache *cache = NULL;
    config.kind = CELLKV_CACHE_SEQUENCE;
    config.max_step = 1;
    CHECK_OK(cellkv_cache_new(&config, &cache));
    int64_t a = open_with(cache, 100);
    CHECK_OK(cellkv_cache_undo_step(cache, 1));
    CHECK_OK(cellkv_cache_rewind(cache, a, 1));
    cellkv_cache_free(cache);
}

/* ---- extend, a verb of every kind ---- */

static void test_extend_declares_for_one_sequence(void) {
    cellkv_cache *caches[] = {new_cache(8, 3), new_small_single()};
    for (int i = 0; i < 2; i++) {
        cellkv_cache *cache = caches[i];
        int64_t a = open_sequence(cache);
        int32_t cells[5], shortfall = -1;
        CHECK_OK(cellkv_cache_extend(cache, a, 3, &shortfall));
        CHECK_EQUAL(shortfall, 0);
        CHECK_EQUAL(stats_of(cache).declared_tokens, 3);
        CHECK_OK(cellkv_cache_extend(cache, a, 5, NULL)); /* replaces it */
        CHECK_REFUSED(cellkv_cache_place(cache, NULL, 3, cells), CELLKV_ERROR_NOT_DECLARED, NULL);
        CHECK_OK(cellkv_cache_place(cache, NULL, 5, cells));
        CHECK_EQUAL(cells[4], 4);
        CHECK_EQUAL(next_pos_of(cache, a), 5);
        cellkv_cache_free(cache);
    }
}

static void test_refused_extend_keeps_the_declaration(void) {
    cellkv_cache *cache = new_cache(8, 3);
    int64_t a = open_sequence(cache);
    int32_t shortfall = -1;
    CHECK_OK(cellkv_cache_extend(cache, a, 3, NULL));
    CHECK_REFUSED(cellkv_cache_extend(cache, a, 9, &shortfall), CELLKV_ERROR_OUT_OF_CELLS,
                  "needs 1 more cells");
    CHECK_EQUAL(shortfall, 1);
    CHECK_REFUSED(cellkv_cache_extend(cache, a, 0, &shortfall), CELLKV_ERROR_EMPTY_STEP, NULL);
    CHECK_EQUAL(shortfall, 0);
    CHECK_REFUSED(cellkv_cache_extend(cache, a, -1, NULL), CELLKV_ERROR_INVALID_ARGUMENT,
                  "n_tokens is -1");
    CHECK_REFUSED(cellkv_cache_extend(cache, a + 1, 1, NULL), CELLKV_ERROR_UNKNOWN_SEQUENCE, NULL);
    CHECK_REFUSED(cellkv_cache_extend(NULL, a, 1, NULL), CELLKV_ERROR_INVALID_ARGUMENT,
                  "cache is NULL");
    CHECK_OK(ck_cache_enter(cache));
    CHECK_REFUSED(cellkv_cache_extend(cache, a, 1, NULL), CELLKV_ERROR_BUSY, NULL);
    ck_cache_leave(cache);
    CHECK_OK(cellkv_cache_place(cache, NULL, 3, NULL));
    cellkv_cache_free(cache);
}

int main(void) {
    RUN(test_ring_is_window_and_step_or_none);
    RUN(test_layers_get_their_rings);
    RUN(test_there_is_one_sequence);
    RUN(test_cells_are_positions);
    RUN(test_clone_is_refused);
    RUN(test_only_the_end_is_removed);
    RUN(test_there_is_nothing_to_trim);
    RUN(test_everything_can_be_reached_while_it_fits);
    RUN(test_the_last_max_step_positions_can_be_taken_back);
    RUN(test_a_rewind_does_not_bring_back_what_was_written_over);
    RUN(test_an_emptied_sequence_starts_anew);
    RUN(test_a_step_of_max_step_can_be_undone);
    RUN(test_of_a_wider_step_what_was_written_over_stays);
    RUN(test_only_what_was_written_counts);
    RUN(test_without_windows_everything_can_be_reached);
    RUN(test_extend_declares_for_one_sequence);
    RUN(test_refused_extend_keeps_the_declaration);
    return 0;
}
