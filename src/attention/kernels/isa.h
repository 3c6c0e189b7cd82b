/* What the files of this folder share: who fills a table, how rows are measured and prefetched. */
#ifndef CELLKV_ATTENTION_KERNELS_ISA_H
#define CELLKV_ATTENTION_KERNELS_ISA_H

#include "attention/kernels/kernels.h"

/* Each fills in the whole table, but for its name. */
void ck_init_c(struct ck_kernels *kernels);
void ck_init_avx2(struct ck_kernels *kernels);
void ck_init_avx512(struct ck_kernels *kernels);
void ck_init_neon(struct ck_kernels *kernels);

/* Kernels are written once for all row types, counts of rows and so on, with these as parameters
 * that must be constants after inlining. */
#define CK_INLINE static inline __attribute__((always_inline))

CK_INLINE bool ck_is_in_blocks(enum ck_row_type type) {
    return type == CK_ROW_Q8_0 || type == CK_ROW_Q4_0;
}

/* Of n elements; where the type has blocks, of the whole ones among them. */
CK_INLINE size_t ck_row_bytes(enum ck_row_type type, int32_t n) {
    switch (type) {
    case CK_ROW_F32:
        return (size_t)n * sizeof(float);
    case CK_ROW_Q8_0:
        return (size_t)(n / CK_BLOCK) * (sizeof(uint16_t) + CK_BLOCK);
    case CK_ROW_Q4_0:
        return (size_t)(n / CK_BLOCK) * (sizeof(uint16_t) + CK_BLOCK / 2);
    default:
        return (size_t)n * sizeof(uint16_t);
    }
}

/* The numbers of a block come after its scale. */
CK_INLINE const char *ck_block_numbers(const char *block) {
    return block + sizeof(uint16_t);
}

CK_INLINE const char *ck_row(const struct ck_tile *tile, int32_t cell) {
    return tile->rows + (size_t)cell * tile->stride;
}

enum { CK_LINE = 64 }; /* of the caches, in bytes */

/* The rows to be prefetched, handed out in even shares over the work on a tile. */
struct ck_prefetch {
    const struct ck_tile *tile;
    bool in_lines; /* rows begin where cache lines do */
    int32_t next;
    int32_t share;
};

/* With n_shares calls of ck_prefetch_share() to come. */
CK_INLINE struct ck_prefetch ck_prefetch_begin(const struct ck_tile *tile, int32_t n_shares) {
    return (struct ck_prefetch){
        .tile = tile,
        .in_lines = ((uintptr_t)tile->upcoming_rows | tile->stride) % CK_LINE == 0,
        .share = (tile->n_upcoming + n_shares - 1) / n_shares,
    };
}

/* As many lines of each row, so that no branch depends on how it lies. */
CK_INLINE void ck_prefetch_row(const struct ck_prefetch *prefetch, const char *row) {
    size_t bytes = prefetch->tile->upcoming_bytes;
    for (size_t at = 0; at < bytes; at += CK_LINE) {
        __builtin_prefetch(row + at, 0, 2);
    }
    if (!prefetch->in_lines) {
        __builtin_prefetch(row + bytes - 1, 0, 2);
    }
}

/* Into the second cache: the rows of interleaved sequences lie at strides that fall on a few sets
 * of the first one, where a tile of them does not fit (4 times slower, measured on Zen 4). */
CK_INLINE void ck_prefetch_share(struct ck_prefetch *prefetch) {
    const struct ck_tile *tile = prefetch->tile;
    int32_t end = prefetch->next + prefetch->share;
    end = end < tile->n_upcoming ? end : tile->n_upcoming;
    for (; prefetch->next < end; prefetch->next++) {
        size_t row = (size_t)tile->upcoming[prefetch->next] * tile->stride;
        ck_prefetch_row(prefetch, tile->upcoming_rows + row);
    }
}

/* A file's kernels for one row type, from its `scores`, `values`, `pack_k` and `pack_v`, which take
 * the type as a constant. */
#define CK_FOR_ROW_TYPE(suffix, type)                                                              \
    static void scores_##suffix(const struct ck_tile *k, const float *queries, int32_t n_rows,     \
                                float *out) {                                                      \
        scores(k, type, queries, n_rows, out);                                                     \
    }                                                                                              \
    static void values_##suffix(const struct ck_tile *v, const float *weights,                     \
                                const float *factors, int32_t n_rows, float *sums) {               \
        values(v, type, weights, factors, n_rows, sums);                                           \
    }                                                                                              \
    static void pack_k_##suffix(const struct ck_tile *k, float *packed) {                          \
        pack_k(k, type, packed);                                                                   \
    }                                                                                              \
    static bool pack_v_##suffix(const struct ck_tile *v, float *packed) {                          \
        return pack_v(v, type, packed);                                                            \
    }

/* Those for all types, and the table of them with the file's `multiply` and `weigh`. */
#define CK_KERNELS(table)                                                                          \
    CK_FOR_ROW_TYPE(f32, CK_ROW_F32)                                                               \
    CK_FOR_ROW_TYPE(f16, CK_ROW_F16)                                                               \
    CK_FOR_ROW_TYPE(bf16, CK_ROW_BF16)                                                             \
    CK_FOR_ROW_TYPE(q8_0, CK_ROW_Q8_0)                                                             \
    CK_FOR_ROW_TYPE(q4_0, CK_ROW_Q4_0)                                                             \
    static const struct ck_kernels table = {                                                       \
        .scores = {scores_f32, scores_f16, scores_bf16, scores_q8_0, scores_q4_0},                 \
        .values = {values_f32, values_f16, values_bf16, values_q8_0, values_q4_0},                 \
        .pack_k = {pack_k_f32, pack_k_f16, pack_k_bf16, pack_k_q8_0, pack_k_q4_0},                 \
        .pack_v = {pack_v_f32, pack_v_f16, pack_v_bf16, pack_v_q8_0, pack_v_q4_0},                 \
        .multiply = multiply,                                                                      \
        .weigh = weigh,                                                                            \
    }

#endif
