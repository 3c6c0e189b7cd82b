/* A part of simd.h: `scores` and `values`, which read each cell's row once for a few query rows.
 * They wait for memory, so the upcoming rows are asked for a few at a time. */
#ifndef CELLKV_ATTENTION_KERNELS_SIMD_FEW_H
#define CELLKV_ATTENTION_KERNELS_SIMD_FEW_H

/* The rows of LANES cells; past the tile's last cell, that one again. */
CK_INLINE void find_rows(const struct ck_tile *tile, int32_t first, const char *rows[LANES]) {
    for (int32_t lane = 0; lane < LANES; lane++) {
        rows[lane] = ck_row(tile, tile->cells[smaller_of(first + lane, tile->n_cells - 1)]);
    }
}

CK_INLINE void add_products(const char *const rows[4], enum ck_row_type type, const float *queries,
                            int32_t width, int32_t begin, int32_t n_rows, bool half,
                            vec sums[FEW_BLOCK][4]) {
    int32_t n_parts = vectors_at_once(type);
    UNROLLED
    for (int32_t c = 0; c < 4; c++) {
        UNROLLED
        for (int32_t part = 0; part < n_parts; part++) {
            const float *from = queries + begin + part * LANES;
            vec k = row_part(rows[c], type, begin, part, half);
            UNROLLED
            for (int32_t r = 0; r < n_rows; r++) {
                vec query = load_part(from + (size_t)r * (size_t)width, half);
                sums[r][c] = vec_fma(k, query, sums[r][c]);
            }
        }
    }
}

/* Four cells' scores for each query row, not yet summed over the fours of lanes. */
CK_INLINE void score_four(const char *const rows[4], enum ck_row_type type, const float *queries,
                          int32_t width, int32_t n_rows, vec fours[FEW_BLOCK]) {
    vec sums[FEW_BLOCK][4];
    UNROLLED
    for (int32_t r = 0; r < n_rows; r++) {
        sums[r][0] = sums[r][1] = sums[r][2] = sums[r][3] = vec_zero();
    }
    int32_t begin = 0, step = vectors_at_once(type) * LANES;
    for (; begin + step <= width; begin += step) {
        add_products(rows, type, queries, width, begin, n_rows, false, sums);
    }
    if (LANES > 8 && !ck_is_in_blocks(type) && begin < width) {
        add_products(rows, type, queries, width, begin, n_rows, true, sums);
    }
    UNROLLED
    for (int32_t r = 0; r < n_rows; r++) {
        fours[r] = vec_sum_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    }
}

/* n_rows query rows over LANES cells, n_fours of whose fours are in the tile. */
CK_INLINE void score_block(const char *const rows[LANES], enum ck_row_type type, int32_t n_fours,
                           const float *queries, int32_t width, int32_t n_rows,
                           struct ck_prefetch *prefetch, float *out) {
    vec fours[FEW_BLOCK][LANES / 4];
    for (int32_t four = 0; four < LANES / 4; four++) {
        vec sums[FEW_BLOCK];
        if (four < n_fours) {
            if (prefetch) {
                ck_prefetch_share(prefetch);
            }
            score_four(rows + 4 * four, type, queries, width, n_rows, sums);
        }
        UNROLLED
        for (int32_t r = 0; r < n_rows; r++) {
            fours[r][four] = four < n_fours ? sums[r] : vec_zero();
        }
    }
    UNROLLED
    for (int32_t r = 0; r < n_rows; r++) {
        vec_store(out + (size_t)r * CK_TILE, vec_sum_fours(fours[r]));
    }
}

CK_INLINE void scores(const struct ck_tile *k, enum ck_row_type type, const float *queries,
                      int32_t n_rows, float *out) {
    int32_t width = k->width;
    int32_t part = even_part(n_rows, FEW_BLOCK);
    struct ck_prefetch upcoming = ck_prefetch_begin(k, (k->n_cells + 3) / 4);
    for (int32_t c = 0; c < k->n_cells; c += LANES) {
        const char *rows[LANES];
        find_rows(k, c, rows);
        int32_t n_fours = (smaller_of(k->n_cells - c, LANES) + 3) / 4;
        for (int32_t r = 0; r < n_rows; r += part) {
            struct ck_prefetch *prefetch = r == 0 ? &upcoming : NULL;
            const float *query = queries + (size_t)r * (size_t)width;
            float *to = out + (size_t)r * CK_TILE + c;
            switch (smaller_of(part, n_rows - r)) {
            case 1:
                score_block(rows, type, n_fours, query, width, 1, prefetch, to);
                break;
            case 2:
                score_block(rows, type, n_fours, query, width, 2, prefetch, to);
                break;
            case 3:
                score_block(rows, type, n_fours, query, width, 3, prefetch, to);
                break;
#if FEW_BLOCK >= 4
            case 4:
                score_block(rows, type, n_fours, query, width, 4, prefetch, to);
                break;
#endif
            }
        }
    }
}

/* What `values` works on, for some of its query rows and columns from `begin`. */
struct value_block {
    const struct ck_tile *v;
    const float *weights;
    const float *factors;
    float *sums;
    int32_t begin;
    struct ck_prefetch *prefetch; /* or NULL */
};

CK_INLINE void add_weighted(const struct value_block *block, enum ck_row_type type, int32_t n_rows,
                            int32_t n_vectors, bool half) {
    const struct ck_tile *v = block->v;
    float *to = block->sums + block->begin;
    size_t width = (size_t)v->width, stride = v->stride;
    const char *columns = v->rows + ck_row_bytes(type, block->begin);
    vec sums[FEW_BLOCK][VALUE_VECTORS];
    UNROLLED
    for (int32_t r = 0; r < n_rows; r++) {
        vec factor = vec_all(block->factors[r]);
        UNROLLED
        for (int32_t i = 0; i < n_vectors; i++) {
            sums[r][i] = vec_mul(load_part(to + (size_t)r * width + i * LANES, half), factor);
        }
    }
    for (int32_t c = 0; c < v->n_cells; c++) {
        if (block->prefetch) {
            ck_prefetch_share(block->prefetch);
        }
        const char *at = columns + (size_t)v->cells[c] * stride;
        UNROLLED
        for (int32_t i = 0; i < n_vectors; i++) {
            vec x = part_at(at, type, block->begin, i, half);
            UNROLLED
            for (int32_t r = 0; r < n_rows; r++) {
                vec weight = vec_all(block->weights[(size_t)r * CK_TILE + (size_t)c]);
                sums[r][i] = vec_fma(x, weight, sums[r][i]);
            }
        }
    }
    UNROLLED
    for (int32_t r = 0; r < n_rows; r++) {
        UNROLLED
        for (int32_t i = 0; i < n_vectors; i++) {
            store_part(to + (size_t)r * width + i * LANES, sums[r][i], half);
        }
    }
}

CK_INLINE void value_columns(const struct value_block *block, enum ck_row_type type, int32_t n_rows,
                             int32_t n_vectors) {
    switch (n_vectors) {
    case 0: /* what is left is half a vector */
        if (LANES > 8 && !ck_is_in_blocks(type)) {
            add_weighted(block, type, n_rows, 1, true);
        }
        break;
    case 1:
        add_weighted(block, type, n_rows, 1, false);
        break;
    case 2:
        add_weighted(block, type, n_rows, 2, false);
        break;
    case 3:
        add_weighted(block, type, n_rows, 3, false);
        break;
    case 4:
        add_weighted(block, type, n_rows, 4, false);
        break;
    }
}

CK_INLINE void value_rows(const struct value_block *block, enum ck_row_type type, int32_t n_rows,
                          int32_t n_vectors) {
    switch (n_rows) {
    case 1:
        value_columns(block, type, 1, n_vectors);
        break;
    case 2:
        value_columns(block, type, 2, n_vectors);
        break;
    case 3:
        value_columns(block, type, 3, n_vectors);
        break;
#if FEW_BLOCK >= 4
    case 4:
        value_columns(block, type, 4, n_vectors);
        break;
#endif
    }
}

CK_INLINE void values(const struct ck_tile *v, enum ck_row_type type, const float *weights,
                      const float *factors, int32_t n_rows, float *sums) {
    int32_t part = even_part(n_rows, FEW_BLOCK);
    int32_t n_vectors = v->width / LANES;
    int32_t vectors_part = n_vectors ? even_part(n_vectors, VALUE_VECTORS) : 0;
    int32_t together = smaller_of(vectors_at_once(type), VALUE_VECTORS);
    vectors_part = (vectors_part + together - 1) / together * together;
    struct ck_prefetch upcoming = ck_prefetch_begin(v, v->n_cells);
    for (int32_t begin = 0; begin < v->width;) {
        int32_t vectors = smaller_of(vectors_part, n_vectors - begin / LANES);
        for (int32_t r = 0; r < n_rows; r += part) {
            struct value_block block = {
                .v = v,
                .weights = weights + (size_t)r * CK_TILE,
                .factors = factors + r,
                .sums = sums + (size_t)r * (size_t)v->width,
                .begin = begin,
                .prefetch = begin == 0 && r == 0 ? &upcoming : NULL,
            };
            value_rows(&block, type, smaller_of(part, n_rows - r), vectors);
        }
        begin += vectors ? vectors * LANES : 8;
    }
}

#endif
