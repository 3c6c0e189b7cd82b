/* trim_windows, and the rewinds, removals and clones that it makes impossible. */
#include "small_cache.h"

static int32_t trim(cellkv_cache *cache) {
    int32_t n_freed = -1;
    CHECK_OK(cellkv_cache_trim_windows(cache, &n_freed));
    return n_freed;
}

static void test_cache_with_a_layer_without_a_window_is_not_trimmed(void) {
    cellkv_layer layers[2] = {{1, 1, 1, 4, CELLKV_TYPE_F32, CELLKV_TYPE_F32},
                              {1, 1, 1, 0, CELLKV_TYPE_F32, CELLKV_TYPE_F32}};
    cellkv_cache_config config = small_config(8, 1);
    config.n_layers = 2;
    config.layers = layers;
    cellkv_cache *cache = NULL;
    int32_t n_freed = -7;
    CHECK_OK(cellkv_cache_new(&config, &cache));
    open_with(cache, 8);
    CHECK_REFUSED(cellkv_cache_trim_windows(cache, &n_freed), CELLKV_ERROR_NOT_WINDOWED,
                  "layer 1 has no window");
    CHECK_EQUAL(n_freed, -7);
    CHECK_EQUAL(used_cells(cache), 8);
    cellkv_cache_free(cache);
}

static void test_cache_without_layers_is_not_trimmed(void) {
    cellkv_cache *cache = new_cache(8, 1);
    CHECK_REFUSED(cellkv_cache_trim_windows(cache, NULL), CELLKV_ERROR_NOT_WINDOWED, "no layers");
    cellkv_cache_free(cache);
}

static void test_trim_drops_what_the_next_token_cannot_see(void) {
    cellkv_cache *cache = new_windowed_cache(16, 2, 3);
    int64_t a = open_with(cache, 6), b = open_with(cache, 2);
    CHECK_EQUAL(trim(cache), 4); /* a's token at 6 sees positions > 3; b loses nothing */
    CHECK_CELLS(cache, a, {4, 4}, {5, 5});
    CHECK_CELLS(cache, b, {6, 0}, {7, 1});
    CHECK_EQUAL(next_pos_of(cache, a), 6);
    CHECK_EQUAL(trim(cache), 0);
    extend(cache, a, 1);
    CHECK_EQUAL(trim(cache), 1);
    cellkv_cache_free(cache);
}

static void test_window_of_one_keeps_the_last_cell(void) {
    cellkv_cache *cache = new_windowed_cache(16, 2, 1);
    int64_t a = open_with(cache, 5);
    open_sequence(cache);
    CHECK_EQUAL(trim(cache), 4);
    CHECK_EQUAL(trim(cache), 0);
    CHECK_EQUAL(next_pos_of(cache, a), 5);
    extend(cache, a, 2);
    CHECK_CELLS(cache, a, {4, 4}, {5, 5}, {6, 6});
    CHECK_OK(cellkv_cache_rewind(cache, a, 5)); /* its token at 5 sees only itself */
    CHECK_EQUAL(next_pos_of(cache, a), 5);
    CHECK_REFUSED(cellkv_cache_rewind(cache, a, 4), CELLKV_ERROR_TRIMMED,
                  "oldest end that can be reached is 5");
    cellkv_cache_free(cache);
}

static void test_shared_cells_free_when_the_last_owner_trims(void) {
    cellkv_cache *cache = new_windowed_cache(16, 2, 3);
    int64_t a = open_with(cache, 6);
    int64_t b = clone(cache, a, 4);
    CHECK_EQUAL(trim(cache), 2); /* a drops 0..3, b drops 0 and 1 */
    CHECK_CELLS(cache, a, {4, 4}, {5, 5});
    CHECK_CELLS(cache, b, {2, 2}, {3, 3});
    cellkv_cache_free(cache);
}

/* Trimmed below 7 with a window of 4: what ends at p sees from p - 3 on, so that 10 is the oldest
 * end. */
static void test_rewind_and_clone_that_need_trimmed_cells_are_refused(void) {
    cellkv_cache *cache = new_windowed_cache(32, 4, 4);
    int64_t a = open_with(cache, 10), copy = 7;
    CHECK_EQUAL(trim(cache), 7);
    extend(cache, a, 5);
    const char *words = "positions below 7 were trimmed, the oldest end that can be reached is 10";
    const int32_t ends[] = {1, 6, 7, 8, 9};
    for (int i = 0; i < 5; i++) {
        CHECK_REFUSED(cellkv_cache_rewind(cache, a, ends[i]), CELLKV_ERROR_TRIMMED, words);
        CHECK_REFUSED(cellkv_cache_clone(cache, a, ends[i], &copy), CELLKV_ERROR_TRIMMED, words);
        CHECK_REFUSED(cellkv_cache_remove(cache, a, ends[i], CELLKV_UNSET), CELLKV_ERROR_TRIMMED,
                      words);
    }
    CHECK_EQUAL(copy, 7);
    CHECK_EQUAL(length_of(cache, a), 8);
    CHECK_EQUAL(next_pos_of(cache, clone(cache, a, 10)), 10);
    CHECK_OK(cellkv_cache_rewind(cache, a, 10));
    CHECK_EQUAL(next_pos_of(cache, a), 10);
    cellkv_cache_free(cache);
}

static void test_clone_inherits_what_was_trimmed(void) {
    cellkv_cache *cache = new_windowed_cache(32, 4, 4);
    int64_t a = open_with(cache, 10);
    trim(cache);
    int64_t copy = clone(cache, a, CELLKV_UNSET), again = 7;
    CHECK_OK(cellkv_cache_close(cache, a));
    CHECK_REFUSED(cellkv_cache_rewind(cache, copy, 9), CELLKV_ERROR_TRIMMED, "end at position 9");
    CHECK_REFUSED(cellkv_cache_clone(cache, copy, 9, &again), CELLKV_ERROR_TRIMMED, NULL);
    cellkv_cache_free(cache);
}

static void test_emptied_sequence_forgets_what_was_trimmed(void) {
    cellkv_cache *cache = new_windowed_cache(32, 4, 4);
    int64_t a = open_with(cache, 10), b = open_with(cache, 10);
    trim(cache);
    int64_t c = clone(cache, a, 0);
    CHECK_OK(cellkv_cache_rewind(cache, a, 0));
    CHECK_OK(cellkv_cache_remove(cache, b, 0, CELLKV_UNSET));
    int64_t seqs[] = {a, b, c};
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(next_pos_of(cache, seqs[i]), 0);
        extend(cache, seqs[i], 3);
        CHECK_OK(cellkv_cache_rewind(cache, seqs[i], 1));
    }
    cellkv_cache_free(cache);
}

static void test_removals_before_the_end_stay_legal_after_a_trim(void) {
    cellkv_cache *cache = new_windowed_cache(32, 4, 4);
    int64_t a = open_with(cache, 10);
    trim(cache);
    extend(cache, a, 3);
    CHECK_OK(cellkv_cache_remove(cache, a, 2, 9)); /* positions 7 and 8 were left of it */
    CHECK_CELLS(cache, a, {9, 9}, {10, 10}, {11, 11}, {12, 12});
    CHECK_REFUSED(cellkv_cache_remove(cache, a, 9, 13), CELLKV_ERROR_TRIMMED, NULL);
    CHECK_OK(cellkv_cache_remove(cache, a, 11, 13));
    CHECK_EQUAL(next_pos_of(cache, a), 11);
    cellkv_cache_free(cache);
}

/* A hole makes the oldest end a later one: 10 and 11 are not owned, so no end lies between. */
static void test_oldest_end_in_the_message_is_one_that_can_be_reached(void) {
    cellkv_cache *cache = new_windowed_cache(32, 4, 4);
    int64_t a = open_with(cache, 10);
    trim(cache);
    extend(cache, a, 6);
    CHECK_OK(cellkv_cache_remove(cache, a, 9, 12));
    CHECK_REFUSED(cellkv_cache_rewind(cache, a, 11), CELLKV_ERROR_TRIMMED,
                  "oldest end that can be reached is 13");
    CHECK_OK(cellkv_cache_rewind(cache, a, 13));
    CHECK_EQUAL(next_pos_of(cache, a), 13);
    cellkv_cache_free(cache);
}

static void test_what_a_user_removed_does_not_count_as_trimmed(void) {
    cellkv_cache *cache = new_windowed_cache(32, 4, 4);
    int64_t a = open_with(cache, 10);
    CHECK_OK(cellkv_cache_remove(cache, a, 2, 7));
    CHECK_EQUAL(trim(cache), 2); /* positions 0 and 1: trimmed below 2 */
    extend(cache, a, 1);
    CHECK_OK(cellkv_cache_rewind(cache, a, 8)); /* would see from 5 on */
    CHECK_REFUSED(cellkv_cache_rewind(cache, a, 4), CELLKV_ERROR_TRIMMED, "below 2 were trimmed");
    cellkv_cache_free(cache);
}

static void test_window_wider_than_every_sequence_trims_nothing(void) {
    cellkv_cache *cache = new_windowed_cache(32, 4, INT32_MAX);
    int64_t a = open_with(cache, 10);
    CHECK_EQUAL(trim(cache), 0);
    CHECK_OK(cellkv_cache_rewind(cache, a, 1));
    cellkv_cache_free(cache);
}

int main(void) {
    RUN(test_cache_with_a_layer_without_a_window_is_not_trimmed);
    RUN(test_cache_without_layers_is_not_trimmed);
    RUN(test_trim_drops_what_the_next_token_cannot_see);
    RUN(test_window_of_one_keeps_the_last_cell);
    RUN(test_shared_cells_free_when_the_last_owner_trims);
    RUN(test_rewind_and_clone_that_need_trimmed_cells_are_refused);
    RUN(test_clone_inherits_what_was_trimmed);
    RUN(test_emptied_sequence_forgets_what_was_trimmed);
    RUN(test_removals_before_the_end_stay_legal_after_a_trim);
    RUN(test_oldest_end_in_the_message_is_one_that_can_be_reached);
    RUN(test_what_a_user_removed_does_not_count_as_trimmed);
    RUN(test_window_wider_than_every_sequence_trims_nothing);
    return 0;
}
