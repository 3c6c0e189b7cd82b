/* The architecture "qwen2": Qwen 2 and 2.5. As llama, but for biases of q, k and v, and rotary
 * positions in pairs that lie half a head apart. */
#include "architecture.h"
#include "blocks.h"

static void read(struct ck_decoder *decoder, struct ck_metadata *metadata) {
    ck_decoder_read(decoder, metadata, GGML_ROPE_TYPE_NEOX);
    ck_decoder_read_feed_forward(decoder, metadata, CK_ACTIVATION_SILU);
}

static void want(struct ck_decoder *decoder, struct ck_weights *weights) {
    ck_decoder_want_ends(decoder, weights);
    for (int32_t l = 0; l < decoder->n_layers; l++) {
        ck_require(weights, "blk.%d.attn_q.bias", l);
        ck_require(weights, "blk.%d.attn_k.bias", l);
        ck_require(weights, "blk.%d.attn_v.bias", l);
        ck_decoder_want_attention(decoder, weights, l);
        ck_decoder_want_feed_forward(decoder, weights, l);
    }
}

const struct ck_architecture ck_architecture_qwen2 = {
    .name = "qwen2",
    .read = read,
    .want = want,
    .build = ck_build_forward,
};
