/* The kernels in portable C: what every other version is compared with. */
#include <math.h>
#include <string.h>

#include "attention/kernels/isa.h"

/* Rows are converted this many elements at a time, for all query rows at once. */
enum { CHUNK = 64 };

static float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float float_of_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t exponent = half >> 10 & 0x1f;
    uint32_t mantissa = half & 0x3ff;
    if (exponent == 0) {
        float magnitude = (float)mantissa * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    uint32_t biased = exponent == 0x1f ? 0xff : exponent + (127 - 15);
    return float_of_bits(sign | biased << 23 | mantissa << 13);
}

static float float_of_bf16(uint16_t brain) {
    return float_of_bits((uint32_t)brain << 16);
}

CK_INLINE void convert_block(const char *block, enum ck_row_type type, float *converted) {
    const char *numbers = ck_block_numbers(block);
    uint16_t half;
    memcpy(&half, block, sizeof half);
    float scale = float_of_f16(half);
    if (type == CK_ROW_Q8_0) {
        for (int32_t i = 0; i < CK_BLOCK; i++) {
            converted[i] = (float)(signed char)numbers[i] * scale;
        }
        return;
    }
    for (int32_t i = 0; i < CK_BLOCK / 2; i++) {
        unsigned char pair = (unsigned char)numbers[i];
        converted[i] = (float)((pair & 15) - 8) * scale;
        converted[i + CK_BLOCK / 2] = (float)((pair >> 4) - 8) * scale;
    }
}

/* Elements [begin, begin + n) of a row, whole blocks where it has them. Rows may lie at odd
 * addresses of their type. */
CK_INLINE void convert(const char *row, enum ck_row_type type, int32_t begin, int32_t n,
                       float *converted) {
    const char *from = row + ck_row_bytes(type, begin);
    if (type == CK_ROW_F32) {
        memcpy(converted, from, (size_t)n * sizeof(float));
        return;
    }
    if (ck_is_in_blocks(type)) {
        for (int32_t i = 0; i < n; i += CK_BLOCK) {
            convert_block(from + ck_row_bytes(type, i), type, converted + i);
        }
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        uint16_t element;
        memcpy(&element, from + (size_t)i * sizeof element, sizeof element);
        converted[i] = type == CK_ROW_F16 ? float_of_f16(element) : float_of_bf16(element);
    }
}

static int32_t chunk_size(int32_t width, int32_t begin) {
    return width - begin < CHUNK ? width - begin : CHUNK;
}

/* Lane by lane, which a compiler may turn into vectors; n is a multiple of 8. */
static float dot(const float *a, const float *b, int32_t n) {
    float lanes[8] = {0};
    for (int32_t i = 0; i < n; i += 8) {
        for (int32_t lane = 0; lane < 8; lane++) {
            lanes[lane] += a[i + lane] * b[i + lane];
        }
    }
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
           ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

CK_INLINE void scores(const struct ck_tile *k, enum ck_row_type type, const float *queries,
                      int32_t n_rows, float *out) {
    struct ck_prefetch prefetch = ck_prefetch_begin(k, k->n_cells);
    for (int32_t c = 0; c < k->n_cells; c++) {
        ck_prefetch_share(&prefetch);
        for (int32_t begin = 0; begin < k->width; begin += CHUNK) {
            float chunk[CHUNK];
            int32_t n = chunk_size(k->width, begin);
            convert(ck_row(k, k->cells[c]), type, begin, n, chunk);
            for (int32_t r = 0; r < n_rows; r++) {
                float *score = &out[r * CK_TILE + c];
                float before = begin ? *score : 0.0F;
                *score = before + dot(queries + (size_t)r * (size_t)k->width + begin, chunk, n);
            }
        }
    }
}

CK_INLINE void values(const struct ck_tile *v, enum ck_row_type type, const float *weights,
                      const float *factors, int32_t n_rows, float *sums) {
    struct ck_prefetch prefetch = ck_prefetch_begin(v, v->n_cells);
    for (int32_t r = 0; r < n_rows; r++) {
        for (int32_t i = 0; i < v->width; i++) {
            sums[r * v->width + i] *= factors[r];
        }
    }
    for (int32_t c = 0; c < v->n_cells; c++) {
        ck_prefetch_share(&prefetch);
        for (int32_t begin = 0; begin < v->width; begin += CHUNK) {
            float chunk[CHUNK];
            int32_t n = chunk_size(v->width, begin);
            convert(ck_row(v, v->cells[c]), type, begin, n, chunk);
            for (int32_t r = 0; r < n_rows; r++) {
                float weight = weights[r * CK_TILE + c];
                float *sum = sums + (size_t)r * (size_t)v->width + begin;
                for (int32_t i = 0; i < n; i++) {
                    sum[i] += weight * chunk[i];
                }
            }
        }
    }
}

CK_INLINE void pack_k(const struct ck_tile *k, enum ck_row_type type, float *packed) {
    struct ck_prefetch prefetch = ck_prefetch_begin(k, k->n_cells);
    if (k->n_cells < CK_TILE) {
        memset(packed, 0, (size_t)k->width * CK_TILE * sizeof(float));
    }
    for (int32_t c = 0; c < k->n_cells; c++) {
        ck_prefetch_share(&prefetch);
        for (int32_t begin = 0; begin < k->width; begin += CHUNK) {
            float chunk[CHUNK];
            int32_t n = chunk_size(k->width, begin);
            convert(ck_row(k, k->cells[c]), type, begin, n, chunk);
            for (int32_t i = 0; i < n; i++) {
                packed[(begin + i) * CK_TILE + c] = chunk[i];
            }
        }
    }
}

CK_INLINE bool pack_v(const struct ck_tile *v, enum ck_row_type type, float *packed) {
    struct ck_prefetch prefetch = ck_prefetch_begin(v, v->n_cells);
    bool finite = true;
    for (int32_t c = 0; c < v->n_cells; c++) {
        ck_prefetch_share(&prefetch);
        float *row = packed + (size_t)c * (size_t)v->width;
        convert(ck_row(v, v->cells[c]), type, 0, v->width, row);
        for (int32_t i = 0; i < v->width; i++) {
            finite &= isfinite(row[i]) != 0;
        }
    }
    return finite;
}

static void multiply(const float *a, size_t a_stride, const float *b, size_t b_stride, float *c,
                     size_t c_stride, const float *factors, int32_t n_rows, int32_t n_inner,
                     int32_t n_columns) {
    for (int32_t r = 0; r < n_rows; r++) {
        float *sums = c + (size_t)r * c_stride;
        for (int32_t j = 0; j < n_columns; j++) {
            sums[j] = factors ? sums[j] * factors[r] : 0.0F;
        }
        for (int32_t i = 0; i < n_inner; i++) {
            float scale = a[(size_t)r * a_stride + (size_t)i];
            const float *row = b + (size_t)i * b_stride;
            for (int32_t j = 0; j < n_columns; j++) {
                sums[j] += scale * row[j];
            }
        }
    }
}

/* The scores of a range with the cap applied, and their maximum; NaN is no maximum. */
static float cap(float *row, struct ck_range range, float soft_cap, float maximum) {
    for (int32_t c = range.begin; c < range.end; c++) {
        if (soft_cap > 0) {
            row[c] = soft_cap * tanhf(row[c] / soft_cap);
        }
        maximum = row[c] > maximum ? row[c] : maximum;
    }
    return maximum;
}

static float weigh_row(float *row, struct ck_range range, int32_t n_cells, float soft_cap,
                       struct ck_softmax *state) {
    float maximum = cap(row, range, soft_cap, state->maximum);
    bool none = maximum == -INFINITY;
    float sum = 0;
    for (int32_t c = 0; c < n_cells; c++) {
        bool inside = c >= range.begin && c < range.end;
        if (inside && isnan(row[c])) {
            sum = NAN;
        }
        row[c] = inside && !none ? expf(row[c] - maximum) : 0.0F;
        sum += row[c];
    }
    /* -INFINITY - -INFINITY is NaN. */
    float factor = maximum == state->maximum ? 1.0F : expf(state->maximum - maximum);
    *state = (struct ck_softmax){.maximum = maximum, .sum = state->sum * factor + sum};
    return factor;
}

static void weigh(float *scores, const struct ck_range *ranges, int32_t n_rows, int32_t n_cells,
                  float soft_cap, struct ck_softmax *states, float *factors) {
    for (int32_t r = 0; r < n_rows; r++) {
        factors[r] =
            weigh_row(scores + (size_t)r * CK_TILE, ranges[r], n_cells, soft_cap, &states[r]);
    }
}

CK_KERNELS(c_kernels);

void ck_init_c(struct ck_kernels *kernels) {
    *kernels = c_kernels;
}
