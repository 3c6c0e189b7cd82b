/* A program of one's own: a model is whatever builds a ggml graph. This one is a decoder of one
 * layer with random weights; it answers two sequences in one forward, then each one alone.
 *
 *     ./program
 *
 * It calls ggml itself, so it is linked with the shared ggml that cellkv's pkg-config file names.
 */
#include <cellkv/cellkv.h>
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N_VOCAB = 32, N_HEADS = 4, N_KV_HEADS = 2, HEAD_DIM = 32, N_EMBD = N_HEADS * HEAD_DIM };

struct decoder {
    struct ggml_tensor *embedding, *q, *k, *v, *out;
};

static void check(cellkv_status status) {
    if (status != CELLKV_OK) {
        fprintf(stderr, "%s: %s\n", cellkv_status_text(status), cellkv_last_error());
        exit(1);
    }
}

/* A projection of the tokens' states to heads with rotary positions: [HEAD_DIM, heads, tokens]. */
static struct ggml_tensor *heads(cellkv_graph *graph, struct ggml_tensor *weight,
                                 struct ggml_tensor *x, bool rotate) {
    struct ggml_context *context = cellkv_graph_context(graph);
    struct ggml_tensor *y = ggml_mul_mat(context, weight, x);
    y = ggml_reshape_3d(context, y, HEAD_DIM, weight->ne[1] / HEAD_DIM, x->ne[1]);
    return rotate ? ggml_rope(context, y, cellkv_graph_positions(graph), HEAD_DIM, 0) : y;
}

/* The forward, for as many tokens as the graph says: a residual block, then logits. */
static cellkv_status build(void *data, cellkv_graph *graph) {
    const struct decoder *decoder = data;
    struct ggml_context *context = cellkv_graph_context(graph);
    struct ggml_tensor *x = ggml_get_rows(context, decoder->embedding, cellkv_graph_tokens(graph));
    struct ggml_tensor *y = ggml_rms_norm(context, x, 1e-5f);
    y = cellkv_attend(graph, 0, heads(graph, decoder->q, y, true),
                      heads(graph, decoder->k, y, true), heads(graph, decoder->v, y, false),
                      &(cellkv_attend_params){.scale = 1.0f / sqrtf(HEAD_DIM)});
    if (y == NULL) {
        return CELLKV_ERROR_BAD_GRAPH;
    }
    if (cellkv_graph_n_outputs(graph) == 0) {
        return CELLKV_OK;
    }
    x = ggml_add(
        context, x,
        ggml_mul_mat(context, decoder->out, ggml_reshape_2d(context, y, N_EMBD, x->ne[1])));
    x = ggml_get_rows(context, x, cellkv_graph_outputs(graph));
    cellkv_graph_set_result(graph, ggml_mul_mat(context, decoder->embedding, x));
    return CELLKV_OK;
}

/* ---- weights ---- */

static struct ggml_tensor *new_matrix(struct ggml_context *context, int64_t n_in, int64_t n_out) {
    return ggml_new_tensor_2d(context, GGML_TYPE_F32, n_in, n_out);
}

static void fill(struct ggml_tensor *matrix) {
    static uint32_t state = 1;
    const int64_t n = ggml_nelements(matrix);
    float *values = malloc((size_t)n * sizeof *values);
    for (int64_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = ((float)(state >> 8) / (1 << 24) - 0.5f) / sqrtf((float)matrix->ne[0] / 12);
    }
    ggml_backend_tensor_set(matrix, values, 0, ggml_nbytes(matrix));
    free(values);
}

/* ---- two sequences, together and apart ---- */

static cellkv_executor *new_executor(const cellkv_program *program, cellkv_cache *cache) {
    cellkv_executor *executor = NULL;
    cellkv_executor_config config = cellkv_executor_config_default();
    config.program = program;
    config.cache = cache;
    check(cellkv_executor_new(&config, &executor));
    return executor;
}

static cellkv_cache *new_cache(const cellkv_layer *layer) {
    cellkv_cache *cache = NULL;
    cellkv_cache_config config = cellkv_cache_config_default();
    config.n_layers = 1;
    config.layers = layer;
    config.device = "CPU";
    check(cellkv_cache_new(&config, &cache));
    return cache;
}

static void compare(cellkv_executor *executor, cellkv_cache *cache) {
    int64_t a = 0, b = 0, c = 0;
    float together[2 * N_VOCAB], apart[N_VOCAB], largest = 0.0f, difference = 0.0f;
    check(cellkv_cache_open(cache, &a));
    check(cellkv_cache_open(cache, &b));
    check(cellkv_cache_open(cache, &c));
    const cellkv_step both = {.n_tokens = 5,
                              .tokens = (int32_t[]){3, 7, 1, 8, 4},
                              .seqs = (int64_t[]){a, b, a, b, a},
                              .n_outputs = 2,
                              .outputs = (int32_t[]){4, 3}};
    const cellkv_step alone[2] = {{.n_tokens = 3,
                                   .tokens = (int32_t[]){3, 1, 4},
                                   .seqs = (int64_t[]){c, c, c},
                                   .n_outputs = 1,
                                   .outputs = (int32_t[]){2}},
                                  {.n_tokens = 2,
                                   .tokens = (int32_t[]){7, 8},
                                   .seqs = (int64_t[]){c, c},
                                   .n_outputs = 1,
                                   .outputs = (int32_t[]){1}}};
    check(cellkv_executor_run(executor, &both, together, NULL));
    for (int i = 0; i < 2; i++) {
        check(cellkv_cache_rewind(cache, c, 0));
        check(cellkv_executor_run(executor, &alone[i], apart, NULL));
        for (int j = 0; j < N_VOCAB; j++) {
            largest = fmaxf(largest, fabsf(apart[j]));
            difference = fmaxf(difference, fabsf(together[i * N_VOCAB + j] - apart[j]));
        }
    }
    printf("logits are within %g; together and apart they differ by at most %g\n", (double)largest,
           (double)difference);
}

int main(void) {
    struct ggml_context *context = ggml_init(
        (struct ggml_init_params){.mem_size = 8 * ggml_tensor_overhead(), .no_alloc = true});
    struct decoder decoder = {
        .embedding = new_matrix(context, N_EMBD, N_VOCAB),
        .q = new_matrix(context, N_EMBD, N_HEADS * HEAD_DIM),
        .k = new_matrix(context, N_EMBD, N_KV_HEADS * HEAD_DIM),
        .v = new_matrix(context, N_EMBD, N_KV_HEADS * HEAD_DIM),
        .out = new_matrix(context, N_EMBD, N_EMBD),
    };
    ggml_backend_buffer_t weights = ggml_backend_alloc_ctx_tensors_from_buft(
        context, ggml_backend_dev_buffer_type(ggml_backend_dev_by_name("CPU")));
    for (struct ggml_tensor *t = ggml_get_first_tensor(context); t != NULL;
         t = ggml_get_next_tensor(context, t)) {
        fill(t);
    }
    const cellkv_layer layer = {.n_kv_heads = N_KV_HEADS,
                                .head_dim_k = HEAD_DIM,
                                .head_dim_v = HEAD_DIM,
                                .type_k = CELLKV_TYPE_F32,
                                .type_v = CELLKV_TYPE_F32};
    const cellkv_program program = {.size = sizeof program,
                                    .context = &decoder,
                                    .n_vocab = N_VOCAB,
                                    .n_result = N_VOCAB,
                                    .n_layers = 1,
                                    .layers = &layer,
                                    .build = build};

    cellkv_cache *cache = new_cache(&layer);
    cellkv_executor *executor = new_executor(&program, cache);
    compare(executor, cache);

    cellkv_executor_free(executor);
    cellkv_cache_free(cache);
    ggml_backend_buffer_free(weights);
    ggml_free(context);
    return 0;
}
