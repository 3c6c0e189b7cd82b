/* The graph pieces that decoders share. Tensors are F32 [width, n_tokens] unless said otherwise. */
#ifndef CELLKV_MODEL_BLOCKS_H
#define CELLKV_MODEL_BLOCKS_H

#include <cellkv/executor.h>
#include <cellkv/model.h>

#include "decoder.h"

/* One forward under construction. */
struct ck_forward {
    const struct ck_decoder *decoder;
    cellkv_output output;
    cellkv_graph *graph;
    struct ggml_context *context; /* the graph's */
};

/* The tokens' rows of the embedding, scaled. */
struct ggml_tensor *ck_embed(const struct ck_forward *forward);

/* x / sqrt(mean(x^2) + epsilon) * weight */
struct ggml_tensor *ck_rms_norm(const struct ck_forward *forward, struct ggml_tensor *x,
                                struct ggml_tensor *weight);

struct ggml_tensor *ck_apply_linear(const struct ck_forward *forward,
                                    const struct ck_linear *linear, struct ggml_tensor *x);

/* Turns each head of x [head_dim, n_heads, n_tokens] by its token's position. */
struct ggml_tensor *ck_apply_rope(const struct ck_forward *forward, const struct ck_rope *rope,
                                  struct ggml_tensor *x);

/* Layer l's attention over x, already normalized, before its output projection: [n_heads *
 * head_dim_v, n_tokens]. NULL: the executor refused, and has said why. */
struct ggml_tensor *ck_attention_heads(const struct ck_forward *forward, int32_t l,
                                       struct ggml_tensor *x);

/* down(activation(gate(x)) * up(x)), x already normalized; of each token's experts, weighed and
 * summed, where there are any. */
struct ggml_tensor *ck_apply_feed_forward(const struct ck_forward *forward,
                                          const struct ck_feed_forward *feed_forward,
                                          struct ggml_tensor *x);

/* Whether nothing after layer l's attention is needed: no token's result is read. */
bool ck_ends_at(const struct ck_forward *forward, int32_t l);

/* After the last layer's attention: only the tokens whose result is read. Elsewhere: x. */
struct ggml_tensor *ck_keep_outputs(const struct ck_forward *forward, int32_t l,
                                    struct ggml_tensor *x);

/* The final norm, and for logits head and soft cap, as the graph's result. */
void ck_finish(const struct ck_forward *forward, struct ggml_tensor *x);

/* All of it, for decoders whose layers add attention, then feed-forward to the hidden state, each
 * over its normalized self: a program's build (executor.h). */
cellkv_status ck_build_forward(const struct ck_decoder *decoder, cellkv_output output,
                               cellkv_graph *graph);

/* The most tensors that ck_build_forward makes, for a program. */
int32_t ck_max_tensors(const struct ck_decoder *decoder);

#endif
