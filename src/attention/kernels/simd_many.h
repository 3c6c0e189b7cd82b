/* A part of simd.h: `pack_k`, `pack_v` and `multiply`, for many query rows over the same cells. */
#ifndef CELLKV_ATTENTION_KERNELS_SIMD_MANY_H
#define CELLKV_ATTENTION_KERNELS_SIMD_MANY_H

/* LANES elements of LANES cells, n_cells of which are in the tile: turned on their diagonal. */
CK_INLINE void pack_square(const char *const rows[LANES], enum ck_row_type type, int32_t n_cells,
                           int32_t begin, int32_t part, bool half, float *packed) {
    vec square[LANES];
    UNROLLED
    for (int32_t lane = 0; lane < LANES; lane++) {
        square[lane] = row_part(rows[lane], type, begin, part, half);
    }
    for (int32_t lane = n_cells; lane < LANES; lane++) {
        square[lane] = vec_zero();
    }
    vec_transpose(square);
    int32_t n_elements = half ? 8 : LANES;
    UNROLLED
    for (int32_t i = 0; i < n_elements; i++) {
        vec_store(packed + (size_t)(begin + part * LANES + i) * CK_TILE, square[i]);
    }
}

static void pack_zeros(int32_t width, int32_t first, float *packed) {
    for (int32_t i = 0; i < width; i++) {
        for (int32_t c = first; c < CK_TILE; c += LANES) {
            vec_store(packed + (size_t)i * CK_TILE + c, vec_zero());
        }
    }
}

CK_INLINE void pack_k(const struct ck_tile *k, enum ck_row_type type, float *packed) {
    int32_t n_groups = (k->n_cells + LANES - 1) / LANES;
    int32_t n_squares = (k->width + LANES - 1) / LANES;
    int32_t n_parts = vectors_at_once(type);
    struct ck_prefetch upcoming = ck_prefetch_begin(k, n_groups * n_squares);
    for (int32_t c = 0; c < k->n_cells; c += LANES) {
        const char *rows[LANES];
        find_rows(k, c, rows);
        int32_t n_cells = smaller_of(LANES, k->n_cells - c);
        int32_t begin = 0;
        for (; begin + n_parts * LANES <= k->width; begin += n_parts * LANES) {
            UNROLLED
            for (int32_t part = 0; part < n_parts; part++) {
                ck_prefetch_share(&upcoming);
                if (n_cells == LANES) {
                    pack_square(rows, type, LANES, begin, part, false, packed + c);
                } else {
                    pack_square(rows, type, n_cells, begin, part, false, packed + c);
                }
            }
        }
        if (LANES > 8 && !ck_is_in_blocks(type) && begin < k->width) {
            ck_prefetch_share(&upcoming);
            pack_square(rows, type, n_cells, begin, 0, true, packed + c);
        }
    }
    pack_zeros(k->width, n_groups * LANES, packed);
}

CK_INLINE bool pack_v(const struct ck_tile *v, enum ck_row_type type, float *packed) {
    struct ck_prefetch upcoming = ck_prefetch_begin(v, v->n_cells);
    int32_t n_parts = vectors_at_once(type);
    vec highest = vec_zero();
    for (int32_t c = 0; c < v->n_cells; c++) {
        ck_prefetch_share(&upcoming);
        const char *row = ck_row(v, v->cells[c]);
        float *to = packed + (size_t)c * (size_t)v->width;
        int32_t begin = 0;
        for (; begin + n_parts * LANES <= v->width; begin += n_parts * LANES) {
            vec x[CK_BLOCK / LANES]; /* all read before any is stored: a block's scale once */
            UNROLLED
            for (int32_t part = 0; part < n_parts; part++) {
                x[part] = row_part(row, type, begin, part, false);
            }
            UNROLLED
            for (int32_t part = 0; part < n_parts; part++) {
                highest = vec_highest_bits(highest, x[part]);
                vec_store(to + begin + part * LANES, x[part]);
            }
        }
        if (LANES > 8 && !ck_is_in_blocks(type) && begin < v->width) {
            vec x = row_part(row, type, begin, 0, true);
            highest = vec_highest_bits(highest, x);
            vec_store_half(to + begin, x);
        }
    }
    return vec_is_finite(highest);
}

/* With 4 vectors of columns, 24 sums: enough to hide the latency of each, in 32 registers. */
enum { MULTIPLY_ROWS = 6 };

/* The arguments of `multiply` for some of its rows and columns. */
struct product {
    const float *a, *b, *factors;
    float *c;
    size_t a_stride, b_stride, c_stride;
    int32_t n_rows, n_inner;
};

CK_INLINE void product_finish(const struct product *of, int32_t row, int32_t n_rows,
                              int32_t n_vectors, bool half,
                              vec sums[MULTIPLY_ROWS][MULTIPLY_VECTORS]) {
    UNROLLED
    for (int32_t r = 0; r < n_rows; r++) {
        float *c = of->c + (size_t)(row + r) * of->c_stride;
        UNROLLED
        for (int32_t j = 0; j < n_vectors; j++) {
            vec sum = sums[r][j];
            if (of->factors) {
                vec factor = vec_all(of->factors[row + r]);
                sum = vec_fma(load_part(c + j * LANES, half), factor, sum);
            }
            store_part(c + j * LANES, sum, half);
        }
    }
}

CK_INLINE void product_block(const struct product *of, int32_t row, int32_t n_rows,
                             int32_t n_vectors, bool half) {
    vec sums[MULTIPLY_ROWS][MULTIPLY_VECTORS];
    UNROLLED
    for (int32_t r = 0; r < n_rows; r++) {
        UNROLLED
        for (int32_t j = 0; j < n_vectors; j++) {
            sums[r][j] = vec_zero();
        }
    }
    const float *a = of->a + (size_t)row * of->a_stride;
    const float *b = of->b;
    size_t a_stride = of->a_stride;
    for (int32_t i = 0; i < of->n_inner; i++, a++, b += of->b_stride) {
        vec columns[MULTIPLY_VECTORS];
        UNROLLED
        for (int32_t j = 0; j < n_vectors; j++) {
            columns[j] = load_part(b + j * LANES, half);
        }
        UNROLLED
        for (int32_t r = 0; r < n_rows; r++) {
            vec scale = vec_all(a[(size_t)r * a_stride]);
            UNROLLED
            for (int32_t j = 0; j < n_vectors; j++) {
                sums[r][j] = vec_fma(scale, columns[j], sums[r][j]);
            }
        }
    }
    product_finish(of, row, n_rows, n_vectors, half, sums);
}

/* All rows of some columns, which are in the innermost cache after the first block of rows. */
CK_INLINE void product_strip(const struct product *of, int32_t n_vectors, bool half) {
    int32_t part = even_part(of->n_rows, MULTIPLY_ROWS);
    for (int32_t row = 0; row < of->n_rows; row += part) {
        switch (smaller_of(part, of->n_rows - row)) {
        case 1:
            product_block(of, row, 1, n_vectors, half);
            break;
        case 2:
            product_block(of, row, 2, n_vectors, half);
            break;
        case 3:
            product_block(of, row, 3, n_vectors, half);
            break;
        case 4:
            product_block(of, row, 4, n_vectors, half);
            break;
        case 5:
            product_block(of, row, 5, n_vectors, half);
            break;
        case 6:
            product_block(of, row, 6, n_vectors, half);
            break;
        }
    }
}

#define FOR_STRIP(name, n_vectors, half)                                                           \
    static void name(const struct product *of) {                                                   \
        product_strip(of, n_vectors, half);                                                        \
    }

FOR_STRIP(strip_1, 1, false)
FOR_STRIP(strip_2, 2, false)
#if MULTIPLY_VECTORS > 2
FOR_STRIP(strip_3, 3, false)
FOR_STRIP(strip_4, 4, false)
#endif
#if LANES > 8
FOR_STRIP(strip_half, 1, true)
#endif

static void (*const strips[])(const struct product *of) = {
#if LANES > 8
    strip_half,
#else
    NULL,
#endif
    strip_1,    strip_2,
#if MULTIPLY_VECTORS > 2
    strip_3,    strip_4,
#endif
};

static void multiply(const float *a, size_t a_stride, const float *b, size_t b_stride, float *c,
                     size_t c_stride, const float *factors, int32_t n_rows, int32_t n_inner,
                     int32_t n_columns) {
    int32_t n_vectors = n_columns / LANES;
    int32_t part = n_vectors ? even_part(n_vectors, MULTIPLY_VECTORS) : 0;
    for (int32_t column = 0; column < n_columns;) {
        struct product of = {
            .a = a,
            .b = b + column,
            .factors = factors,
            .c = c + column,
            .a_stride = a_stride,
            .b_stride = b_stride,
            .c_stride = c_stride,
            .n_rows = n_rows,
            .n_inner = n_inner,
        };
        int32_t vectors = smaller_of(part, n_vectors - column / LANES);
        strips[vectors](&of); /* 0: what is left is half a vector */
        column += vectors ? vectors * LANES : 8;
    }
}

#endif
