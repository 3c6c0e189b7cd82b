/* A prompt computed once; sequences that share its cells, decoded together, one forward a step.
 *
 *     ./shared_prefix SmolLM2-135M-Instruct.gguf
 *
 * The C library takes and gives tokens; these are SmolLM2's. The Python package has a tokenizer. */
#include <cellkv/cellkv.h>
#include <stdio.h>
#include <stdlib.h>

enum { N_PROMPT = 17, N_SEQS = 3 };

/* "The capital of Sweden is Stockholm. The capital of Norway is Oslo. The capital of" */
static const int32_t prompt[N_PROMPT] = {504, 3575,  282, 12598, 314, 31473, 30,   378, 3575,
                                         282, 14197, 314, 41730, 30,  378,   3575, 282};
enum { FRANCE = 4649, EGYPT = 4754, JAPAN = 3085, GREECE = 10040, CUBA = 15553 };

static void check(cellkv_status status) {
    if (status != CELLKV_OK) {
        fprintf(stderr, "%s: %s\n", cellkv_status_text(status), cellkv_last_error());
        exit(1);
    }
}

/* Steps of one token per sequence: tokens[i] continues seqs[i] and becomes the likeliest next. */
static void decode(cellkv_executor *executor, int32_t n_vocab, int n_steps, int32_t n_seqs,
                   const int64_t *seqs, int32_t *tokens) {
    static const int32_t outputs[N_SEQS] = {0, 1, 2}; /* all */
    float *logits = malloc(sizeof *logits * (size_t)n_vocab * (size_t)n_seqs);
    for (int step = 0; step < n_steps; step++) {
        const cellkv_step tokens_of_all = {.n_tokens = n_seqs,
                                           .tokens = tokens,
                                           .seqs = seqs,
                                           .n_outputs = n_seqs,
                                           .outputs = outputs};
        check(cellkv_executor_run(executor, &tokens_of_all, logits, NULL));
        for (int32_t i = 0; i < n_seqs; i++) {
            const float *row = logits + (size_t)i * (size_t)n_vocab;
            tokens[i] = 0;
            for (int32_t token = 1; token < n_vocab; token++) {
                tokens[i] = row[token] > row[tokens[i]] ? token : tokens[i];
            }
            printf("%8d", (int)tokens[i]);
        }
        printf("\n");
    }
    free(logits);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL.gguf\n", argv[0]);
        return 2;
    }
    cellkv_model *model = NULL;
    cellkv_program program;
    check(cellkv_model_load(argv[1], NULL, &model));
    check(cellkv_model_program(model, CELLKV_OUTPUT_LOGITS, &program));

    cellkv_cache *cache = NULL;
    cellkv_cache_config cache_config = cellkv_cache_config_default();
    check(cellkv_model_new_cache(model, &cache_config, CELLKV_TYPE_F16, CELLKV_TYPE_F16, &cache));

    cellkv_executor *executor = NULL;
    cellkv_executor_config config = cellkv_executor_config_default();
    config.program = &program;
    config.cache = cache;
    check(cellkv_executor_new(&config, &executor));

    /* The prompt is computed once; nobody needs its logits. */
    int64_t owner[N_PROMPT];
    check(cellkv_cache_open(cache, &owner[0]));
    for (int i = 1; i < N_PROMPT; i++) {
        owner[i] = owner[0];
    }
    const cellkv_step prefill = {.n_tokens = N_PROMPT, .tokens = prompt, .seqs = owner};
    check(cellkv_executor_run(executor, &prefill, NULL, NULL));

    /* Three sequences share its cells: each costs the cells of its own tokens alone. */
    int64_t seqs[N_SEQS];
    for (int i = 0; i < N_SEQS; i++) {
        check(cellkv_cache_clone(cache, owner[0], CELLKV_UNSET, &seqs[i]));
    }
    int32_t tokens[N_SEQS] = {FRANCE, EGYPT, JAPAN};
    decode(executor, program.n_vocab, 3, N_SEQS, seqs, tokens);

    /* The second goes back to the prompt's end; the third ends, another takes its place. */
    check(cellkv_cache_rewind(cache, seqs[1], N_PROMPT));
    check(cellkv_cache_close(cache, seqs[2]));
    check(cellkv_cache_clone(cache, owner[0], CELLKV_UNSET, &seqs[2]));
    tokens[1] = GREECE;
    tokens[2] = CUBA;
    decode(executor, program.n_vocab, 3, 2, seqs + 1, tokens + 1);

    cellkv_cache_stats stats = {.size = sizeof stats};
    check(cellkv_cache_get_stats(cache, &stats));
    printf("%d cells in use, by sequences that own %d\n", (int)stats.used_cells,
           (int)stats.owned_cells);

    cellkv_executor_free(executor);
    cellkv_cache_free(cache);
    cellkv_model_free(model);
    return 0;
}
