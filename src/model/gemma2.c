/* The architecture "gemma2": Gemma 2. Every other layer has a window; scores and logits have soft
 * caps. */
#include "architecture.h"
#include "blocks.h"
#include "gemma.h"

static const struct ck_gemma gemma2 = {.period = 2, .window = 4096, .n_layers_of_largest = 46};

static void read(struct ck_decoder *decoder, struct ck_metadata *metadata) {
    ck_gemma_read(decoder, metadata, &gemma2);
    const float soft_cap = ck_decoder_read_soft_cap(metadata, "attn_logit_softcapping", 50.0f);
    decoder->logit_soft_cap = ck_decoder_read_soft_cap(metadata, "final_logit_softcapping", 30.0f);
    for (int32_t l = 0; l < decoder->n_layers && metadata->status == CELLKV_OK; l++) {
        decoder->layers[l].attention.soft_cap = soft_cap;
    }
}

const struct ck_architecture ck_architecture_gemma2 = {
    .name = "gemma2",
    .read = read,
    .want = ck_gemma_want,
    .build = ck_build_forward,
};
