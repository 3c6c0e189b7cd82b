/* The executor: runs steps of a program over a cache.
 *
 * A program is anything that can build a ggml graph for n tokens: model.h makes one from a GGUF
 * file, a user can write one in a page of C (examples/program.c). For each shape of step the
 * executor asks it to build a graph, keeps the graph, and from then on only fills its inputs.
 *
 * This header names ggml's types but does not include ggml. A program callback and the library must
 * use one ggml: link the shared one that cellkv's pkg-config file names. */
#ifndef CELLKV_EXECUTOR_H
#define CELLKV_EXECUTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cache.h"
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_context;
struct ggml_tensor;

/* ---- programs ---- */

/** A graph under construction, valid inside a program's build callback only. */
typedef struct cellkv_graph cellkv_graph;

/** What a model is to the executor. */
typedef struct cellkv_program {
    size_t size;                /* sizeof(cellkv_program) */
    void *context;              /* the program's own data, given to each callback */
    int32_t n_vocab;            /* tokens are in [0, n_vocab) */
    int32_t n_result;           /* floats per result row */
    int32_t n_layers;           /* entries of `layers` */
    const cellkv_layer *layers; /* what the program will store and how far it looks back; the types
                                   are the cache's own choice and not compared. Read while an
                                   executor is made, not kept */
    int32_t max_tensors;        /* the most tensors that build makes, those of cellkv_attend
                                   included (at most 20 a call); 0: 256 + 64 * n_layers */

    /** Builds the forward of `graph`'s tokens and names its result with cellkv_graph_set_result.
     *  It must depend on nothing but the counts that the graph gives: the graph is kept and run
     *  again for other steps of that shape. Called twice for each graph: to measure, then to keep.
     *  Return CELLKV_OK or any other status to give up. */
    cellkv_status (*build)(void *context, cellkv_graph *graph);

    void (*retain)(void *context);  /* called when an executor starts using context; may be NULL */
    void (*release)(void *context); /* called when it stops; may be NULL */
} cellkv_program;

/** The ggml context to make the graph's tensors in. Its tensors have no data while building. */
CELLKV_API struct ggml_context *cellkv_graph_context(cellkv_graph *graph);

/** How many tokens one run of this graph computes, >= 1. */
CELLKV_API int32_t cellkv_graph_n_tokens(const cellkv_graph *graph);

/** How many tokens have their result read out, 0 .. n_tokens. */
CELLKV_API int32_t cellkv_graph_n_outputs(const cellkv_graph *graph);

/** The tokens: I32 [n_tokens]. */
CELLKV_API struct ggml_tensor *cellkv_graph_tokens(cellkv_graph *graph);

/** The tokens' positions: I32 [n_tokens]. */
CELLKV_API struct ggml_tensor *cellkv_graph_positions(cellkv_graph *graph);

/** Which tokens have their result read out: I32 [n_outputs], for ggml_get_rows; NULL when there are
 *  none. Applied before the last layer's feed-forward, rows that nobody reads cost nothing. */
CELLKV_API struct ggml_tensor *cellkv_graph_outputs(cellkv_graph *graph);

/** Has a tensor computed on the device of a layer, if that can. Between layers of different devices
 *  ggml's scheduler may cut anywhere; a program that places what a layer ends with and what the
 * next one begins with has one tensor cross. Where all layers are on one device this does nothing.
 *
 *  @param layer    in [0, n_layers)
 *  @param tensor   made in the graph's context, the result of an op
 *  An argument that is none of these fails the run with CELLKV_ERROR_BAD_GRAPH.
 */
CELLKV_API void cellkv_graph_place(cellkv_graph *graph, int32_t layer, struct ggml_tensor *tensor);

/** Names the result: F32 [n_result, n_outputs]. Not to be called when n_outputs is 0. */
CELLKV_API void cellkv_graph_set_result(cellkv_graph *graph, struct ggml_tensor *result);

/** Records in words why the program cannot build, and returns `status`: for use as
 *  `return cellkv_graph_fail(graph, CELLKV_ERROR_BAD_GRAPH, "...")`. */
CELLKV_API cellkv_status cellkv_graph_fail(cellkv_graph *graph, cellkv_status status,
                                           const char *message);

/** How attention's scores are formed. */
typedef struct cellkv_attend_params {
    float scale;               /* score = scale * (q . k) */
    float soft_cap;            /* > 0: score = soft_cap * tanh(score / soft_cap); 0: none */
    struct ggml_tensor *sinks; /* F32 [n_heads]: one more logit per head, which takes part in the
                                  softmax and contributes no value; NULL: none */
} cellkv_attend_params;

/** Update and attend: writes this step's K and V into the cells' rows of `layer` and returns the
 *  attention of each query over the cells it sees: those at positions p' of its own sequence with
 *  p' <= p and, in a layer of window W > 0, p' > p - W. To be called exactly once per layer.
 *
 *  @param layer    in [0, n_layers)
 *  @param q        F32 [head_dim_k, n_heads, n_tokens]; n_heads a multiple of the layer's
 *                  n_kv_heads (query head h reads K/V head h / (n_heads / n_kv_heads)). Each head's
 *                  floats are contiguous
 *  @param k        F32 [head_dim_k, n_kv_heads, n_tokens]; each head's floats are contiguous
 *  @param v        F32 [head_dim_v, n_kv_heads, n_tokens]; likewise
 *  @param params   borrowed
 *  @return    F32 [head_dim_v, n_heads, n_tokens], contiguous; NULL if an argument does not fit
 *             (the run then fails with CELLKV_ERROR_BAD_GRAPH and says which)
 */
CELLKV_API struct ggml_tensor *cellkv_attend(cellkv_graph *graph, int32_t layer,
                                             struct ggml_tensor *q, struct ggml_tensor *k,
                                             struct ggml_tensor *v,
                                             const cellkv_attend_params *params);

/* ---- executors ---- */

/** An executor. Opaque; made by cellkv_executor_new. */
typedef struct cellkv_executor cellkv_executor;

/** How attention is computed. */
typedef enum cellkv_strategy {
    CELLKV_STRATEGY_AUTO = 0,  /* ragged where it can be, else dense */
    CELLKV_STRATEGY_DENSE = 1, /* ggml's flash attention with a mask: sequences whose cells are
                                  in blocks of their own are attended apart, where cells mix a query
                                  pays for those of all. On any device that has the op */
    CELLKV_STRATEGY_RAGGED = 2 /* a query reads the cells it sees and no others, and cells that
                                  several queries see are read once for each 32 of them. On the CPU,
                                  for head widths that are multiples of 8 */
} cellkv_strategy;

/** The instructions that strategy ragged uses. */
typedef enum cellkv_isa {
    CELLKV_ISA_BEST = 0,   /* the best that this build has and this CPU can run */
    CELLKV_ISA_C = 1,      /* portable C */
    CELLKV_ISA_AVX2 = 2,   /* x86-64 with AVX2, FMA and F16C */
    CELLKV_ISA_AVX512 = 3, /* x86-64 with AVX-512 F, BW, DQ and VL */
    CELLKV_ISA_NEON = 4    /* aarch64 */
} cellkv_isa;

/** What cellkv_executor_new makes. Start from cellkv_executor_config_default(). */
typedef struct cellkv_executor_config {
    size_t size;                   /* sizeof(cellkv_executor_config) */
    const cellkv_program *program; /* copied; its context is retained */
    cellkv_cache *cache;           /* the cache; NULL: `cache_key` names it. A reference is taken */
    int64_t cache_key;             /* key of a published cache; 0: `cache` is given */
    cellkv_strategy strategy;
    cellkv_isa isa;     /* what strategy ragged uses, refused if it cannot; dense ignores it */
    int32_t n_threads;  /* of the CPU device, 1 .. 512; 0: one per core, at most 16 */
    int32_t max_batch;  /* tokens computed at once, >= 1: a wider step goes in slices. Kind sequence
                           with windows: more than the cache's max_step does no more than that */
    int32_t max_graphs; /* graphs kept, >= 1: the least recently used goes first */
    bool reuse_graphs;  /* false: a graph is built for each run. Same results, bit for bit */
    bool (*should_abort)(void *context); /* asked between a running graph's nodes, by any thread:
                                            true stops the run; may be NULL */
    void *abort_context;
} cellkv_executor_config;

/** A configuration with strategy auto, the best isa, a thread per core, 512 tokens at once, 32
 * graphs kept.
 *
 *  Threads: any.
 */
CELLKV_API cellkv_executor_config cellkv_executor_config_default(void);

/** Makes an executor of a program over a cache. It computes on the devices that hold the cache's
 *  rows, each layer on its own, and on the CPU what they cannot do. Attention, and what the program
 *  attends over, must be possible there: a program that reads weights on any other device is
 *  refused when it first runs.
 *
 *  @param config     borrowed
 *  @param executor   receives the executor, the caller's to free
 *  @return    CELLKV_OK;
 *             CELLKV_ERROR_INVALID_ARGUMENT: NULL, a wrong `size`, or a field outside its range;
 *             CELLKV_ERROR_UNKNOWN_KEY: cache_key names no cache;
 *             CELLKV_ERROR_NO_STORAGE: the cache has no rows (backend "cells");
 *             CELLKV_ERROR_MISMATCH: the cache's layers are not the program's (the message names
 *             the layer and both shapes);
 *             CELLKV_ERROR_UNSUPPORTED: the strategy cannot attend on this device over a layer of
 *             these types and widths (the message names layer, device and types); or this build or
 *             CPU has no such isa;
 *             CELLKV_ERROR_OUT_OF_MEMORY
 *  On failure: *executor is unchanged.  Threads: any.
 */
CELLKV_API cellkv_status cellkv_executor_new(const cellkv_executor_config *config,
                                             cellkv_executor **executor);

/** Frees the executor, its graphs and its references; NULL is fine.
 *
 *  @pre       no call on it is running
 */
CELLKV_API void cellkv_executor_free(cellkv_executor *executor);

/** What becomes of the results of a step's outputs. */
typedef enum cellkv_pooling {
    CELLKV_POOLING_NONE = 0, /* each is a result row */
    CELLKV_POOLING_MEAN = 1 /* each sequence's are averaged: a result row for each sequence that has
                               any, in the order in which they first appear in `outputs` */
} cellkv_pooling;

/** One step: the tokens of one forward, flat on one axis. */
typedef struct cellkv_step {
    int32_t n_tokens;         /* >= 1 */
    int32_t n_outputs;        /* >= 0 */
    const int32_t *tokens;    /* [n_tokens], each in [0, n_vocab) */
    const int64_t *seqs;      /* [n_tokens] handles: declares the step first, replacing a
                                 declaration; NULL: the control plane has declared it */
    const int32_t *positions; /* [n_tokens]; NULL: each token continues its sequence */
    const int32_t *outputs;   /* [n_outputs] indices of tokens whose result is wanted, any order */
    cellkv_pooling pooling;
} cellkv_step;

/** Runs a step: places its tokens, grows the rows if needed, computes, reads out the results asked
 *  for.
 *
 *  @param step      borrowed
 *  @param results   [n_outputs * n_result] floats, receives result rows in the order of `outputs`
 *                   (with pooling: a row for each sequence among them, and
 *                   no more is touched); may be NULL when n_outputs
 *                   is 0. Unspecified on failure
 *  @param n_done    receives how many of the step's tokens have been computed (all, on success);
 *                   may be NULL
 *  @return    CELLKV_OK; before any compute:
 *             CELLKV_ERROR_INVALID_ARGUMENT: NULL, negative counts, an output outside the
 *             step, a pooling that is none;
 *             CELLKV_ERROR_BAD_TOKEN (the message names it);
 *             CELLKV_ERROR_EMPTY_STEP, CELLKV_ERROR_UNKNOWN_SEQUENCE, CELLKV_ERROR_OUT_OF_CELLS: as
 *             cellkv_cache_declare; CELLKV_ERROR_NOT_DECLARED, CELLKV_ERROR_BAD_POSITION: as
 *             cellkv_cache_place; CELLKV_ERROR_BUSY: the cache or the executor is in use;
 *             CELLKV_ERROR_OUT_OF_MEMORY: rows or a graph could not be allocated;
 *             CELLKV_ERROR_BAD_GRAPH, or the status that the program's build returned;
 *             during compute:
 *             CELLKV_ERROR_ABORTED; CELLKV_ERROR_COMPUTE; or, from the second slice on, those above
 *  On failure before compute: cells, sequences and declaration are as before the call (rows may
 *  have grown). Once compute has begun the step's cells stay claimed: call cellkv_cache_undo_step,
 *  then run again (kind sequence with rings, a step wider than max_step: undo from n_done on, and
 *  run the rest). *n_done tells the two apart only for slices; cellkv_cache_undo_step's answer
 *  always does.
 *  Cost: the forward; bookkeeping O(n_tokens + cells seen).  Threads: one caller at a time; refused
 *  with CELLKV_ERROR_BUSY otherwise.
 */
CELLKV_API cellkv_status cellkv_executor_run(cellkv_executor *executor, const cellkv_step *step,
                                             float *results, int32_t *n_done);

/** Asks the step that runs now to stop; without one, does nothing. The run then returns
 *  CELLKV_ERROR_ABORTED, unless it was already past its last node.
 *
 *  @return    CELLKV_OK; CELLKV_ERROR_INVALID_ARGUMENT: NULL
 *  Threads: any, also while a run is in progress.
 */
CELLKV_API cellkv_status cellkv_executor_abort(cellkv_executor *executor);

/** An executor's figures, counted since it was made unless said otherwise. */
typedef struct cellkv_executor_stats {
    size_t size;      /* set to sizeof(cellkv_executor_stats) by the caller */
    int64_t n_steps;  /* steps run to their end */
    int64_t n_tokens; /* tokens computed */
    int64_t n_graphs_built;
    int64_t n_graphs_reused;     /* runs of a graph that was there already */
    int64_t n_graphs_kept;       /* now */
    int64_t graph_bytes;         /* memory of the graphs kept now: nodes and compute buffers */
    int64_t n_attention_strayed; /* attention nodes that ran elsewhere than on the rows' device */
    int64_t n_row_growths;       /* times the cache's rows grew in this executor's steps */
    int64_t step_us;             /* microseconds spent in steps, failed ones included, */
    int64_t compute_us;          /* and the part of them in which the graphs were computed */
    cellkv_strategy strategy;    /* in use: never AUTO */
    cellkv_isa isa;              /* in use by strategy ragged: never BEST; dense: BEST */
    int32_t n_threads;           /* in use */
} cellkv_executor_stats;

/** Reads the executor's figures.
 *
 *  @param stats   its `size` must be set
 *  @return    CELLKV_OK; CELLKV_ERROR_INVALID_ARGUMENT: NULL or a wrong size; CELLKV_ERROR_BUSY
 *  Threads: one caller at a time.
 */
CELLKV_API cellkv_status cellkv_executor_get_stats(cellkv_executor *executor,
                                                   cellkv_executor_stats *stats);

#ifdef __cplusplus
}
#endif

#endif
