/* The composition root: which builders there are. The one place that knows all of them, so that
 * `cells` need know none. */
#include <pthread.h>

#include <cellkv/cache.h>

#include "cells/registry.h"
#include "storage/storage.h"

/* Cells alone: every part is there already. */
static cellkv_status build_cells(const cellkv_cache_config *config, cellkv_cache *cache) {
    (void)config;
    (void)cache;
    return CELLKV_OK;
}

static void register_builders(void) {
    ck_registry_add_builder("cells", CELLKV_CACHE_SEQUENCE, build_cells);
    ck_registry_add_builder("cells", CELLKV_CACHE_BATCHED, build_cells);
    ck_registry_add_builder("cells", CELLKV_CACHE_BATCHED_CELL, build_cells);
    ck_registry_add_builder("ggml", CELLKV_CACHE_SEQUENCE, ck_storage_build);
    ck_registry_add_builder("ggml", CELLKV_CACHE_BATCHED, ck_storage_build);
    ck_registry_add_builder("ggml", CELLKV_CACHE_BATCHED_CELL, ck_storage_build);
}

cellkv_status cellkv_cache_new(const cellkv_cache_config *config, cellkv_cache **cache) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_builders);
    return ck_cache_build(config, cache);
}
