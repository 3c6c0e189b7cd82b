/* Making a cache: its configuration, checked, and the parts that every kind has. */
#include <string.h>

#include "cache_object.h"
#include "error.h"
#include "memory.h"
#include "registry.h"
#include "ring.h"

static const char *const kind_names[] = {
    [CELLKV_CACHE_SEQUENCE] = "sequence",
    [CELLKV_CACHE_BATCHED] = "batched",
    [CELLKV_CACHE_BATCHED_CELL] = "batched_cell",
};
enum { N_KINDS = sizeof kind_names / sizeof *kind_names };

const char *cellkv_cache_kind_name(cellkv_cache_kind kind) {
    return (int)kind >= 0 && (int)kind < N_KINDS ? kind_names[kind] : NULL;
}

cellkv_status cellkv_cache_kind_by_name(const char *name, cellkv_cache_kind *kind) {
    if (!name || !kind) {
        return ck_fail_null(name ? "kind" : "name");
    }
    for (int i = 0; i < N_KINDS; i++) {
        if (strcmp(name, kind_names[i]) == 0) {
            *kind = (cellkv_cache_kind)i;
            return CELLKV_OK;
        }
    }
    return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "\"%s\" is not a kind of cache", name);
}

cellkv_cache_config cellkv_cache_config_default(void) {
    return (cellkv_cache_config){
        .size = sizeof(cellkv_cache_config),
        .backend = "ggml",
        .kind = CELLKV_CACHE_BATCHED,
        .capacity = 4096,
        .max_seqs = 64,
        .initial_rows = 256,
        .max_step = 512,
    };
}

/* ---- checks ---- */

static cellkv_status check_field(const char *name, int32_t value, int32_t least, int32_t most) {
    if (value >= least && value <= most) {
        return CELLKV_OK;
    }
    return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "%s is %d, not in [%d, %d]", name, value, least,
                   most);
}

/* How many values of a head share a block of the type; 0: no type of cellkv's. */
static int32_t block_of(cellkv_type type) {
    switch (type) {
    case CELLKV_TYPE_F32:
    case CELLKV_TYPE_F16:
    case CELLKV_TYPE_BF16:
        return 1;
    case CELLKV_TYPE_Q8_0:
    case CELLKV_TYPE_Q4_0:
        return 32;
    }
    return 0;
}

static cellkv_status check_type(int32_t layer, const char *what, cellkv_type type, int32_t width) {
    int32_t block = block_of(type);
    if (!block) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "layer %d: type %d is none of cellkv's",
                       layer, (int)type);
    }
    if (width % block) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT,
                       "layer %d: %s is %d, its type stores blocks of %d: a multiple is needed",
                       layer, what, width, block);
    }
    return CELLKV_OK;
}

static cellkv_status check_layer(const cellkv_layer *layer, int32_t index) {
    const struct {
        const char *name;
        int32_t value, least, most;
    } fields[] = {
        {"n_kv_heads", layer->n_kv_heads, 1, CELLKV_MAX_WIDTH},
        {"head_dim_k", layer->head_dim_k, 1, CELLKV_MAX_WIDTH},
        {"head_dim_v", layer->head_dim_v, 1, CELLKV_MAX_WIDTH},
        {"window", layer->window, 0, INT32_MAX},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].value < fields[i].least || fields[i].value > fields[i].most) {
            return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "layer %d: %s is %d, not in [%d, %d]",
                           index, fields[i].name, fields[i].value, fields[i].least, fields[i].most);
        }
    }
    cellkv_status status = check_type(index, "head_dim_k", layer->type_k, layer->head_dim_k);
    return status ? status : check_type(index, "head_dim_v", layer->type_v, layer->head_dim_v);
}

static cellkv_status check_layers(const cellkv_cache_config *config) {
    if (config->n_layers > 0 && !config->layers) {
        return ck_fail_null("layers");
    }
    cellkv_status status = CELLKV_OK;
    for (int32_t i = 0; i < config->n_layers && !status; i++) {
        status = check_layer(&config->layers[i], i);
    }
    return status;
}

static cellkv_status check_config(const cellkv_cache_config *config) {
    if (config->size != sizeof *config) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "size is %zu, that of this version is %zu",
                       config->size, sizeof *config);
    }
    if (!config->backend) {
        return ck_fail_null("backend");
    }
    if (!cellkv_cache_kind_name(config->kind)) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "%d is not a kind of cache",
                       (int)config->kind);
    }
    cellkv_status status = check_field("capacity", config->capacity, 1, CELLKV_MAX_CAPACITY);
    if (!status) {
        status = check_field("max_seqs", config->max_seqs, 1, CELLKV_MAX_SEQS);
    }
    if (!status) {
        status = check_field("initial_rows", config->initial_rows, 0, config->capacity);
    }
    if (!status) {
        status = check_field("max_step", config->max_step, 1, CELLKV_MAX_CAPACITY);
    }
    if (!status) { /* only a table of cells can do without layers */
        int32_t least = strcmp(config->backend, "cells") == 0 ? 0 : 1;
        status = check_field("n_layers", config->n_layers, least, INT32_MAX);
    }
    return status ? status : check_layers(config);
}

/* ---- parts ---- */

/* The largest window where every layer has one, else 0. */
static int32_t common_window(const cellkv_cache_config *config) {
    int32_t largest = 0;
    for (int32_t i = 0; i < config->n_layers; i++) {
        if (config->layers[i].window == 0) {
            return 0;
        }
        if (config->layers[i].window > largest) {
            largest = config->layers[i].window;
        }
    }
    return largest;
}

/* Gives each layer its ring, and the cells the smallest that anything is missed in: in a window of
 * 1 no earlier position is seen. */
static void make_rings(cellkv_cache *cache, const cellkv_cache_config *config,
                       struct ck_cells_config *cells) {
    for (int32_t i = 0; i < config->n_layers; i++) {
        int32_t window = config->layers[i].window;
        int32_t ring = ck_ring_rows(config->capacity, window, config->max_step);
        cache->rings[i] = ring;
        if (ring > 0) {
            cache->max_slice = config->max_step;
        }
        if (ring > 0 && window > 1 && (cells->ring == 0 || ring < cells->ring)) {
            cells->ring = ring;
            cells->window = window;
        }
    }
}

static struct ck_cells *make_cells(cellkv_cache *cache, const cellkv_cache_config *config) {
    struct ck_cells_config cells = {.capacity = config->capacity};
    if (config->kind == CELLKV_CACHE_SEQUENCE) {
        cells.max_seqs = 1;
        cells.is_contiguous = true;
        make_rings(cache, config, &cells);
    } else {
        cells.max_seqs = config->max_seqs;
        cells.window = common_window(config);
    }
    return ck_cells_new(&cells);
}

static bool make_parts(cellkv_cache *cache, const cellkv_cache_config *config) {
    size_t n_layers = (size_t)config->n_layers;
    cache->kind = config->kind;
    cache->n_layers = config->n_layers;
    cache->max_slice = INT32_MAX;
    cache->n_users = 1;
    cache->layers = ck_calloc(n_layers, sizeof *cache->layers);
    cache->rings = ck_calloc(n_layers, sizeof *cache->rings);
    if (!cache->layers || !cache->rings) {
        return false;
    }
    if (n_layers) {
        memcpy(cache->layers, config->layers, n_layers * sizeof *cache->layers);
    }
    cache->cells = make_cells(cache, config);
    return cache->cells != NULL;
}

cellkv_status ck_cache_build(const cellkv_cache_config *config, cellkv_cache **cache) {
    if (!config || !cache) {
        return ck_fail_null(config ? "cache" : "config");
    }
    cellkv_status status = check_config(config);
    if (status) {
        return status;
    }
    ck_cache_builder builder = ck_registry_find_builder(config->backend, config->kind);
    if (!builder) {
        return ck_fail(CELLKV_ERROR_NO_BUILDER, "nothing builds kind %s for backend \"%s\"",
                       cellkv_cache_kind_name(config->kind), config->backend);
    }
    cellkv_cache *made = ck_calloc(1, sizeof *made);
    if (!made) {
        return ck_fail_memory("a cache");
    }
    atomic_init(&made->busy, false);
    status = make_parts(made, config) ? builder(config, made) : ck_fail_memory("a table of cells");
    if (status) {
        ck_cache_destroy(made);
        return status;
    }
    *cache = made;
    return CELLKV_OK;
}

void ck_cache_destroy(cellkv_cache *cache) {
    if (cache->storage) {
        cache->storage_class->free(cache->storage);
    }
    ck_cells_free(cache->cells);
    ck_free(cache->layers);
    ck_free(cache->rings);
    ck_free(cache);
}
