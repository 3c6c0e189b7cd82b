/* The architecture "llama": Llama 2 and 3, Mistral, SmolLM2 and what else is converted to it.
 * Pre-norm layers of grouped-query attention with rotary positions in neighbouring pairs, and a
 * SiLU-gated feed-forward. */
#include "architecture.h"
#include "blocks.h"

static void read(struct ck_decoder *decoder, struct ck_metadata *metadata) {
    if (ck_metadata_int_or(metadata, "expert_count", 0, INT32_MAX, 0) > 0) {
        ck_metadata_refuse(metadata, "expert_count", "mixtures of experts are unsupported");
    }
    if (!ck_metadata_bool_or(metadata, "attention.causal", true)) {
        ck_metadata_refuse(metadata, "attention.causal", "only causal attention is supported");
    }
    ck_decoder_read(decoder, metadata, GGML_ROPE_TYPE_NORMAL);
}

/* One table of frequency factors serves every layer. */
static void want_rope_factors(struct ck_decoder *decoder, struct ck_weights *weights) {
    for (int32_t l = 0; l < decoder->n_layers; l++) {
        struct ck_rope *rope = &decoder->layers[l].attention.rope;
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

static cellkv_status build(const struct ck_decoder *decoder, cellkv_graph *graph) {
    const struct ck_forward forward = {decoder, graph, cellkv_graph_context(graph)};
    struct ggml_tensor *x = ck_embed(&forward);
    for (int32_t l = 0; l < decoder->n_layers; l++) {
        const struct ck_layer *layer = &decoder->layers[l];
        struct ggml_tensor *y = ck_rms_norm(&forward, x, layer->attention.norm);
        y = ck_attention_heads(&forward, l, y);
        if (y == NULL) {
            return CELLKV_ERROR_BAD_GRAPH;
        }
        if (ck_ends_at(&forward, l)) {
            return CELLKV_OK;
        }
        x = ck_keep_outputs(&forward, l, x);
        y = ck_apply_linear(&forward, &layer->attention.out, ck_keep_outputs(&forward, l, y));
        x = ggml_add(forward.context, x, y);
        y = ck_rms_norm(&forward, x, layer->feed_forward.norm);
        y = ck_gated_feed_forward(&forward, &layer->feed_forward, y);
        x = ggml_add(forward.context, x, y);
    }
    ck_finish(&forward, x);
    return CELLKV_OK;
}

const struct ck_architecture ck_architecture_llama = {
    .name = "llama",
    .read = read,
    .want = want,
    .build = build,
};
