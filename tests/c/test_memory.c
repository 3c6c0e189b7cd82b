/* Memory: how much the table takes, and what happens when there is none. */
#include "cells/cache_object.h"
#include "cells/cells_struct.h"
#include "cells/memory.h"

#include "small_cache.h"

/* ---- how much ---- */

/* The promise: 16 bytes for each cell of capacity, 4 for each sequence's token. On top of that: a
 * constant, something for each slot, and two steps of three words for each token of the widest. */
static int64_t promised_bytes(const cellkv_cache_stats *stats, int64_t widest_step) {
    enum { PER_CACHE = 2048, PER_SLOT = 32, PER_OPEN = 64, PER_STEP_TOKEN = 2 * 3 * 4 };
    int64_t slack = stats->owned_cells / 32 * 4; /* lists grow by a 32nd */
    return PER_CACHE + 16LL * stats->capacity + 4 * stats->owned_cells + slack +
           PER_SLOT * stats->max_seqs + PER_OPEN * stats->n_seqs + PER_STEP_TOKEN * widest_step;
}

static void check_promise(cellkv_cache *cache, int64_t widest_step) {
    cellkv_cache_stats stats = stats_of(cache);
    if (stats.table_bytes > promised_bytes(&stats, widest_step)) {
        fprintf(stderr, "capacity %d, owned %lld: %lld bytes, promised %lld\n", stats.capacity,
                (long long)stats.owned_cells, (long long)stats.table_bytes,
                (long long)promised_bytes(&stats, widest_step));
    }
    CHECK(stats.table_bytes <= promised_bytes(&stats, widest_step));
}

static void look(cellkv_cache *cache, int64_t seq) {
    struct ck_sight sight = {0};
    CHECK_OK(ck_cells_begin_step(cache->cells, &seq, NULL, 1, 0));
    CHECK_OK(ck_sight_build(&sight, cache->cells, 0, 1, 0));
    ck_sight_free(&sight);
}

static void test_table_takes_no_more_than_promised(void) {
    const int32_t capacities[] = {1, 100, 4096, 100000};
    for (int i = 0; i < 4; i++) {
        int32_t capacity = capacities[i];
        cellkv_cache *cache = new_cache(capacity, 64);
        check_promise(cache, 0);
        int64_t seq = open_sequence(cache);
        look(cache, seq);
        for (int32_t left = capacity - 1; left > 0; left -= 128) {
            extend(cache, seq, left < 128 ? left : 128);
        }
        check_promise(cache, 128);
        for (int32_t n = 0; n < 20; n++) {
            clone(cache, seq, CELLKV_UNSET);
        }
        check_promise(cache, 128);
        CHECK_OK(cellkv_cache_rewind(cache, seq, capacity / 1000));
        check_promise(cache, 128);
        cellkv_cache_free(cache);
    }
}

static void test_clones_that_go_on_take_no_more_than_promised(void) {
    cellkv_cache *cache = new_cache(8192, 64);
    int64_t source = open_with(cache, 4000), clones[40];
    for (int i = 0; i < 40; i++) {
        clones[i] = clone(cache, source, CELLKV_UNSET);
    }
    for (int step = 0; step < 100; step++) {
        CHECK_OK(cellkv_cache_declare(cache, clones, 40, NULL));
        CHECK_OK(cellkv_cache_place(cache, NULL, 40, NULL));
        check_promise(cache, 4000);
    }
    cellkv_cache_free(cache);
}

static void test_memory_of_a_wide_step_is_given_back(void) {
    cellkv_cache *cache = new_cache(4096, 64);
    int64_t seq = open_with(cache, 4000);
    check_promise(cache, 4000);
    extend(cache, seq, 1);
    extend(cache, seq, 1);
    check_promise(cache, 64);
    cellkv_cache_free(cache);
}

static void test_closed_sequences_give_their_memory_back(void) {
    cellkv_cache *cache = new_cache(4096, 64);
    int64_t seq = open_with(cache, 4000);
    clone(cache, seq, CELLKV_UNSET);
    int64_t before = stats_of(cache).table_bytes;
    CHECK_OK(cellkv_cache_clear(cache));
    CHECK(stats_of(cache).table_bytes <= before - 2 * 4 * 4000);
    check_promise(cache, 4000);
    cellkv_cache_free(cache);
}

static void test_overflowing_sizes_are_refused(void) {
    int32_t room = 3;
    CHECK(ck_calloc(SIZE_MAX / 2, 4) == NULL);
    CHECK(ck_realloc_array(NULL, SIZE_MAX / 2, 4) == NULL);
    CHECK(ck_make_room(NULL, &room, (int64_t)INT32_MAX + 1, 1) == NULL);
    CHECK_EQUAL(room, 3);
    void *empty = ck_malloc(0);
    CHECK(empty != NULL);
    ck_free(empty);
    empty = ck_calloc(0, 8);
    CHECK(empty != NULL);
    empty = ck_realloc_array(empty, 0, 8);
    CHECK(empty != NULL);
    ck_free(empty);
}

#ifdef CELLKV_CHECKS

/* ---- when there is none ---- */

/* All that the public calls tell of a cache, but for table_bytes: room that was made stays. */
struct picture {
    cellkv_cache_stats stats;
    int64_t seqs[8];
    int32_t n_seqs;
    int32_t lengths[8], ends[8];
    int32_t cells[8][256], positions[8][256];
};

static void take_picture(cellkv_cache *cache, const int64_t *seqs, int32_t n_seqs,
                         struct picture *picture) {
    memset(picture, 0, sizeof *picture);
    picture->stats = stats_of(cache);
    picture->stats.table_bytes = 0;
    picture->n_seqs = n_seqs;
    for (int32_t s = 0; s < n_seqs; s++) {
        picture->seqs[s] = seqs[s];
        picture->ends[s] = next_pos_of(cache, seqs[s]);
        CHECK_OK(cellkv_cache_read_cells(cache, seqs[s], picture->cells[s], picture->positions[s],
                                         256, &picture->lengths[s]));
    }
}

/* A cache with something in it: two sequences that share, and a declaration of what comes next. */
struct scene {
    cellkv_cache *cache;
    int64_t seqs[2];
    bool is_placed; /* the declared step was placed, and can be undone */
};

static struct scene new_scene(bool is_placed) {
    struct scene scene = {.cache = new_cache(1024, 8), .is_placed = is_placed};
    scene.seqs[0] = open_with(scene.cache, 40);
    scene.seqs[1] = clone(scene.cache, scene.seqs[0], 30);
    CHECK_OK(cellkv_cache_declare(scene.cache, scene.seqs, 2, NULL));
    if (is_placed) {
        CHECK_OK(cellkv_cache_place(scene.cache, NULL, 2, NULL));
    }
    return scene;
}

/* What was declared can still be placed, what was placed can still be undone. */
static void check_step_is_kept(struct scene *scene) {
    if (scene->is_placed) {
        CHECK_OK(cellkv_cache_undo_step(scene->cache, 0));
        CHECK_EQUAL(length_of(scene->cache, scene->seqs[0]), 40);
    } else {
        CHECK_OK(cellkv_cache_place(scene->cache, NULL, 2, NULL));
        CHECK_EQUAL(length_of(scene->cache, scene->seqs[0]), 41);
    }
    CHECK(ck_cells_valid(scene->cache->cells));
}

enum { WIDE = 200 }; /* tokens; wider than any room that there is in lists and buffers */

static cellkv_status do_open(struct scene *scene) {
    int64_t seq;
    return cellkv_cache_open(scene->cache, &seq);
}

static cellkv_status do_clone(struct scene *scene) {
    int64_t seq;
    return cellkv_cache_clone(scene->cache, scene->seqs[0], CELLKV_UNSET, &seq);
}

static void wide_step(const struct scene *scene, int64_t *seqs) {
    for (int i = 0; i < WIDE; i++) {
        seqs[i] = scene->seqs[i % 2];
    }
}

static cellkv_status do_declare(struct scene *scene) {
    int64_t seqs[WIDE];
    wide_step(scene, seqs);
    return cellkv_cache_declare(scene->cache, seqs, WIDE, NULL);
}

static cellkv_status do_begin_step(struct scene *scene) {
    int64_t seqs[WIDE];
    wide_step(scene, seqs);
    return ck_cells_begin_step(scene->cache->cells, seqs, NULL, WIDE, 0);
}

static cellkv_status do_rewind(struct scene *scene) {
    return cellkv_cache_rewind(scene->cache, scene->seqs[0], 1);
}

static cellkv_status do_extend(struct scene *scene) {
    return cellkv_cache_extend(scene->cache, scene->seqs[0], WIDE, NULL);
}

static cellkv_status do_remove(struct scene *scene) {
    return cellkv_cache_remove(scene->cache, scene->seqs[0], 1, CELLKV_UNSET);
}

static cellkv_status do_close(struct scene *scene) {
    return cellkv_cache_close(scene->cache, scene->seqs[0]);
}

/* Makes the verb's allocations fail, the first, the second, ... until none of them does; returns
 * how many there were. */
static int check_every_failure(cellkv_status (*verb)(struct scene *), bool is_placed) {
    for (int n = 0;; n++) {
        struct scene scene = new_scene(is_placed);
        static struct picture before, after;
        take_picture(scene.cache, scene.seqs, 2, &before);
        cellkv_test_fail_allocation_after(n);
        cellkv_status status = verb(&scene);
        if (!cellkv_test_fail_allocation_after(-1)) {
            CHECK_OK(status);
            cellkv_cache_free(scene.cache);
            return n;
        }
        CHECK_REFUSED(status, CELLKV_ERROR_OUT_OF_MEMORY, "no memory for");
        take_picture(scene.cache, scene.seqs, 2, &after);
        CHECK(memcmp(&before, &after, sizeof before) == 0);
        CHECK(ck_cells_valid(scene.cache->cells));
        check_step_is_kept(&scene);
        cellkv_cache_free(scene.cache);
    }
}

static void test_failed_allocation_changes_nothing(void) {
    for (int is_placed = 0; is_placed < 2; is_placed++) {
        CHECK_EQUAL(check_every_failure(do_open, is_placed), 0);
        CHECK_EQUAL(check_every_failure(do_clone, is_placed), 1);
        CHECK_EQUAL(check_every_failure(do_declare, is_placed), 1);
        CHECK_EQUAL(check_every_failure(do_extend, is_placed), 1);
        CHECK_EQUAL(check_every_failure(do_begin_step, is_placed), 3); /* the step, two lists */
        CHECK_EQUAL(check_every_failure(do_close, is_placed), 0);
    }
}

/* They give memory back where they can; that they cannot is no reason to fail. */
static void test_dropping_cells_cannot_fail(void) {
    cellkv_status (*const verbs[])(struct scene *) = {do_rewind, do_remove};
    for (int i = 0; i < 2; i++) {
        struct scene scene = new_scene(true);
        CHECK_OK(do_begin_step(&scene)); /* long enough for the list to shrink after */
        cellkv_test_fail_allocation_after(0);
        CHECK_OK(verbs[i](&scene));
        CHECK(cellkv_test_fail_allocation_after(-1));
        CHECK_EQUAL(length_of(scene.cache, scene.seqs[0]), 1);
        cellkv_cache_free(scene.cache);
    }
}

static void test_narrow_step_after_a_wide_one_cannot_fail(void) {
    cellkv_cache *cache = new_cache(4096, 1);
    int64_t seq = open_with(cache, 4000);
    cellkv_test_fail_allocation_after(0);
    CHECK_OK(cellkv_cache_declare(cache, &seq, 1, NULL));
    CHECK(cellkv_test_fail_allocation_after(0));
    CHECK_OK(cellkv_cache_place(cache, NULL, 1, NULL));
    CHECK(cellkv_test_fail_allocation_after(-1));
    CHECK_EQUAL(length_of(cache, seq), 4001);
    cellkv_cache_free(cache);
}

static void test_failed_place_keeps_the_declaration(void) {
    for (int n = 0;; n++) {
        struct scene scene = new_scene(true);
        CHECK_OK(do_declare(&scene));
        cellkv_test_fail_allocation_after(n);
        cellkv_status status = cellkv_cache_place(scene.cache, NULL, WIDE, NULL);
        bool has_failed = cellkv_test_fail_allocation_after(-1);
        if (has_failed) {
            CHECK_REFUSED(status, CELLKV_ERROR_OUT_OF_MEMORY, "no memory for");
            CHECK_EQUAL(stats_of(scene.cache).declared_tokens, WIDE);
            status = cellkv_cache_place(scene.cache, NULL, WIDE, NULL);
        }
        CHECK_OK(status);
        CHECK_EQUAL(length_of(scene.cache, scene.seqs[0]), 41 + WIDE / 2);
        cellkv_cache_free(scene.cache);
        if (!has_failed) {
            CHECK_EQUAL(n, 3);
            return;
        }
    }
}

static void check_making(cellkv_cache_kind kind) {
    cellkv_layer layer = {1, 1, 1, 4, CELLKV_TYPE_F32, CELLKV_TYPE_F32};
    cellkv_cache_config config = small_config(1000, 8);
    config.kind = kind;
    config.n_layers = 1;
    config.layers = &layer;
    for (int n = 0;; n++) {
        cellkv_cache *cache = NULL;
        cellkv_test_fail_allocation_after(n);
        cellkv_status status = cellkv_cache_new(&config, &cache);
        if (!cellkv_test_fail_allocation_after(-1)) {
            CHECK_OK(status);
            CHECK(n > 3);
            cellkv_cache_free(cache);
            return;
        }
        CHECK_REFUSED(status, CELLKV_ERROR_OUT_OF_MEMORY, "no memory for");
        CHECK(cache == NULL);
    }
}

static void test_cache_that_cannot_be_made_leaves_nothing_behind(void) {
    check_making(CELLKV_CACHE_BATCHED);
    check_making(CELLKV_CACHE_SEQUENCE);
}

static void test_cache_that_cannot_be_published_stays_unpublished(void) {
    cellkv_cache *cache = new_cache(4, 1);
    int64_t key = 7;
    cellkv_test_fail_allocation_after(0);
    CHECK_REFUSED(cellkv_cache_publish(cache, &key), CELLKV_ERROR_OUT_OF_MEMORY, "no memory for");
    CHECK(cellkv_test_fail_allocation_after(-1));
    CHECK_EQUAL(key, 7);
    CHECK_OK(cellkv_cache_publish(cache, &key));
    cellkv_cache_free(cache);
}

static void test_failed_sight_can_be_built_again(void) {
    struct ck_sight expected = {0};
    struct scene scene = new_scene(true);
    CHECK_OK(ck_sight_build(&expected, scene.cache->cells, 0, 2, 0));
    cellkv_cache_free(scene.cache);
    int n = 0;
    for (bool has_failed = true; has_failed; n++) {
        struct ck_sight sight = {0};
        scene = new_scene(true);
        cellkv_test_fail_allocation_after(n);
        cellkv_status status = ck_sight_build(&sight, scene.cache->cells, 0, 2, 0);
        has_failed = cellkv_test_fail_allocation_after(-1);
        if (has_failed) {
            CHECK_REFUSED(status, CELLKV_ERROR_OUT_OF_MEMORY, "sight");
            CHECK_EQUAL(sight.n_segments, 0);
            CHECK(ck_cells_valid(scene.cache->cells));
            CHECK_OK(ck_sight_build(&sight, scene.cache->cells, 0, 2, 0));
        }
        CHECK_EQUAL(sight.n_cells, expected.n_cells);
        CHECK_EQUAL(sight.n_views, expected.n_views);
        CHECK(memcmp(sight.cells, expected.cells, (size_t)sight.n_cells * 4) == 0);
        ck_sight_free(&sight);
        cellkv_cache_free(scene.cache);
    }
    CHECK(n > 6);
    ck_sight_free(&expected);
}

static void test_only_one_allocation_fails(void) {
    cellkv_test_fail_allocation_after(1);
    void *blocks[] = {ck_malloc(1), ck_malloc(1), ck_malloc(1)};
    CHECK(blocks[0] && !blocks[1] && blocks[2]);
    CHECK(cellkv_test_fail_allocation_after(-1));
    CHECK(!cellkv_test_fail_allocation_after(-1));
    CHECK(!ck_allocation_should_fail());
    ck_free(blocks[0]);
    ck_free(blocks[2]);
    char *copy = ck_strdup("text");
    CHECK(strcmp(copy, "text") == 0);
    ck_free(copy);
}

#endif

int main(void) {
    RUN(test_table_takes_no_more_than_promised);
    RUN(test_clones_that_go_on_take_no_more_than_promised);
    RUN(test_memory_of_a_wide_step_is_given_back);
    RUN(test_closed_sequences_give_their_memory_back);
    RUN(test_overflowing_sizes_are_refused);
#ifdef CELLKV_CHECKS
    RUN(test_failed_allocation_changes_nothing);
    RUN(test_dropping_cells_cannot_fail);
    RUN(test_narrow_step_after_a_wide_one_cannot_fail);
    RUN(test_failed_place_keeps_the_declaration);
    RUN(test_cache_that_cannot_be_made_leaves_nothing_behind);
    RUN(test_cache_that_cannot_be_published_stays_unpublished);
    RUN(test_failed_sight_can_be_built_again);
    RUN(test_only_one_allocation_fails);
#endif
    return 0;
}
