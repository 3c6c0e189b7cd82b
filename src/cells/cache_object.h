/* What a cache is made of, for the rooms above: cells, an optional storage, two kinds of holders.
 */
#ifndef CELLKV_CELLS_CACHE_OBJECT_H
#define CELLKV_CELLS_CACHE_OBJECT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <cellkv/cache.h>

#include "cells.h"

struct ck_storage; /* src/storage/storage.h; NULL in a cache of cells alone */

/* What cells need to know of a storage without knowing what it is. */
struct ck_storage_class {
    void (*free)(struct ck_storage *storage);
    int32_t (*rows)(const struct ck_storage *storage);
    int64_t (*bytes)(const struct ck_storage *storage);
    int64_t (*n_growths)(const struct ck_storage *storage);
};

struct cellkv_cache {
    cellkv_cache_kind kind;
    int32_t n_layers;
    cellkv_layer *layers;
    int32_t *rings;    /* [n_layers] rows of each layer's ring (ring.h); 0: row c is cell c */
    int32_t max_slice; /* the most tokens that may be computed at once, for the rings' sake */
    struct ck_cells *cells;
    struct ck_storage *storage;
    const struct ck_storage_class *storage_class; /* NULL iff storage is */
    atomic_bool busy;
    /* The registry's, under its lock: */
    int64_t key;       /* published under it; 0: not published */
    int32_t n_users;   /* references that cellkv_cache_free drops */
    int32_t n_holders; /* executors */
};

/* Makes a cache with the builder that is registered for its backend and kind: cellkv_cache_new once
 * the builders are registered. */
cellkv_status ck_cache_build(const cellkv_cache_config *config, cellkv_cache **cache);

/* Frees everything; for the registry, when nobody holds the cache any more. */
void ck_cache_destroy(cellkv_cache *cache);

/* Claims the cache for one verb or one step: CELLKV_ERROR_BUSY if somebody is inside. */
cellkv_status ck_cache_enter(cellkv_cache *cache);
void ck_cache_leave(cellkv_cache *cache);

/* An executor's reference. */
void ck_cache_hold(cellkv_cache *cache);
void ck_cache_drop(cellkv_cache *cache);

#endif
