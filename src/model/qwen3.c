/* The architecture "qwen3": Qwen 3. As llama, but that each head of q and k is normalized before it
 * is turned by its position, in pairs that lie half a head apart. */
#include "architecture.h"
#include "blocks.h"

static void read(struct ck_decoder *decoder, struct ck_metadata *metadata) {
    ck_decoder_read(decoder, metadata, GGML_ROPE_TYPE_NEOX);
    ck_decoder_read_feed_forward(decoder, metadata, CK_ACTIVATION_SILU);
}

static void want(struct ck_decoder *decoder, struct ck_weights *weights) {
    ck_decoder_want_ends(decoder, weights);
    for (int32_t l = 0; l < decoder->n_layers; l++) {
        ck_decoder_want_attention(decoder, weights, l);
        ck_decoder_want_head_norms(decoder, weights, l);
        ck_decoder_want_feed_forward(decoder, weights, l);
    }
}

const struct ck_architecture ck_architecture_qwen3 = {
    .name = "qwen3",
    .read = read,
    .want = want,
    .build = ck_build_forward,
};
