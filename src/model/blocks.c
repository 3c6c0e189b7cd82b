#include "blocks.h"

struct ggml_tensor *ck_embed(const struct ck_forward *forward) {
    struct ggml_tensor *x = ggml_get_rows(forward->context, forward->decoder->embedding,
                                          cellkv_graph_tokens(forward->graph));
    const float scale = forward->decoder->embedding_scale;
    return scale != 1.0f ? ggml_scale(forward->context, x, scale) : x;
}

struct ggml_tensor *ck_rms_norm(const struct ck_forward *forward, struct ggml_tensor *x,
                                struct ggml_tensor *weight) {
    x = ggml_rms_norm(forward->context, x, forward->decoder->norm_epsilon);
    return ggml_mul(forward->context, x, weight);
}

/* The same, of what has such a norm. */
static struct ggml_tensor *maybe_norm(const struct ck_forward *forward, struct ggml_tensor *x,
                                      struct ggml_tensor *weight) {
    return weight != NULL ? ck_rms_norm(forward, x, weight) : x;
}

struct ggml_tensor *ck_apply_linear(const struct ck_forward *forward,
                                    const struct ck_linear *linear, struct ggml_tensor *x) {
    x = ggml_mul_mat(forward->context, linear->weight, x);
    return linear->bias != NULL ? ggml_add(forward->context, x, linear->bias) : x;
}

struct ggml_tensor *ck_apply_rope(const struct ck_forward *forward, const struct ck_rope *rope,
                                  struct ggml_tensor *x) {
    /* The last four are YaRN's, which an extrapolation factor of 0 turns off. */
    return ggml_rope_ext(forward->context, x, cellkv_graph_positions(forward->graph), rope->factors,
                         rope->n_dims, rope->ordering, forward->decoder->n_context, rope->base,
                         rope->scale, 0.0f, 1.0f, 32.0f, 1.0f);
}

/* A projection of x, split into heads: [head_dim, n_heads, n_tokens]. */
static struct ggml_tensor *project(const struct ck_forward *forward, const struct ck_linear *linear,
                                   struct ggml_tensor *x, int32_t head_dim, int32_t n_heads) {
    x = ck_apply_linear(forward, linear, x);
    return ggml_reshape_3d(forward->context, x, head_dim, n_heads, x->ne[1]);
}

struct ggml_tensor *ck_attention_heads(const struct ck_forward *forward, int32_t l,
                                       struct ggml_tensor *x) {
    const struct ck_attention *attention = &forward->decoder->layers[l].attention;
    const int32_t n_heads = attention->n_heads;
    const int32_t n_kv_heads = attention->n_kv_heads;
    struct ggml_tensor *q = project(forward, &attention->q, x, attention->head_dim_k, n_heads);
    struct ggml_tensor *k = project(forward, &attention->k, x, attention->head_dim_k, n_kv_heads);
    struct ggml_tensor *v = project(forward, &attention->v, x, attention->head_dim_v, n_kv_heads);
    q = ck_apply_rope(forward, &attention->rope, maybe_norm(forward, q, attention->q_norm));
    k = ck_apply_rope(forward, &attention->rope, maybe_norm(forward, k, attention->k_norm));
    const cellkv_attend_params params = {.scale = attention->scale,
                                         .soft_cap = attention->soft_cap};
    struct ggml_tensor *heads = cellkv_attend(forward->graph, l, q, k, v, &params);
    if (heads == NULL) {
        return NULL;
    }
    return ggml_reshape_2d(forward->context, heads, heads->ne[0] * heads->ne[1], heads->ne[2]);
}

/* gelu(gate) * up. The tanh form of GELU is g * sigmoid(g * d) with d = a + b g^2, a = 2
 * sqrt(2/pi), b = 0.044715 a: that is silu(g * d) / d. ggml's own op rounds to f16 on the CPU. */
static struct ggml_tensor *gelu_gated(struct ggml_context *context, struct ggml_tensor *gate,
                                      struct ggml_tensor *up) {
    const float a = 1.5957691216f;
    struct ggml_tensor *d = ggml_scale_bias(context, ggml_sqr(context, gate), 0.044715f * a, a);
    struct ggml_tensor *silu = ggml_swiglu_split(context, ggml_mul(context, gate, d), up);
    return ggml_div(context, silu, d);
}

static struct ggml_tensor *gated(const struct ck_forward *forward, enum ck_activation activation,
                                 struct ggml_tensor *gate, struct ggml_tensor *up) {
    return activation == CK_ACTIVATION_GELU ? gelu_gated(forward->context, gate, up)
                                            : ggml_swiglu_split(forward->context, gate, up);
}

static struct ggml_tensor *one_unit(const struct ck_forward *forward,
                                    const struct ck_feed_forward *feed_forward,
                                    struct ggml_tensor *x) {
    struct ggml_tensor *gate = ck_apply_linear(forward, &feed_forward->gate, x);
    struct ggml_tensor *up = ck_apply_linear(forward, &feed_forward->up, x);
    return ck_apply_linear(forward, &feed_forward->down,
                           gated(forward, feed_forward->activation, gate, up));
}

/* Each token's experts, the best-scored first: I32 [n_used, n_tokens]; and the softmax of their
 * scores: [n_used, 1, n_tokens]. What is sorted are the probabilities of all: they are all NaN or
 * none is, which ggml's sort needs. */
static struct ggml_tensor *choose_experts(const struct ck_forward *forward,
                                          const struct ck_experts *experts, struct ggml_tensor *x,
                                          struct ggml_tensor **weights) {
    struct ggml_context *context = forward->context;
    const int64_t n_tokens = x->ne[1];
    struct ggml_tensor *probabilities =
        ggml_soft_max(context, ggml_mul_mat(context, experts->router, x));
    struct ggml_tensor *chosen = ggml_argsort_top_k(context, probabilities, experts->n_used);
    struct ggml_tensor *shares = ggml_get_rows(
        context, ggml_reshape_3d(context, probabilities, 1, experts->n, n_tokens), chosen);
    shares = ggml_reshape_3d(context, shares, experts->n_used, 1, n_tokens);
    *weights = ggml_div(context, shares, ggml_sum_rows(context, shares));
    return chosen;
}

static struct ggml_tensor *mixture(const struct ck_forward *forward,
                                   const struct ck_feed_forward *feed_forward,
                                   struct ggml_tensor *x) {
    struct ggml_context *context = forward->context;
    const int64_t n_embd = x->ne[0];
    const int64_t n_tokens = x->ne[1];
    struct ggml_tensor *weights;
    struct ggml_tensor *chosen = choose_experts(forward, &feed_forward->experts, x, &weights);
    x = ggml_reshape_3d(context, x, n_embd, 1, n_tokens);
    struct ggml_tensor *gate = ggml_mul_mat_id(context, feed_forward->gate.weight, x, chosen);
    struct ggml_tensor *up = ggml_mul_mat_id(context, feed_forward->up.weight, x, chosen);
    struct ggml_tensor *y = gated(forward, feed_forward->activation, gate, up);
    y = ggml_mul_mat_id(context, feed_forward->down.weight, y, chosen); /* [n_embd, n_used, ...] */
    y = ggml_cont(context, ggml_permute(context, y, 1, 0, 2, 3));
    return ggml_reshape_2d(context, ggml_mul_mat(context, y, weights), n_embd, n_tokens);
}

struct ggml_tensor *ck_apply_feed_forward(const struct ck_forward *forward,
                                          const struct ck_feed_forward *feed_forward,
                                          struct ggml_tensor *x) {
    return feed_forward->experts.n > 0 ? mixture(forward, feed_forward, x)
                                       : one_unit(forward, feed_forward, x);
}

static bool is_last(const struct ck_forward *forward, int32_t l) {
    return l == forward->decoder->n_layers - 1;
}

bool ck_ends_at(const struct ck_forward *forward, int32_t l) {
    return is_last(forward, l) && cellkv_graph_n_outputs(forward->graph) == 0;
}

struct ggml_tensor *ck_keep_outputs(const struct ck_forward *forward, int32_t l,
                                    struct ggml_tensor *x) {
    if (!is_last(forward, l)) {
        return x;
    }
    return ggml_get_rows(forward->context, x, cellkv_graph_outputs(forward->graph));
}

/* cap * tanh(x / cap) */
static struct ggml_tensor *soft_capped(struct ggml_context *context, struct ggml_tensor *x,
                                       float cap) {
    x = ggml_tanh(context, ggml_scale(context, x, 1.0f / cap));
    return ggml_scale(context, x, cap);
}

void ck_finish(const struct ck_forward *forward, struct ggml_tensor *x) {
    const struct ck_decoder *decoder = forward->decoder;
    x = ck_rms_norm(forward, x, decoder->norm);
    if (forward->output == CELLKV_OUTPUT_LOGITS) {
        x = ggml_mul_mat(forward->context, decoder->head, x);
    }
    if (forward->output == CELLKV_OUTPUT_LOGITS && decoder->logit_soft_cap > 0.0f) {
        x = soft_capped(forward->context, x, decoder->logit_soft_cap);
    }
    cellkv_graph_set_result(forward->graph, x);
}

/* A layer's first norm. Where the layer before it is on another device, the hidden state is all
 * that crosses: it was placed there, and its norm is placed here. */
static struct ggml_tensor *enter_layer(const struct ck_forward *forward, int32_t l,
                                       struct ggml_tensor *x) {
    const struct ck_decoder *decoder = forward->decoder;
    x = ggml_rms_norm(forward->context, x, decoder->norm_epsilon);
    cellkv_graph_place(forward->graph, l, x);
    return ggml_mul(forward->context, x, decoder->layers[l].attention.norm);
}

cellkv_status ck_build_forward(const struct ck_decoder *decoder, cellkv_output output,
                               cellkv_graph *graph) {
    const struct ck_forward forward = {decoder, output, graph, cellkv_graph_context(graph)};
    struct ggml_tensor *x = ck_embed(&forward);
    for (int32_t l = 0; l < decoder->n_layers; l++) {
        const struct ck_attention *attention = &decoder->layers[l].attention;
        const struct ck_feed_forward *feed_forward = &decoder->layers[l].feed_forward;
        struct ggml_tensor *y = enter_layer(&forward, l, x);
        y = ck_attention_heads(&forward, l, y);
        if (y == NULL) {
            return CELLKV_ERROR_BAD_GRAPH;
        }
        if (ck_ends_at(&forward, l)) {
            return CELLKV_OK;
        }
        x = ck_keep_outputs(&forward, l, x);
        y = ck_apply_linear(&forward, &attention->out, ck_keep_outputs(&forward, l, y));
        x = ggml_add(forward.context, x, maybe_norm(&forward, y, attention->post_norm));
        y = ck_rms_norm(&forward, x, feed_forward->norm);
        y = ck_apply_feed_forward(&forward, feed_forward, y);
        x = ggml_add(forward.context, x, maybe_norm(&forward, y, feed_forward->post_norm));
        cellkv_graph_place(graph, l, x);
    }
    ck_finish(&forward, x);
    return CELLKV_OK;
}

/* A layer with biases, all norms and experts makes 70, 20 of them attention's. */
int32_t ck_max_tensors(const struct ck_decoder *decoder) {
    return 256 + 96 * decoder->n_layers;
}
