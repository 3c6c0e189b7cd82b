/* The registry: keys, references, and both from many threads at once. */
#include <pthread.h>

#include "cells/cache_object.h"
#include "cells/registry.h"

#include "small_cache.h"

static int64_t publish(cellkv_cache *cache) {
    int64_t key = 0;
    CHECK_OK(cellkv_cache_publish(cache, &key));
    CHECK(key > 0);
    return key;
}

static cellkv_cache *find(int64_t key) {
    cellkv_cache *cache = NULL;
    CHECK_OK(cellkv_cache_find(key, &cache));
    return cache;
}

static void check_unknown_key(int64_t key) {
    cellkv_cache *untouched = (cellkv_cache *)&key, *cache = untouched;
    char words[64];
    snprintf(words, sizeof words, "no cache is published under key %lld", (long long)key);
    CHECK_REFUSED(cellkv_cache_find(key, &cache), CELLKV_ERROR_UNKNOWN_KEY, words);
    CHECK_REFUSED(cellkv_cache_unpublish(key), CELLKV_ERROR_UNKNOWN_KEY, words);
    CHECK(cache == untouched);
}

static void test_published_cache_is_found_by_its_key(void) {
    cellkv_cache *cache = new_cache(4, 1), *other = new_cache(4, 1);
    int64_t key = publish(cache), other_key = publish(other);
    CHECK(key != other_key);
    CHECK(find(key) == cache);
    CHECK(find(other_key) == other);
    cellkv_cache_free(cache); /* found once */
    cellkv_cache_free(other);
    cellkv_cache_free(cache);
    cellkv_cache_free(other);
}

static void test_publishing_twice_gives_the_same_key(void) {
    cellkv_cache *cache = new_cache(4, 1);
    CHECK_EQUAL(publish(cache), publish(cache));
    cellkv_cache_free(cache);
}

static void test_key_that_names_nothing_is_an_error(void) {
    const int64_t keys[] = {0, -1, 1 << 30, INT64_MAX, INT64_MIN};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        check_unknown_key(keys[i]);
    }
}

static void test_unpublishing_erases_the_key_and_keeps_the_cache(void) {
    cellkv_cache *cache = new_cache(4, 1);
    int64_t key = publish(cache);
    CHECK_OK(cellkv_cache_unpublish(key));
    check_unknown_key(key);
    open_with(cache, 4);
    int64_t again = publish(cache);
    CHECK(again != key); /* no key is given twice */
    check_unknown_key(key);
    cellkv_cache_free(cache);
    check_unknown_key(again);
}

static void test_key_lives_until_the_last_user_frees(void) {
    cellkv_cache *cache = new_cache(4, 1);
    int64_t key = publish(cache);
    cellkv_cache *found = find(key);
    cellkv_cache_free(cache);
    cellkv_cache_free(find(key));
    open_with(found, 4);
    cellkv_cache_free(found);
    check_unknown_key(key);
}

static void test_executors_keep_the_cache_but_not_its_key(void) {
    cellkv_cache *cache = new_cache(4, 1);
    int64_t key = publish(cache);
    ck_cache_hold(cache);
    cellkv_cache_free(cache);
    check_unknown_key(key);
    open_with(cache, 4); /* it is alive as long as the executor is */
    ck_cache_drop(cache);
}

static void test_cache_outlives_its_executors(void) {
    cellkv_cache *cache = new_cache(4, 1);
    ck_cache_hold(cache);
    ck_cache_hold(cache);
    ck_cache_drop(cache);
    ck_cache_drop(cache);
    open_with(cache, 4);
    cellkv_cache_free(cache);
}

static void test_many_keys_are_told_apart(void) {
    enum { N = 500 };
    cellkv_cache *caches[N];
    int64_t keys[N];
    for (int i = 0; i < N; i++) {
        caches[i] = new_cache(1, 1);
        keys[i] = publish(caches[i]);
    }
    for (int i = 0; i < N; i += 3) {
        CHECK_OK(cellkv_cache_unpublish(keys[i]));
    }
    for (int i = 0; i < N; i++) {
        if (i % 3 == 0) {
            check_unknown_key(keys[i]);
        } else {
            CHECK(find(keys[i]) == caches[i]);
            cellkv_cache_free(caches[i]);
        }
        cellkv_cache_free(caches[i]);
    }
}

/* ---- storage and builders of others ---- */

static int n_storages_freed;

static void free_storage(struct ck_storage *storage) {
    (void)storage;
    n_storages_freed++;
}
static int32_t storage_rows(const struct ck_storage *storage) {
    (void)storage;
    return 11;
}
static int64_t storage_bytes(const struct ck_storage *storage) {
    (void)storage;
    return 22;
}
static int64_t storage_growths(const struct ck_storage *storage) {
    (void)storage;
    return 33;
}
static const struct ck_storage_class storage_class = {free_storage, storage_rows, storage_bytes,
                                                      storage_growths};

static cellkv_status build_with_storage(const cellkv_cache_config *config, cellkv_cache *cache) {
    CHECK(cache->cells && cache->kind == config->kind && cache->n_layers == config->n_layers);
    cache->storage = (struct ck_storage *)&n_storages_freed;
    cache->storage_class = &storage_class;
    return CELLKV_OK;
}

static cellkv_status refuse_to_build(const cellkv_cache_config *config, cellkv_cache *cache) {
    build_with_storage(config, cache);
    return CELLKV_ERROR_UNSUPPORTED;
}

static void test_storage_is_asked_for_figures_and_freed_with_its_cache(void) {
    cellkv_layer layer = {1, 1, 1, 0, CELLKV_TYPE_F32, CELLKV_TYPE_F32};
    cellkv_cache_config config = small_config(8, 2);
    cellkv_cache *cache = NULL;
    config.backend = "test";
    config.n_layers = 1;
    config.layers = &layer;
    CHECK_OK(ck_registry_add_builder("test", CELLKV_CACHE_BATCHED, build_with_storage));
    CHECK_OK(cellkv_cache_new(&config, &cache));
    CHECK_EQUAL(stats_of(cache).rows, 11);
    CHECK_EQUAL(stats_of(cache).storage_bytes, 22);
    CHECK_EQUAL(stats_of(cache).n_growths, 33);
    ck_cache_hold(cache);
    cellkv_cache_free(cache);
    CHECK_EQUAL(n_storages_freed, 0);
    ck_cache_drop(cache);
    CHECK_EQUAL(n_storages_freed, 1);
    /* A second registration replaces the first; a builder that fails leaves nothing behind. */
    CHECK_OK(ck_registry_add_builder("test", CELLKV_CACHE_BATCHED, refuse_to_build));
    CHECK_REFUSED(cellkv_cache_new(&config, &cache), CELLKV_ERROR_UNSUPPORTED, NULL);
    CHECK_EQUAL(n_storages_freed, 2);
}

/* ---- threads ---- */

enum { N_THREADS = 64, ROUNDS = 200, N_SHARED = 4 };

static int64_t shared_keys[N_SHARED];
static atomic_int n_refused;

/* Makes, publishes, finds, verbs and frees: its own caches in peace, the shared ones in
 * competition. */
static void *hammer(void *argument) {
    struct dice dice = {(uint64_t)(uintptr_t)argument};
    for (int round = 0; round < ROUNDS; round++) {
        cellkv_cache *own = new_cache(8, 2);
        int64_t key = publish(own);
        int64_t seq = open_sequence(own);
        CHECK(find(key) == own);
        cellkv_cache_free(own);
        if (roll(&dice, 2)) {
            CHECK_OK(cellkv_cache_unpublish(key));
        }
        CHECK_EQUAL(length_of(own, seq), 0);
        cellkv_cache *shared = find(shared_keys[roll(&dice, N_SHARED)]);
        ck_cache_hold(shared);
        cellkv_cache_free(shared);
        cellkv_status status = cellkv_cache_open(shared, &seq);
        if (status == CELLKV_ERROR_BUSY) {
            atomic_fetch_add(&n_refused, 1);
        } else if (status == CELLKV_OK) {
            do { /* nothing blocks: whoever wants in asks again */
                status = cellkv_cache_close(shared, seq);
            } while (status == CELLKV_ERROR_BUSY);
            CHECK_OK(status);
        } else {
            CHECK_EQUAL(status, CELLKV_ERROR_NO_SLOT);
        }
        ck_cache_drop(shared);
        cellkv_cache_free(own);
        check_unknown_key(key);
    }
    return NULL;
}

static void test_many_threads_share_the_registry(void) {
    pthread_t threads[N_THREADS];
    cellkv_cache *shared[N_SHARED];
    for (int i = 0; i < N_SHARED; i++) {
        shared[i] = new_cache(8, 8);
        shared_keys[i] = publish(shared[i]);
    }
    for (int i = 0; i < N_THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, hammer, (void *)(uintptr_t)(i + 1)) == 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    for (int i = 0; i < N_SHARED; i++) {
        CHECK_EQUAL(stats_of(shared[i]).n_seqs, 0);
        cellkv_cache_free(shared[i]);
        check_unknown_key(shared_keys[i]);
    }
    printf("  refused as busy: %d\n", atomic_load(&n_refused));
}

enum { N_PUBLISHERS = 64 };

static atomic_bool may_publish;
static cellkv_cache *published_by_all;

struct publisher {
    cellkv_cache *own;
    int64_t own_key, common_key;
};

static void *publish_both(void *argument) {
    struct publisher *publisher = argument;
    while (!atomic_load(&may_publish)) {
    }
    publisher->own_key = publish(publisher->own);
    publisher->common_key = publish(published_by_all);
    return NULL;
}

static void test_threads_that_publish_at_once_get_keys_of_their_own(void) {
    pthread_t threads[N_PUBLISHERS];
    struct publisher publishers[N_PUBLISHERS];
    published_by_all = new_cache(4, 1);
    for (int i = 0; i < N_PUBLISHERS; i++) {
        publishers[i].own = new_cache(4, 1);
        CHECK(pthread_create(&threads[i], NULL, publish_both, &publishers[i]) == 0);
    }
    atomic_store(&may_publish, true);
    for (int i = 0; i < N_PUBLISHERS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    for (int i = 0; i < N_PUBLISHERS; i++) {
        CHECK_EQUAL(publishers[i].common_key, publishers[0].common_key);
        CHECK(find(publishers[i].own_key) == publishers[i].own);
        cellkv_cache_free(publishers[i].own);
        cellkv_cache_free(publishers[i].own);
        check_unknown_key(publishers[i].own_key);
    }
    cellkv_cache_free(published_by_all);
    check_unknown_key(publishers[0].common_key);
}

/* Several threads free the last user references of one cache: exactly one of them destroys it. */
static void *free_reference(void *cache) {
    cellkv_cache_free(cache);
    return NULL;
}

static void test_last_of_many_threads_frees_the_cache(void) {
    for (int round = 0; round < 50; round++) {
        pthread_t threads[8];
        cellkv_cache *cache = new_cache(4, 1);
        int64_t key = publish(cache);
        for (int i = 1; i < 8; i++) {
            CHECK(find(key) == cache);
        }
        for (int i = 0; i < 8; i++) {
            CHECK(pthread_create(&threads[i], NULL, free_reference, cache) == 0);
        }
        for (int i = 0; i < 8; i++) {
            CHECK(pthread_join(threads[i], NULL) == 0);
        }
        check_unknown_key(key);
    }
}

int main(void) {
    RUN(test_published_cache_is_found_by_its_key);
    RUN(test_publishing_twice_gives_the_same_key);
    RUN(test_key_that_names_nothing_is_an_error);
    RUN(test_unpublishing_erases_the_key_and_keeps_the_cache);
    RUN(test_key_lives_until_the_last_user_frees);
    RUN(test_executors_keep_the_cache_but_not_its_key);
    RUN(test_cache_outlives_its_executors);
    RUN(test_many_keys_are_told_apart);
    RUN(test_storage_is_asked_for_figures_and_freed_with_its_cache);
    RUN(test_many_threads_share_the_registry);
    RUN(test_threads_that_publish_at_once_get_keys_of_their_own);
    RUN(test_last_of_many_threads_frees_the_cache);
    return 0;
}
