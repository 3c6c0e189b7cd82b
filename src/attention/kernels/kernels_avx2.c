/* Vectors of AVX2, with FMA and F16C. */
#include <immintrin.h>
#include <string.h>

#include "attention/kernels/isa.h"

typedef __m256 vec;
#define LANES            8
#define FEW_BLOCK        3 /* 12 sums, 3 queries and a row, in 16 registers */
#define MULTIPLY_VECTORS 2

CK_INLINE vec vec_zero(void) {
    return _mm256_setzero_ps();
}

CK_INLINE vec vec_all(float x) {
    return _mm256_set1_ps(x);
}

CK_INLINE vec vec_load(const float *from) {
    return _mm256_loadu_ps(from);
}

CK_INLINE void vec_store(float *to, vec v) {
    _mm256_storeu_ps(to, v);
}

CK_INLINE vec vec_row(const char *from, enum ck_row_type type) {
    if (type == CK_ROW_F32) {
        return _mm256_loadu_ps((const float *)from);
    }
    __m128i stored = _mm_loadu_si128((const __m128i *)from);
    if (type == CK_ROW_F16) {
        return _mm256_cvtph_ps(stored);
    }
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(stored), 16));
}

CK_INLINE vec vec_block_scale(const char *block) {
    uint16_t half;
    memcpy(&half, block, sizeof half);
    return _mm256_cvtph_ps(_mm_set1_epi16((short)half));
}

CK_INLINE vec vec_block(const char *block, enum ck_row_type type, int32_t part, vec scale) {
    const char *numbers = ck_block_numbers(block);
    if (type == CK_ROW_Q8_0) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(numbers + part * LANES));
        return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), scale);
    }
    __m128i bytes = _mm_loadl_epi64((const __m128i *)(numbers + part % 2 * LANES));
    __m256i pairs = _mm256_cvtepu8_epi32(bytes);
    __m256i halves =
        part < 2 ? _mm256_and_si256(pairs, _mm256_set1_epi32(15)) : _mm256_srli_epi32(pairs, 4);
    __m256i values = _mm256_sub_epi32(halves, _mm256_set1_epi32(8));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(values), scale);
}

#define vec_load_half  vec_load
#define vec_store_half vec_store
#define vec_row_half   vec_row

CK_INLINE vec vec_add(vec a, vec b) {
    return _mm256_add_ps(a, b);
}

CK_INLINE vec vec_sub(vec a, vec b) {
    return _mm256_sub_ps(a, b);
}

CK_INLINE vec vec_mul(vec a, vec b) {
    return _mm256_mul_ps(a, b);
}

CK_INLINE vec vec_div(vec a, vec b) {
    return _mm256_div_ps(a, b);
}

CK_INLINE vec vec_fma(vec a, vec b, vec c) {
    return _mm256_fmadd_ps(a, b, c);
}

/* Of two operands one of which is NaN, the instruction takes the second. */
CK_INLINE vec vec_larger(vec x, vec y) {
    return _mm256_max_ps(x, y);
}

CK_INLINE vec vec_smaller(vec x, vec y) {
    return _mm256_min_ps(y, x);
}

CK_INLINE vec vec_magnitude(vec x) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x);
}

CK_INLINE vec vec_copy_sign(vec magnitude, vec sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0F)));
}

CK_INLINE vec vec_keep_range(vec x, int32_t first, struct ck_range range) {
    __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i cells = _mm256_add_epi32(lanes, _mm256_set1_epi32(first));
    __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(range.begin), cells);
    __m256i inside =
        _mm256_andnot_si256(below, _mm256_cmpgt_epi32(_mm256_set1_epi32(range.end), cells));
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, _mm256_castsi256_ps(inside));
}

CK_INLINE vec vec_zero_below(vec x, vec limit, vec y) {
    return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), y);
}

CK_INLINE vec vec_scale(vec x, vec t) {
    __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
}

CK_INLINE vec vec_highest_bits(vec a, vec b) {
    __m256i magnitude = _mm256_castps_si256(vec_magnitude(b));
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), magnitude));
}

CK_INLINE bool vec_is_finite(vec x) {
    __m256i below =
        _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), _mm256_castps_si256(vec_magnitude(x)));
    return _mm256_movemask_epi8(below) == -1;
}

CK_INLINE float vec_largest(vec x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

CK_INLINE float vec_total(vec x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

CK_INLINE vec vec_sum_four(vec a, vec b, vec c, vec d) {
    vec ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    vec cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}

CK_INLINE vec vec_sum_fours(const vec v[2]) {
    return _mm256_add_ps(_mm256_permute2f128_ps(v[0], v[1], 0x20),
                         _mm256_permute2f128_ps(v[0], v[1], 0x31));
}

/* 4 by 4 floats in each 128 bits. */
CK_INLINE void transpose_four(vec v[4]) {
    vec low_01 = _mm256_unpacklo_ps(v[0], v[1]), high_01 = _mm256_unpackhi_ps(v[0], v[1]);
    vec low_23 = _mm256_unpacklo_ps(v[2], v[3]), high_23 = _mm256_unpackhi_ps(v[2], v[3]);
    v[0] = _mm256_shuffle_ps(low_01, low_23, 0x44);
    v[1] = _mm256_shuffle_ps(low_01, low_23, 0xee);
    v[2] = _mm256_shuffle_ps(high_01, high_23, 0x44);
    v[3] = _mm256_shuffle_ps(high_01, high_23, 0xee);
}

CK_INLINE void vec_transpose(vec v[8]) {
    transpose_four(v);
    transpose_four(v + 4);
    for (int i = 0; i < 4; i++) {
        vec low = v[i], high = v[i + 4];
        v[i] = _mm256_permute2f128_ps(low, high, 0x20);
        v[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
}

#include "attention/kernels/simd.h"

void ck_init_avx2(struct ck_kernels *kernels) {
    *kernels = simd_kernels;
}
