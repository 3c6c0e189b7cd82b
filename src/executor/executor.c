#include "executor_object.h"

#include <string.h>

#include "attention/dense.h"
#include "cells/error.h"
#include "cells/memory.h"

enum { MAX_THREADS = GGML_MAX_N_THREADS };

cellkv_executor_config cellkv_executor_config_default(void) {
    return (cellkv_executor_config){
        .size = sizeof(cellkv_executor_config),
        .strategy = CELLKV_STRATEGY_AUTO,
        .max_batch = 512,
        .max_graphs = 32,
        .reuse_graphs = true,
    };
}

/* ---- checks ---- */

static cellkv_status check_program(const cellkv_program *program) {
    if (program == NULL) {
        return ck_fail_null("config.program");
    }
    if (program->size != sizeof *program) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "program.size is %zu, expected %zu",
                       program->size, sizeof *program);
    }
    if (program->build == NULL) {
        return ck_fail_null("program.build");
    }
    if (program->n_vocab < 1 || program->n_result < 1 || program->n_layers < 1) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT,
                       "program: n_vocab %d, n_result %d and n_layers %d must be at least 1",
                       program->n_vocab, program->n_result, program->n_layers);
    }
    if (program->layers == NULL) {
        return ck_fail_null("program.layers");
    }
    if (program->max_tensors < 0) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "program.max_tensors is %d, expected >= 0",
                       program->max_tensors);
    }
    return CELLKV_OK;
}

static cellkv_status check_config(const cellkv_executor_config *config) {
    if (config == NULL) {
        return ck_fail_null("config");
    }
    if (config->size != sizeof *config) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "config.size is %zu, expected %zu",
                       config->size, sizeof *config);
    }
    if ((config->cache == NULL) == (config->cache_key == 0)) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT,
                       "give either config.cache or config.cache_key");
    }
    if ((int)config->strategy < CELLKV_STRATEGY_AUTO || config->strategy > CELLKV_STRATEGY_RAGGED) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "config.strategy %d is none",
                       (int)config->strategy);
    }
    if ((int)config->isa < CELLKV_ISA_BEST || config->isa > CELLKV_ISA_NEON) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "config.isa %d is none", (int)config->isa);
    }
    if (config->n_threads < 0 || config->n_threads > MAX_THREADS) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "config.n_threads is %d, expected 0 .. %d",
                       config->n_threads, MAX_THREADS);
    }
    if (config->max_batch < 1 || config->max_graphs < 1) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT,
                       "config: max_batch %d and max_graphs %d must be at least 1",
                       config->max_batch, config->max_graphs);
    }
    return check_program(config->program);
}

static bool is_same_layer(const cellkv_layer *a, const cellkv_layer *b) {
    return a->n_kv_heads == b->n_kv_heads && a->head_dim_k == b->head_dim_k &&
           a->head_dim_v == b->head_dim_v && a->window == b->window;
}

static cellkv_status check_layers(const cellkv_program *program, const cellkv_cache *cache) {
    if (cache->storage == NULL) {
        return ck_fail(CELLKV_ERROR_NO_STORAGE,
                       "the cache was made with backend \"cells\": it has no K/V rows");
    }
    if (program->n_layers != cache->n_layers) {
        return ck_fail(CELLKV_ERROR_MISMATCH, "the program has %d layers, the cache %d",
                       program->n_layers, cache->n_layers);
    }
    for (int32_t l = 0; l < program->n_layers; l++) {
        const cellkv_layer *want = &program->layers[l];
        const cellkv_layer *have = &cache->layers[l];
        if (!is_same_layer(want, have)) {
            return ck_fail(
                CELLKV_ERROR_MISMATCH,
                "layer %d: the program has %d K/V heads, widths %d and %d, window %d; the "
                "cache %d, %d and %d, %d",
                l, want->n_kv_heads, want->head_dim_k, want->head_dim_v, want->window,
                have->n_kv_heads, have->head_dim_k, have->head_dim_v, have->window);
        }
    }
    return CELLKV_OK;
}

/* ---- making ---- */

static int32_t find_window(const struct ck_windows *windows, int32_t size) {
    for (int32_t w = 0; w < windows->n_windows; w++) {
        if (windows->sizes[w] == size) {
            return w;
        }
    }
    return -1;
}

static cellkv_status windows_init(struct ck_windows *windows, const cellkv_cache *cache) {
    const size_t n = (size_t)cache->n_layers;
    windows->sizes = ck_calloc(n, sizeof *windows->sizes);
    windows->rings = ck_calloc(n, sizeof *windows->rings);
    windows->of_layer = ck_calloc(n, sizeof *windows->of_layer);
    if (windows->sizes == NULL || windows->rings == NULL || windows->of_layer == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "executor: no memory");
    }
    for (int32_t l = 0; l < cache->n_layers; l++) {
        const int32_t size = cache->layers[l].window;
        int32_t w = find_window(windows, size);
        if (w < 0) {
            w = windows->n_windows++;
            windows->sizes[w] = size;
            windows->rings[w] = cache->rings[l];
        }
        windows->of_layer[l] = w;
    }
    return CELLKV_OK;
}

static cellkv_status scratch_init(struct ck_scratch *scratch, int32_t max_batch,
                                  int32_t n_windows) {
    scratch->rows = ck_calloc((size_t)max_batch, sizeof *scratch->rows);
    scratch->steps = ck_calloc((size_t)n_windows, sizeof *scratch->steps);
    scratch->layouts = ck_calloc((size_t)n_windows, sizeof *scratch->layouts);
    if (scratch->rows == NULL || scratch->steps == NULL || scratch->layouts == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "executor: no memory");
    }
    return CELLKV_OK;
}

static void scratch_free(struct ck_scratch *scratch, int32_t n_windows) {
    for (int32_t w = 0; scratch->steps != NULL && w < n_windows; w++) {
        ck_sight_free(&scratch->steps[w].sight);
        ck_plan_free(&scratch->steps[w].plan);
    }
    for (int32_t w = 0; scratch->layouts != NULL && w < n_windows; w++) {
        ck_layout_free(&scratch->layouts[w]);
    }
    ck_free(scratch->steps);
    ck_free(scratch->layouts);
    ck_free(scratch->rows);
    ck_free(scratch->mask);
    ck_free(scratch->outputs);
    ck_free(scratch->result_rows);
    ck_pooling_free(&scratch->pooling);
}

/* ggml's question between nodes. */
static bool abort_wanted(void *context) {
    cellkv_executor *executor = context;
    return atomic_load(&executor->abort) ||
           (executor->should_abort != NULL && executor->should_abort(executor->abort_context));
}

static void adopt_config(cellkv_executor *executor, const cellkv_executor_config *config) {
    executor->program = *config->program;
    executor->program.layers = executor->cache->layers; /* equal, and they live as long */
    executor->reuse_graphs = config->reuse_graphs;
    executor->should_abort = config->should_abort;
    executor->abort_context = config->abort_context;
    executor->shared = (struct ck_graph_context){
        .program = &executor->program,
        .layers = executor->cache->layers,
        .windows = &executor->windows,
        .storage = executor->cache->storage,
        .devices = &executor->devices,
        .kernels = executor->strategy == CELLKV_STRATEGY_RAGGED ? ck_kernels(executor->isa) : NULL,
        .steps = executor->scratch.steps,
    };
}

/* ---- strategy ---- */

/* The kernels' word for an isa is the public one without BEST. */
_Static_assert((int)CELLKV_ISA_C == CK_ISA_C + 1 && (int)CELLKV_ISA_AVX2 == CK_ISA_AVX2 + 1 &&
                   (int)CELLKV_ISA_AVX512 == CK_ISA_AVX512 + 1 &&
                   (int)CELLKV_ISA_NEON == CK_ISA_NEON + 1 && (int)CELLKV_ISA_NEON == CK_N_ISAS,
               "both enums have the same order");

static cellkv_status choose_ragged(cellkv_executor *executor,
                                   const cellkv_executor_config *config) {
    const cellkv_cache *cache = executor->cache;
    cellkv_status status = ck_ragged_probe(cache->storage, cache->layers, cache->n_layers);
    if (status != CELLKV_OK) {
        return status;
    }
    executor->isa = config->isa == CELLKV_ISA_BEST ? ck_isa_best() : (enum ck_isa)(config->isa - 1);
    if (!ck_isa_is_available(executor->isa)) {
        return ck_fail(CELLKV_ERROR_UNSUPPORTED,
                       "isa %s: this build has no kernels for it, or this CPU cannot run them",
                       ck_isa_name(executor->isa));
    }
    executor->strategy = CELLKV_STRATEGY_RAGGED;
    return CELLKV_OK;
}

static cellkv_status choose_dense(cellkv_executor *executor) {
    const cellkv_cache *cache = executor->cache;
    executor->strategy = CELLKV_STRATEGY_DENSE;
    return ck_dense_probe(cache->storage, cache->layers, cache->n_layers, &executor->layout_limit);
}

static cellkv_status choose_strategy(cellkv_executor *executor,
                                     const cellkv_executor_config *config) {
    const cellkv_cache *cache = executor->cache;
    switch (config->strategy) {
    case CELLKV_STRATEGY_DENSE:
        return choose_dense(executor);
    case CELLKV_STRATEGY_RAGGED:
        return choose_ragged(executor, config);
    case CELLKV_STRATEGY_AUTO:
        break;
    }
    return ck_ragged_probe(cache->storage, cache->layers, cache->n_layers) == CELLKV_OK
               ? choose_ragged(executor, config)
               : choose_dense(executor);
}

/* Everything that can fail; what was made by then is freed by free_parts. */
static cellkv_status make_parts(cellkv_executor *executor, const cellkv_executor_config *config) {
    const cellkv_cache *cache = executor->cache;
    executor->max_batch =
        config->max_batch < cache->max_slice ? config->max_batch : cache->max_slice;
    cellkv_status status = check_layers(config->program, cache);
    if (status == CELLKV_OK) {
        status = choose_strategy(executor, config);
    }
    if (status == CELLKV_OK) {
        status = windows_init(&executor->windows, cache);
    }
    if (status == CELLKV_OK) {
        status = scratch_init(&executor->scratch, executor->max_batch, executor->windows.n_windows);
    }
    if (status == CELLKV_OK) {
        status = ck_graph_cache_init(&executor->graphs, config->max_graphs);
    }
    if (status == CELLKV_OK) {
        status = ck_devices_start(&executor->devices, cache->storage, cache->n_layers,
                                  config->n_threads);
    }
    return status;
}

static void free_parts(cellkv_executor *executor) {
    const cellkv_cache *cache = executor->cache;
    if (executor->graphs.n_graphs > 0) {
        cellkv_devices_enter(ck_storage_devices(cache->storage), cache->n_layers);
        ck_graph_cache_drop(&executor->graphs);
        cellkv_devices_leave(ck_storage_devices(cache->storage), cache->n_layers);
    }
    ck_graph_cache_free(&executor->graphs);
    ck_devices_stop(&executor->devices);
    scratch_free(&executor->scratch, executor->windows.n_windows);
    ck_free(executor->windows.sizes);
    ck_free(executor->windows.rings);
    ck_free(executor->windows.of_layer);
    ck_cache_drop(executor->cache);
    ck_free(executor);
}

/* A reference to the cache that the configuration names. */
static cellkv_status hold_cache(const cellkv_executor_config *config, cellkv_cache **cache) {
    if (config->cache != NULL) {
        ck_cache_hold(config->cache);
        *cache = config->cache;
        return CELLKV_OK;
    }
    cellkv_cache *found;
    cellkv_status status = cellkv_cache_find(config->cache_key, &found);
    if (status != CELLKV_OK) {
        return status;
    }
    ck_cache_hold(found);
    cellkv_cache_free(found);
    *cache = found;
    return CELLKV_OK;
}

cellkv_status cellkv_executor_new(const cellkv_executor_config *config, cellkv_executor **out) {
    cellkv_status status = check_config(config);
    if (status != CELLKV_OK) {
        return status;
    }
    if (out == NULL) {
        return ck_fail_null("executor");
    }
    cellkv_executor *executor = ck_calloc(1, sizeof *executor);
    if (executor == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "executor: no memory");
    }
    status = hold_cache(config, &executor->cache);
    if (status != CELLKV_OK) {
        ck_free(executor);
        return status;
    }
    status = make_parts(executor, config);
    if (status != CELLKV_OK) {
        free_parts(executor);
        return status;
    }
    adopt_config(executor, config);
    ck_devices_set_abort(&executor->devices, abort_wanted, executor);
    if (executor->program.retain != NULL) {
        executor->program.retain(executor->program.context);
    }
    *out = executor;
    return CELLKV_OK;
}

void cellkv_executor_free(cellkv_executor *executor) {
    if (executor == NULL) {
        return;
    }
    void (*release)(void *) = executor->program.release;
    void *context = executor->program.context;
    free_parts(executor);
    if (release != NULL) {
        release(context);
    }
}

cellkv_status cellkv_executor_abort(cellkv_executor *executor) {
    if (executor == NULL) {
        return ck_fail_null("executor");
    }
    if (atomic_load(&executor->running)) {
        atomic_store(&executor->abort, true);
    }
    return CELLKV_OK;
}

cellkv_status cellkv_executor_get_stats(cellkv_executor *executor, cellkv_executor_stats *stats) {
    if (executor == NULL || stats == NULL) {
        return ck_fail_null(executor == NULL ? "executor" : "stats");
    }
    if (stats->size != sizeof *stats) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "stats.size is %zu, expected %zu",
                       stats->size, sizeof *stats);
    }
    if (atomic_exchange(&executor->busy, true)) {
        return ck_fail(CELLKV_ERROR_BUSY, "the executor is in use");
    }
    *stats = (cellkv_executor_stats){
        .size = sizeof *stats,
        .n_steps = executor->n_steps,
        .n_tokens = executor->n_tokens,
        .n_graphs_built = executor->graphs.n_built,
        .n_graphs_reused = executor->graphs.n_reused,
        .n_graphs_kept = executor->graphs.n_graphs,
        .graph_bytes = ck_graph_cache_bytes(&executor->graphs),
        .n_attention_strayed = executor->n_strayed,
        .n_row_growths = executor->n_row_growths,
        .step_us = executor->step_us,
        .compute_us = executor->compute_us,
        .strategy = executor->strategy,
        .isa = executor->strategy == CELLKV_STRATEGY_RAGGED ? (cellkv_isa)(executor->isa + 1)
                                                            : CELLKV_ISA_BEST,
        .n_threads = executor->devices.n_threads,
    };
    atomic_store(&executor->busy, false);
    return CELLKV_OK;
}
