/* The architecture "llama": Llama 2 and 3, Mistral, SmolLM2 and what else is converted to it.
 * Pre-norm layers of grouped-query attention with rotary positions in neighbouring pairs, and a
 * SiLU-gated feed-forward. */
#include "architecture.h"
#include "blocks.h"

static void read(struct ck_decoder *decoder, struct ck_metadata *metadata) {
    ck_decoder_read(decoder, metadata, GGML_ROPE_TYPE_NORMAL);
    ck_decoder_read_feed_forward(decoder, metadata, CK_ACTIVATION_SILU);
}

/* One table of frequency factors serves every layer. */
static void want_rope_factors(struct ck_decoder *decoder, struct ck_weights *weights) {
    for (int32_t l = 0; l < decoder->n_layers; l++) {
        struct ck_rope *rope = &decoder->layers[l].attention.rope;
        weights->layer = l;
        ck_want_optional(weights, &rope->factors, CK_USE_VECTOR, rope->n_dims / 2, 1,
                         "rope_freqs.weight");
    }
}

static void want(struct ck_decoder *decoder, struct ck_weights *weights) {
    ck_decoder_want_ends(decoder, weights);
    want_rope_factors(decoder, weights);
    for (int32_t l = 0; l < decoder->n_layers; l++) {
        ck_decoder_want_attention(decoder, weights, l);
        ck_decoder_want_feed_forward(decoder, weights, l);
        ck_ignore(weights, "blk.%d.attn_rot_embd.weight", l); /* old files: what rope computes */
    }
}

const struct ck_architecture ck_architecture_llama = {
    .name = "llama",
    .read = read,
    .want = want,
    .build = ck_build_forward,
};
