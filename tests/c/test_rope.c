/* Rotary positions in both orderings, over part of a head, with factors and scaling, against their
 * definition in double precision. No file reaches all of these together. */
#include <math.h>

#include <ggml-alloc.h>
#include <ggml-backend.h>

#include "model/blocks.h"

#include "check.h"

enum { HEAD_DIM = 16, N_VOCAB = 32, N_TOKENS = 24 };

struct program {
    struct ck_decoder decoder;
    struct ck_rope rope;
    struct ggml_context *context; /* of the table and the factors */
    ggml_backend_buffer_t buffer;
};

/* One head that attends to itself; what is read out is the head after its turn. */
static cellkv_status build(void *context, cellkv_graph *graph) {
    struct program *program = context;
    const struct ck_forward forward = {&program->decoder, CELLKV_OUTPUT_LOGITS, graph,
                                       cellkv_graph_context(graph)};
    struct ggml_tensor *x = ck_embed(&forward);
    x = ggml_reshape_3d(forward.context, x, HEAD_DIM, 1, x->ne[1]);
    x = ck_apply_rope(&forward, &program->rope, x);
    const cellkv_attend_params params = {.scale = 1.0f};
    if (cellkv_attend(graph, 0, x, x, x, &params) == NULL) {
        return CELLKV_ERROR_BAD_GRAPH;
    }
    x = ggml_reshape_2d(forward.context, x, HEAD_DIM, x->ne[2]);
    cellkv_graph_set_result(graph, ggml_get_rows(forward.context, x, cellkv_graph_outputs(graph)));
    return CELLKV_OK;
}

static float element(int32_t token, int32_t i) {
    return sinf((float)(7 * token + 3 * i + 1));
}

static float factor(int32_t pair) {
    return 1.0f + 0.5f * (float)pair;
}

/* One head turned by `position`, by definition. */
static void turn(const struct ck_rope *rope, int32_t token, int32_t position, double *head) {
    const bool neighbours = rope->ordering == GGML_ROPE_TYPE_NORMAL;
    for (int32_t i = 0; i < HEAD_DIM; i++) {
        head[i] = (double)element(token, i);
    }
    for (int32_t pair = 0; pair < rope->n_dims / 2; pair++) {
        const int32_t a = neighbours ? 2 * pair : pair;
        const int32_t b = neighbours ? 2 * pair + 1 : pair + rope->n_dims / 2;
        double angle = position * (double)rope->scale;
        angle *= pow((double)rope->base, -2.0 * pair / rope->n_dims);
        angle /= rope->factors != NULL ? (double)factor(pair) : 1.0;
        const double x = head[a], y = head[b];
        head[a] = x * cos(angle) - y * sin(angle);
        head[b] = x * sin(angle) + y * cos(angle);
    }
}

static void fill(struct program *program) {
    struct ggml_tensor *factors = program->rope.factors;
    float table[N_VOCAB * HEAD_DIM];
    for (int32_t i = 0; i < N_VOCAB * HEAD_DIM; i++) {
        table[i] = element(i / HEAD_DIM, i % HEAD_DIM);
    }
    ggml_backend_tensor_set(program->decoder.embedding, table, 0, sizeof table);
    for (int32_t pair = 0; factors != NULL && pair < factors->ne[0]; pair++) {
        const float value = factor(pair);
        ggml_backend_tensor_set(factors, &value, (size_t)pair * sizeof value, sizeof value);
    }
}

static void make(struct program *program, int32_t ordering, int32_t n_dims, bool factors,
                 float scale) {
    *program = (struct program){
        .decoder = {.embedding_scale = 1.0f},
        .rope = {.n_dims = n_dims, .ordering = ordering, .base = 10000.0f, .scale = scale}};
    program->context = ggml_init((struct ggml_init_params){.mem_size = 1 << 14, .no_alloc = true});
    program->decoder.embedding =
        ggml_new_tensor_2d(program->context, GGML_TYPE_F32, HEAD_DIM, N_VOCAB);
    if (factors) {
        program->rope.factors = ggml_new_tensor_1d(program->context, GGML_TYPE_F32, n_dims / 2);
    }
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    program->buffer = ggml_backend_alloc_ctx_tensors_from_buft(program->context,
                                                               ggml_backend_dev_buffer_type(cpu));
    CHECK(program->buffer != NULL);
    fill(program);
}

static void run(struct program *program, const int32_t *tokens, float *results) {
    const cellkv_layer layer = {.n_kv_heads = 1, .head_dim_k = HEAD_DIM, .head_dim_v = HEAD_DIM};
    const cellkv_program interface = {.size = sizeof interface,
                                      .context = program,
                                      .n_vocab = N_VOCAB,
                                      .n_result = HEAD_DIM,
                                      .n_layers = 1,
                                      .layers = &layer,
                                      .build = build};
    cellkv_cache_config cache_config = cellkv_cache_config_default();
    cache_config.n_layers = 1;
    cache_config.layers = &layer;
    cache_config.device = "CPU";
    cellkv_cache *cache = NULL;
    CHECK_OK(cellkv_cache_new(&cache_config, &cache));
    cellkv_executor_config config = cellkv_executor_config_default();
    config.program = &interface;
    config.cache = cache;
    config.n_threads = 1;
    cellkv_executor *executor = NULL;
    CHECK_OK(cellkv_executor_new(&config, &executor));
    int64_t seqs[N_TOKENS];
    int32_t outputs[N_TOKENS];
    CHECK_OK(cellkv_cache_open(cache, &seqs[0]));
    for (int32_t i = 0; i < N_TOKENS; i++) {
        seqs[i] = seqs[0];
        outputs[i] = i;
    }
    const cellkv_step step = {.n_tokens = N_TOKENS,
                              .n_outputs = N_TOKENS,
                              .tokens = tokens,
                              .seqs = seqs,
                              .outputs = outputs};
    CHECK_OK(cellkv_executor_run(executor, &step, results, NULL));
    cellkv_executor_free(executor);
    cellkv_cache_free(cache);
}

static void check_rope(int32_t ordering, int32_t n_dims, bool factors, float scale) {
    struct program program;
    make(&program, ordering, n_dims, factors, scale);
    int32_t tokens[N_TOKENS];
    for (int32_t i = 0; i < N_TOKENS; i++) {
        tokens[i] = 5 * i % N_VOCAB;
    }
    float results[N_TOKENS * HEAD_DIM];
    run(&program, tokens, results);
    for (int32_t position = 0; position < N_TOKENS; position++) {
        double expected[HEAD_DIM];
        turn(&program.rope, tokens[position], position, expected);
        for (int32_t i = 0; i < HEAD_DIM; i++) {
            CHECK(fabs((double)results[position * HEAD_DIM + i] - expected[i]) < 1e-5);
        }
    }
    ggml_backend_buffer_free(program.buffer);
    ggml_free(program.context);
}

static void test_pairs_of_neighbours(void) {
    check_rope(GGML_ROPE_TYPE_NORMAL, HEAD_DIM, false, 1.0f);
    check_rope(GGML_ROPE_TYPE_NORMAL, HEAD_DIM, true, 0.25f);
    check_rope(GGML_ROPE_TYPE_NORMAL, 6, true, 1.0f);
}

static void test_pairs_of_halves(void) {
    check_rope(GGML_ROPE_TYPE_NEOX, HEAD_DIM, false, 1.0f);
    check_rope(GGML_ROPE_TYPE_NEOX, HEAD_DIM, true, 0.25f);
    check_rope(GGML_ROPE_TYPE_NEOX, 6, true, 1.0f);
}

int main(void) {
    RUN(test_pairs_of_neighbours);
    RUN(test_pairs_of_halves);
    return 0;
}
