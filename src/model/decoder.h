/* What a decoder is made of, whatever its architecture: hyperparameters, and weights by their part
 * in the forward. An architecture (architecture.h) reads the one, lists the other and builds the
 * graph from the pieces in blocks.h. */
#ifndef CELLKV_MODEL_DECODER_H
#define CELLKV_MODEL_DECODER_H

#include <stdbool.h>
#include <stdint.h>

#include <ggml.h>

#include <cellkv/cache.h>

#include "metadata.h"
#include "weights.h"

/* Rotary positions: pair i of a head turns by position * scale / factors[i] * base^(-2i / n_dims).
 */
struct ck_rope {
    int32_t n_dims;   /* elements of a head that turn; the rest passes through */
    int32_t ordering; /* GGML_ROPE_TYPE_NORMAL: pairs are neighbours; _NEOX: halves apart */
    float base;
    float scale;                 /* 1 / the linear scaling factor */
    struct ggml_tensor *factors; /* F32 [n_dims / 2]; NULL: all 1 */
};

/* y = weight x + bias */
struct ck_linear {
    struct ggml_tensor *weight; /* [in, out] */
    struct ggml_tensor *bias;   /* [out]; NULL: none */
};

struct ck_attention {
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t head_dim_k;
    int32_t head_dim_v;
    int32_t window; /* 0: none */
    float scale;    /* of the scores */
    struct ck_rope rope;
    struct ggml_tensor *norm;
    struct ck_linear q, k, v, out;
};

struct ck_feed_forward {
    int32_t width;
    struct ggml_tensor *norm;
    struct ck_linear gate, up, down;
};

struct ck_layer {
    struct ck_attention attention;
    struct ck_feed_forward feed_forward;
};

struct ck_decoder {
    int32_t n_vocab;
    int32_t n_embd;
    int32_t n_context; /* 0: not stated */
    int32_t n_layers;
    float norm_epsilon;
    struct ck_layer *layers;       /* [n_layers] */
    struct ggml_tensor *embedding; /* [n_embd, n_vocab] */
    struct ggml_tensor *norm;
    struct ggml_tensor *head; /* [n_embd, n_vocab]; may be the embedding */
};

/* ---- hyperparameters, by the keys that GGUF gives to every architecture ---- */

/* Widths, norm, heads, windows, feed-forward and rope with its linear scaling; allocates the
 * layers. Failures stay in metadata->status. */
void ck_decoder_read(struct ck_decoder *decoder, struct ck_metadata *metadata,
                     int32_t rope_ordering);

/* ---- weights, by the names that GGUF gives to every architecture ---- */

/* token_embd, output_norm, output: without an output of its own, the head is the embedding. */
void ck_decoder_want_ends(struct ck_decoder *decoder, struct ck_weights *weights);

/* Layer l's attn_norm, attn_q, attn_k, attn_v, attn_output, with biases where the model has them.
 */
void ck_decoder_want_attention(struct ck_decoder *decoder, struct ck_weights *weights, int32_t l);

/* Layer l's ffn_norm, ffn_gate, ffn_up, ffn_down, with biases where the model has them. */
void ck_decoder_want_feed_forward(struct ck_decoder *decoder, struct ck_weights *weights,
                                  int32_t l);

void ck_decoder_free(struct ck_decoder *decoder);

#endif
