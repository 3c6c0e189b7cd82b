/* Models when there is no memory, and how long they live. */
#define _POSIX_C_SOURCE 200809L /* mkstemp */

#include <stdlib.h>
#include <unistd.h>

#include <ggml.h>
#include <gguf.h>

#include <cellkv/model.h>

#include "cells/memory.h"

#include "check.h"

enum { N_EMBD = 32, N_VOCAB = 40, N_FF = 64, N_ARRAYS = 12 };

static float weights[N_VOCAB * N_FF];

static const cellkv_model_value values[] = {
    {"general.architecture", "llama", 0, false},
    {"llama.block_count", NULL, 1, false},
    {"llama.embedding_length", NULL, N_EMBD, false},
    {"llama.feed_forward_length", NULL, N_FF, false},
    {"llama.attention.head_count", NULL, 2, false},
    {"llama.attention.layer_norm_rms_epsilon", NULL, 1e-5, true},
};
enum { N_VALUES = sizeof values / sizeof *values };

static const cellkv_model_array arrays[N_ARRAYS] = {
    {"token_embd.weight", weights, 2, {N_EMBD, N_VOCAB}},
    {"output_norm.weight", weights, 1, {N_EMBD}},
    {"output.weight", weights, 2, {N_EMBD, N_VOCAB}},
    {"blk.0.attn_norm.weight", weights, 1, {N_EMBD}},
    {"blk.0.ffn_norm.weight", weights, 1, {N_EMBD}},
    {"blk.0.attn_q.weight", weights, 2, {N_EMBD, N_EMBD}},
    {"blk.0.attn_k.weight", weights, 2, {N_EMBD, N_EMBD}},
    {"blk.0.attn_v.weight", weights, 2, {N_EMBD, N_EMBD}},
    {"blk.0.attn_output.weight", weights, 2, {N_EMBD, N_EMBD}},
    {"blk.0.ffn_gate.weight", weights, 2, {N_EMBD, N_FF}},
    {"blk.0.ffn_up.weight", weights, 2, {N_EMBD, N_FF}},
    {"blk.0.ffn_down.weight", weights, 2, {N_FF, N_EMBD}},
};

/* ---- a file of the same model: norms in f16, matrices in q4_0 ---- */

static char path[] = "/tmp/cellkv-model-XXXXXX";

static enum ggml_type file_type(const cellkv_model_array *array) {
    return array->n_dims == 1 ? GGML_TYPE_F16 : GGML_TYPE_Q4_0;
}

static void add_tensors(struct gguf_context *gguf, struct ggml_context *context) {
    for (int i = 0; i < N_ARRAYS; i++) {
        const cellkv_model_array *array = &arrays[i];
        const enum ggml_type type = file_type(array);
        struct ggml_tensor *tensor = ggml_new_tensor(context, type, array->n_dims, array->shape);
        ggml_set_name(tensor, array->name);
        const int64_t n_rows = ggml_nrows(tensor);
        ggml_quantize_chunk(type, array->data, tensor->data, 0, n_rows, array->shape[0], NULL);
        gguf_add_tensor(gguf, tensor);
    }
}

static void write_file(void) {
    const int descriptor = mkstemp(path);
    CHECK(descriptor >= 0);
    close(descriptor);
    struct gguf_context *gguf = gguf_init_empty();
    for (int i = 0; i < N_VALUES; i++) {
        if (values[i].string != NULL) {
            gguf_set_val_str(gguf, values[i].key, values[i].string);
        } else if (values[i].is_float) {
            gguf_set_val_f32(gguf, values[i].key, (float)values[i].number);
        } else {
            gguf_set_val_u32(gguf, values[i].key, (uint32_t)values[i].number);
        }
    }
    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = 1 << 20});
    add_tensors(gguf, context);
    CHECK(gguf_write_to_file(gguf, path, false));
    ggml_free(context);
    gguf_free(gguf);
}

/* ---- no memory ---- */

enum way { FROM_ARRAYS, MAPPED, READ, N_WAYS };

static cellkv_status make(enum way way, bool repack, cellkv_model **model) {
    cellkv_model_config config = cellkv_model_config_default();
    config.device = "CPU";
    config.use_mmap = way == MAPPED;
    config.repack = repack;
    if (way == FROM_ARRAYS) {
        return cellkv_model_from_arrays(values, N_VALUES, arrays, N_ARRAYS, &config, model);
    }
    return cellkv_model_load(path, &config, model);
}

#ifdef CELLKV_CHECKS

static void fail_each_allocation(enum way way, bool repack) {
    cellkv_model *model = NULL;
    int n = 0;
    for (bool failed = true; failed; n++) {
        cellkv_test_fail_allocation_after(n);
        const cellkv_status status = make(way, repack, &model);
        failed = cellkv_test_fail_allocation_after(-1);
        CHECK_EQUAL(status, failed ? CELLKV_ERROR_OUT_OF_MEMORY : CELLKV_OK);
        CHECK((model == NULL) == failed);
    }
    CHECK(n > 5);
    cellkv_model_free(model);
}

static void test_each_allocation_may_fail_while_a_model_is_made(void) {
    for (int way = 0; way < N_WAYS; way++) {
        fail_each_allocation((enum way)way, true);
        fail_each_allocation((enum way)way, false);
    }
}

static void test_making_a_cache_may_fail(void) {
    cellkv_model *model = NULL;
    CHECK_OK(make(FROM_ARRAYS, true, &model));
    const cellkv_cache_config config = cellkv_cache_config_default();
    cellkv_cache *cache = NULL;
    cellkv_test_fail_allocation_after(0);
    CHECK_EQUAL(cellkv_model_new_cache(model, &config, CELLKV_TYPE_F16, CELLKV_TYPE_F16, &cache),
                CELLKV_ERROR_OUT_OF_MEMORY);
    CHECK(cellkv_test_fail_allocation_after(-1));
    CHECK(cache == NULL);
    cellkv_model_free(model);
}

#endif

/* ---- lifetime ---- */

static void run_one_token(cellkv_executor *executor, cellkv_cache *cache) {
    int64_t seq;
    CHECK_OK(cellkv_cache_open(cache, &seq));
    const int32_t token = 3, output = 0;
    float logits[N_VOCAB];
    const cellkv_step step = {
        .n_tokens = 1, .n_outputs = 1, .tokens = &token, .seqs = &seq, .outputs = &output};
    CHECK_OK(cellkv_executor_run(executor, &step, logits, NULL));
}

static void test_executors_keep_a_model_and_its_file_alive(void) {
    cellkv_model *model = NULL;
    CHECK_OK(make(MAPPED, false, &model));
    cellkv_cache_config cache_config = cellkv_cache_config_default();
    cache_config.device = "CPU";
    cellkv_cache *cache = NULL;
    CHECK_OK(
        cellkv_model_new_cache(model, &cache_config, CELLKV_TYPE_F32, CELLKV_TYPE_F16, &cache));
    cellkv_program program;
    CHECK_OK(cellkv_model_program(model, CELLKV_OUTPUT_LOGITS, &program));
    cellkv_executor_config config = cellkv_executor_config_default();
    config.program = &program;
    config.cache = cache;
    config.n_threads = 1;
    cellkv_executor *executors[2];
    CHECK_OK(cellkv_executor_new(&config, &executors[0]));
    CHECK_OK(cellkv_executor_new(&config, &executors[1]));
    cellkv_model_free(model);
    CHECK_EQUAL(unlink(path), 0);
    run_one_token(executors[0], cache);
    cellkv_executor_free(executors[0]);
    run_one_token(executors[1], cache);
    cellkv_executor_free(executors[1]);
    cellkv_cache_free(cache);
}

int main(void) {
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
        weights[i] = 0.01f * (float)((int)(i * 7919 % 201) - 100);
    }
    write_file();
#ifdef CELLKV_CHECKS
    RUN(test_each_allocation_may_fail_while_a_model_is_made);
    RUN(test_making_a_cache_may_fail);
#endif
    RUN(test_executors_keep_a_model_and_its_file_alive);
    return 0;
}
