/* An architecture: what it reads, which weights it wants, how its forward goes. Each is one file
 * over the pieces in decoder.h and blocks.h. */
#ifndef CELLKV_MODEL_ARCHITECTURE_H
#define CELLKV_MODEL_ARCHITECTURE_H

#include <cellkv/executor.h>
#include <cellkv/model.h>

#include "decoder.h"
#include "metadata.h"
#include "weights.h"

struct ck_architecture {
    const char *name; /* general.architecture, and the prefix of its keys */

    /* Fills the decoder's hyperparameters; failures stay in metadata->status. What it allocates,
     * ck_decoder_free frees. */
    void (*read)(struct ck_decoder *decoder, struct ck_metadata *metadata);

    /* Wants every weight that `build` uses; failures stay in weights->status. */
    void (*want)(struct ck_decoder *decoder, struct ck_weights *weights);

    /* A program's build (executor.h). */
    cellkv_status (*build)(const struct ck_decoder *decoder, cellkv_output output,
                           cellkv_graph *graph);
};

extern const struct ck_architecture ck_architecture_llama;
extern const struct ck_architecture ck_architecture_gemma2;
extern const struct ck_architecture ck_architecture_gemma3;
extern const struct ck_architecture ck_architecture_qwen2;
extern const struct ck_architecture ck_architecture_qwen3;
extern const struct ck_architecture ck_architecture_qwen3moe;

/* The architecture of this name. Returns CELLKV_OK or CELLKV_ERROR_UNKNOWN_ARCHITECTURE. */
cellkv_status ck_architecture_find(const char *name, const struct ck_architecture **found);

#endif
