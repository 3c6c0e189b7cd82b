#include "graph_cache.h"

#include <string.h>

#include "cells/error.h"
#include "cells/memory.h"

cellkv_status ck_graph_cache_init(struct ck_graph_cache *cache, int32_t max_graphs) {
    *cache = (struct ck_graph_cache){.max_graphs = max_graphs};
    cache->graphs = ck_calloc((size_t)max_graphs, sizeof(struct cellkv_graph *));
    if (cache->graphs == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "no memory to keep %d graphs", max_graphs);
    }
    return CELLKV_OK;
}

void ck_graph_cache_free(struct ck_graph_cache *cache) {
    ck_graph_cache_drop(cache);
    ck_free(cache->graphs);
    *cache = (struct ck_graph_cache){0};
}

void ck_graph_cache_drop(struct ck_graph_cache *cache) {
    while (cache->n_graphs > 0) {
        ck_graph_free(cache->graphs[--cache->n_graphs]);
    }
}

static bool is_same_shape(const struct ck_shape *a, const struct ck_shape *b, int32_t n_windows) {
    bool is_same =
        a->n_tokens == b->n_tokens && a->n_outputs == b->n_outputs && a->n_parts == b->n_parts;
    for (int32_t w = 0; is_same && a->layouts != NULL && w < n_windows; w++) {
        is_same = ck_layout_equal(&a->layouts[w], &b->layouts[w]);
    }
    return is_same;
}

static struct cellkv_graph *move_to_front(struct ck_graph_cache *cache, int32_t i) {
    struct cellkv_graph *graph = cache->graphs[i];
    memmove(cache->graphs + 1, cache->graphs, (size_t)i * sizeof(struct cellkv_graph *));
    cache->graphs[0] = graph;
    return graph;
}

cellkv_status ck_graph_cache_get(struct ck_graph_cache *cache,
                                 const struct ck_graph_context *shared,
                                 const struct ck_shape *shape, struct cellkv_graph **out) {
    for (int32_t i = 0; i < cache->n_graphs; i++) {
        if (is_same_shape(&cache->graphs[i]->shape, shape, shared->windows->n_windows)) {
            cache->n_reused++;
            *out = move_to_front(cache, i);
            return CELLKV_OK;
        }
    }
    struct cellkv_graph *graph;
    cellkv_status status = ck_graph_new(shared, shape, &graph);
    if (status != CELLKV_OK) {
        return status;
    }
    if (cache->n_graphs == cache->max_graphs) {
        ck_graph_free(cache->graphs[--cache->n_graphs]);
    }
    cache->graphs[cache->n_graphs++] = graph;
    cache->n_built++;
    *out = move_to_front(cache, cache->n_graphs - 1);
    return CELLKV_OK;
}

int64_t ck_graph_cache_bytes(const struct ck_graph_cache *cache) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < cache->n_graphs; i++) {
        bytes += ck_graph_bytes(cache->graphs[i]);
    }
    return bytes;
}
