#include "registry.h"

#include <assert.h>
#include <pthread.h>
#include <string.h>

#include "error.h"
#include "memory.h"

enum { MAX_BUILDERS = 32 };

struct builder {
    const char *backend;
    cellkv_cache_kind kind;
    ck_cache_builder build;
};

/* Keys are given in ascending order and appended, so that the list is sorted by them. */
struct published {
    int64_t key;
    cellkv_cache *cache;
};

/* Everything below, and `key`, `n_users` and `n_holders` of every cache, is read and written under
 * this lock. It is held for a few instructions only, and never while a cache is destroyed. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct builder builders[MAX_BUILDERS];
static int32_t n_builders;
static struct published *published;
static int32_t n_published, room_published;
static int64_t last_key;

static _Atomic int64_t last_serial;

int64_t ck_registry_next_serial(void) {
    int64_t serial = atomic_fetch_add_explicit(&last_serial, 1, memory_order_relaxed) + 1;
    assert(serial < INT64_C(1) << 47);
    return serial;
}

/* ---- builders ---- */

static struct builder *find_builder(const char *backend, cellkv_cache_kind kind) {
    for (int32_t i = 0; i < n_builders; i++) {
        if (builders[i].kind == kind && strcmp(builders[i].backend, backend) == 0) {
            return &builders[i];
        }
    }
    return NULL;
}

cellkv_status ck_registry_add_builder(const char *backend, cellkv_cache_kind kind,
                                      ck_cache_builder builder) {
    pthread_mutex_lock(&lock);
    struct builder *entry = find_builder(backend, kind);
    if (!entry && n_builders < MAX_BUILDERS) {
        entry = &builders[n_builders++];
    }
    if (entry) {
        *entry = (struct builder){backend, kind, builder};
    }
    pthread_mutex_unlock(&lock);
    return entry ? CELLKV_OK : ck_fail_memory("another builder");
}

ck_cache_builder ck_registry_find_builder(const char *backend, cellkv_cache_kind kind) {
    pthread_mutex_lock(&lock);
    const struct builder *entry = find_builder(backend, kind);
    ck_cache_builder build = entry ? entry->build : NULL;
    pthread_mutex_unlock(&lock);
    return build;
}

/* ---- published caches ---- */

/* The index of a key, or -1. */
static int32_t find_key(int64_t key) {
    int32_t low = 0, high = n_published;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (published[middle].key < key) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < n_published && published[low].key == key ? low : -1;
}

static void erase_key(int64_t key) {
    int32_t i = find_key(key);
    published[i].cache->key = 0;
    n_published--;
    memmove(&published[i], &published[i + 1], (size_t)(n_published - i) * sizeof *published);
    if (n_published == 0) { /* nothing is left behind at exit for leak checkers to find */
        ck_free(published);
        published = NULL;
        room_published = 0;
    }
}

static bool append_key(cellkv_cache *cache) {
    if (!CK_RESERVE(published, &room_published, (int64_t)n_published + 1)) {
        return false;
    }
    cache->key = ++last_key;
    published[n_published++] = (struct published){cache->key, cache};
    return true;
}

cellkv_status cellkv_cache_publish(cellkv_cache *cache, int64_t *key) {
    if (!cache || !key) {
        return ck_fail_null(cache ? "key" : "cache");
    }
    pthread_mutex_lock(&lock);
    bool is_published = cache->key || append_key(cache);
    if (is_published) {
        *key = cache->key;
    }
    pthread_mutex_unlock(&lock);
    return is_published ? CELLKV_OK : ck_fail_memory("another published cache");
}

static cellkv_status unknown_key(int64_t key) {
    return ck_fail(CELLKV_ERROR_UNKNOWN_KEY, "no cache is published under key %lld",
                   (long long)key);
}

cellkv_status cellkv_cache_unpublish(int64_t key) {
    pthread_mutex_lock(&lock);
    bool found = find_key(key) >= 0;
    if (found) {
        erase_key(key);
    }
    pthread_mutex_unlock(&lock);
    return found ? CELLKV_OK : unknown_key(key);
}

cellkv_status cellkv_cache_find(int64_t key, cellkv_cache **cache) {
    if (!cache) {
        return ck_fail_null("cache");
    }
    pthread_mutex_lock(&lock);
    int32_t i = find_key(key);
    if (i >= 0) {
        *cache = published[i].cache;
        (*cache)->n_users++;
    }
    pthread_mutex_unlock(&lock);
    return i >= 0 ? CELLKV_OK : unknown_key(key);
}

/* ---- references ---- */

/* Drops one of either kind. A key names a cache that its users still want: it goes with the last of
 * them, even where an executor keeps the cache alive. */
static void drop_reference(cellkv_cache *cache, int32_t *count) {
    pthread_mutex_lock(&lock);
    assert(*count > 0);
    --*count;
    if (cache->n_users == 0 && cache->key) {
        erase_key(cache->key);
    }
    bool was_last = cache->n_users == 0 && cache->n_holders == 0;
    pthread_mutex_unlock(&lock);
    if (was_last) {
        ck_cache_destroy(cache);
    }
}

void cellkv_cache_free(cellkv_cache *cache) {
    if (cache) {
        drop_reference(cache, &cache->n_users);
    }
}

void ck_cache_drop(cellkv_cache *cache) {
    drop_reference(cache, &cache->n_holders);
}

void ck_cache_hold(cellkv_cache *cache) {
    pthread_mutex_lock(&lock);
    cache->n_holders++;
    pthread_mutex_unlock(&lock);
}
