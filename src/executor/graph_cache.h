/* Graphs kept by shape; when there are too many, the least recently used goes first. */
#ifndef CELLKV_EXECUTOR_GRAPH_CACHE_H
#define CELLKV_EXECUTOR_GRAPH_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "executor/graph.h"

struct ck_graph_cache {
    struct cellkv_graph **graphs; /* [max_graphs], the most recently used first */
    int32_t n_graphs;
    int32_t max_graphs;
    int64_t n_built;
    int64_t n_reused;
};

/* Returns CELLKV_OK or CELLKV_ERROR_OUT_OF_MEMORY. */
cellkv_status ck_graph_cache_init(struct ck_graph_cache *cache, int32_t max_graphs);
void ck_graph_cache_free(struct ck_graph_cache *cache);

/* The graph of this shape: a kept one or a new one, which is then kept. It lives at least until the
 * next call. Statuses: those of ck_graph_new. */
cellkv_status ck_graph_cache_get(struct ck_graph_cache *cache,
                                 const struct ck_graph_context *shared,
                                 const struct ck_shape *shape, struct cellkv_graph **graph);

/* Frees all graphs: the tensors they were built on are gone, or nothing is to be kept. */
void ck_graph_cache_drop(struct ck_graph_cache *cache);

int64_t ck_graph_cache_bytes(const struct ck_graph_cache *cache);

#endif
