/* Sequences: opening, sharing, dropping, handles. */
#include "small_cache.h"

/* ---- handles ---- */

static void check_unknown(cellkv_cache *cache, int64_t seq) {
    const cellkv_status unknown = CELLKV_ERROR_UNKNOWN_SEQUENCE;
    char words[64];
    int64_t clone = 7;
    int32_t figure = 7;
    snprintf(words, sizeof words, "sequence %lld is not open in this cache", (long long)seq);
    CHECK_REFUSED(cellkv_cache_clone(cache, seq, CELLKV_UNSET, &clone), unknown, words);
    CHECK_REFUSED(cellkv_cache_rewind(cache, seq, 0), unknown, words);
    CHECK_REFUSED(cellkv_cache_remove(cache, seq, 0, 0), unknown, words);
    CHECK_REFUSED(cellkv_cache_close(cache, seq), unknown, words);
    CHECK_REFUSED(cellkv_cache_declare(cache, &seq, 1, NULL), unknown, words);
    CHECK_REFUSED(cellkv_cache_length(cache, seq, &figure), unknown, words);
    CHECK_REFUSED(cellkv_cache_next_pos(cache, seq, &figure), unknown, words);
    CHECK_REFUSED(cellkv_cache_read_cells(cache, seq, NULL, NULL, 0, &figure), unknown, words);
    CHECK_EQUAL(clone, 7);
    CHECK_EQUAL(figure, 7);
}

static void test_numbers_that_are_no_handles_are_refused(void) {
    cellkv_cache *cache = new_cache(16, CELLKV_MAX_SEQS);
    const int64_t none[] = {0, -1, 1, 65535, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN};
    for (int round = 0; round < 2; round++) { /* with no sequence open, then with one */
        for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
            check_unknown(cache, none[i]);
        }
        CHECK(open_sequence(cache) > 0);
    }
    cellkv_cache_free(cache);
}

static void test_closed_handle_stays_dead_when_its_slot_is_reused(void) {
    cellkv_cache *cache = new_cache(16, 1);
    int64_t first = open_with(cache, 3);
    CHECK_OK(cellkv_cache_close(cache, first));
    int64_t second = open_with(cache, 2);
    CHECK(first != second);
    check_unknown(cache, first);
    CHECK_EQUAL(length_of(cache, second), 2);
    cellkv_cache_free(cache);
}

static void test_foreign_handle_is_refused(void) {
    cellkv_cache *here = new_cache(16, 4), *there = new_cache(16, 4);
    int64_t seq_here = open_with(here, 1), seq_there = open_with(there, 1);
    CHECK(seq_here != seq_there);
    check_unknown(here, seq_there);
    check_unknown(there, seq_here);
    cellkv_cache_free(here);
    cellkv_cache_free(there);
}

static int compare_handles(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void test_no_handle_is_given_twice(void) {
    enum { ROUNDS = 2000, SEQS = 8, CACHES = 2 };
    static int64_t handles[ROUNDS * SEQS * CACHES];
    size_t n = 0;
    cellkv_cache *caches[CACHES] = {new_cache(16, SEQS), new_cache(16, SEQS)};
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < SEQS * CACHES; i++) {
            handles[n++] = open_sequence(caches[i % CACHES]);
        }
        CHECK_OK(cellkv_cache_clear(caches[round % CACHES]));
        CHECK_OK(cellkv_cache_clear(caches[(round + 1) % CACHES]));
    }
    qsort(handles, n, sizeof *handles, compare_handles);
    for (size_t i = 1; i < n; i++) {
        CHECK(handles[i - 1] < handles[i]);
    }
    CHECK(handles[0] > 0);
    cellkv_cache_free(caches[0]);
    cellkv_cache_free(caches[1]);
}

static void test_every_slot_opens_and_reopens(int32_t max_seqs) {
    cellkv_cache *cache = new_cache(8, max_seqs);
    int64_t *handles = calloc((size_t)max_seqs, sizeof *handles), extra = 7;
    char words[64];
    snprintf(words, sizeof words, "all %d sequence slots are open", max_seqs);
    for (int32_t i = 0; i < max_seqs; i++) {
        handles[i] = open_sequence(cache);
    }
    CHECK_EQUAL(stats_of(cache).n_seqs, max_seqs);
    CHECK_REFUSED(cellkv_cache_open(cache, &extra), CELLKV_ERROR_NO_SLOT, words);
    CHECK_REFUSED(cellkv_cache_clone(cache, handles[0], CELLKV_UNSET, &extra), CELLKV_ERROR_NO_SLOT,
                  words);
    CHECK_EQUAL(extra, 7);
    for (int32_t i = 0; i < max_seqs; i += 3) {
        CHECK_OK(cellkv_cache_close(cache, handles[i]));
    }
    for (int32_t i = 0; i < max_seqs; i += 3) {
        int64_t stale = handles[i];
        handles[i] = open_sequence(cache);
        CHECK_REFUSED(cellkv_cache_close(cache, stale), CELLKV_ERROR_UNKNOWN_SEQUENCE, NULL);
    }
    CHECK_REFUSED(cellkv_cache_open(cache, &extra), CELLKV_ERROR_NO_SLOT, words);
    for (int32_t i = 0; i < max_seqs; i++) {
        CHECK_EQUAL(length_of(cache, handles[i]), 0);
    }
    free(handles);
    cellkv_cache_free(cache);
}

static void test_thousands_of_sequences_open_at_once(void) {
    test_every_slot_opens_and_reopens(1);
    test_every_slot_opens_and_reopens(5000);
    test_every_slot_opens_and_reopens(CELLKV_MAX_SEQS);
}

/* ---- sharing ---- */

static void test_emptied_sequence_stays_open_until_closed(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t seq = open_with(cache, 3);
    CHECK_OK(cellkv_cache_rewind(cache, seq, 0));
    CHECK_EQUAL(length_of(cache, seq), 0);
    CHECK_EQUAL(next_pos_of(cache, seq), 0);
    extend(cache, seq, 2);
    CHECK_CELLS(cache, seq, {0, 0}, {1, 1});
    CHECK_OK(cellkv_cache_close(cache, seq));
    check_unknown(cache, seq);
    cellkv_cache_free(cache);
}

static void test_clone_shares_prefix_without_new_cells(void) {
    cellkv_cache *cache = new_cache(16, 4);
    int64_t source = open_with(cache, 4);
    int64_t whole = clone(cache, source, CELLKV_UNSET), part = clone(cache, source, 2);
    CHECK_EQUAL(used_cells(cache), 4);
    CHECK_EQUAL(stats_of(cache).owned_cells, 4 + 4 + 2);
    CHECK_CELLS(cache, whole, {0, 0}, {1, 1}, {2, 2}, {3, 3});
    CHECK_CELLS(cache, part, {0, 0}, {1, 1});
    CHECK_EQUAL(next_pos_of(cache, part), 2);
    cellkv_cache_free(cache);
}

static void test_clone_and_source_go_on_apart(void) {
    cellkv_cache *cache = new_cache(16, 4);
    int64_t source = open_with(cache, 2);
    int64_t copy = clone(cache, source, CELLKV_UNSET);
    extend(cache, source, 1);
    extend(cache, copy, 2);
    CHECK_CELLS(cache, source, {0, 0}, {1, 1}, {2, 2});
    CHECK_CELLS(cache, copy, {0, 0}, {1, 1}, {3, 2}, {4, 3});
    cellkv_cache_free(cache);
}

static void test_empty_sequence_can_be_cloned(void) {
    cellkv_cache *cache = new_cache(8, 4);
    int64_t copy = clone(cache, open_sequence(cache), CELLKV_UNSET);
    CHECK_EQUAL(length_of(cache, copy), 0);
    CHECK_EQUAL(length_of(cache, clone(cache, open_with(cache, 3), 0)), 0);
    cellkv_cache_free(cache);
}

static void test_clone_upto_outside_the_sequence_is_refused(void) {
    cellkv_cache *cache = new_cache(8, 4);
    int64_t seq = open_with(cache, 3), copy = 7;
    CHECK_REFUSED(cellkv_cache_clone(cache, seq, 4, &copy), CELLKV_ERROR_BAD_RANGE, "upto is 4");
    CHECK_REFUSED(cellkv_cache_clone(cache, seq, -1, &copy), CELLKV_ERROR_BAD_RANGE, "upto is -1");
    CHECK_REFUSED(cellkv_cache_clone(cache, seq, INT32_MAX, &copy), CELLKV_ERROR_BAD_RANGE,
                  "positions [0, 3)");
    CHECK_EQUAL(copy, 7);
    CHECK_EQUAL(stats_of(cache).n_seqs, 1);
    cellkv_cache_free(cache);
}

static void test_cell_frees_when_its_last_owner_lets_go(void) {
    cellkv_cache *cache = new_cache(16, 4);
    int64_t a = open_with(cache, 4);
    int64_t b = clone(cache, a, CELLKV_UNSET), c = clone(cache, b, 3);
    CHECK_OK(cellkv_cache_close(cache, a));
    CHECK_EQUAL(used_cells(cache), 4);
    CHECK_OK(cellkv_cache_rewind(cache, b, 1));
    CHECK_EQUAL(used_cells(cache), 3);
    CHECK_OK(cellkv_cache_close(cache, c));
    CHECK_EQUAL(used_cells(cache), 1);
    CHECK_CELLS(cache, b, {0, 0});
    CHECK_OK(cellkv_cache_close(cache, b));
    CHECK_EQUAL(used_cells(cache), 0);
    cellkv_cache_free(cache);
}

/* ---- dropping ---- */

static void test_rewind_drops_positions_from_pos_on(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t seq = open_with(cache, 5);
    CHECK_OK(cellkv_cache_rewind(cache, seq, 5)); /* nothing to drop */
    CHECK_EQUAL(length_of(cache, seq), 5);
    CHECK_OK(cellkv_cache_rewind(cache, seq, 2));
    CHECK_CELLS(cache, seq, {0, 0}, {1, 1});
    CHECK_EQUAL(next_pos_of(cache, seq), 2);
    CHECK_REFUSED(cellkv_cache_rewind(cache, seq, 3), CELLKV_ERROR_BAD_RANGE, "pos is 3");
    CHECK_REFUSED(cellkv_cache_rewind(cache, seq, -1), CELLKV_ERROR_BAD_RANGE, "pos is -1");
    CHECK_REFUSED(cellkv_cache_rewind(cache, seq, CELLKV_UNSET), CELLKV_ERROR_BAD_RANGE,
                  "positions [0, 2)");
    CHECK_EQUAL(length_of(cache, seq), 2);
    cellkv_cache_free(cache);
}

static void test_remove_leaves_a_hole_and_keeps_positions(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t seq = open_with(cache, 5);
    CHECK_OK(cellkv_cache_remove(cache, seq, 1, 3));
    CHECK_CELLS(cache, seq, {0, 0}, {3, 3}, {4, 4});
    CHECK_EQUAL(next_pos_of(cache, seq), 5);
    extend(cache, seq, 5); /* in the freed cells at last, but after the rest */
    CHECK_CELLS(cache, seq, {0, 0}, {3, 3}, {4, 4}, {5, 5}, {6, 6}, {7, 7}, {1, 8}, {2, 9});
    CHECK_OK(cellkv_cache_remove(cache, seq, 1, 3)); /* nothing there: fine */
    CHECK_EQUAL(length_of(cache, seq), 8);
    cellkv_cache_free(cache);
}

static void test_removing_the_end_steps_back_to_what_is_owned(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t seq = open_with(cache, 6);
    CHECK_OK(cellkv_cache_remove(cache, seq, 2, 4));
    CHECK_OK(cellkv_cache_remove(cache, seq, 4, CELLKV_UNSET));
    CHECK_CELLS(cache, seq, {0, 0}, {1, 1});
    CHECK_EQUAL(next_pos_of(cache, seq), 2);
    CHECK_OK(cellkv_cache_remove(cache, seq, 0, CELLKV_UNSET));
    CHECK_EQUAL(next_pos_of(cache, seq), 0);
    cellkv_cache_free(cache);
}

static void test_rewind_and_clone_into_a_hole_end_at_what_is_owned(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t seq = open_with(cache, 6);
    CHECK_OK(cellkv_cache_remove(cache, seq, 2, 5));
    int64_t copy = clone(cache, seq, 4);
    CHECK_EQUAL(next_pos_of(cache, copy), 2);
    CHECK_OK(cellkv_cache_rewind(cache, seq, 4));
    CHECK_EQUAL(next_pos_of(cache, seq), 2);
    cellkv_cache_free(cache);
}

static void test_remove_refuses_what_is_no_range_of_the_sequence(void) {
    cellkv_cache *cache = new_cache(8, 2);
    int64_t seq = open_with(cache, 3);
    const int32_t bad[][2] = {{-1, 2}, {2, 1}, {0, 4}, {4, CELLKV_UNSET}, {0, -1}, {4, 4}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_REFUSED(cellkv_cache_remove(cache, seq, bad[i][0], bad[i][1]), CELLKV_ERROR_BAD_RANGE,
                      "which has positions [0, 3)");
    }
    CHECK_EQUAL(length_of(cache, seq), 3);
    CHECK_OK(cellkv_cache_remove(cache, seq, 3, 3));
    CHECK_OK(cellkv_cache_remove(cache, seq, 3, CELLKV_UNSET));
    CHECK_EQUAL(length_of(cache, seq), 3);
    cellkv_cache_free(cache);
}

static void test_any_run_can_be_shared_after_removals(void) {
    cellkv_cache *cache = new_cache(16, 3);
    int64_t a = open_with(cache, 6), b = clone(cache, a, CELLKV_UNSET);
    CHECK_OK(cellkv_cache_remove(cache, a, 0, 2));
    CHECK_OK(cellkv_cache_remove(cache, b, 3, 4));
    CHECK_CELLS(cache, a, {2, 2}, {3, 3}, {4, 4}, {5, 5});
    CHECK_CELLS(cache, b, {0, 0}, {1, 1}, {2, 2}, {4, 4}, {5, 5});
    CHECK_EQUAL(used_cells(cache), 6);
    CHECK_OK(cellkv_cache_remove(cache, a, 3, 4));
    CHECK_EQUAL(used_cells(cache), 5);
    cellkv_cache_free(cache);
}

static void test_clear_closes_every_sequence(void) {
    cellkv_cache *cache = new_cache(16, 3);
    int64_t a = open_with(cache, 6), b = clone(cache, a, 3);
    CHECK_OK(cellkv_cache_clear(cache));
    check_unknown(cache, a);
    check_unknown(cache, b);
    cellkv_cache_stats stats = stats_of(cache);
    CHECK_EQUAL(stats.used_cells, 0);
    CHECK_EQUAL(stats.n_seqs, 0);
    CHECK_EQUAL(stats.owned_cells, 0);
    CHECK_EQUAL(stats.extent, 0);
    CHECK_EQUAL(length_of(cache, open_with(cache, 16)), 16);
    cellkv_cache_free(cache);
}

/* ---- read-outs ---- */

static void test_read_cells_writes_no_more_than_max(void) {
    cellkv_cache *cache = new_cache(8, 1);
    int64_t seq = open_with(cache, 4);
    int32_t cells[3] = {-7, -7, -7}, length = 0;
    CHECK_OK(cellkv_cache_read_cells(cache, seq, cells, NULL, 2, &length));
    CHECK_EQUAL(length, 4);
    CHECK_EQUAL(cells[1], 1);
    CHECK_EQUAL(cells[2], -7);
    CHECK_OK(cellkv_cache_read_cells(cache, seq, NULL, NULL, 0, NULL));
    CHECK_REFUSED(cellkv_cache_read_cells(cache, seq, cells, NULL, -1, &length),
                  CELLKV_ERROR_INVALID_ARGUMENT, "max is -1");
    cellkv_cache_free(cache);
}

static void test_can_extend_tells_what_declare_will_say(void) {
    cellkv_cache *cache = new_cache(8, 1);
    open_with(cache, 5);
    bool fits = false;
    CHECK_OK(cellkv_cache_can_extend(cache, 3, &fits));
    CHECK(fits);
    CHECK_OK(cellkv_cache_can_extend(cache, 4, &fits));
    CHECK(!fits);
    CHECK_OK(cellkv_cache_can_extend(cache, 0, &fits));
    CHECK(fits);
    CHECK_REFUSED(cellkv_cache_can_extend(cache, -1, &fits), CELLKV_ERROR_INVALID_ARGUMENT,
                  "n is -1");
    cellkv_cache_free(cache);
}

static void test_stats_tell_the_figures(void) {
    cellkv_cache *cache = new_cache(32, 4);
    int64_t a = open_with(cache, 10), b = clone(cache, a, 4);
    CHECK_OK(cellkv_cache_remove(cache, a, 8, 9));
    CHECK_OK(cellkv_cache_declare(cache, (int64_t[]){a, b, b}, 3, NULL));
    cellkv_cache_stats stats = stats_of(cache);
    CHECK_EQUAL(stats.capacity, 32);
    CHECK_EQUAL(stats.free_cells, 23);
    CHECK_EQUAL(stats.used_cells, 9);
    CHECK_EQUAL(stats.extent, 10);
    CHECK_EQUAL(stats.rows, 0);
    CHECK_EQUAL(stats.n_seqs, 2);
    CHECK_EQUAL(stats.max_seqs, 4);
    CHECK_EQUAL(stats.declared_tokens, 3);
    CHECK_EQUAL(stats.owned_cells, 13);
    CHECK_EQUAL(stats.storage_bytes, 0);
    CHECK_EQUAL(stats.n_growths, 0);
    CHECK(stats.table_bytes > 0);
    stats.size--;
    CHECK_REFUSED(cellkv_cache_get_stats(cache, &stats), CELLKV_ERROR_INVALID_ARGUMENT, "size is");
    cellkv_cache_free(cache);
}

int main(void) {
    RUN(test_numbers_that_are_no_handles_are_refused);
    RUN(test_closed_handle_stays_dead_when_its_slot_is_reused);
    RUN(test_foreign_handle_is_refused);
    RUN(test_no_handle_is_given_twice);
    RUN(test_thousands_of_sequences_open_at_once);
    RUN(test_emptied_sequence_stays_open_until_closed);
    RUN(test_clone_shares_prefix_without_new_cells);
    RUN(test_clone_and_source_go_on_apart);
    RUN(test_empty_sequence_can_be_cloned);
    RUN(test_clone_upto_outside_the_sequence_is_refused);
    RUN(test_cell_frees_when_its_last_owner_lets_go);
    RUN(test_rewind_drops_positions_from_pos_on);
    RUN(test_remove_leaves_a_hole_and_keeps_positions);
    RUN(test_removing_the_end_steps_back_to_what_is_owned);
    RUN(test_rewind_and_clone_into_a_hole_end_at_what_is_owned);
    RUN(test_remove_refuses_what_is_no_range_of_the_sequence);
    RUN(test_any_run_can_be_shared_after_removals);
    RUN(test_clear_closes_every_sequence);
    RUN(test_read_cells_writes_no_more_than_max);
    RUN(test_can_extend_tells_what_declare_will_say);
    RUN(test_stats_tell_the_figures);
    return 0;
}
