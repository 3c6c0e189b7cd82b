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

/* The parts that not every architecture has are NULL, 0 or 1 where there are none. */
struct ck_attention {
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t head_dim_k;
    int32_t head_dim_v;
    int32_t window; /* 0: none */
    float scale;    /* of the scores */
    float soft_cap; /* of the scores; 0: none */
    struct ck_rope rope;
    struct ggml_tensor *norm;
    struct ck_linear q, k, v, out;
    struct ggml_tensor *q_norm, *k_norm; /* of each head, before rope: [head_dim_k] */
    struct ggml_tensor *post_norm;       /* of what is added to the hidden state */
};

enum ck_activation {
    CK_ACTIVATION_SILU,
    CK_ACTIVATION_GELU /* in its tanh form */
};

/* Experts: the router's matrix scores them for each token, the n_used best-scored compute, and
 * their results are weighed by the softmax of these scores among themselves. */
struct ck_experts {
    int32_t n;                  /* 0: none, the feed-forward is one gated unit */
    int32_t n_used;             /* per token, 1 .. n */
    struct ggml_tensor *router; /* [n_embd, n] */
};

struct ck_feed_forward {
    int32_t width; /* of an expert, if there are any */
    enum ck_activation activation;
    struct ggml_tensor *norm;
    struct ck_linear gate, up, down; /* of all experts: [in, out, n] */
    struct ck_experts experts;
    struct ggml_tensor *post_norm; /* of what is added to the hidden state */
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
    float embedding_scale;
    float logit_soft_cap;          /* 0: none */
    struct ck_layer *layers;       /* [n_layers] */
    struct ggml_tensor *embedding; /* [n_embd, n_vocab] */
    struct ggml_tensor *norm;
    struct ggml_tensor *head; /* [n_embd, n_vocab]; may be the embedding */
};

/* ---- hyperparameters, by the keys that GGUF gives to every architecture ---- */

/* Widths, norm, heads, windows and rope with its linear scaling; allocates the layers. Failures
 * stay in metadata->status, in all of these. */
void ck_decoder_read(struct ck_decoder *decoder, struct ck_metadata *metadata,
                     int32_t rope_ordering);

/* The width of each layer's gated unit. Experts are refused. */
void ck_decoder_read_feed_forward(struct ck_decoder *decoder, struct ck_metadata *metadata,
                                  enum ck_activation activation);

/* How many experts, how many of them per token, and their width. */
void ck_decoder_read_experts(struct ck_decoder *decoder, struct ck_metadata *metadata);

/* Takes the window away from the layers that attend globally: those that the file lists, else the
 * last of every `period`, which the file may state, too. Where the file has a window for each layer
 * and no pattern, these are left as they are. */
void ck_decoder_read_window_pattern(struct ck_decoder *decoder, struct ck_metadata *metadata,
                                    int32_t period);

/* A soft cap: finite, >= 0. */
float ck_decoder_read_soft_cap(struct ck_metadata *metadata, const char *key, float fallback);

/* ---- weights, by the names that GGUF gives to every architecture ---- */

/* token_embd with the first layer, output_norm and output with the last: without an output of its
 * own, the head is the embedding. */
void ck_decoder_want_ends(struct ck_decoder *decoder, struct ck_weights *weights);

/* Layer l's attn_norm, attn_q, attn_k, attn_v, attn_output, with biases where the model has them.
 */
void ck_decoder_want_attention(struct ck_decoder *decoder, struct ck_weights *weights, int32_t l);

/* Layer l's attn_q_norm and attn_k_norm. */
void ck_decoder_want_head_norms(struct ck_decoder *decoder, struct ck_weights *weights, int32_t l);

/* Layer l's ffn_norm, ffn_gate, ffn_up, ffn_down, with biases where the model has them. */
void ck_decoder_want_feed_forward(struct ck_decoder *decoder, struct ck_weights *weights,
                                  int32_t l);

/* Layer l's ffn_norm, ffn_gate_inp (the router), ffn_gate_exps, ffn_up_exps, ffn_down_exps. */
void ck_decoder_want_experts(struct ck_decoder *decoder, struct ck_weights *weights, int32_t l);

/* Layer l's post_attention_norm and post_ffw_norm. */
void ck_decoder_want_post_norms(struct ck_decoder *decoder, struct ck_weights *weights, int32_t l);

void ck_decoder_free(struct ck_decoder *decoder);

#endif
