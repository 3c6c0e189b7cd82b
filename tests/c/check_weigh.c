/* A part of check_kernels: `weigh`, and a whole online softmax with it. */
#include "kernel_support.h"

void check_weigh(const struct ck_kernels *of);

static const struct ck_kernels *kernels;
static struct dice dice;
static struct fence output;

/* The largest relative errors met, to be printed. */
static double worst_exp, worst_cap;

/* What the header says, in double; the difference to the maximum is taken in float. */
static void weigh_in_double(const float *scores, struct ck_range range, int32_t n_cells,
                            const struct ck_softmax *before, double *weights, double *maximum,
                            double *sum, double *factor) {
    float most = before->maximum;
    bool nan = false;
    for (int32_t c = range.begin; c < range.end; c++) {
        nan |= isnan(scores[c]) != 0;
        most = scores[c] > most ? scores[c] : most;
    }
    double total = nan ? (double)NAN : 0;
    for (int32_t c = 0; c < n_cells; c++) {
        bool inside = c >= range.begin && c < range.end && most != -INFINITY;
        weights[c] = inside ? exp((double)(scores[c] - most)) : 0;
        total += weights[c];
    }
    *maximum = (double)most;
    *factor = most == before->maximum ? 1 : exp((double)(before->maximum - most));
    *sum = (double)before->sum * *factor + total;
}

static void check_near(float got, double expected, double relative, const char *what) {
    bool same = isnan(expected) ? isnan(got) != 0
                                : (double)got == expected ||
                                      fabs((double)got - expected) <=
                                          relative * fabs(expected) + 1.7e-38; /* e^-87 */
    if (!same) {
        fprintf(stderr, "%s weigh %s: %.9g, expected %.9g\n", kernels->name, what, (double)got,
                expected);
        exit(1);
    }
}

/* Rows of scores as the caller has them, poisoned where no score is. */
struct weighed {
    float *scores;
    float before[CK_FEW_ROWS * CK_TILE];
    struct ck_range ranges[CK_FEW_ROWS];
    struct ck_softmax states[CK_FEW_ROWS];
    int32_t n_rows, n_cells;
};

static void check_rows(struct weighed *rows) {
    size_t bytes = (size_t)rows->n_rows * CK_TILE * sizeof(float);
    struct ck_softmax states[CK_FEW_ROWS];
    float factors[CK_FEW_ROWS + 1];
    factors[rows->n_rows] = 42;
    rows->scores = fence_take(&output, bytes);
    memcpy(rows->scores, rows->before, bytes);
    memcpy(states, rows->states, sizeof states);
    kernels->weigh(rows->scores, rows->ranges, rows->n_rows, rows->n_cells, 0, states, factors);
    for (int32_t r = 0; r < rows->n_rows; r++) {
        double weights[CK_TILE], maximum, sum, factor;
        weigh_in_double(rows->before + r * CK_TILE, rows->ranges[r], rows->n_cells,
                        &rows->states[r], weights, &maximum, &sum, &factor);
        for (int32_t c = 0; c < rows->n_cells; c++) {
            check_near(rows->scores[r * CK_TILE + c], weights[c], 2e-7, "weight");
        }
        check_near(states[r].maximum, maximum, 0, "maximum");
        check_near(states[r].sum, sum, 1e-6, "sum");
        check_near(factors[r], factor, 2e-7, "factor");
    }
    CHECK(factors[rows->n_rows] == 42);
    CHECK(memcmp(&states[rows->n_rows], &rows->states[rows->n_rows],
                 (CK_FEW_ROWS - (size_t)rows->n_rows) * sizeof *states) == 0);
    fence_check(&output, bytes);
}

static float extreme(void) {
    static const float extremes[] = {1e30F,  -1e30F, 3e38F,   -3e38F, -INFINITY, INFINITY,
                                     NAN,    0,      1e-40F,  -0.0F,  88,        -88,
                                     -87.1F, -86.9F, -126.5F, -104};
    uint32_t i = roll(&dice, sizeof extremes / sizeof *extremes + 1);
    if (i < sizeof extremes / sizeof *extremes) {
        return extremes[i];
    }
    uint32_t bits = 0x7fc00000 + roll(&dice, 0x400); /* a NaN that says something */
    float nan;
    memcpy(&nan, &bits, sizeof nan);
    return nan;
}

static void fill(struct weighed *rows, int32_t one_in, float limit) {
    for (int32_t r = 0; r < CK_FEW_ROWS; r++) {
        int32_t a = (int32_t)roll(&dice, (uint32_t)rows->n_cells + 1);
        int32_t b = (int32_t)roll(&dice, (uint32_t)rows->n_cells + 1);
        rows->ranges[r] = (struct ck_range){.begin = a, .end = roll(&dice, 4) ? b : rows->n_cells};
        for (int32_t c = 0; c < CK_TILE; c++) {
            bool inside = c >= rows->ranges[r].begin && c < rows->ranges[r].end;
            float score = random_float(&dice, limit);
            if (one_in && roll(&dice, (uint32_t)one_in) == 0) {
                score = extreme();
            }
            rows->before[r * CK_TILE + c] = inside || roll(&dice, 2) ? score : NAN;
        }
        bool first = roll(&dice, 3) == 0;
        rows->states[r].maximum = first ? -INFINITY : random_float(&dice, limit);
        rows->states[r].sum = first ? 0 : 1 + (float)roll(&dice, 1000);
    }
}

static void test_weights_of_every_range(void) {
    struct weighed rows;
    for (int32_t round = 0; round < 4000; round++) {
        rows.n_rows = 1 + (int32_t)roll(&dice, CK_FEW_ROWS);
        rows.n_cells = 1 + (int32_t)roll(&dice, CK_TILE);
        fill(&rows, 0, round % 2 ? 10 : 100);
        check_rows(&rows);
    }
}

static void test_extreme_scores(void) {
    struct weighed rows;
    for (int32_t round = 0; round < 8000; round++) {
        rows.n_rows = 1 + (int32_t)roll(&dice, CK_FEW_ROWS);
        rows.n_cells = 1 + (int32_t)roll(&dice, CK_TILE);
        fill(&rows, 1 << roll(&dice, 7), 10);
        check_rows(&rows);
    }
}

static void test_row_without_a_finite_score_stays_unseen(void) {
    float scores[CK_TILE], factor;
    for (int32_t nan = 0; nan < 2; nan++) {
        for (int32_t c = 0; c < CK_TILE; c++) {
            scores[c] = -INFINITY;
        }
        scores[37] = nan ? NAN : -INFINITY;
        struct ck_softmax state = {.maximum = -INFINITY};
        struct ck_range range = {.begin = 3, .end = 50};
        kernels->weigh(scores, &range, 1, CK_TILE, 0, &state, &factor);
        CHECK(state.maximum == -INFINITY && factor == 1);
        CHECK(nan ? isnan(state.sum) : state.sum == 0);
        for (int32_t c = 0; c < CK_TILE; c++) {
            CHECK(scores[c] == 0);
        }
    }
}

static void test_exponential_is_exact_to_its_last_digits(void) {
    worst_exp = 0;
    for (int32_t round = 0; round < 20000; round++) {
        float scores[CK_TILE], before[CK_TILE], factor;
        struct ck_softmax state = {.maximum = 0};
        struct ck_range range = {.end = CK_TILE};
        for (int32_t c = 0; c < CK_TILE; c++) {
            scores[c] = before[c] = (random_float(&dice, 1) - 1) * (round % 2 ? 43 : 0.5F);
        }
        kernels->weigh(scores, &range, 1, CK_TILE, 0, &state, &factor);
        for (int32_t c = 0; c < CK_TILE; c++) {
            double expected = exp((double)before[c]);
            worst_exp = fmax(worst_exp, fabs((double)scores[c] - expected) / expected);
        }
    }
    CHECK(worst_exp < 2e-7);
}

/* The maximum of a range of one cell is that cell's score, capped. */
static float capped(float score, float soft_cap) {
    float scores[CK_TILE] = {0}, factor;
    struct ck_softmax state = {.maximum = -INFINITY};
    struct ck_range range = {.begin = 5, .end = 6};
    scores[5] = score;
    kernels->weigh(scores, &range, 1, 8, soft_cap, &state, &factor);
    CHECK(isnan(score) ? isnan(state.sum) : scores[5] == 1 && state.sum == 1);
    return state.maximum;
}

static void test_soft_cap_is_exact_to_its_last_digits(void) {
    worst_cap = 0;
    for (int32_t round = 0; round < 300000; round++) {
        float soft_cap = round % 3 ? 50 : 0.7F;
        float score = random_float(&dice, 3) * soft_cap * ldexpf(1, -(int)roll(&dice, 40));
        double expected = (double)soft_cap * tanh((double)score / (double)soft_cap);
        double error = expected == 0 ? 0 : fabs((double)capped(score, soft_cap) / expected - 1);
        worst_cap = fmax(worst_cap, error);
    }
    CHECK(worst_cap < 6e-7);
    CHECK(capped(1e30F, 30) == 30 && capped(INFINITY, 30) == 30);
    CHECK(capped(-1e30F, 30) == -30 && capped(-INFINITY, 30) == -30);
    CHECK(capped(NAN, 30) == -INFINITY);
    CHECK(capped(0, 30) == 0 && capped(-0.0F, 30) == 0);
}

static void test_soft_cap_comes_before_the_range(void) {
    float scores[CK_TILE], factor;
    for (int32_t c = 0; c < CK_TILE; c++) {
        scores[c] = c == 20 ? 10 : c == 21 ? -1e30F : NAN;
    }
    struct ck_softmax state = {.maximum = -INFINITY};
    struct ck_range range = {.begin = 20, .end = 22};
    kernels->weigh(scores, &range, 1, 40, 20, &state, &factor);
    double expected = exp(-20 - 20 * tanh(0.5));
    for (int32_t c = 0; c < 40; c++) {
        CHECK(c == 20   ? scores[c] == 1
              : c == 21 ? fabs((double)scores[c] / expected - 1) < 1e-5
                        : scores[c] == 0);
    }
}

static void test_softmax_over_100000_cells(void) {
    enum { N = 100000 };
    double maximum = -(double)INFINITY, sum = 0, mean = 0;
    float *all = malloc(N * sizeof(float));
    for (int32_t c = 0; c < N; c++) {
        all[c] = random_float(&dice, 8) + (float)c / N * 4;
        maximum = fmax(maximum, (double)all[c]);
    }
    struct ck_softmax state = {.maximum = -INFINITY};
    float accumulated = 0;
    for (int32_t first = 0; first < N; first += CK_TILE) {
        float scores[CK_TILE], factor;
        struct ck_range range = {.end = N - first < CK_TILE ? N - first : CK_TILE};
        memcpy(scores, all + first, (size_t)range.end * sizeof(float));
        kernels->weigh(scores, &range, 1, range.end, 0, &state, &factor);
        float tile_sum = 0;
        for (int32_t c = 0; c < range.end; c++) {
            tile_sum += scores[c] * (float)((first + c) % 7);
        }
        accumulated = accumulated * factor + tile_sum;
    }
    for (int32_t c = 0; c < N; c++) {
        double weight = exp((double)all[c] - maximum);
        sum += weight;
        mean += weight * (c % 7);
    }
    free(all);
    CHECK((double)state.maximum == maximum);
    CHECK(fabs((double)state.sum / sum - 1) < 1e-5);
    CHECK(fabs((double)(accumulated / state.sum) / (mean / sum) - 1) < 1e-5);
}

void check_weigh(const struct ck_kernels *of) {
    kernels = of;
    output = fence_new(CK_FEW_ROWS * CK_TILE * sizeof(float));
    RUN(test_weights_of_every_range);
    RUN(test_extreme_scores);
    RUN(test_row_without_a_finite_score_stays_unseen);
    RUN(test_exponential_is_exact_to_its_last_digits);
    RUN(test_soft_cap_is_exact_to_its_last_digits);
    RUN(test_soft_cap_comes_before_the_range);
    RUN(test_softmax_over_100000_cells);
    printf("  relative errors: exp %.2g, soft-cap %.2g\n", worst_exp, worst_cap);
    fence_free(&output);
}
