/* Making caches, statuses and their words, and what every call refuses. */
#include "cells/cache_object.h"

#include "small_cache.h"

/* ---- statuses ---- */

static void test_every_status_has_a_name_and_a_text(void) {
    int n = 0;
#define CHECK_ENTRY(name, value, exception, text)                                                  \
    CHECK(strcmp(cellkv_status_name(CELLKV_##name), #name) == 0);                                  \
    CHECK(strcmp(cellkv_status_text(CELLKV_##name), text) == 0);                                   \
    CHECK_EQUAL(CELLKV_##name, -n++);
    CELLKV_STATUS_LIST(CHECK_ENTRY)
#undef CHECK_ENTRY
    CHECK(cellkv_status_name((cellkv_status)1) == NULL);
    CHECK(strcmp(cellkv_status_text((cellkv_status)1), "unknown status") == 0);
    CHECK(cellkv_status_name((cellkv_status)-n) == NULL);
}

static void test_last_error_is_empty_first_and_kept_by_success(void) {
    CHECK(strcmp(cellkv_last_error(), "") == 0);
    cellkv_cache *cache = new_cache(4, 1);
    CHECK(strcmp(cellkv_last_error(), "") == 0);
    CHECK_REFUSED(cellkv_cache_close(cache, 77), CELLKV_ERROR_UNKNOWN_SEQUENCE, "sequence 77");
    open_sequence(cache);
    CHECK(strstr(cellkv_last_error(), "sequence 77"));
    cellkv_cache_free(cache);
}

/* ---- kinds ---- */

static void test_kinds_have_names(void) {
    const char *names[] = {"sequence", "batched", "batched_cell"};
    for (int i = 0; i < 3; i++) {
        cellkv_cache_kind kind = (cellkv_cache_kind)-1;
        CHECK(strcmp(cellkv_cache_kind_name((cellkv_cache_kind)i), names[i]) == 0);
        CHECK_OK(cellkv_cache_kind_by_name(names[i], &kind));
        CHECK_EQUAL(kind, i);
    }
    cellkv_cache_kind kind = CELLKV_CACHE_BATCHED;
    CHECK(cellkv_cache_kind_name((cellkv_cache_kind)3) == NULL);
    CHECK(cellkv_cache_kind_name((cellkv_cache_kind)-1) == NULL);
    CHECK_REFUSED(cellkv_cache_kind_by_name("batch", &kind), CELLKV_ERROR_INVALID_ARGUMENT,
                  "\"batch\" is not a kind");
    CHECK_REFUSED(cellkv_cache_kind_by_name(NULL, &kind), CELLKV_ERROR_INVALID_ARGUMENT,
                  "name is NULL");
    CHECK_REFUSED(cellkv_cache_kind_by_name("batched", NULL), CELLKV_ERROR_INVALID_ARGUMENT,
                  "kind is NULL");
    CHECK_EQUAL(kind, CELLKV_CACHE_BATCHED);
}

/* ---- configurations ---- */

static void check_no_cache(cellkv_cache_config config, cellkv_status status, const char *words) {
    cellkv_cache *untouched = (cellkv_cache *)&config, *cache = untouched;
    CHECK_REFUSED(cellkv_cache_new(&config, &cache), status, words);
    CHECK(cache == untouched);
}

static void check_invalid(cellkv_cache_config config, const char *words) {
    check_no_cache(config, CELLKV_ERROR_INVALID_ARGUMENT, words);
}

static void test_default_config_needs_layers_only(void) {
    cellkv_cache_config config = cellkv_cache_config_default();
    CHECK_EQUAL(config.size, sizeof config);
    CHECK(strcmp(config.backend, "ggml") == 0);
    CHECK_EQUAL(config.kind, CELLKV_CACHE_BATCHED);
    CHECK_EQUAL(config.capacity, 4096);
    CHECK_EQUAL(config.max_seqs, 64);
    CHECK_EQUAL(config.initial_rows, 256);
    CHECK_EQUAL(config.max_step, 512);
    CHECK_EQUAL(config.n_layers, 0);
    CHECK(!config.layers && !config.device);
    check_invalid(config, "n_layers is 0");
}

static void test_fields_outside_their_range_are_refused(void) {
    const cellkv_cache_config good = small_config(8, 2);
    cellkv_cache_config config = good;
    config.size--;
    check_invalid(config, "size is");
    config = good, config.backend = NULL;
    check_invalid(config, "backend is NULL");
    config = good, config.kind = (cellkv_cache_kind)3;
    check_invalid(config, "3 is not a kind");
    const struct {
        size_t field;
        int32_t value;
        const char *words;
    } bad[] = {
        {offsetof(cellkv_cache_config, capacity), 0, "capacity is 0, not in [1, 1073741824]"},
        {offsetof(cellkv_cache_config, capacity), CELLKV_MAX_CAPACITY + 1, "capacity is"},
        {offsetof(cellkv_cache_config, max_seqs), 0, "max_seqs is 0, not in [1, 65535]"},
        {offsetof(cellkv_cache_config, max_seqs), CELLKV_MAX_SEQS + 1, "max_seqs is 65536"},
        {offsetof(cellkv_cache_config, initial_rows), -1, "initial_rows is -1, not in [0, 8]"},
        {offsetof(cellkv_cache_config, initial_rows), 9, "initial_rows is 9, not in [0, 8]"},
        {offsetof(cellkv_cache_config, max_step), 0, "max_step is 0, not in [1, 1073741824]"},
        {offsetof(cellkv_cache_config, max_step), -1, "max_step is -1"},
        {offsetof(cellkv_cache_config, max_step), CELLKV_MAX_CAPACITY + 1, "max_step is"},
        {offsetof(cellkv_cache_config, n_layers), -1, "n_layers is -1, not in [0,"},
        {offsetof(cellkv_cache_config, n_layers), 1, "layers is NULL"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        config = good;
        memcpy((char *)&config + bad[i].field, &bad[i].value, sizeof bad[i].value);
        check_invalid(config, bad[i].words);
    }
}

static void test_layers_outside_their_range_are_refused(void) {
    const cellkv_layer good = {1, 1, 1, 0, CELLKV_TYPE_F32, CELLKV_TYPE_F16};
    const struct {
        cellkv_layer layer;
        const char *words;
    } bad[] = {
        {{0, 1, 1, 0, CELLKV_TYPE_F32, CELLKV_TYPE_F32}, "layer 1: n_kv_heads is 0"},
        {{1, 0, 1, 0, CELLKV_TYPE_F32, CELLKV_TYPE_F32}, "layer 1: head_dim_k is 0"},
        {{1, 1, -5, 0, CELLKV_TYPE_F32, CELLKV_TYPE_F32}, "layer 1: head_dim_v is -5"},
        {{1, 1, 1, -1, CELLKV_TYPE_F32, CELLKV_TYPE_F32}, "layer 1: window is -1"},
        {{1, 1, 1, 0, (cellkv_type)3, CELLKV_TYPE_F32}, "layer 1: type 3"},
        {{1, 1, 1, 0, CELLKV_TYPE_F32, (cellkv_type)-1}, "layer 1: type -1"},
        {{1, 40, 32, 0, CELLKV_TYPE_Q8_0, CELLKV_TYPE_Q8_0},
         "layer 1: head_dim_k is 40, its type stores blocks of 32"},
        {{1, 40, 48, 0, CELLKV_TYPE_F32, CELLKV_TYPE_Q4_0},
         "layer 1: head_dim_v is 48, its type stores blocks of 32"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cellkv_layer layers[] = {good, bad[i].layer};
        cellkv_cache_config config = small_config(8, 2);
        config.n_layers = 2;
        config.layers = layers;
        check_invalid(config, bad[i].words);
    }
}

static void test_what_nothing_builds_is_refused(void) {
    cellkv_layer layer = {1, 1, 1, 0, CELLKV_TYPE_F32, CELLKV_TYPE_F32};
    cellkv_cache_config config = small_config(8, 2);
    config.backend = "abacus";
    config.n_layers = 1;
    config.layers = &layer;
    check_no_cache(config, CELLKV_ERROR_NO_BUILDER,
                   "nothing builds kind batched for backend \"abacus\"");
}

static void test_both_batched_kinds_are_built(void) {
    for (int kind = CELLKV_CACHE_BATCHED; kind <= CELLKV_CACHE_BATCHED_CELL; kind++) {
        cellkv_cache_config config = small_config(8, 2);
        cellkv_cache *cache = NULL;
        config.kind = (cellkv_cache_kind)kind;
        CHECK_OK(cellkv_cache_new(&config, &cache));
        CHECK_EQUAL(length_of(cache, open_with(cache, 8)), 8);
        cellkv_cache_free(cache);
    }
}

static void test_layers_are_copied(void) {
    cellkv_cache *cache = new_windowed_cache(8, 2, 3); /* its layers were on the stack */
    CHECK_EQUAL(cache->layers[0].window, 3);
    CHECK_EQUAL(cache->layers[1].window, 1);
    cellkv_cache_free(cache);
}

/* ---- NULL and BUSY ---- */

static cellkv_cache *shared_cache;
static int64_t handle = 7;
static int32_t figure = 7;
static bool fits;
static cellkv_cache_stats stats = {.size = sizeof stats};

static void check_all(cellkv_cache *cache, cellkv_status status, const char *words) {
    CHECK_REFUSED(cellkv_cache_open(cache, &handle), status, words);
    CHECK_REFUSED(cellkv_cache_clone(cache, 1, 0, &handle), status, words);
    CHECK_REFUSED(cellkv_cache_rewind(cache, 1, 0), status, words);
    CHECK_REFUSED(cellkv_cache_remove(cache, 1, 0, 0), status, words);
    CHECK_REFUSED(cellkv_cache_close(cache, 1), status, words);
    CHECK_REFUSED(cellkv_cache_clear(cache), status, words);
    CHECK_REFUSED(cellkv_cache_trim_windows(cache, &figure), status, words);
    CHECK_REFUSED(cellkv_cache_declare(cache, &handle, 1, &figure), status, words);
    CHECK_REFUSED(cellkv_cache_place(cache, NULL, 1, NULL), status, words);
    CHECK_REFUSED(cellkv_cache_undo_step(cache, 0), status, words);
    CHECK_REFUSED(cellkv_cache_can_extend(cache, 0, &fits), status, words);
    CHECK_REFUSED(cellkv_cache_length(cache, 1, &figure), status, words);
    CHECK_REFUSED(cellkv_cache_next_pos(cache, 1, &figure), status, words);
    CHECK_REFUSED(cellkv_cache_read_cells(cache, 1, NULL, NULL, 0, &figure), status, words);
    CHECK_REFUSED(cellkv_cache_get_stats(cache, &stats), status, words);
    CHECK_EQUAL(handle, 7);
    CHECK_EQUAL(figure, 7);
}

static void test_null_cache_is_refused_by_every_verb(void) {
    check_all(NULL, CELLKV_ERROR_INVALID_ARGUMENT, "cache is NULL");
    CHECK_REFUSED(cellkv_cache_publish(NULL, &handle), CELLKV_ERROR_INVALID_ARGUMENT,
                  "cache is NULL");
    cellkv_cache_free(NULL);
}

static void test_null_results_are_refused(void) {
    const cellkv_status invalid = CELLKV_ERROR_INVALID_ARGUMENT;
    cellkv_cache *cache = new_cache(8, 2);
    cellkv_cache_config config = small_config(8, 2);
    int64_t seq = open_sequence(cache);
    CHECK_REFUSED(cellkv_cache_new(NULL, &cache), invalid, "config is NULL");
    CHECK_REFUSED(cellkv_cache_new(&config, NULL), invalid, "cache is NULL");
    CHECK_REFUSED(cellkv_cache_open(cache, NULL), invalid, "seq is NULL");
    CHECK_REFUSED(cellkv_cache_clone(cache, seq, 0, NULL), invalid, "seq is NULL");
    CHECK_REFUSED(cellkv_cache_declare(cache, NULL, 1, NULL), invalid, "seqs is NULL");
    CHECK_REFUSED(cellkv_cache_can_extend(cache, 0, NULL), invalid, "fits is NULL");
    CHECK_REFUSED(cellkv_cache_length(cache, seq, NULL), invalid, "length is NULL");
    CHECK_REFUSED(cellkv_cache_next_pos(cache, seq, NULL), invalid, "pos is NULL");
    CHECK_REFUSED(cellkv_cache_get_stats(cache, NULL), invalid, "stats is NULL");
    CHECK_REFUSED(cellkv_cache_publish(cache, NULL), invalid, "key is NULL");
    CHECK_REFUSED(cellkv_cache_find(1, NULL), invalid, "cache is NULL");
    open_sequence(cache); /* none of them left the cache busy */
    cellkv_cache_free(cache);
}

static void test_every_verb_is_refused_while_a_step_runs(void) {
    shared_cache = new_cache(8, 2);
    CHECK_OK(ck_cache_enter(shared_cache));
    check_all(shared_cache, CELLKV_ERROR_BUSY, "a step runs or another thread is inside");
    CHECK_REFUSED(ck_cache_enter(shared_cache), CELLKV_ERROR_BUSY, NULL);
    ck_cache_leave(shared_cache);
    CHECK_EQUAL(used_cells(shared_cache), 0);
    cellkv_cache_free(shared_cache);
}

static void test_refused_verbs_leave_the_cache_free_for_the_next(void) {
    cellkv_cache *cache = new_cache(8, 2);
    for (int i = 0; i < 2; i++) {
        CHECK(cellkv_cache_clone(cache, 1, 0, &handle) == CELLKV_ERROR_UNKNOWN_SEQUENCE);
        CHECK(cellkv_cache_rewind(cache, 1, 0) == CELLKV_ERROR_UNKNOWN_SEQUENCE);
        CHECK(cellkv_cache_remove(cache, 1, 0, 0) == CELLKV_ERROR_UNKNOWN_SEQUENCE);
        CHECK(cellkv_cache_close(cache, 1) == CELLKV_ERROR_UNKNOWN_SEQUENCE);
        CHECK(cellkv_cache_trim_windows(cache, NULL) == CELLKV_ERROR_NOT_WINDOWED);
        CHECK(cellkv_cache_declare(cache, &handle, 1, NULL) == CELLKV_ERROR_UNKNOWN_SEQUENCE);
        CHECK(cellkv_cache_place(cache, NULL, 1, NULL) == CELLKV_ERROR_NOT_DECLARED);
        CHECK(cellkv_cache_undo_step(cache, 0) == CELLKV_ERROR_NOTHING_TO_UNDO);
        CHECK(cellkv_cache_can_extend(cache, -1, &fits) == CELLKV_ERROR_INVALID_ARGUMENT);
        CHECK(cellkv_cache_length(cache, 1, &figure) == CELLKV_ERROR_UNKNOWN_SEQUENCE);
        CHECK(cellkv_cache_next_pos(cache, 1, &figure) == CELLKV_ERROR_UNKNOWN_SEQUENCE);
        CHECK(cellkv_cache_read_cells(cache, 1, NULL, NULL, -1, NULL) ==
              CELLKV_ERROR_INVALID_ARGUMENT);
        CHECK(cellkv_cache_read_cells(cache, 1, NULL, NULL, 0, NULL) ==
              CELLKV_ERROR_UNKNOWN_SEQUENCE);
    }
    cellkv_cache_free(cache);
}

int main(void) {
    RUN(test_last_error_is_empty_first_and_kept_by_success);
    RUN(test_every_status_has_a_name_and_a_text);
    RUN(test_kinds_have_names);
    RUN(test_default_config_needs_layers_only);
    RUN(test_fields_outside_their_range_are_refused);
    RUN(test_layers_outside_their_range_are_refused);
    RUN(test_what_nothing_builds_is_refused);
    RUN(test_both_batched_kinds_are_built);
    RUN(test_layers_are_copied);
    RUN(test_null_cache_is_refused_by_every_verb);
    RUN(test_null_results_are_refused);
    RUN(test_every_verb_is_refused_while_a_step_runs);
    RUN(test_refused_verbs_leave_the_cache_free_for_the_next);
    return 0;
}
