/* The kernels in vectors, for any instruction set. A file that includes this has defined, for its
 * own vectors:
 *
 *   vec, LANES                      LANES floats: 4, 8 or 16
 *   FEW_BLOCK                       query rows that `scores` and `values` take at once, <= 4
 *   MULTIPLY_VECTORS                vectors of columns that `multiply` takes at once, <= 4
 *   vec_zero, vec_all               the same float in each lane
 *   vec_load, vec_store             at any alignment
 *   vec_load_half, vec_store_half   8 floats of 16 lanes, the others 0; called with 16 lanes only
 *   vec_row, vec_row_half           the same from a stored row, converted; not from blocks
 *   vec_block_scale(block)          the block's scale in each lane
 *   vec_block(block, type, part, scale)
 *                                   elements part * LANES ... of a block, times its scale
 *   vec_add, _sub, _mul, _div       by lane
 *   vec_fma(a, b, c)                a * b + c, rounded once
 *   vec_larger(x, y)                y where x is NaN
 *   vec_smaller(x, y)               x where x is NaN
 *   vec_magnitude, vec_copy_sign(magnitude, sign)
 *   vec_keep_range(x, first, range) x in the lanes where first + lane is in it, -INFINITY elsewhere
 *   vec_zero_below(x, limit, y)     0 where x < limit, else y
 *   vec_scale(x, t)                 x * 2^n, where n is in the low bits of t
 *   vec_highest_bits(a, b)          the higher magnitude, compared as integers: NaN is above all
 *   vec_is_finite                   every lane
 *   vec_largest, vec_total          over the lanes; no lane is NaN for the former
 *   vec_sum_four(a, b, c, d)        for each four lanes, the sums over them of a, b, c and d
 *   vec_sum_fours(v)                the sums of LANES vectors from LANES / 4 results of the former
 *   vec_transpose(v)                LANES vectors, in place
 */
#ifndef CELLKV_ATTENTION_KERNELS_SIMD_H
#define CELLKV_ATTENTION_KERNELS_SIMD_H

#include <math.h>

/* Arrays of vectors stay in registers only where every loop over them is unrolled. */
#ifdef __clang__
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

/* The parts, each of at most `most`, that differ in size the least. */
CK_INLINE int32_t even_part(int32_t n, int32_t most) {
    int32_t n_parts = (n + most - 1) / most;
    return (n + n_parts - 1) / n_parts;
}

CK_INLINE int32_t smaller_of(int32_t a, int32_t b) {
    return a < b ? a : b;
}

/* Where `half` is a constant, these are one instruction. */
CK_INLINE vec load_part(const float *from, bool half) {
    return half ? vec_load_half(from) : vec_load(from);
}

CK_INLINE void store_part(float *to, vec v, bool half) {
    if (half) {
        vec_store_half(to, v);
    } else {
        vec_store(to, v);
    }
}

enum {
    VALUE_VECTORS = 4, /* vectors of columns that `values` takes at once */
    BLOCKS_ARE_WHOLE = VALUE_VECTORS * LANES >= CK_BLOCK,
};

/* Rows are read this many vectors at once: what a block's scale is for. */
CK_INLINE int32_t vectors_at_once(enum ck_row_type type) {
    return ck_is_in_blocks(type) ? CK_BLOCK / LANES : 1;
}

/* Vector `part`, a constant, of a row from element `begin` on, which is at `at`: where a block
 * begins, or in small lanes, half a block. */
CK_INLINE vec part_at(const char *at, enum ck_row_type type, int32_t begin, int32_t part,
                      bool half) {
    const char *from = at + ck_row_bytes(type, part * LANES);
    if (ck_is_in_blocks(type)) {
        part = (BLOCKS_ARE_WHOLE ? part : begin / LANES + part) % (CK_BLOCK / LANES);
        return vec_block(from, type, part, vec_block_scale(from));
    }
    return half ? vec_row_half(from, type) : vec_row(from, type);
}

CK_INLINE vec row_part(const char *row, enum ck_row_type type, int32_t begin, int32_t part,
                       bool half) {
    return part_at(row + ck_row_bytes(type, begin), type, begin, part, half);
}

#include "attention/kernels/simd_few.h"
#include "attention/kernels/simd_many.h"
#include "attention/kernels/simd_softmax.h"

CK_KERNELS(simd_kernels);

#endif
