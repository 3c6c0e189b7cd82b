/* What an executor is made of. */
#ifndef CELLKV_EXECUTOR_EXECUTOR_OBJECT_H
#define CELLKV_EXECUTOR_EXECUTOR_OBJECT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <cellkv/executor.h>

#include "cells/cache_object.h"
#include "executor/devices.h"
#include "executor/graph_cache.h"
#include "executor/pooling.h"

/* Host copies of a slice's inputs, kept to be reused. */
struct ck_scratch {
    int64_t *rows;                /* [max_batch] */
    struct ck_window_step *steps; /* [n_windows] */
    struct ck_layout *layouts;    /* [n_windows]; dense only */
    ggml_fp16_t *mask;
    size_t mask_size;     /* half floats there is room for */
    int32_t *outputs;     /* [cap_outputs] the slice's outputs, as indices into the slice */
    int32_t *result_rows; /* [cap_outputs] where each one's result goes */
    int32_t cap_outputs;
    struct ck_pooling pooling;
};

struct cellkv_executor {
    cellkv_program program;
    cellkv_cache *cache;
    cellkv_strategy strategy;          /* never AUTO */
    enum ck_isa isa;                   /* ragged only */
    enum ck_layout_limit layout_limit; /* dense only */
    int32_t max_batch;
    bool reuse_graphs;
    bool (*should_abort)(void *context);
    void *abort_context;

    struct ck_devices devices;
    struct ck_windows windows;
    struct ck_graph_context shared;
    struct ck_graph_cache graphs;
    int64_t generation; /* of the storage that the kept graphs were built on */
    struct ck_scratch scratch;

    atomic_bool busy;
    atomic_bool running; /* a graph is being computed, or about to be */
    atomic_bool abort;   /* asked for by cellkv_executor_abort */

    int64_t n_steps;
    int64_t n_tokens;
    int64_t n_strayed;
    int64_t n_row_growths;
    int64_t step_us;    /* in steps */
    int64_t compute_us; /* in their graphs */
};

#endif
