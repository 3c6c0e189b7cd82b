/* The public verbs: pointers are checked, the cache is claimed without waiting, and the cells do
 * the rest. */
#include "cache_object.h"
#include "error.h"

cellkv_status ck_cache_enter(cellkv_cache *cache) {
    if (atomic_exchange_explicit(&cache->busy, true, memory_order_acquire)) {
        return ck_fail(CELLKV_ERROR_BUSY, "the cache is in use: a step runs or another thread is "
                                          "inside");
    }
    return CELLKV_OK;
}

void ck_cache_leave(cellkv_cache *cache) {
    atomic_store_explicit(&cache->busy, false, memory_order_release);
}

/* Enters, for a verb that also needs `argument`; its name is for the message. */
static cellkv_status enter_with(cellkv_cache *cache, const void *argument, const char *name) {
    if (!cache || !argument) {
        return ck_fail_null(cache ? name : "cache");
    }
    return ck_cache_enter(cache);
}

static cellkv_status enter(cellkv_cache *cache) {
    return enter_with(cache, cache, "cache");
}

static cellkv_status leave(cellkv_cache *cache, cellkv_status status) {
    ck_cache_leave(cache);
    return status;
}

/* ---- sequences ---- */

cellkv_status cellkv_cache_open(cellkv_cache *cache, int64_t *seq) {
    cellkv_status status = enter_with(cache, seq, "seq");
    return status ? status : leave(cache, ck_cells_open(cache->cells, seq));
}

cellkv_status cellkv_cache_clone(cellkv_cache *cache, int64_t src, int32_t upto, int64_t *seq) {
    cellkv_status status = enter_with(cache, seq, "seq");
    return status ? status : leave(cache, ck_cells_clone(cache->cells, src, upto, seq));
}

cellkv_status cellkv_cache_rewind(cellkv_cache *cache, int64_t seq, int32_t pos) {
    cellkv_status status = enter(cache);
    return status ? status : leave(cache, ck_cells_rewind(cache->cells, seq, pos));
}

cellkv_status cellkv_cache_remove(cellkv_cache *cache, int64_t seq, int32_t p0, int32_t p1) {
    cellkv_status status = enter(cache);
    return status ? status : leave(cache, ck_cells_remove(cache->cells, seq, p0, p1));
}

cellkv_status cellkv_cache_close(cellkv_cache *cache, int64_t seq) {
    cellkv_status status = enter(cache);
    return status ? status : leave(cache, ck_cells_close(cache->cells, seq));
}

cellkv_status cellkv_cache_clear(cellkv_cache *cache) {
    cellkv_status status = enter(cache);
    if (status) {
        return status;
    }
    ck_cells_clear(cache->cells);
    return leave(cache, CELLKV_OK);
}

static cellkv_status check_windows(const cellkv_cache *cache) {
    for (int32_t i = 0; i < cache->n_layers; i++) {
        if (cache->layers[i].window == 0) {
            return ck_fail(CELLKV_ERROR_NOT_WINDOWED, "layer %d has no window", i);
        }
    }
    if (cache->n_layers == 0) {
        return ck_fail(CELLKV_ERROR_NOT_WINDOWED, "the cache has no layers");
    }
    if (cache->kind == CELLKV_CACHE_SEQUENCE) {
        return ck_fail(CELLKV_ERROR_UNSUPPORTED,
                       "kind sequence has nothing to trim: its layers' rows are bounded anyway");
    }
    return CELLKV_OK;
}

cellkv_status cellkv_cache_trim_windows(cellkv_cache *cache, int32_t *n_freed) {
    cellkv_status status = enter(cache);
    if (status) {
        return status;
    }
    status = check_windows(cache);
    if (!status) {
        int32_t n = ck_cells_trim_windows(cache->cells);
        if (n_freed) {
            *n_freed = n;
        }
    }
    return leave(cache, status);
}

/* ---- the step ---- */

static int32_t rows_of(const cellkv_cache *cache) {
    return cache->storage ? cache->storage_class->rows(cache->storage) : 0;
}

cellkv_status cellkv_cache_declare(cellkv_cache *cache, const int64_t *seqs, int32_t n_tokens,
                                   int32_t *shortfall) {
    cellkv_status status = enter_with(cache, seqs, "seqs");
    return status ? status
                  : leave(cache, ck_cells_declare(cache->cells, seqs, n_tokens, shortfall));
}

cellkv_status cellkv_cache_extend(cellkv_cache *cache, int64_t seq, int32_t n_tokens,
                                  int32_t *shortfall) {
    cellkv_status status = enter(cache);
    return status ? status : leave(cache, ck_cells_extend(cache->cells, seq, n_tokens, shortfall));
}

cellkv_status cellkv_cache_place(cellkv_cache *cache, const int32_t *positions, int32_t n_tokens,
                                 int32_t *cells) {
    cellkv_status status = enter(cache);
    if (status) {
        return status;
    }
    status = ck_cells_begin_step(cache->cells, NULL, positions, n_tokens, rows_of(cache));
    if (!status) { /* the caller writes them, and nobody will say when */
        ck_cells_begin_write(cache->cells, 0, n_tokens);
    }
    if (!status && cells) {
        struct ck_step step = ck_cells_step(cache->cells);
        for (int32_t i = 0; i < step.n_tokens; i++) {
            cells[i] = step.cells[i];
        }
    }
    return leave(cache, status);
}

cellkv_status cellkv_cache_undo_step(cellkv_cache *cache, int32_t n_keep) {
    cellkv_status status = enter(cache);
    return status ? status : leave(cache, ck_cells_undo_step(cache->cells, n_keep));
}

/* ---- read-outs ---- */

cellkv_status cellkv_cache_can_extend(cellkv_cache *cache, int32_t n, bool *fits) {
    cellkv_status status = enter_with(cache, fits, "fits");
    if (status) {
        return status;
    }
    if (n < 0) {
        return leave(cache, ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "n is %d", n));
    }
    *fits = n <= ck_cells_n_free(cache->cells);
    return leave(cache, CELLKV_OK);
}

cellkv_status cellkv_cache_length(cellkv_cache *cache, int64_t seq, int32_t *length) {
    cellkv_status status = enter_with(cache, length, "length");
    return status ? status : leave(cache, ck_cells_length(cache->cells, seq, length));
}

cellkv_status cellkv_cache_next_pos(cellkv_cache *cache, int64_t seq, int32_t *pos) {
    cellkv_status status = enter_with(cache, pos, "pos");
    return status ? status : leave(cache, ck_cells_next_pos(cache->cells, seq, pos));
}

cellkv_status cellkv_cache_read_cells(cellkv_cache *cache, int64_t seq, int32_t *cells,
                                      int32_t *positions, int32_t max, int32_t *length) {
    cellkv_status status = enter(cache);
    if (status) {
        return status;
    }
    if (max < 0) {
        return leave(cache, ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "max is %d", max));
    }
    return leave(cache, ck_cells_read(cache->cells, seq, cells, positions, max, length));
}

cellkv_status cellkv_cache_get_stats(cellkv_cache *cache, cellkv_cache_stats *stats) {
    cellkv_status status = enter_with(cache, stats, "stats");
    if (status) {
        return status;
    }
    if (stats->size != sizeof *stats) {
        return leave(cache, ck_fail(CELLKV_ERROR_INVALID_ARGUMENT,
                                    "size is %zu, that of this version is %zu", stats->size,
                                    sizeof *stats));
    }
    *stats = (cellkv_cache_stats){.size = sizeof *stats};
    ck_cells_stats(cache->cells, stats);
    if (cache->storage) {
        stats->rows = cache->storage_class->rows(cache->storage);
        stats->storage_bytes = cache->storage_class->bytes(cache->storage);
        stats->n_growths = cache->storage_class->n_growths(cache->storage);
    }
    return leave(cache, CELLKV_OK);
}
