/* The architecture "qwen3moe": Qwen 3 with a mixture of experts. As qwen3, but for the experts in
 * place of one feed-forward. */
#include "architecture.h"
#include "blocks.h"

static void read(struct ck_decoder *decoder, struct ck_metadata *metadata) {
    ck_decoder_read(decoder, metadata, GGML_ROPE_TYPE_NEOX);
    ck_decoder_read_experts(decoder, metadata);
}

static void want(struct ck_decoder *decoder, struct ck_weights *weights) {
    ck_decoder_want_ends(decoder, weights);
    for (int32_t l = 0; l < decoder->n_layers; l++) {
        ck_decoder_want_attention(decoder, weights, l);
        ck_decoder_want_head_norms(decoder, weights, l);
        ck_decoder_want_experts(decoder, weights, l);
    }
}

const struct ck_architecture ck_architecture_qwen3moe = {
    .name = "qwen3moe",
    .read = read,
    .want = want,
    .build = ck_build_forward,
};
