/* A model whose weights, K/V rows and attention are on the devices that the command line names.
 *
 *     ./devices SmolLM2-135M-Instruct.gguf rpc://127.0.0.1:50052,rpc://127.0.0.1:50053 */
#include <cellkv/cellkv.h>
#include <stdio.h>
#include <stdlib.h>

static void check(cellkv_status status) {
    if (status != CELLKV_OK) {
        fprintf(stderr, "%s: %s\n", cellkv_status_text(status), cellkv_last_error());
        exit(1);
    }
}

int main(int argc, char **argv) {
    if (argc != 2 && argc != 3) {
        fprintf(stderr, "usage: %s MODEL.gguf [DEVICES]\ndevices of this machine:\n", argv[0]);
        for (int32_t i = 0; i < cellkv_device_count(); i++) {
            fprintf(stderr, "  %s\n", cellkv_device_name(i));
        }
        return 2;
    }
    cellkv_model_config model_config = cellkv_model_config_default();
    model_config.device = argc == 3 ? argv[2] : NULL; /* NULL: the best one */
    cellkv_model *model = NULL;
    cellkv_program program;
    check(cellkv_model_load(argv[1], &model_config, &model));
    check(cellkv_model_program(model, CELLKV_OUTPUT_LOGITS, &program));

    /* Its config names no device: each layer's rows are where its weights are. */
    cellkv_cache *cache = NULL;
    cellkv_cache_config cache_config = cellkv_cache_config_default();
    cache_config.capacity = 256;
    check(cellkv_model_new_cache(model, &cache_config, CELLKV_TYPE_F16, CELLKV_TYPE_F16, &cache));

    cellkv_executor *executor = NULL;
    cellkv_executor_config config = cellkv_executor_config_default();
    config.program = &program;
    config.cache = cache;
    check(cellkv_executor_new(&config, &executor));

    enum { N_PROMPT = 5 };
    static const int32_t prompt[N_PROMPT] = {504, 3575, 282, 14197, 314}; /* of SmolLM2 */
    int64_t seqs[N_PROMPT];
    check(cellkv_cache_open(cache, &seqs[0]));
    for (int i = 1; i < N_PROMPT; i++) {
        seqs[i] = seqs[0];
    }
    const int32_t last = N_PROMPT - 1;
    const cellkv_step step = {
        .n_tokens = N_PROMPT, .tokens = prompt, .seqs = seqs, .n_outputs = 1, .outputs = &last};
    float *logits = malloc(sizeof *logits * (size_t)program.n_vocab);
    check(cellkv_executor_run(executor, &step, logits, NULL));
    int32_t best = 0;
    for (int32_t token = 1; token < program.n_vocab; token++) {
        best = logits[token] > logits[best] ? token : best;
    }
    printf("the likeliest next token is %d\n", (int)best);

    free(logits);
    cellkv_executor_free(executor);
    cellkv_cache_free(cache);
    cellkv_model_free(model);
    return 0;
}
