/* One step: place, grow, then slice by slice take a graph, fill, compute, read out. */
#include <string.h>

#include "attention/layout.h"
#include "cells/error.h"
#include "cells/memory.h"
#include "cells/ring.h"
#include "executor_object.h"

/* Graphs of ragged attention have room for this many parts, or a power of 2 times as many: a decode
 * loop's parts grow with its sequences, and its graph should not change with each. */
enum { MIN_PARTS = 64 };

/* The part of a step that is computed at once. */
struct slice {
    int32_t first;
    int32_t n_tokens;
    int32_t n_outputs; /* in scratch.outputs, scratch.result_rows */
};

/* ---- before anything changes ---- */

static cellkv_status check_tokens(const cellkv_executor *executor, const cellkv_step *step) {
    for (int32_t i = 0; i < step->n_tokens; i++) {
        if (step->tokens[i] < 0 || step->tokens[i] >= executor->program.n_vocab) {
            return ck_fail(CELLKV_ERROR_BAD_TOKEN, "token %d of the step is %d, expected 0 .. %d",
                           i, step->tokens[i], executor->program.n_vocab - 1);
        }
    }
    return CELLKV_OK;
}

static cellkv_status check_outputs(const cellkv_step *step, const float *results) {
    if (step->n_outputs == 0) {
        return CELLKV_OK;
    }
    if (step->outputs == NULL || results == NULL) {
        return ck_fail_null(step->outputs == NULL ? "step.outputs" : "results");
    }
    for (int32_t i = 0; i < step->n_outputs; i++) {
        if (step->outputs[i] < 0 || step->outputs[i] >= step->n_tokens) {
            return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "output %d is token %d, expected 0 .. %d",
                           i, step->outputs[i], step->n_tokens - 1);
        }
    }
    return CELLKV_OK;
}

static cellkv_status check_step(const cellkv_executor *executor, const cellkv_step *step,
                                const float *results) {
    if (step->n_tokens < 0 || step->n_outputs < 0) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT,
                       "step: n_tokens %d and n_outputs %d must not be negative", step->n_tokens,
                       step->n_outputs);
    }
    if ((int)step->pooling < CELLKV_POOLING_NONE || step->pooling > CELLKV_POOLING_MEAN) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "step.pooling %d is none",
                       (int)step->pooling);
    }
    if (step->n_tokens == 0) {
        return ck_fail(CELLKV_ERROR_EMPTY_STEP, "the step has no tokens");
    }
    if (step->tokens == NULL) {
        return ck_fail_null("step.tokens");
    }
    cellkv_status status = check_tokens(executor, step);
    return status == CELLKV_OK ? check_outputs(step, results) : status;
}

/* ---- one slice ---- */

static cellkv_status reserve_outputs(struct ck_scratch *scratch, int32_t n) {
    if (n <= scratch->cap_outputs) {
        return CELLKV_OK;
    }
    int32_t *outputs = ck_realloc_array(scratch->outputs, (size_t)n, sizeof *outputs);
    if (outputs != NULL) {
        scratch->outputs = outputs;
    }
    int32_t *rows = ck_realloc_array(scratch->result_rows, (size_t)n, sizeof *rows);
    if (rows != NULL) {
        scratch->result_rows = rows;
    }
    if (outputs == NULL || rows == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "no memory for %d outputs", n);
    }
    scratch->cap_outputs = n;
    return CELLKV_OK;
}

/* Collects which of the step's outputs fall into the slice. */
static void find_outputs(struct ck_scratch *scratch, const cellkv_step *step, struct slice *slice) {
    slice->n_outputs = 0;
    for (int32_t i = 0; i < step->n_outputs; i++) {
        const int32_t token = step->outputs[i] - slice->first;
        if (token < 0 || token >= slice->n_tokens) {
            continue;
        }
        scratch->outputs[slice->n_outputs] = token;
        scratch->result_rows[slice->n_outputs++] = i;
    }
}

/* Where the layers have rings, the cells seen are not their rows. */
static void map_cells(struct ck_sight *sight, int32_t ring) {
    for (int32_t i = 0; ring > 0 && i < sight->n_cells; i++) {
        sight->cells[i] = ck_ring_row(ring, sight->cells[i]);
    }
}

static cellkv_status reserve_mask(struct ck_scratch *scratch, const struct ck_layout *layout) {
    const size_t size = (size_t)layout->mask_size;
    if (size <= scratch->mask_size) {
        return CELLKV_OK;
    }
    ggml_fp16_t *mask = ck_realloc_array(scratch->mask, size, sizeof *mask);
    if (mask == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY,
                       "no memory for the masks of %d tokens, %zu in all", layout->n_queries, size);
    }
    scratch->mask = mask;
    scratch->mask_size = size;
    return CELLKV_OK;
}

/* Each piece makes nodes in every layer, and ggml's scheduler takes 20 kB of address space for each
 * node there is. */
static int32_t most_pieces(int32_t n_layers) {
    enum { MAX_CALLS = 2048 };
    const int32_t n = MAX_CALLS / n_layers;
    return n < 1 ? 1 : n < CK_MAX_LAYOUT_PIECES ? n : CK_MAX_LAYOUT_PIECES;
}

/* A window's layout, and room for its masks. */
static cellkv_status prepare_layout(cellkv_executor *executor, int32_t window) {
    struct ck_scratch *scratch = &executor->scratch;
    const int32_t extent = ck_windows_extent(&executor->windows, window,
                                             ck_pad_rows(ck_cells_extent(executor->cache->cells)));
    cellkv_status status =
        ck_layout_build(&scratch->layouts[window], &scratch->steps[window].sight, extent,
                        executor->layout_limit, most_pieces(executor->cache->n_layers));
    return status == CELLKV_OK ? reserve_mask(scratch, &scratch->layouts[window]) : status;
}

/* Each window's sight, and its layout or plan. */
static cellkv_status prepare_windows(cellkv_executor *executor, const struct slice *slice) {
    for (int32_t w = 0; w < executor->windows.n_windows; w++) {
        struct ck_window_step *step = &executor->scratch.steps[w];
        cellkv_status status = ck_sight_build(&step->sight, executor->cache->cells, slice->first,
                                              slice->n_tokens, executor->windows.sizes[w]);
        map_cells(&step->sight, executor->windows.rings[w]);
        if (status == CELLKV_OK) {
            status = executor->strategy == CELLKV_STRATEGY_DENSE
                         ? prepare_layout(executor, w)
                         : ck_plan_build(&step->plan, &step->sight, executor->devices.n_threads);
        }
        if (status != CELLKV_OK) {
            return status;
        }
    }
    return CELLKV_OK;
}

/* An input that the program does not use has no place in the allocated graph. */
static void set_input(struct ggml_tensor *tensor, const void *data) {
    if (tensor != NULL && tensor->buffer != NULL) {
        ggml_backend_tensor_set(tensor, data, 0, ggml_nbytes(tensor));
    }
}

/* Each window's rows; those without a ring have one input. */
static void fill_rows(cellkv_executor *executor, struct cellkv_graph *graph, const int32_t *cells,
                      int32_t n_tokens) {
    const struct ck_windows *windows = &executor->windows;
    int64_t *rows = executor->scratch.rows;
    bool has_cells = false;
    for (int32_t w = 0; w < windows->n_windows; w++) {
        const int32_t ring = windows->rings[w];
        if (ring == 0 && has_cells) {
            continue;
        }
        for (int32_t i = 0; i < n_tokens; i++) {
            rows[i] = ck_ring_row(ring, cells[i]);
        }
        set_input(graph->rows[w], rows);
        has_cells = has_cells || ring == 0;
    }
}

static void fill_inputs(cellkv_executor *executor, struct cellkv_graph *graph,
                        const cellkv_step *step, const struct slice *slice) {
    struct ck_scratch *scratch = &executor->scratch;
    const struct ck_step placed = ck_cells_step(executor->cache->cells);
    set_input(graph->tokens, step->tokens + slice->first);
    set_input(graph->positions, placed.positions + slice->first);
    fill_rows(executor, graph, placed.cells + slice->first, slice->n_tokens);
    set_input(graph->outputs, scratch->outputs);
    for (int32_t w = 0; w < executor->windows.n_windows; w++) {
        if (graph->masks[w] != NULL) {
            ck_layout_render_mask(&scratch->layouts[w], &scratch->steps[w].sight, scratch->mask);
            set_input(graph->masks[w], scratch->mask);
        }
    }
    ck_graph_rewind(graph);
}

static cellkv_status compute(cellkv_executor *executor, struct cellkv_graph *graph) {
    enum ggml_status status = GGML_STATUS_ABORTED;
    executor->n_strayed += graph->n_strayed;
    if (!atomic_load(&executor->abort)) {
        const int64_t start = ggml_time_us();
        status = ck_allocation_should_fail()
                     ? GGML_STATUS_ALLOC_FAILED /* ggml's work buffer, say */
                     : ggml_backend_sched_graph_compute(graph->scheduler, graph->nodes);
        executor->compute_us += ggml_time_us() - start;
    }
    if (status == GGML_STATUS_SUCCESS) {
        return CELLKV_OK;
    }
    if (status == GGML_STATUS_ABORTED) {
        return ck_fail(CELLKV_ERROR_ABORTED, "the forward was aborted; undo_step frees its cells");
    }
    return ck_fail(CELLKV_ERROR_COMPUTE, "the forward failed (%s); undo_step frees its cells",
                   ggml_status_to_string(status));
}

/* Each output's result is added to its sequence's. */
static void pool_results(const cellkv_executor *executor, const struct cellkv_graph *graph,
                         const struct slice *slice, float *results) {
    const struct ck_pooling *pooling = &executor->scratch.pooling;
    const size_t size = (size_t)executor->program.n_result * sizeof(float);
    for (int32_t i = 0; i < slice->n_outputs; i++) {
        ggml_backend_tensor_get(graph->result, pooling->result, (size_t)i * size, size);
        ck_pooling_add(pooling, executor->scratch.result_rows[i], executor->program.n_result,
                       results);
    }
}

static void read_results(const cellkv_executor *executor, const struct cellkv_graph *graph,
                         const struct slice *slice, float *results) {
    const size_t width = (size_t)executor->program.n_result;
    for (int32_t i = 0, end; i < slice->n_outputs; i = end) {
        const int32_t *rows = executor->scratch.result_rows;
        end = i + 1;
        while (end < slice->n_outputs && rows[end] == rows[end - 1] + 1) {
            end++;
        }
        ggml_backend_tensor_get(graph->result, results + (size_t)rows[i] * width,
                                (size_t)i * width * sizeof(float),
                                (size_t)(end - i) * width * sizeof(float));
    }
}

static struct ck_shape find_shape(const cellkv_executor *executor, const struct slice *slice) {
    struct ck_shape shape = {.n_tokens = slice->n_tokens, .n_outputs = slice->n_outputs};
    if (executor->strategy == CELLKV_STRATEGY_DENSE) {
        shape.layouts = executor->scratch.layouts;
        return shape;
    }
    shape.n_parts = MIN_PARTS;
    for (int32_t w = 0; w < executor->windows.n_windows; w++) {
        while (shape.n_parts < executor->scratch.steps[w].plan.n_parts) {
            shape.n_parts *= 2;
        }
    }
    return shape;
}

/* All of a slice that can fail before its compute begins. */
static cellkv_status prepare_slice(cellkv_executor *executor, const cellkv_step *step,
                                   struct slice *slice, struct cellkv_graph **graph) {
    find_outputs(&executor->scratch, step, slice);
    cellkv_status status = prepare_windows(executor, slice);
    if (status != CELLKV_OK) {
        return status;
    }
    const struct ck_shape shape = find_shape(executor, slice);
    return ck_graph_cache_get(&executor->graphs, &executor->shared, &shape, graph);
}

/* ---- the step ---- */

/* Graphs hold views of the rows' tensors: new tensors, new graphs. */
static void drop_stale_graphs(cellkv_executor *executor) {
    const int64_t generation = ck_storage_generation(executor->cache->storage);
    if (executor->generation != generation) {
        ck_graph_cache_drop(&executor->graphs);
    }
    executor->generation = generation;
}

/* Dense attention reads freed rows, too, so they must hold no NaN. Ragged attention reads none, and
 * leaves them to the next dense step. */
static void zero_freed_rows(cellkv_executor *executor) {
    if (executor->strategy != CELLKV_STRATEGY_DENSE) {
        return;
    }
    const cellkv_cache *cache = executor->cache;
    const int32_t *freed;
    const int32_t n = ck_cells_take_freed(cache->cells, &freed);
    if (cache->kind != CELLKV_CACHE_SEQUENCE) {
        ck_storage_zero_rows(cache->storage, freed, n);
    } else if (n > 0) {
        ck_storage_zero_positions(cache->storage, ck_cells_step(cache->cells).positions[0],
                                  freed[n - 1] + 1, ck_cells_written(cache->cells));
    }
}

/* Room for the placed step. */
static cellkv_status prepare_rows(cellkv_executor *executor) {
    struct ck_storage *storage = executor->cache->storage;
    const int32_t rows = executor->cache->storage_class->rows(storage);
    cellkv_status status = ck_storage_reserve(storage, ck_cells_extent(executor->cache->cells));
    if (status != CELLKV_OK) {
        return status;
    }
    executor->n_row_growths += executor->cache->storage_class->rows(storage) != rows;
    drop_stale_graphs(executor);
    zero_freed_rows(executor);
    return CELLKV_OK;
}

/* Rows of sums, nothing added yet. */
static cellkv_status prepare_pooling(cellkv_executor *executor, const cellkv_step *step,
                                     float *results) {
    if (step->pooling == CELLKV_POOLING_NONE || step->n_outputs == 0) {
        return CELLKV_OK;
    }
    struct ck_pooling *pooling = &executor->scratch.pooling;
    const struct ck_step placed = ck_cells_step(executor->cache->cells);
    const int32_t n_result = executor->program.n_result;
    cellkv_status status =
        ck_pooling_begin(pooling, &placed, step->outputs, step->n_outputs, n_result);
    if (status == CELLKV_OK) {
        memset(results, 0, (size_t)pooling->n_rows * (size_t)n_result * sizeof *results);
    }
    return status;
}

/* Computes the placed step. *n_done: tokens computed; *began: whether any compute began. */
static cellkv_status run_slices(cellkv_executor *executor, const cellkv_step *step, float *results,
                                int32_t *n_done, bool *began) {
    while (*n_done < step->n_tokens) {
        const int32_t left = step->n_tokens - *n_done;
        struct slice slice = {.first = *n_done,
                              .n_tokens = left < executor->max_batch ? left : executor->max_batch};
        struct cellkv_graph *graph;
        cellkv_status status = prepare_slice(executor, step, &slice, &graph);
        if (status != CELLKV_OK) {
            return status;
        }
        *began = true;
        ck_cells_begin_write(executor->cache->cells, slice.first, slice.n_tokens);
        fill_inputs(executor, graph, step, &slice);
        status = compute(executor, graph);
        if (status != CELLKV_OK) {
            return status;
        }
        ck_cells_keep_written(executor->cache->cells, slice.first, slice.n_tokens);
        if (step->pooling == CELLKV_POOLING_MEAN) {
            pool_results(executor, graph, &slice, results);
        } else {
            read_results(executor, graph, &slice, results);
        }
        *n_done += slice.n_tokens;
        executor->n_tokens += slice.n_tokens;
        if (!executor->reuse_graphs) {
            ck_graph_cache_drop(&executor->graphs);
        }
    }
    return CELLKV_OK;
}

/* With the executor and its cache claimed. */
static cellkv_status run_claimed(cellkv_executor *executor, const cellkv_step *step, float *results,
                                 int32_t *n_done) {
    const cellkv_cache *cache = executor->cache;
    struct ck_cells *cells = cache->cells;
    cellkv_status status = reserve_outputs(&executor->scratch, step->n_outputs);
    if (status == CELLKV_OK) {
        status = ck_cells_begin_step(cells, step->seqs, step->positions, step->n_tokens,
                                     cache->storage_class->rows(cache->storage));
    }
    if (status != CELLKV_OK) {
        return status;
    }
    bool began = false;
    cellkv_devices_enter(ck_storage_devices(cache->storage), cache->n_layers);
    status = prepare_pooling(executor, step, results);
    if (status == CELLKV_OK) {
        status = prepare_rows(executor);
    }
    if (status == CELLKV_OK) {
        status = run_slices(executor, step, results, n_done, &began);
    }
    cellkv_devices_leave(ck_storage_devices(cache->storage), cache->n_layers);
    if (status != CELLKV_OK && !began) {
        ck_cells_rollback_step(cells);
    }
    executor->n_steps += status == CELLKV_OK;
    return status;
}

cellkv_status cellkv_executor_run(cellkv_executor *executor, const cellkv_step *step,
                                  float *results, int32_t *n_done) {
    int32_t done = 0;
    if (n_done != NULL) {
        *n_done = 0;
    }
    if (executor == NULL || step == NULL) {
        return ck_fail_null(executor == NULL ? "executor" : "step");
    }
    cellkv_status status = check_step(executor, step, results);
    if (status != CELLKV_OK) {
        return status;
    }
    if (atomic_exchange(&executor->busy, true)) {
        return ck_fail(CELLKV_ERROR_BUSY, "the executor is in use");
    }
    status = ck_cache_enter(executor->cache);
    if (status == CELLKV_OK) {
        atomic_store(&executor->abort, false);
        atomic_store(&executor->running, true);
        const int64_t start = ggml_time_us();
        status = run_claimed(executor, step, results, &done);
        executor->step_us += ggml_time_us() - start;
        atomic_store(&executor->running, false);
        ck_cache_leave(executor->cache);
    }
    atomic_store(&executor->busy, false);
    if (n_done != NULL) {
        *n_done = done;
    }
    return status;
}
