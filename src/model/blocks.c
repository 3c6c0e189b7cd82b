#include "blocks.h"

struct ggml_tensor *ck_embed(const struct ck_forward *forward) {
    return ggml_get_rows(forward->context, forward->decoder->embedding,
                         cellkv_graph_tokens(forward->graph));
}

struct ggml_tensor *ck_rms_norm(const struct ck_forward *forward, struct ggml_tensor *x,
                                struct ggml_tensor *weight) {
    x = ggml_rms_norm(forward->context, x, forward->decoder->norm_epsilon);
    return ggml_mul(forward->context, x, weight);
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
    q = ck_apply_rope(forward, &attention->rope, q);
    k = ck_apply_rope(forward, &attention->rope, k);
    const cellkv_attend_params params = {.scale = attention->scale};
    struct ggml_tensor *heads = cellkv_attend(forward->graph, l, q, k, v, &params);
    if (heads == NULL) {
        return NULL;
    }
    return ggml_reshape_2d(forward->context, heads, heads->ne[0] * heads->ne[1], heads->ne[2]);
}

struct ggml_tensor *ck_gated_feed_forward(const struct ck_forward *forward,
                                          const struct ck_feed_forward *feed_forward,
                                          struct ggml_tensor *x) {
    struct ggml_tensor *gate = ck_apply_linear(forward, &feed_forward->gate, x);
    struct ggml_tensor *up = ck_apply_linear(forward, &feed_forward->up, x);
    return ck_apply_linear(forward, &feed_forward->down,
                           ggml_swiglu_split(forward->context, gate, up));
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

void ck_finish(const struct ck_forward *forward, struct ggml_tensor *x) {
    x = ck_rms_norm(forward, x, forward->decoder->norm);
    cellkv_graph_set_result(forward->graph,
                            ggml_mul_mat(forward->context, forward->decoder->head, x));
}
