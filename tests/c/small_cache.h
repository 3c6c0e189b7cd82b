/* Caches of cells alone, for tests. */
#ifndef SMALL_CACHE_H
#define SMALL_CACHE_H

#include <cellkv/cache.h>

#include "check.h"

enum { MAX_TOKENS = 4096 }; /* of a step that `step` makes */

static inline cellkv_cache_config small_config(int32_t capacity, int32_t max_seqs) {
    cellkv_cache_config config = cellkv_cache_config_default();
    config.backend = "cells";
    config.capacity = capacity;
    config.max_seqs = max_seqs;
    config.initial_rows = 0;
    return config;
}

static inline cellkv_cache *new_cache(int32_t capacity, int32_t max_seqs) {
    cellkv_cache_config config = small_config(capacity, max_seqs);
    cellkv_cache *cache = NULL;
    CHECK_OK(cellkv_cache_new(&config, &cache));
    return cache;
}

/* Two layers: one of this window, one of a smaller one. */
static inline cellkv_cache *new_windowed_cache(int32_t capacity, int32_t max_seqs, int32_t window) {
    cellkv_layer layers[2] = {{1, 1, 1, window, CELLKV_TYPE_F32, CELLKV_TYPE_F32},
                              {1, 1, 1, 1, CELLKV_TYPE_F32, CELLKV_TYPE_F32}};
    cellkv_cache_config config = small_config(capacity, max_seqs);
    config.n_layers = 2;
    config.layers = layers;
    cellkv_cache *cache = NULL;
    CHECK_OK(cellkv_cache_new(&config, &cache));
    return cache;
}

static inline int64_t open_sequence(cellkv_cache *cache) {
    int64_t seq = 0;
    CHECK_OK(cellkv_cache_open(cache, &seq));
    return seq;
}

static inline int64_t clone(cellkv_cache *cache, int64_t src, int32_t upto) {
    int64_t seq = 0;
    CHECK_OK(cellkv_cache_clone(cache, src, upto, &seq));
    return seq;
}

/* One step of n tokens, all of one sequence. */
static inline void extend(cellkv_cache *cache, int64_t seq, int32_t n) {
    int64_t seqs[MAX_TOKENS];
    for (int32_t i = 0; i < n; i++) {
        seqs[i] = seq;
    }
    CHECK_OK(cellkv_cache_declare(cache, seqs, n, NULL));
    CHECK_OK(cellkv_cache_place(cache, NULL, n, NULL));
}

static inline int64_t open_with(cellkv_cache *cache, int32_t n) {
    int64_t seq = open_sequence(cache);
    if (n > 0) {
        extend(cache, seq, n);
    }
    return seq;
}

static inline int32_t length_of(cellkv_cache *cache, int64_t seq) {
    int32_t length = -1;
    CHECK_OK(cellkv_cache_length(cache, seq, &length));
    return length;
}

static inline int32_t next_pos_of(cellkv_cache *cache, int64_t seq) {
    int32_t pos = -1;
    CHECK_OK(cellkv_cache_next_pos(cache, seq, &pos));
    return pos;
}

static inline cellkv_cache_stats stats_of(cellkv_cache *cache) {
    cellkv_cache_stats stats = {.size = sizeof stats};
    CHECK_OK(cellkv_cache_get_stats(cache, &stats));
    return stats;
}

static inline int32_t used_cells(cellkv_cache *cache) {
    return stats_of(cache).used_cells;
}

/* The sequence's cells are exactly these: pairs of cell and position. */
#define CHECK_CELLS(cache, seq, ...)                                                               \
    check_cells(cache, seq, (const int32_t[][2]){__VA_ARGS__},                                     \
                (int32_t)(sizeof((const int32_t[][2]){__VA_ARGS__}) / sizeof(int32_t[2])),         \
                __LINE__)

static inline void check_cells(cellkv_cache *cache, int64_t seq, const int32_t (*expected)[2],
                               int32_t n, int line) {
    int32_t cells[64], positions[64], length = 0;
    CHECK_OK(cellkv_cache_read_cells(cache, seq, cells, positions, 64, &length));
    check_equal(length, n, "length", __FILE__, line);
    for (int32_t i = 0; i < n; i++) {
        check_equal(cells[i], expected[i][0], "cell", __FILE__, line);
        check_equal(positions[i], expected[i][1], "position", __FILE__, line);
    }
}

#endif
