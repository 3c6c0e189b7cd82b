/* The architecture "gemma3": Gemma 3, its text part. Five layers with a window to one without; the
 * two kinds turn by different bases. Each head of q and k is normalized. */
#include "architecture.h"
#include "blocks.h"
#include "gemma.h"

static const struct ck_gemma gemma3 = {.period = 6, .window = 0, .n_layers_of_largest = 62};

/* Stretched positions are for the layers that see far. */
static void read_local_rope(struct ck_decoder *decoder, struct ck_metadata *metadata) {
    const float base = ck_metadata_float_or(metadata, "rope.freq_base_swa", 1.0f, 1e30f, 10000.0f);
    for (int32_t l = 0; l < decoder->n_layers && metadata->status == CELLKV_OK; l++) {
        struct ck_attention *attention = &decoder->layers[l].attention;
        if (attention->window > 0) {
            attention->rope.base = base;
            attention->rope.scale = 1.0f;
        }
    }
}

static void read(struct ck_decoder *decoder, struct ck_metadata *metadata) {
    ck_gemma_read(decoder, metadata, &gemma3);
    read_local_rope(decoder, metadata);
    decoder->logit_soft_cap = ck_decoder_read_soft_cap(metadata, "final_logit_softcapping", 0.0f);
}

static void want(struct ck_decoder *decoder, struct ck_weights *weights) {
    ck_gemma_want(decoder, weights);
    for (int32_t l = 0; l < decoder->n_layers; l++) {
        ck_decoder_want_head_norms(decoder, weights, l);
    }
}

const struct ck_architecture ck_architecture_gemma3 = {
    .name = "gemma3",
    .read = read,
    .want = want,
    .build = ck_build_forward,
};
