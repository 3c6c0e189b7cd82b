/* The registry: the only global state, locked. Builders by (backend, kind), published caches by
 * key, and the numbers that must never be given twice in one process. */
#ifndef CELLKV_CELLS_REGISTRY_H
#define CELLKV_CELLS_REGISTRY_H

#include <cellkv/cache.h>

#include "cache_object.h"

/* Fills in what the kind and the backend need; cells, layers and the rest are there already. */
typedef cellkv_status (*ck_cache_builder)(const cellkv_cache_config *config, cellkv_cache *cache);

/* Names the builder of a (backend, kind). The built-in ones are registered by src/builders.c on
 * first use, so that `cells` need not know who else is linked. A second registration of the same
 * pair replaces the first. `backend` is kept, not copied. Returns CELLKV_OK, or
 * CELLKV_ERROR_OUT_OF_MEMORY when the registry is full. */
cellkv_status ck_registry_add_builder(const char *backend, cellkv_cache_kind kind,
                                      ck_cache_builder builder);

/* The builder of a (backend, kind), or NULL. */
ck_cache_builder ck_registry_find_builder(const char *backend, cellkv_cache_kind kind);

/* A number that no other call in this process has been given: 1, 2, ... below 2^47, which is four
 * years of one each microsecond. */
int64_t ck_registry_next_serial(void);

#endif
