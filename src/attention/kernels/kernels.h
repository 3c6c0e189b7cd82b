/* The arithmetic of ragged attention, a tile of cells at a time: a table of function pointers that
 * starts with portable C and is overwritten by what the CPU has.
 *
 * Two forms do the same work. Few query rows (decode): `scores` and `values` read the cells' rows
 * as they are stored, once for all query rows. Many (prefill, a shared prefix): `pack_k` and
 * `pack_v` turn the tile into floats once, `multiply` does the rest. `weigh` is the softmax between
 * the two halves of either form.
 *
 * All sums are f32, and what comes out for a query row does not depend on the other rows of the
 * call. No function reads a cell that it is not given, or a byte past a row's last. */
#ifndef CELLKV_ATTENTION_KERNELS_KERNELS_H
#define CELLKV_ATTENTION_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CK_TILE = 64,     /* the most cells of a tile */
    CK_FEW_ROWS = 16, /* the most query rows that `scores` and `values` take */
};

/* How K and V are stored. The last two are blocks of CK_BLOCK elements: a scale in f16, then either
 * 32 signed bytes, or 16 bytes whose low halves are elements 0 .. 15 and whose high halves are 16
 * .. 31, each 8 too high. An element is its number times the scale, which f32 holds exactly. */
enum ck_row_type {
    CK_ROW_F32,
    CK_ROW_F16,
    CK_ROW_BF16,
    CK_ROW_Q8_0,
    CK_ROW_Q4_0,
    CK_N_ROW_TYPES,
};

enum { CK_BLOCK = 32 };

/* What one K/V head has in some cells' rows. */
struct ck_tile {
    const char *rows;     /* the head's part of row 0; aligned to an f32 or an f16 of the type */
    size_t stride;        /* bytes from row to row */
    int32_t width;        /* elements of the head's part, >= 8: a multiple of 8, or whole blocks */
    int32_t n_cells;      /* 1 .. CK_TILE */
    const int32_t *cells; /* [n_cells] the rows, in any order */
    /* What will be read next, to be prefetched: bytes of some other rows, at the same stride. */
    const char *upcoming_rows;
    size_t upcoming_bytes;
    const int32_t *upcoming; /* [n_upcoming] */
    int32_t n_upcoming;      /* 0 .. CK_TILE */
};

/* The online softmax of one query row: what has been seen so far. Starts as {-INFINITY, 0}. */
struct ck_softmax {
    float maximum; /* of the scores */
    float sum;     /* of exp(score - maximum) */
};

/* The cells of a tile that a query row sees: [begin, end) of its n_cells, may be empty. */
struct ck_range {
    int32_t begin;
    int32_t end;
};

struct ck_kernels {
    const char *name; /* of the instruction set that the fastest of them use */

    /* scores[r * CK_TILE + c] = queries[r * width + ...] . K of cell c, for c < n_cells.
     * n_rows: 1 .. CK_FEW_ROWS. Scores at c >= n_cells may be overwritten with anything. */
    void (*scores[CK_N_ROW_TYPES])(const struct ck_tile *k, const float *queries, int32_t n_rows,
                                   float *scores);

    /* sums[r * width + ...] = sums * factors[r] + sum over c of weights[r * CK_TILE + c] * V of
     * cell c. n_rows: 1 .. CK_FEW_ROWS. */
    void (*values[CK_N_ROW_TYPES])(const struct ck_tile *v, const float *weights,
                                   const float *factors, int32_t n_rows, float *sums);

    /* packed[i * CK_TILE + c] = element i of cell c, 0 for c >= n_cells: [width][CK_TILE]. */
    void (*pack_k[CK_N_ROW_TYPES])(const struct ck_tile *k, float *packed);

    /* packed[c * width + i] = element i of cell c: [n_cells][width]. Returns whether all are
     * finite. */
    bool (*pack_v[CK_N_ROW_TYPES])(const struct ck_tile *v, float *packed);

    /* c[r * c_stride + j] = c * factors[r] + sum over i < n_inner of a[r * a_stride + i] *
     * b[i * b_stride + j], for r < n_rows, j < n_columns (a multiple of 8). With factors NULL, c is
     * only written. b_stride is a multiple of 8; b is read fastest at 64 bytes. */
    void (*multiply)(const float *a, size_t a_stride, const float *b, size_t b_stride, float *c,
                     size_t c_stride, const float *factors, int32_t n_rows, int32_t n_inner,
                     int32_t n_columns);

    /* One step of the online softmax of each row over scores[r * CK_TILE + c], c in ranges[r]:
     * takes the soft-cap (> 0: score = soft_cap * tanh(score / soft_cap)), raises the row's
     * maximum, turns the scores into weights exp(score - maximum), adds them to its sum, scaled to
     * the new maximum by factors[r] = exp(old maximum - new maximum). Weights at c < n_cells
     * outside the range are 0, whatever was there, NaN included; those at c >= n_cells may be
     * overwritten with anything. A row that has seen no score above -INFINITY keeps that
     * maximum, weights 0 and factor 1; a NaN score in its range makes its sum NaN. */
    void (*weigh)(float *scores, const struct ck_range *ranges, int32_t n_rows, int32_t n_cells,
                  float soft_cap, struct ck_softmax *states, float *factors);
};

/* The instruction sets, each including those before it on its kind of CPU. */
enum ck_isa { CK_ISA_C, CK_ISA_AVX2, CK_ISA_AVX512, CK_ISA_NEON, CK_N_ISAS };

const char *ck_isa_name(enum ck_isa isa);

/* Whether this build has kernels for it and this CPU can run them. */
bool ck_isa_is_available(enum ck_isa isa);

/* The best that is available. */
enum ck_isa ck_isa_best(void);

/* The table for an available isa, alive as long as the process. Threads: any. */
const struct ck_kernels *ck_kernels(enum ck_isa isa);

#endif
