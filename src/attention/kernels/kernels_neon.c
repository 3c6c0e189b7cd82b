/* Vectors of NEON, on any aarch64. */
#include <arm_neon.h>
#include <string.h>

#include "attention/kernels/isa.h"

typedef float32x4_t vec;
#define LANES            4
#define FEW_BLOCK        4
#define MULTIPLY_VECTORS 4

CK_INLINE vec vec_zero(void) {
    return vdupq_n_f32(0);
}

CK_INLINE vec vec_all(float x) {
    return vdupq_n_f32(x);
}

CK_INLINE vec vec_load(const float *from) {
    return vld1q_f32(from);
}

CK_INLINE void vec_store(float *to, vec v) {
    vst1q_f32(to, v);
}

CK_INLINE vec vec_row(const char *from, enum ck_row_type type) {
    if (type == CK_ROW_F32) {
        return vld1q_f32((const float *)(const void *)from);
    }
    uint16x4_t stored = vld1_u16((const uint16_t *)(const void *)from);
    if (type == CK_ROW_F16) {
        return vcvt_f32_f16(vreinterpret_f16_u16(stored));
    }
    return vreinterpretq_f32_u32(vshll_n_u16(stored, 16));
}

CK_INLINE vec vec_block_scale(const char *block) {
    uint16_t half;
    memcpy(&half, block, sizeof half);
    return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half)));
}

CK_INLINE vec vec_block(const char *block, enum ck_row_type type, int32_t part, vec scale) {
    const char *numbers = ck_block_numbers(block);
    bool in_pairs = type == CK_ROW_Q4_0;
    uint32_t four;
    memcpy(&four, numbers + (in_pairs ? part % 4 : part) * LANES, sizeof four);
    uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    int8x8_t values = vreinterpret_s8_u8(bytes);
    if (in_pairs) {
        uint8x8_t halves = vand_u8(vshl_u8(bytes, vdup_n_s8(part < 4 ? 0 : -4)), vdup_n_u8(15));
        values = vsub_s8(vreinterpret_s8_u8(halves), vdup_n_s8(8));
    }
    int32x4_t wide = vmovl_s16(vget_low_s16(vmovl_s8(values)));
    return vmulq_f32(vcvtq_f32_s32(wide), scale);
}

#define vec_load_half  vec_load
#define vec_store_half vec_store
#define vec_row_half   vec_row

CK_INLINE vec vec_add(vec a, vec b) {
    return vaddq_f32(a, b);
}

CK_INLINE vec vec_sub(vec a, vec b) {
    return vsubq_f32(a, b);
}

CK_INLINE vec vec_mul(vec a, vec b) {
    return vmulq_f32(a, b);
}

CK_INLINE vec vec_div(vec a, vec b) {
    return vdivq_f32(a, b);
}

CK_INLINE vec vec_fma(vec a, vec b, vec c) {
    return vfmaq_f32(c, a, b);
}

/* The one instruction takes the number of a number and NaN, the other takes NaN. */
CK_INLINE vec vec_larger(vec x, vec y) {
    return vmaxnmq_f32(x, y);
}

CK_INLINE vec vec_smaller(vec x, vec y) {
    return vminq_f32(x, y);
}

CK_INLINE vec vec_magnitude(vec x) {
    return vabsq_f32(x);
}

CK_INLINE vec vec_copy_sign(vec magnitude, vec sign) {
    return vbslq_f32(vdupq_n_u32(0x80000000), sign, magnitude);
}

CK_INLINE vec vec_keep_range(vec x, int32_t first, struct ck_range range) {
    static const int32_t lanes[] = {0, 1, 2, 3};
    int32x4_t cells = vaddq_s32(vld1q_s32(lanes), vdupq_n_s32(first));
    uint32x4_t inside = vandq_u32(vcgeq_s32(cells, vdupq_n_s32(range.begin)),
                                  vcltq_s32(cells, vdupq_n_s32(range.end)));
    return vbslq_f32(inside, x, vdupq_n_f32(-__builtin_inff()));
}

CK_INLINE vec vec_zero_below(vec x, vec limit, vec y) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, limit)));
}

CK_INLINE vec vec_scale(vec x, vec t) {
    uint32x4_t exponent = vshlq_n_u32(vreinterpretq_u32_f32(t), 23);
    return vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(x), exponent));
}

CK_INLINE vec vec_highest_bits(vec a, vec b) {
    uint32x4_t magnitude = vreinterpretq_u32_f32(vabsq_f32(b));
    return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(a), magnitude));
}

CK_INLINE bool vec_is_finite(vec x) {
    return vmaxvq_u32(vreinterpretq_u32_f32(vabsq_f32(x))) < 0x7f800000;
}

CK_INLINE float vec_largest(vec x) {
    return vmaxnmvq_f32(x);
}

CK_INLINE float vec_total(vec x) {
    return vaddvq_f32(x);
}

CK_INLINE vec vec_sum_four(vec a, vec b, vec c, vec d) {
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}

CK_INLINE vec vec_sum_fours(const vec v[1]) {
    return v[0];
}

CK_INLINE void vec_transpose(vec v[4]) {
    float32x4x2_t low = vzipq_f32(v[0], v[2]);
    float32x4x2_t high = vzipq_f32(v[1], v[3]);
    float32x4x2_t first = vzipq_f32(low.val[0], high.val[0]);
    float32x4x2_t second = vzipq_f32(low.val[1], high.val[1]);
    v[0] = first.val[0];
    v[1] = first.val[1];
    v[2] = second.val[0];
    v[3] = second.val[1];
}

#include "attention/kernels/simd.h"

void ck_init_neon(struct ck_kernels *kernels) {
    *kernels = simd_kernels;
}
