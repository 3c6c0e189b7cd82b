/* A part of simd.h: `weigh`. */
#ifndef CELLKV_ATTENTION_KERNELS_SIMD_SOFTMAX_H
#define CELLKV_ATTENTION_KERNELS_SIMD_SOFTMAX_H

/* Added to a small float, it leaves the nearest integer in the low bits. */
#define ROUNDER 0x1.8p23F

/* e^x = 2^n * (1 + fraction), where |fraction| < 1/2. */
struct exponential {
    vec power;    /* n in its low bits: see vec_scale */
    vec fraction; /* e^r - 1 for the r = x - n * ln 2 that is nearest to 0 */
};

/* The polynomial's relative error in e^r is below 4e-9 (fitted to |r| <= ln 2 / 2). */
CK_INLINE struct exponential exponential(vec x) {
    vec power = vec_fma(x, vec_all(0x1.715476p+0F), vec_all(ROUNDER));
    vec n = vec_sub(power, vec_all(ROUNDER));
    vec r = vec_fma(n, vec_all(-0x1.62e4p-1F), x); /* ln 2 in two parts */
    r = vec_fma(n, vec_all(-0x1.7f7d1cp-20F), r);
    vec q = vec_all(0x1.6a2352p-10F);
    q = vec_fma(q, r, vec_all(0x1.123a6cp-7F));
    q = vec_fma(q, r, vec_all(0x1.5558f4p-5F));
    q = vec_fma(q, r, vec_all(0x1.55549p-3F));
    q = vec_fma(q, r, vec_all(0x1.fffffcp-2F));
    return (struct exponential){.power = power, .fraction = vec_fma(vec_mul(r, r), q, r)};
}

/* e^x for x <= 0, 0 below the normal floats. */
CK_INLINE vec vec_exp(vec x) {
    struct exponential e = exponential(x);
    vec result = vec_scale(vec_add(vec_all(1), e.fraction), e.power);
    result = vec_fma(e.fraction, vec_zero(), result); /* scaling adds to the bits of a NaN, too */
    return vec_zero_below(x, vec_all(-87), result);
}

/* From e^2x - 1, which near 0 has all its digits. */
CK_INLINE vec vec_tanh(vec x) {
    vec magnitude = vec_smaller(vec_magnitude(x), vec_all(10)); /* where tanh has reached 1 */
    struct exponential e = exponential(vec_add(magnitude, magnitude));
    vec two_to_n = vec_scale(vec_all(1), e.power);
    vec less_1 = vec_fma(two_to_n, e.fraction, vec_sub(two_to_n, vec_all(1)));
    return vec_copy_sign(vec_div(less_1, vec_add(less_1, vec_all(2))), x);
}

static void store_zeros(float *row, int32_t n_cells) {
    for (int32_t c = 0; c < n_cells; c += LANES) {
        vec_store(row + c, vec_zero());
    }
}

/* Leaves in the row the scores of the range, capped, -INFINITY at all other cells. */
CK_INLINE float cap(float *row, struct ck_range range, int32_t n_cells, float soft_cap) {
    vec largest = vec_all(-INFINITY);
    for (int32_t c = 0; c < n_cells; c += LANES) {
        vec x = vec_load(row + c);
        if (soft_cap > 0) {
            vec limit = vec_all(soft_cap);
            x = vec_mul(limit, vec_tanh(vec_div(x, limit)));
        }
        x = vec_keep_range(x, c, range);
        largest = vec_larger(x, largest);
        vec_store(row + c, x);
    }
    return vec_largest(largest);
}

/* A row with no score above -INFINITY in the range, or before. */
static float weigh_nothing(float *row, struct ck_range range, int32_t n_cells,
                           struct ck_softmax *state) {
    for (int32_t c = range.begin; c < range.end; c++) {
        if (isnan(row[c])) {
            state->sum = NAN;
        }
    }
    store_zeros(row, n_cells);
    return 1;
}

static float weigh_row(float *row, struct ck_range range, int32_t n_cells, float soft_cap,
                       struct ck_softmax *state) {
    if (range.begin >= range.end) {
        store_zeros(row, n_cells);
        return 1;
    }
    float largest = soft_cap > 0 ? cap(row, range, n_cells, soft_cap) : cap(row, range, n_cells, 0);
    float before = state->maximum;
    float maximum = largest > before ? largest : before;
    if (maximum == -INFINITY) {
        return weigh_nothing(row, range, n_cells, state);
    }
    vec sum = vec_zero();
    for (int32_t c = 0; c < n_cells; c += LANES) {
        vec weight = vec_exp(vec_sub(vec_load(row + c), vec_all(maximum)));
        vec_store(row + c, weight);
        sum = vec_add(sum, weight);
    }
    float factor = 1;
    if (maximum > before) {
        float lanes[LANES];
        vec_store(lanes, vec_exp(vec_all(before - maximum)));
        factor = lanes[0];
    }
    *state = (struct ck_softmax){
        .maximum = maximum,
        .sum = state->sum * factor + vec_total(sum),
    };
    return factor;
}

static void weigh(float *scores, const struct ck_range *ranges, int32_t n_rows, int32_t n_cells,
                  float soft_cap, struct ck_softmax *states, float *factors) {
    for (int32_t r = 0; r < n_rows; r++) {
        factors[r] =
            weigh_row(scores + (size_t)r * CK_TILE, ranges[r], n_cells, soft_cap, &states[r]);
    }
}

#endif
