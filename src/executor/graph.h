/* A program's graph for one shape of step: built, allocated, ready to be filled and run any number
 * of times. */
#ifndef CELLKV_EXECUTOR_GRAPH_H
#define CELLKV_EXECUTOR_GRAPH_H

#include <stdbool.h>
#include <stdint.h>

#include <ggml-backend.h>
#include <ggml.h>

#include <cellkv/executor.h>

#include "attention/layout.h"
#include "attention/ragged.h"
#include "cells/sight.h"
#include "executor/devices.h"
#include "storage/storage.h"

/* What a graph depends on. */
struct ck_shape {
    int32_t n_tokens;
    int32_t n_outputs;
    int32_t n_parts;                 /* ragged: the most parts of a plan, rounded up; else 0 */
    const struct ck_layout *layouts; /* dense: [n_windows]; else NULL */
};

/* The layers' distinct windows: layers of one window share one sight, one mask. */
struct ck_windows {
    int32_t n_windows;
    int32_t *sizes;    /* [n_windows] window, 0: none */
    int32_t *rings;    /* [n_windows] rows of its layers' rings, 0: row c is cell c */
    int32_t *of_layer; /* [n_layers] index into sizes */
};

/* The rows that a window's layers are read of, out of `extent` cells; both padded. */
static inline int32_t ck_windows_extent(const struct ck_windows *windows, int32_t w,
                                        int32_t extent) {
    const int32_t ring = ck_pad_rows(windows->rings[w]);
    return ring > 0 && ring < extent ? ring : extent;
}

/* What a slice's attention reads beside tensors, for one window. */
struct ck_window_step {
    struct ck_sight sight; /* its cells are rows */
    struct ck_plan plan;   /* ragged only */
};

/* What all graphs of an executor share; owned by the executor, outlives the graphs. */
struct ck_graph_context {
    const cellkv_program *program;
    const cellkv_layer *layers; /* [program->n_layers], the cache's: with its types */
    const struct ck_windows *windows;
    const struct ck_storage *storage;
    const struct ck_devices *devices;
    const struct ck_kernels *kernels;   /* NULL: strategy dense */
    const struct ck_window_step *steps; /* [n_windows] */
};

/* A node that runs on its layer's device, whatever the scheduler would make of it. */
struct ck_pin {
    struct ggml_tensor *node;
    int32_t layer;
    bool is_attention;
};

/* A mask where a layer's device has it. */
struct ck_mask {
    struct ggml_tensor *tensor;
    ggml_backend_t backend;
};

struct cellkv_graph {
    const struct ck_graph_context *shared;
    struct ck_shape shape;     /* with layouts of its own, */
    struct ck_layout *layouts; /* these */
    struct ggml_context *context;
    size_t context_size; /* bytes */
    struct ggml_cgraph *nodes;
    ggml_backend_sched_t scheduler;

    /* inputs */
    struct ggml_tensor *tokens;    /* I32 [n_tokens] */
    struct ggml_tensor *positions; /* I32 [n_tokens] */
    struct ggml_tensor *outputs;   /* I32 [n_outputs]; NULL if there are none */
    struct ggml_tensor **rows;     /* [n_windows] I64 [n_tokens]; one where there is no ring */
    struct ggml_tensor **masks;    /* [n_windows] by ck_dense_new_mask; dense only */

    struct ck_mask *masks_read; /* [n_windows] what the last layer attended has read of the mask */

    struct ggml_tensor *result; /* F32 [n_result, n_outputs]; NULL if there are none */

    /* what must run where a layer's rows are */
    struct ck_pin *pins;
    int32_t n_pins, room_pins;
    bool *attended;                 /* [n_layers] */
    struct ck_ragged_layer *ragged; /* [n_layers]; NULL: strategy dense */
    int32_t n_strayed;              /* nodes of attention that the scheduler put elsewhere */

    cellkv_status status; /* the first failure while building */
};

/* Builds and allocates. Returns CELLKV_OK, CELLKV_ERROR_OUT_OF_MEMORY, CELLKV_ERROR_BAD_GRAPH or
 * what the program's build returned. */
cellkv_status ck_graph_new(const struct ck_graph_context *shared, const struct ck_shape *shape,
                           struct cellkv_graph **graph);
void ck_graph_free(struct cellkv_graph *graph);

/* To be called before each run of a ragged graph: no piece has been taken yet. */
void ck_graph_rewind(struct cellkv_graph *graph);

/* Bytes of nodes and compute buffers. */
int64_t ck_graph_bytes(const struct cellkv_graph *graph);

#endif
