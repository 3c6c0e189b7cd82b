#include "gemma.h"

#include <math.h>

static void read_scale(struct ck_decoder *decoder, struct ck_metadata *metadata,
                       const struct ck_gemma *gemma) {
    const struct ck_attention *first = &decoder->layers[0].attention;
    float scale = first->scale;
    if (decoder->n_layers == gemma->n_layers_of_largest) {
        scale = 1.0f / sqrtf((float)decoder->n_embd / (float)first->n_heads);
    }
    scale = ck_metadata_float_or(metadata, "attention.scale", 1e-9f, 1e9f, scale);
    for (int32_t l = 0; l < decoder->n_layers; l++) {
        decoder->layers[l].attention.scale = scale;
    }
}

static void set_windows(struct ck_decoder *decoder, const struct ck_metadata *metadata,
                        int32_t window) {
    if (!ck_metadata_has(metadata, "attention.sliding_window")) {
        for (int32_t l = 0; l < decoder->n_layers; l++) {
            decoder->layers[l].attention.window = window;
        }
    }
}

void ck_gemma_read(struct ck_decoder *decoder, struct ck_metadata *metadata,
                   const struct ck_gemma *gemma) {
    ck_decoder_read(decoder, metadata, GGML_ROPE_TYPE_NEOX);
    ck_decoder_read_feed_forward(decoder, metadata, CK_ACTIVATION_GELU);
    if (metadata->status != CELLKV_OK) {
        return;
    }
    set_windows(decoder, metadata, gemma->window);
    ck_decoder_read_window_pattern(decoder, metadata, gemma->period);
    read_scale(decoder, metadata, gemma);
    decoder->embedding_scale = sqrtf((float)decoder->n_embd);
}

void ck_gemma_want(struct ck_decoder *decoder, struct ck_weights *weights) {
    ck_decoder_want_ends(decoder, weights);
    for (int32_t l = 0; l < decoder->n_layers; l++) {
        ck_decoder_want_attention(decoder, weights, l);
        ck_decoder_want_feed_forward(decoder, weights, l);
        ck_decoder_want_post_norms(decoder, weights, l);
    }
}
