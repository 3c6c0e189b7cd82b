/* Vectors of AVX-512 (F, BW, DQ and VL). */
#include <immintrin.h>

#include "attention/kernels/isa.h"

typedef __m512 vec;
#define LANES            16
#define FEW_BLOCK        4
#define MULTIPLY_VECTORS 4

CK_INLINE vec vec_zero(void) {
    return _mm512_setzero_ps();
}

CK_INLINE vec vec_all(float x) {
    return _mm512_set1_ps(x);
}

CK_INLINE vec vec_load(const float *from) {
    return _mm512_loadu_ps(from);
}

CK_INLINE void vec_store(float *to, vec v) {
    _mm512_storeu_ps(to, v);
}

CK_INLINE vec vec_load_half(const float *from) {
    return _mm512_zextps256_ps512(_mm256_loadu_ps(from));
}

CK_INLINE void vec_store_half(float *to, vec v) {
    _mm256_storeu_ps(to, _mm512_castps512_ps256(v));
}

CK_INLINE vec vec_row(const char *from, enum ck_row_type type) {
    if (type == CK_ROW_F32) {
        return _mm512_loadu_ps(from);
    }
    __m256i stored = _mm256_loadu_si256((const __m256i *)from);
    if (type == CK_ROW_F16) {
        return _mm512_cvtph_ps(stored);
    }
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
}

CK_INLINE vec vec_row_half(const char *from, enum ck_row_type type) {
    if (type == CK_ROW_F32) {
        return vec_load_half((const float *)from);
    }
    __m256i stored = _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)from));
    if (type == CK_ROW_F16) {
        return _mm512_cvtph_ps(stored);
    }
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
}

CK_INLINE vec vec_block_scale(const char *block) {
    /* With 6 more bytes of the block, which is one load. */
    return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)block)));
}

CK_INLINE vec vec_block(const char *block, enum ck_row_type type, int32_t part, vec scale) {
    const char *numbers = ck_block_numbers(block);
    if (type == CK_ROW_Q8_0) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(numbers + part * LANES));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale);
    }
    /* The block's 16 values, picked by the lowest 4 bits of each lane. */
    vec values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)numbers));
    __m512i picks = part == 0 ? pairs : _mm512_srli_epi32(pairs, 4);
    return _mm512_permutexvar_ps(picks, _mm512_mul_ps(values, scale));
}

CK_INLINE vec vec_add(vec a, vec b) {
    return _mm512_add_ps(a, b);
}

CK_INLINE vec vec_sub(vec a, vec b) {
    return _mm512_sub_ps(a, b);
}

CK_INLINE vec vec_mul(vec a, vec b) {
    return _mm512_mul_ps(a, b);
}

CK_INLINE vec vec_div(vec a, vec b) {
    return _mm512_div_ps(a, b);
}

CK_INLINE vec vec_fma(vec a, vec b, vec c) {
    return _mm512_fmadd_ps(a, b, c);
}

/* Of two operands one of which is NaN, the instruction takes the second. */
CK_INLINE vec vec_larger(vec x, vec y) {
    return _mm512_max_ps(x, y);
}

CK_INLINE vec vec_smaller(vec x, vec y) {
    return _mm512_min_ps(y, x);
}

CK_INLINE vec vec_magnitude(vec x) {
    return _mm512_abs_ps(x);
}

CK_INLINE vec vec_copy_sign(vec magnitude, vec sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0F)));
}

/* The mask is made of integers, whose units are idle here. */
CK_INLINE vec vec_keep_range(vec x, int32_t first, struct ck_range range) {
    uint64_t inside = (~UINT64_C(0) >> (CK_TILE - range.end)) & (~UINT64_C(0) << range.begin);
    __mmask16 lanes = (__mmask16)(inside >> first);
    return _mm512_mask_blend_ps(lanes, _mm512_set1_ps(-__builtin_inff()), x);
}

CK_INLINE vec vec_zero_below(vec x, vec limit, vec y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}

CK_INLINE vec vec_scale(vec x, vec t) {
    __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), exponent));
}

CK_INLINE vec vec_highest_bits(vec a, vec b) {
    __m512i magnitude = _mm512_castps_si512(_mm512_abs_ps(b));
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), magnitude));
}

CK_INLINE bool vec_is_finite(vec x) {
    __m512i infinity = _mm512_set1_epi32(0x7f800000);
    return _mm512_cmpge_epi32_mask(_mm512_castps_si512(_mm512_abs_ps(x)), infinity) == 0;
}

CK_INLINE float vec_largest(vec x) {
    return _mm512_reduce_max_ps(x);
}

CK_INLINE float vec_total(vec x) {
    return _mm512_reduce_add_ps(x);
}

CK_INLINE vec vec_sum_four(vec a, vec b, vec c, vec d) {
    vec ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    vec cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}

CK_INLINE vec vec_sum_fours(const vec v[4]) {
    vec low = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88),
                            _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
    vec high = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x88),
                             _mm512_shuffle_f32x4(v[2], v[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                         _mm512_shuffle_f32x4(low, high, 0xdd));
}

/* 4 by 4 floats in each 128 bits. */
CK_INLINE void transpose_four(vec v[4]) {
    vec low_01 = _mm512_unpacklo_ps(v[0], v[1]), high_01 = _mm512_unpackhi_ps(v[0], v[1]);
    vec low_23 = _mm512_unpacklo_ps(v[2], v[3]), high_23 = _mm512_unpackhi_ps(v[2], v[3]);
    v[0] = _mm512_shuffle_ps(low_01, low_23, 0x44);
    v[1] = _mm512_shuffle_ps(low_01, low_23, 0xee);
    v[2] = _mm512_shuffle_ps(high_01, high_23, 0x44);
    v[3] = _mm512_shuffle_ps(high_01, high_23, 0xee);
}

/* Then 4 by 4 of the 128 bits. */
CK_INLINE void vec_transpose(vec v[16]) {
    transpose_four(v);
    transpose_four(v + 4);
    transpose_four(v + 8);
    transpose_four(v + 12);
    for (int i = 0; i < 4; i++) {
        vec even_01 = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88);
        vec odd_01 = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
        vec even_23 = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x88);
        vec odd_23 = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xdd);
        v[i] = _mm512_shuffle_f32x4(even_01, even_23, 0x88);
        v[i + 4] = _mm512_shuffle_f32x4(odd_01, odd_23, 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(even_01, even_23, 0xdd);
        v[i + 12] = _mm512_shuffle_f32x4(odd_01, odd_23, 0xdd);
    }
}

#include "attention/kernels/simd.h"

void ck_init_avx512(struct ck_kernels *kernels) {
    *kernels = simd_kernels;
}
