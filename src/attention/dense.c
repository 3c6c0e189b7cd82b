#include "dense.h"

#include <assert.h>
#include <string.h>

#include "cells/error.h"
#include "cells/memory.h"
#include "storage/device.h"
#include "write.h"

struct ggml_tensor *ck_dense_new_mask(struct ggml_context *context,
                                      const struct ck_layout *layout) {
    return layout->n_pieces == 1 ? ggml_new_tensor_2d(context, GGML_TYPE_F16,
                                                      layout->pieces[0].extent, layout->n_queries)
                                 : ggml_new_tensor_1d(context, GGML_TYPE_F16, layout->mask_size);
}

struct ggml_tensor *ck_dense_mask_at_device(struct ggml_context *context,
                                            const struct ck_layout *layout,
                                            struct ggml_tensor *mask, ck_take_node take,
                                            void *taker) {
    if (layout->n_pieces == 1) {
        return mask;
    }
    struct ggml_tensor *copy = ggml_cont(context, mask);
    take(taker, copy);
    return copy;
}

/* The nodes of one update-and-attend as they are made. */
struct maker {
    struct ggml_context *context;
    const struct ck_dense_op *op;
    struct ggml_tensor *written_k, *written_v;
    ck_take_node take;
    void *taker;
};

/* ---- what a piece reads ---- */

/* `first` may be before the rows, if those are a view of more: ggml adds up offsets as size_t, in
 * which a negative one wraps to what it should be. */
static struct ggml_tensor *view_rows(struct ggml_context *context, struct ggml_tensor *rows,
                                     int64_t first, int64_t n) {
    return ggml_view_2d(context, rows, rows->ne[0], n, rows->nb[1],
                        (size_t)(first * (int64_t)rows->nb[1]));
}

static const struct ck_row_run *longest_run(const struct ck_row_run *runs, int32_t n_runs) {
    const struct ck_row_run *longest = runs;
    for (int32_t i = 1; i < n_runs; i++) {
        longest = runs[i].n_rows > longest->n_rows ? &runs[i] : longest;
    }
    return longest;
}

/* The rows of several runs, one after the other: [width, extent]. ggml has no op that makes this of
 * rows of blocks, so one run is copied together with as many of its neighbours as there will be
 * rows of the other runs, which are then copied over those. It has that many neighbours: the runs
 * before it fit into the rows before it, those after it into the rows after it. Each copy goes into
 * a view of the last one's result, and attention reads such a view: that is their order. */
static struct ggml_tensor *gather(const struct maker *maker, struct ggml_tensor *written,
                                  const struct ck_layout_piece *piece) {
    const struct ck_row_run *runs = maker->op->layout->runs + piece->first_run;
    const struct ck_row_run *longest = longest_run(runs, piece->n_runs);
    const int64_t begin = longest->first_row - longest->first_column;
    assert(begin >= 0 && begin + piece->extent <= written->ne[1]);
    struct ggml_context *context = maker->context;
    struct ggml_tensor *last =
        ggml_cont(context, view_rows(context, written, begin, piece->extent));
    int64_t column = 0; /* of the copy, where `last` begins */
    maker->take(maker->taker, last);
    for (const struct ck_row_run *run = runs; run < runs + piece->n_runs; run++) {
        if (run != longest) {
            struct ggml_tensor *from = view_rows(context, written, run->first_row, run->n_rows);
            last = ggml_cpy(context, from,
                            view_rows(context, last, run->first_column - column, run->n_rows));
            column = run->first_column;
            maker->take(maker->taker, last);
        }
    }
    return view_rows(context, last, -column, piece->extent);
}

/* The piece's rows of K or V, head by head: [head_dim, extent, n_heads]. All reading goes through
 * the result of the write, so that it can only come after it. */
static struct ggml_tensor *read_heads(const struct maker *maker, struct ggml_tensor *written,
                                      int64_t head_dim, const struct ck_layout_piece *piece) {
    const struct ck_row_run *run = &maker->op->layout->runs[piece->first_run];
    const bool is_copy = piece->n_runs > 1;
    struct ggml_tensor *rows = is_copy ? gather(maker, written, piece) : written;
    return ggml_view_3d(maker->context, rows, head_dim, piece->extent, maker->op->layer->n_kv_heads,
                        rows->nb[1], ggml_row_size(rows->type, head_dim),
                        is_copy ? 0 : (size_t)run->first_row * rows->nb[1]);
}

static struct ggml_tensor *view_queries(struct ggml_context *context, struct ggml_tensor *q,
                                        const struct ck_layout_piece *piece) {
    if (piece->n_queries == q->ne[2]) {
        return q;
    }
    return ggml_view_3d(context, q, q->ne[0], q->ne[1], piece->n_queries, q->nb[1], q->nb[2],
                        (size_t)piece->first_query * q->nb[2]);
}

static struct ggml_tensor *view_mask(struct ggml_context *context, struct ggml_tensor *mask,
                                     const struct ck_layout_piece *piece) {
    if (piece->extent == mask->ne[0] && piece->n_queries == mask->ne[1]) {
        return mask;
    }
    return ggml_view_2d(context, mask, piece->extent, piece->n_queries,
                        (size_t)piece->extent * sizeof(ggml_fp16_t),
                        (size_t)piece->mask_offset * sizeof(ggml_fp16_t));
}

/* ---- attending ---- */

static struct ggml_tensor *attend_piece(const struct maker *maker,
                                        const struct ck_layout_piece *piece) {
    const struct ck_dense_op *op = maker->op;
    const cellkv_layer *layer = op->layer;
    struct ggml_context *context = maker->context;
    struct ggml_tensor *q = ggml_permute(context, view_queries(context, op->q, piece), 0, 2, 1, 3);
    struct ggml_tensor *k = read_heads(maker, maker->written_k, layer->head_dim_k, piece);
    struct ggml_tensor *v = read_heads(maker, maker->written_v, layer->head_dim_v, piece);
    struct ggml_tensor *attention =
        ggml_flash_attn_ext(context, q, k, v, view_mask(context, op->mask, piece),
                            op->params->scale, 0.0f, op->params->soft_cap);
    ggml_flash_attn_ext_set_prec(attention, GGML_PREC_F32);
    if (op->params->sinks != NULL) {
        ggml_flash_attn_ext_add_sinks(attention, op->params->sinks);
    }
    maker->take(maker->taker, attention);
    return attention;
}

/* The attention of pieces [first, end), put together in halves: each row is copied as often as
 * there are levels, not as there are pieces. */
static struct ggml_tensor *attend_pieces(const struct maker *maker, int32_t first, int32_t end) {
    if (end - first == 1) {
        return attend_piece(maker, &maker->op->layout->pieces[first]);
    }
    const int32_t middle = first + (end - first) / 2;
    struct ggml_tensor *head = attend_pieces(maker, first, middle);
    struct ggml_tensor *tail = attend_pieces(maker, middle, end);
    struct ggml_tensor *both = ggml_concat(maker->context, head, tail, 2);
    maker->take(maker->taker, both);
    return both;
}

struct ggml_tensor *ck_dense_attend(struct ggml_context *context, const struct ck_dense_op *op,
                                    ck_take_node take, void *taker) {
    struct maker maker = {.context = context, .op = op, .take = take, .taker = taker};
    maker.written_k = ck_write_rows(context, op->k_rows, op->k, op->rows);
    maker.written_v = ck_write_rows(context, op->v_rows, op->v, op->rows);
    take(taker, maker.written_k);
    take(taker, maker.written_v);
    return attend_pieces(&maker, 0, op->layout->n_pieces);
}

size_t ck_dense_extra_tensors(const struct ck_layout *layout) {
    /* The mask. Views of q, K, V and the mask, q permuted, attention, concatenation. In a copy of K
     * or of V, a view and a copy; for each further run two views and a copy; a view of the whole.
     */
    const size_t by_pieces = layout->n_pieces > 1 ? 8 * (size_t)layout->n_pieces : 0;
    return layout->n_runs > layout->n_pieces ? by_pieces + 6 * (size_t)layout->n_runs : by_pieces;
}

/* ---- probing ---- */

enum { PROBE_TOKENS = 4, PROBE_TENSORS = 64 };

struct probe {
    ggml_backend_dev_t device;
    bool is_supported;
};

static void probe_node(void *taker, struct ggml_tensor *node) {
    struct probe *probe = taker;
    probe->is_supported = probe->is_supported && ck_device_supports(probe->device, node);
}

/* The ops of one layer for a few tokens in this layout, on tensors shaped as the storage's. */
static void probe_layout(struct ggml_context *context, const cellkv_layer *layer,
                         const struct ck_layout *layout, struct probe *probe) {
    const int64_t heads = layer->n_kv_heads, n_rows = 4 * CK_ROW_PADDING;
    const cellkv_attend_params params = {.scale = 1.0f};
    struct ck_dense_op op = {.layer = layer, .layout = layout, .params = &params};
    op.k_rows = ggml_new_tensor_2d(context, (enum ggml_type)layer->type_k,
                                   heads * layer->head_dim_k, n_rows);
    op.v_rows = ggml_new_tensor_2d(context, (enum ggml_type)layer->type_v,
                                   heads * layer->head_dim_v, n_rows);
    op.q = ggml_new_tensor_3d(context, GGML_TYPE_F32, layer->head_dim_k, heads, PROBE_TOKENS);
    op.k = op.q;
    op.v = ggml_new_tensor_3d(context, GGML_TYPE_F32, layer->head_dim_v, heads, PROBE_TOKENS);
    op.rows = ggml_new_tensor_1d(context, GGML_TYPE_I64, PROBE_TOKENS);
    op.mask = ck_dense_mask_at_device(context, layout, ck_dense_new_mask(context, layout),
                                      probe_node, probe);
    ck_dense_attend(context, &op, probe_node, probe);
}

/* One call, or two pieces, the second of which may read a copy. */
static void probe_kind(struct ggml_context *context, const cellkv_layer *layer,
                       enum ck_layout_limit kind, struct probe *probe) {
    enum { HALF = PROBE_TOKENS / 2, PAD = CK_ROW_PADDING };
    const bool is_cut = kind != CK_LAYOUT_ONE_CALL;
    const int32_t second = kind == CK_LAYOUT_COPIES ? 2 : 1; /* runs of the second piece */
    struct ck_row_run runs[] = {{0, PAD, 0}, {0, PAD, 0}, {2 * PAD, PAD, PAD}};
    struct ck_layout_piece pieces[] = {
        {0, is_cut ? HALF : PROBE_TOKENS, 0, 1, PAD, 0},
        {HALF, HALF, 1, second, second * PAD, (int64_t)HALF * PAD},
    };
    const struct ck_layout layout = {
        .n_queries = PROBE_TOKENS,
        .n_pieces = is_cut ? 2 : 1,
        .pieces = pieces,
        .n_runs = is_cut ? 1 + second : 1,
        .runs = runs,
        .mask_size = (int64_t)HALF * PAD * (1 + second),
    };
    probe_layout(context, layer, &layout, probe);
}

static cellkv_status probe_layer(ggml_backend_dev_t device, const cellkv_layer *layer,
                                 int32_t index, enum ck_layout_limit kind, bool *is_supported) {
    struct ggml_init_params init = {.mem_size = PROBE_TENSORS * ggml_tensor_overhead(),
                                    .no_alloc = true};
    struct ggml_context *context = ck_allocation_should_fail() ? NULL : ggml_init(init);
    if (context == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "no memory to probe layer %d", index);
    }
    struct probe probe = {.device = device, .is_supported = true};
    probe_kind(context, layer, kind, &probe);
    ggml_free(context);
    *is_supported = probe.is_supported;
    return CELLKV_OK;
}

/* Lowers *limit to what the device can do for the layer. */
static cellkv_status limit_layer(ggml_backend_dev_t device, const cellkv_layer *layer,
                                 int32_t index, enum ck_layout_limit *limit) {
    bool is_supported;
    for (;; (*limit)--) {
        cellkv_status status = probe_layer(device, layer, index, *limit, &is_supported);
        if (status != CELLKV_OK || is_supported) {
            return status;
        }
        if (*limit == CK_LAYOUT_ONE_CALL) {
            break;
        }
    }
    return ck_fail(CELLKV_ERROR_UNSUPPORTED,
                   "layer %d: %s cannot attend over K of type %s, width %d, V of type %s, width %d",
                   index, ck_device_name(device), ggml_type_name((enum ggml_type)layer->type_k),
                   layer->head_dim_k, ggml_type_name((enum ggml_type)layer->type_v),
                   layer->head_dim_v);
}

cellkv_status ck_dense_probe(const struct ck_storage *storage, const cellkv_layer *layers,
                             int32_t n_layers, enum ck_layout_limit *limit) {
    *limit = CK_LAYOUT_COPIES;
    for (int32_t l = 0; l < n_layers; l++) {
        ggml_backend_dev_t device = ck_storage_device(storage, l);
        if (l > 0 && device == ck_storage_device(storage, l - 1) &&
            memcmp(&layers[l], &layers[l - 1], sizeof *layers) == 0) {
            continue;
        }
        cellkv_status status = limit_layer(device, &layers[l], l, limit);
        if (status != CELLKV_OK) {
            return status;
        }
    }
    return CELLKV_OK;
}
