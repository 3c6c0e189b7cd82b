/* The kernels of ragged attention, for every instruction set that this CPU has: each against a
 * computation in double. `check_kernels --bench [isa]` times them instead. */
#include "kernel_support.h"

static const int32_t widths[] = {8, 16, 24, 32, 40, 64, 72, 80, 96, 128, 160, 200, 256};
enum { N_WIDTHS = sizeof widths / sizeof *widths, MOST_WIDTH = 256 };

/* What the tests go through: the kernels and the type they are at, memory for each argument. */
static const struct ck_kernels *kernels;
static enum ck_row_type type;
static struct dice dice;
static struct fence stored, input, weights_in, output;

/* Sums of n products in f32: the error is a few roundings of the sum of their magnitudes. */
static void check_sum(float got, double expected, double magnitude, const char *what) {
    double limit = 1e-6 * magnitude + 1e-30;
    if (!(fabs(got - expected) <= limit)) {
        fprintf(stderr, "%s %s %s: %.9g, expected %.9g +- %.3g\n", kernels->name, type_names[type],
                what, (double)got, expected, limit);
        exit(1);
    }
}

static float *random_floats(const struct fence *fence, size_t n, float limit) {
    float *floats = fence_take(fence, n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        floats[i] = random_float(&dice, limit);
    }
    return floats;
}

/* A row computed alone has the same bits as among others. */
static void check_same(const float *among, const float *alone, int32_t n) {
    CHECK(memcmp(among, alone, (size_t)n * sizeof(float)) == 0);
}

static void check_scores(int32_t width, int32_t n_cells, int32_t n_rows) {
    struct rows k;
    rows_new(&k, &stored, &dice, type, width, n_cells);
    float *queries = random_floats(&input, (size_t)(n_rows * width), 2);
    size_t bytes = (size_t)n_rows * CK_TILE * sizeof(float);
    float *scores = fence_take(&output, bytes);
    kernels->scores[type](&k.tile, queries, n_rows, scores);
    for (int32_t r = 0; r < n_rows; r++) {
        for (int32_t c = 0; c < n_cells; c++) {
            double sum = 0, magnitude = 0;
            for (int32_t i = 0; i < width; i++) {
                double product = k.values[c * width + i] * (double)queries[r * width + i];
                sum += product;
                magnitude += fabs(product);
            }
            check_sum(scores[r * CK_TILE + c], sum, magnitude, "scores");
        }
    }
    fence_check(&output, bytes);
    int32_t row = (int32_t)roll(&dice, (uint32_t)n_rows);
    float alone[CK_TILE];
    kernels->scores[type](&k.tile, queries + row * width, 1, alone);
    check_same(scores + row * CK_TILE, alone, n_cells);
    rows_free(&k);
}

static void check_values(int32_t width, int32_t n_cells, int32_t n_rows) {
    struct rows v;
    rows_new(&v, &stored, &dice, type, width, n_cells);
    float *weights = random_floats(&weights_in, (size_t)n_rows * CK_TILE, 1);
    for (int32_t r = 0; r < n_rows; r++) {
        for (int32_t c = n_cells; c < CK_TILE; c++) {
            weights[r * CK_TILE + c] = NAN;
        }
    }
    float *factors = random_floats(&input, (size_t)n_rows, 1);
    size_t n = (size_t)(n_rows * width);
    float *sums = random_floats(&output, n, 3);
    float *before = malloc(n * sizeof(float));
    memcpy(before, sums, n * sizeof(float));
    kernels->values[type](&v.tile, weights, factors, n_rows, sums);
    for (int32_t r = 0; r < n_rows; r++) {
        for (int32_t i = 0; i < width; i++) {
            double sum = (double)before[r * width + i] * (double)factors[r];
            double magnitude = fabs(sum);
            for (int32_t c = 0; c < n_cells; c++) {
                double product = (double)weights[r * CK_TILE + c] * v.values[c * width + i];
                sum += product;
                magnitude += fabs(product);
            }
            check_sum(sums[r * width + i], sum, magnitude, "values");
        }
    }
    fence_check(&output, n * sizeof(float));
    int32_t row = (int32_t)roll(&dice, (uint32_t)n_rows);
    float *alone = before + row * width;
    kernels->values[type](&v.tile, weights + row * CK_TILE, factors + row, 1, alone);
    check_same(sums + row * width, alone, width);
    free(before);
    rows_free(&v);
}

static void check_packs(int32_t width, int32_t n_cells) {
    struct rows rows;
    rows_new(&rows, &stored, &dice, type, width, n_cells);
    size_t bytes = (size_t)width * CK_TILE * sizeof(float);
    float *packed = fence_take(&output, bytes);
    kernels->pack_k[type](&rows.tile, packed);
    for (int32_t i = 0; i < width; i++) {
        for (int32_t c = 0; c < CK_TILE; c++) {
            double expected = c < n_cells ? rows.values[c * width + i] : 0;
            CHECK((double)packed[i * CK_TILE + c] == expected);
        }
    }
    fence_check(&output, bytes);
    bytes = (size_t)(n_cells * width) * sizeof(float);
    packed = fence_take(&output, bytes);
    CHECK(kernels->pack_v[type](&rows.tile, packed));
    for (int32_t i = 0; i < n_cells * width; i++) {
        CHECK((double)packed[i] == rows.values[i]);
    }
    fence_check(&output, bytes);
    rows_free(&rows);
}

static int32_t die(int32_t n) { /* in [1, n] */
    return 1 + (int32_t)roll(&dice, (uint32_t)n);
}

static void test_rows_of_every_shape(void) {
    for (int32_t w = 0; w < N_WIDTHS; w++) {
        if (is_in_blocks(type) && widths[w] % CK_BLOCK) {
            continue;
        }
        for (int32_t n_cells = 1; n_cells <= CK_TILE; n_cells++) {
            check_scores(widths[w], n_cells, die(CK_FEW_ROWS));
            check_values(widths[w], n_cells, die(CK_FEW_ROWS));
            check_packs(widths[w], n_cells);
        }
        for (int32_t n_rows = 1; n_rows <= CK_FEW_ROWS; n_rows++) {
            check_scores(widths[w], die(CK_TILE), n_rows);
            check_values(widths[w], die(CK_TILE), n_rows);
        }
    }
}

/* Puts a number of these bits, or a block with this scale, at a random place of a row. */
static void put_bits(char *row, int32_t width, uint32_t bits) {
    int32_t step = is_in_blocks(type) ? CK_BLOCK : 1;
    int32_t place = (int32_t)roll(&dice, (uint32_t)(width / step)) * step;
    char *at = row + row_bytes(type, place);
    uint32_t wide = bits << 16 | roll(&dice, 1 << 16);
    uint16_t narrow = (uint16_t)bits;
    if (is_in_blocks(type)) {
        store_random(&dice, at, type, CK_BLOCK);
    }
    memcpy(at, type == CK_ROW_F32 ? (void *)&wide : (void *)&narrow, type == CK_ROW_F32 ? 4 : 2);
}

static void check_number(float got, double expected) {
    CHECK(isnan(expected) ? isnan(got) : (double)got == expected);
}

/* Every number of 16 bits, as many of 32, and every scale, in all lanes of whole and half vectors.
 */
static void test_every_number_is_converted_and_known_to_be_finite(void) {
    enum { MOST = 96 };
    int32_t width = is_in_blocks(type) ? MOST : 40;
    for (uint32_t bits = 0; bits < 1U << 16; bits++) {
        char *row = fence_take(&stored, row_bytes(type, width));
        memset(row, 0, row_bytes(type, width));
        put_bits(row, width, bits);
        int32_t cell = 0;
        struct ck_tile tile = {.rows = row, .width = width, .n_cells = 1, .cells = &cell};
        float packed[MOST], transposed[MOST * CK_TILE];
        bool finite = kernels->pack_v[type](&tile, packed);
        kernels->pack_k[type](&tile, transposed);
        bool expect_finite = true;
        for (int32_t i = 0; i < width; i++) {
            double expected = stored_value(row, type, i);
            expect_finite &= isfinite(expected) != 0;
            check_number(packed[i], expected);
            check_number(transposed[i * CK_TILE], expected);
        }
        CHECK(finite == expect_finite);
    }
}

static void check_multiply(int32_t n_rows, int32_t n_inner, int32_t n_columns, bool with_factors) {
    size_t a_stride = (size_t)n_inner + roll(&dice, 9);
    size_t b_stride = (size_t)n_columns + 8 * roll(&dice, 3);
    size_t c_stride = (size_t)n_columns + roll(&dice, 9);
    float *a = random_floats(&input, (size_t)(n_rows - 1) * a_stride + (size_t)n_inner, 2);
    /* Whole lines, so that b is aligned. */
    size_t b_size = (size_t)(n_inner - 1) * b_stride + (size_t)n_columns;
    float *b = random_floats(&stored, (b_size + 15) / 16 * 16, 2);
    float *factors = random_floats(&weights_in, (size_t)n_rows, 1);
    size_t c_size = (size_t)(n_rows - 1) * c_stride + (size_t)n_columns;
    float *c = random_floats(&output, c_size, with_factors ? 2 : NAN);
    float *before = malloc(c_size * sizeof(float));
    memcpy(before, c, c_size * sizeof(float));
    kernels->multiply(a, a_stride, b, b_stride, c, c_stride, with_factors ? factors : NULL, n_rows,
                      n_inner, n_columns);
    for (size_t at = 0; at < c_size; at++) {
        size_t r = at / c_stride, j = at % c_stride;
        if (j >= (size_t)n_columns) {
            CHECK(memcmp(&c[at], &before[at], sizeof(float)) == 0);
            continue;
        }
        double sum = with_factors ? (double)before[at] * (double)factors[r] : 0;
        double magnitude = fabs(sum);
        for (size_t i = 0; i < (size_t)n_inner; i++) {
            double product = (double)a[r * a_stride + i] * (double)b[i * b_stride + j];
            sum += product;
            magnitude += fabs(product);
        }
        check_sum(c[at], sum, magnitude, "multiply");
    }
    fence_check(&output, c_size * sizeof(float));
    size_t row = roll(&dice, (uint32_t)n_rows);
    float *alone = before + row * c_stride;
    kernels->multiply(a + row * a_stride, a_stride, b, b_stride, alone, c_stride,
                      with_factors ? factors + row : NULL, 1, n_inner, n_columns);
    check_same(c + row * c_stride, alone, n_columns);
    free(before);
}

static void test_products_of_every_shape(void) {
    for (int32_t n_rows = 1; n_rows <= 40; n_rows++) {
        for (int32_t w = 0; w < N_WIDTHS; w++) {
            check_multiply(n_rows, die(CK_TILE), widths[w], roll(&dice, 2));
        }
        check_multiply(n_rows, widths[roll(&dice, N_WIDTHS)], CK_TILE, false);
    }
    check_multiply(128, MOST_WIDTH, MOST_WIDTH, true);
    check_multiply(96, 64, 64, true);
}

/* See check_weigh.c */
void check_weigh(const struct ck_kernels *of);

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        bench(argc > 2 ? argv[2] : NULL);
        return 0;
    }
    size_t most = (size_t)2 * CK_TILE * (3 * MOST_WIDTH + 3) * sizeof(float);
    stored = fence_new(most);
    input = fence_new(most);
    weights_in = fence_new(most);
    output = fence_new(most);
    for (int isa = 0; isa < CK_N_ISAS; isa++) {
        if (!ck_isa_is_available((enum ck_isa)isa)) {
            continue;
        }
        kernels = ck_kernels((enum ck_isa)isa);
        CHECK(strcmp(kernels->name, ck_isa_name((enum ck_isa)isa)) == 0);
        printf("%s\n", kernels->name);
        for (int t = 0; t < CK_N_ROW_TYPES; t++) {
            type = (enum ck_row_type)t;
            RUN(test_rows_of_every_shape);
            RUN(test_every_number_is_converted_and_known_to_be_finite);
        }
        RUN(test_products_of_every_shape);
        check_weigh(kernels);
    }
    CHECK(ck_isa_is_available(ck_isa_best()));
    fence_free(&stored);
    fence_free(&input);
    fence_free(&weights_in);
    fence_free(&output);
    return 0;
}
