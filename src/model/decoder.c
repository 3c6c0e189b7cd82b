#include "decoder.h"

#include <math.h>
#include <string.h>

#include "cells/error.h"
#include "cells/memory.h"

/* Beyond any model there is, and small enough that products of two of them fit an int32. */
#define MAX_LAYERS   4096
#define MAX_HEADS    (1 << 14)
#define MAX_HEAD_DIM (1 << 14)
#define MAX_WIDTH    (1 << 24)
#define MAX_EXPERTS  (1 << 12)

/* Below this a factor's inverse stops being a useful float. */
#define MIN_FACTOR 1e-6f

/* ---- hyperparameters ---- */

/* Linear scaling is stated as a factor that positions are divided by; older files have it under
 * rope.scale_linear. 0 stands for none. */
static float read_rope_scale(struct ck_metadata *metadata) {
    const char *type = ck_metadata_string_or(metadata, "rope.scaling.type", "linear");
    const float legacy = ck_metadata_float_or(metadata, "rope.scale_linear", 0.0f, 1e9f, 0.0f);
    const float factor = ck_metadata_float_or(metadata, "rope.scaling.factor", 0.0f, 1e9f, legacy);
    const float magnitude =
        ck_metadata_float_or(metadata, "rope.scaling.attn_factor", -1e9f, 1e9f, 1.0f);
    if (magnitude != 1.0f) {
        ck_metadata_refuse(metadata, "rope.scaling.attn_factor", "only 1 is supported");
    }
    const bool linear = strcmp(type, "linear") == 0;
    if (!linear && strcmp(type, "none") != 0) {
        ck_metadata_refuse(metadata, "rope.scaling.type",
                           "unsupported; linear and none are supported");
    }
    if (!linear || factor == 0.0f) {
        return 1.0f;
    }
    if (factor < MIN_FACTOR) {
        ck_metadata_refuse(metadata, "rope.scaling.factor", "too small");
    }
    return 1.0f / factor;
}

static struct ck_rope read_rope(struct ck_metadata *metadata, int32_t head_dim, int32_t ordering) {
    struct ck_rope rope = {.ordering = ordering};
    rope.n_dims = ck_metadata_int_or(metadata, "rope.dimension_count", 2, head_dim, head_dim);
    if (rope.n_dims % 2 != 0) {
        ck_metadata_refuse(metadata, "rope.dimension_count", "odd");
    }
    rope.base = ck_metadata_float_or(metadata, "rope.freq_base", 1.0f, 1e30f, 10000.0f);
    rope.scale = read_rope_scale(metadata);
    return rope;
}

static void read_heads(struct ck_attention *attention, struct ck_metadata *metadata, int32_t l,
                       int32_t n_layers) {
    attention->n_heads =
        ck_metadata_layer_int(metadata, "attention.head_count", l, n_layers, 1, MAX_HEADS);
    attention->n_kv_heads = ck_metadata_layer_int_or(metadata, "attention.head_count_kv", l,
                                                     n_layers, 1, MAX_HEADS, attention->n_heads);
    attention->window = ck_metadata_layer_int_or(metadata, "attention.sliding_window", l, n_layers,
                                                 0, INT32_MAX, 0);
    if (metadata->status == CELLKV_OK && attention->n_heads % attention->n_kv_heads != 0) {
        ck_metadata_refuse(metadata, "attention.head_count",
                           "not a multiple of attention.head_count_kv");
    }
}

/* Unless stated, the heads of the first layer share the hidden state's width among them. */
static int32_t read_head_dim(struct ck_metadata *metadata, const char *key, int32_t n_embd,
                             int32_t n_heads) {
    if (ck_metadata_has(metadata, key)) {
        return ck_metadata_int(metadata, key, 1, MAX_HEAD_DIM);
    }
    if (metadata->status != CELLKV_OK) {
        return 0;
    }
    if (n_embd % n_heads != 0 || n_embd / n_heads > MAX_HEAD_DIM) {
        ck_metadata_refuse(metadata, "embedding_length",
                           "does not divide into attention.head_count heads");
        return 0;
    }
    return n_embd / n_heads;
}

static void read_layers(struct ck_decoder *decoder, struct ck_metadata *metadata,
                        int32_t ordering) {
    const int32_t n = decoder->n_layers;
    const int32_t first_heads =
        ck_metadata_layer_int(metadata, "attention.head_count", 0, n, 1, MAX_HEADS);
    const int32_t k = read_head_dim(metadata, "attention.key_length", decoder->n_embd, first_heads);
    const int32_t v =
        read_head_dim(metadata, "attention.value_length", decoder->n_embd, first_heads);
    if (k % 2 != 0) {
        ck_metadata_refuse(metadata, "attention.key_length", "odd");
    }
    if (metadata->status != CELLKV_OK) {
        return;
    }
    const struct ck_rope rope = read_rope(metadata, k, ordering);
    for (int32_t l = 0; l < n && metadata->status == CELLKV_OK; l++) {
        struct ck_layer *layer = &decoder->layers[l];
        layer->attention = (struct ck_attention){.head_dim_k = k, .head_dim_v = v};
        layer->attention.rope = rope;
        layer->attention.scale = 1.0f / sqrtf((float)k);
        read_heads(&layer->attention, metadata, l, n);
    }
}

void ck_decoder_read(struct ck_decoder *decoder, struct ck_metadata *metadata,
                     int32_t rope_ordering) {
    if (!ck_metadata_bool_or(metadata, "attention.causal", true)) {
        ck_metadata_refuse(metadata, "attention.causal", "only causal attention is supported");
    }
    decoder->n_layers = ck_metadata_int(metadata, "block_count", 1, MAX_LAYERS);
    decoder->n_embd = ck_metadata_int(metadata, "embedding_length", 1, MAX_WIDTH);
    decoder->n_context = ck_metadata_int_or(metadata, "context_length", 1, INT32_MAX, 0);
    decoder->embedding_scale = 1.0f;
    decoder->norm_epsilon = ck_metadata_float(metadata, "attention.layer_norm_rms_epsilon", 0, 1);
    ck_metadata_int_or(metadata, "vocab_size", 1, INT32_MAX, 0); /* token_embd's shape decides */
    if (metadata->status != CELLKV_OK) {
        return;
    }
    decoder->layers = ck_calloc((size_t)decoder->n_layers, sizeof *decoder->layers);
    if (decoder->layers == NULL) {
        metadata->status = ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "%d layers", decoder->n_layers);
    } else {
        read_layers(decoder, metadata, rope_ordering);
    }
}

void ck_decoder_read_feed_forward(struct ck_decoder *decoder, struct ck_metadata *metadata,
                                  enum ck_activation activation) {
    const int32_t n = decoder->n_layers;
    if (ck_metadata_int_or(metadata, "expert_count", 0, INT32_MAX, 0) > 0) {
        ck_metadata_refuse(metadata, "expert_count",
                           "mixtures of experts are unsupported in this architecture");
    }
    for (int32_t l = 0; l < n && metadata->status == CELLKV_OK; l++) {
        struct ck_feed_forward *feed_forward = &decoder->layers[l].feed_forward;
        feed_forward->activation = activation;
        feed_forward->width =
            ck_metadata_layer_int(metadata, "feed_forward_length", l, n, 1, MAX_WIDTH);
    }
}

/* Ways to score and weigh experts that nobody here computes. */
static void refuse_other_experts(struct ck_metadata *metadata) {
    enum { BY_SOFTMAX = 1 };
    if (ck_metadata_int_or(metadata, "expert_gating_func", 0, INT32_MAX, BY_SOFTMAX) !=
        BY_SOFTMAX) {
        ck_metadata_refuse(metadata, "expert_gating_func", "only 1, softmax, is supported");
    }
    if (!ck_metadata_bool_or(metadata, "expert_weights_norm", true)) {
        ck_metadata_refuse(metadata, "expert_weights_norm", "only true is supported");
    }
    const float scale = ck_metadata_float_or(metadata, "expert_weights_scale", -1e9f, 1e9f, 1.0f);
    if (scale != 1.0f && scale != 0.0f) { /* 0 stands for none */
        ck_metadata_refuse(metadata, "expert_weights_scale", "only 1 is supported");
    }
    if (ck_metadata_int_or(metadata, "expert_shared_count", 0, INT32_MAX, 0) > 0) {
        ck_metadata_refuse(metadata, "expert_shared_count", "shared experts are unsupported");
    }
}

void ck_decoder_read_experts(struct ck_decoder *decoder, struct ck_metadata *metadata) {
    refuse_other_experts(metadata);
    const int32_t n = ck_metadata_int(metadata, "expert_count", 1, MAX_EXPERTS);
    const int32_t n_used = ck_metadata_int(metadata, "expert_used_count", 1, n);
    for (int32_t l = 0; l < decoder->n_layers && metadata->status == CELLKV_OK; l++) {
        struct ck_feed_forward *feed_forward = &decoder->layers[l].feed_forward;
        feed_forward->activation = CK_ACTIVATION_SILU;
        feed_forward->experts = (struct ck_experts){.n = n, .n_used = n_used};
        feed_forward->width = ck_metadata_layer_int(metadata, "expert_feed_forward_length", l,
                                                    decoder->n_layers, 1, MAX_WIDTH);
    }
}

void ck_decoder_read_window_pattern(struct ck_decoder *decoder, struct ck_metadata *metadata,
                                    int32_t period) {
    const char *key = "attention.sliding_window_pattern";
    const bool listed = ck_metadata_is_array(metadata, key);
    if (!ck_metadata_has(metadata, key) &&
        ck_metadata_is_array(metadata, "attention.sliding_window")) {
        return;
    }
    if (!listed) {
        period = ck_metadata_int_or(metadata, key, 1, INT32_MAX, period);
    }
    const int32_t n = decoder->n_layers;
    for (int32_t l = 0; l < n && metadata->status == CELLKV_OK; l++) {
        const bool local =
            listed ? ck_metadata_layer_bool(metadata, key, l, n) : l % period < period - 1;
        if (!local) {
            decoder->layers[l].attention.window = 0;
        }
    }
}

float ck_decoder_read_soft_cap(struct ck_metadata *metadata, const char *key, float fallback) {
    const float cap = ck_metadata_float_or(metadata, key, 0.0f, 1e9f, fallback);
    if (cap > 0.0f && cap < MIN_FACTOR) {
        ck_metadata_refuse(metadata, key, "too small");
    }
    return cap;
}

/* ---- weights ---- */

static void want_linear(struct ck_weights *weights, struct ck_linear *linear, int64_t in,
                        int64_t out, int32_t l, const char *name) {
    ck_want(weights, &linear->weight, CK_USE_MATMUL, in, out, "blk.%d.%s.weight", l, name);
    ck_want_optional(weights, &linear->bias, CK_USE_VECTOR, out, 1, "blk.%d.%s.bias", l, name);
}

void ck_decoder_want_ends(struct ck_decoder *decoder, struct ck_weights *weights) {
    const int64_t n_vocab = ck_weights_length(weights, "token_embd.weight", 1);
    const int64_t n_embd = decoder->n_embd;
    if (weights->status == CELLKV_OK && n_vocab > INT32_MAX) {
        weights->status = ck_fail(CELLKV_ERROR_BAD_TENSOR, "token_embd.weight: too many rows");
    }
    decoder->n_vocab = weights->status == CELLKV_OK ? (int32_t)n_vocab : 0;
    weights->layer = 0;
    ck_want(weights, &decoder->embedding, CK_USE_ROWS, n_embd, n_vocab, "token_embd.weight");
    weights->layer = decoder->n_layers - 1;
    ck_want(weights, &decoder->norm, CK_USE_VECTOR, n_embd, 1, "output_norm.weight");
    if (!ck_want_optional(weights, &decoder->head, CK_USE_MATMUL, n_embd, n_vocab,
                          "output.weight")) {
        ck_want(weights, &decoder->head, CK_USE_MATMUL, n_embd, n_vocab, "token_embd.weight");
    }
}

void ck_decoder_want_attention(struct ck_decoder *decoder, struct ck_weights *weights, int32_t l) {
    weights->layer = l;
    struct ck_attention *attention = &decoder->layers[l].attention;
    const int64_t n_embd = decoder->n_embd;
    const int64_t n_heads = attention->n_heads;
    const int64_t n_kv_heads = attention->n_kv_heads;
    ck_want(weights, &attention->norm, CK_USE_VECTOR, n_embd, 1, "blk.%d.attn_norm.weight", l);
    want_linear(weights, &attention->q, n_embd, n_heads * attention->head_dim_k, l, "attn_q");
    want_linear(weights, &attention->k, n_embd, n_kv_heads * attention->head_dim_k, l, "attn_k");
    want_linear(weights, &attention->v, n_embd, n_kv_heads * attention->head_dim_v, l, "attn_v");
    want_linear(weights, &attention->out, n_heads * attention->head_dim_v, n_embd, l,
                "attn_output");
}

void ck_decoder_want_head_norms(struct ck_decoder *decoder, struct ck_weights *weights, int32_t l) {
    weights->layer = l;
    struct ck_attention *attention = &decoder->layers[l].attention;
    const int64_t width = attention->head_dim_k;
    ck_want(weights, &attention->q_norm, CK_USE_VECTOR, width, 1, "blk.%d.attn_q_norm.weight", l);
    ck_want(weights, &attention->k_norm, CK_USE_VECTOR, width, 1, "blk.%d.attn_k_norm.weight", l);
}

void ck_decoder_want_feed_forward(struct ck_decoder *decoder, struct ck_weights *weights,
                                  int32_t l) {
    weights->layer = l;
    struct ck_feed_forward *feed_forward = &decoder->layers[l].feed_forward;
    const int64_t n_embd = decoder->n_embd;
    const int64_t width = feed_forward->width;
    ck_want(weights, &feed_forward->norm, CK_USE_VECTOR, n_embd, 1, "blk.%d.ffn_norm.weight", l);
    want_linear(weights, &feed_forward->gate, n_embd, width, l, "ffn_gate");
    want_linear(weights, &feed_forward->up, n_embd, width, l, "ffn_up");
    want_linear(weights, &feed_forward->down, width, n_embd, l, "ffn_down");
}

void ck_decoder_want_experts(struct ck_decoder *decoder, struct ck_weights *weights, int32_t l) {
    weights->layer = l;
    struct ck_feed_forward *feed_forward = &decoder->layers[l].feed_forward;
    const int64_t n_embd = decoder->n_embd;
    const int64_t width = feed_forward->width;
    const int64_t n = feed_forward->experts.n;
    ck_want(weights, &feed_forward->norm, CK_USE_VECTOR, n_embd, 1, "blk.%d.ffn_norm.weight", l);
    ck_want(weights, &feed_forward->experts.router, CK_USE_MATMUL, n_embd, n,
            "blk.%d.ffn_gate_inp.weight", l);
    ck_want_experts(weights, &feed_forward->gate.weight, n_embd, width, n,
                    "blk.%d.ffn_gate_exps.weight", l);
    ck_want_experts(weights, &feed_forward->up.weight, n_embd, width, n,
                    "blk.%d.ffn_up_exps.weight", l);
    ck_want_experts(weights, &feed_forward->down.weight, width, n_embd, n,
                    "blk.%d.ffn_down_exps.weight", l);
}

void ck_decoder_want_post_norms(struct ck_decoder *decoder, struct ck_weights *weights, int32_t l) {
    weights->layer = l;
    struct ck_layer *layer = &decoder->layers[l];
    const int64_t n_embd = decoder->n_embd;
    ck_want(weights, &layer->attention.post_norm, CK_USE_VECTOR, n_embd, 1,
            "blk.%d.post_attention_norm.weight", l);
    ck_want(weights, &layer->feed_forward.post_norm, CK_USE_VECTOR, n_embd, 1,
            "blk.%d.post_ffw_norm.weight", l);
}

void ck_decoder_free(struct ck_decoder *decoder) {
    ck_free(decoder->layers);
    *decoder = (struct ck_decoder){0};
}
