/* Programs that do with attention's result what programs may: read it again, and give it out. */
#include <math.h>

#include <cellkv/cellkv.h>
#include <ggml.h>

#include "check.h"

enum { N_VOCAB = 8, WIDTH = 32, N_LAYERS = 2, N_TOKENS = 6 };

static const cellkv_layer layers[N_LAYERS] = {
    {.n_kv_heads = 1, .head_dim_k = WIDTH, .head_dim_v = WIDTH},
    {.n_kv_heads = 1, .head_dim_k = WIDTH, .head_dim_v = WIDTH},
};

/* tokens as floats, spread over one head: no weights are needed */
static struct ggml_tensor *embed(struct ggml_context *context, cellkv_graph *graph) {
    struct ggml_tensor *x = ggml_cast(context, cellkv_graph_tokens(graph), GGML_TYPE_F32);
    x = ggml_reshape_3d(context, x, 1, 1, cellkv_graph_n_tokens(graph));
    return ggml_sin(context, ggml_repeat_4d(context, x, WIDTH, 1, x->ne[2], 1));
}

/* The result is the first layer's attention itself, which the second layer goes on with. */
static cellkv_status build(void *context, cellkv_graph *graph) {
    (void)context;
    struct ggml_context *tensors = cellkv_graph_context(graph);
    const cellkv_attend_params params = {.scale = 0.1f};
    struct ggml_tensor *x = embed(tensors, graph);
    struct ggml_tensor *first = cellkv_attend(graph, 0, x, x, x, &params);
    if (first == NULL) {
        return CELLKV_ERROR_BAD_GRAPH;
    }
    cellkv_graph_set_result(graph, first); /* one head: [WIDTH, 1, n_tokens] */
    struct ggml_tensor *y = ggml_scale(tensors, first, 1000.0f);
    y = ggml_sin(tensors, y);
    return cellkv_attend(graph, 1, y, y, y, &params) ? CELLKV_OK : CELLKV_ERROR_BAD_GRAPH;
}

static const cellkv_program program = {
    .size = sizeof(cellkv_program),
    .n_vocab = N_VOCAB,
    .n_result = WIDTH,
    .n_layers = N_LAYERS,
    .layers = layers,
    .build = build,
};

static void run(cellkv_strategy strategy, float *results) {
    cellkv_cache_config cache_config = cellkv_cache_config_default();
    cache_config.n_layers = N_LAYERS;
    cache_config.layers = layers;
    cellkv_cache *cache = NULL;
    CHECK_OK(cellkv_cache_new(&cache_config, &cache));
    cellkv_executor_config config = cellkv_executor_config_default();
    config.program = &program;
    config.cache = cache;
    config.strategy = strategy;
    config.n_threads = 2;
    cellkv_executor *executor = NULL;
    CHECK_OK(cellkv_executor_new(&config, &executor));
    int64_t seqs[N_TOKENS];
    CHECK_OK(cellkv_cache_open(cache, &seqs[0]));
    for (int i = 1; i < N_TOKENS; i++) {
        seqs[i] = seqs[0];
    }
    const int32_t tokens[N_TOKENS] = {1, 5, 2, 2, 7, 3}, outputs[N_TOKENS] = {0, 1, 2, 3, 4, 5};
    const cellkv_step step = {.n_tokens = N_TOKENS,
                              .tokens = tokens,
                              .seqs = seqs,
                              .n_outputs = N_TOKENS,
                              .outputs = outputs};
    CHECK_OK(cellkv_executor_run(executor, &step, results, NULL));
    cellkv_executor_free(executor);
    cellkv_cache_free(cache);
}

static void check_attention(const float *results) {
    static const double values[N_TOKENS] = {1, 5, 2, 2, 7, 3};
    for (int i = 0; i < N_TOKENS; i++) {
        double sum = 0, weighted = 0;
        for (int j = 0; j <= i; j++) {
            const double weight = exp(0.1 * WIDTH * sin(values[i]) * sin(values[j]));
            sum += weight;
            weighted += weight * sin(values[j]);
        }
        for (int d = 0; d < WIDTH; d++) {
            CHECK(fabs((double)results[i * WIDTH + d] - weighted / sum) < 1e-5);
        }
    }
}

static void test_a_layers_attention_may_be_the_result_and_be_read_again(void) {
    float results[N_TOKENS * WIDTH];
    run(CELLKV_STRATEGY_DENSE, results);
    check_attention(results);
    run(CELLKV_STRATEGY_RAGGED, results);
    check_attention(results);
}

int main(void) {
    RUN(test_a_layers_attention_may_be_the_result_and_be_read_again);
    return 0;
}
