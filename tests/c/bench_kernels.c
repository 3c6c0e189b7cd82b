/* A part of check_kernels: what each kernel takes, beside what the machine could do in the same
 * run. Times are of the threads' own clocks, so that other programs disturb them less. */
#define _DEFAULT_SOURCE

#include <pthread.h>
#include <time.h>

#include "kernel_support.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { N_SEQUENCES = 16, N_CELLS = 1024, N_HEADS = 3, N_THREADS = 2, HOT_ROWS = 128 };

static const struct ck_kernels *kernels;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void *memory(size_t bytes, int fill) {
    void *start = aligned_alloc(64, (bytes + 63) / 64 * 64);
    CHECK(start);
    memset(start, fill, bytes);
    return start;
}

/* The few-row kernels over interleaved sequences, each thread with K and V of its own. */
struct decode {
    enum ck_row_type type;
    int32_t width, n_rows;
    enum { STREAM, SCORES, VALUES, WHOLE } what;
    double gigabytes_per_second, nanoseconds_per_tile;
};

static size_t stride_of(const struct decode *decode) {
    return row_bytes(decode->type, decode->width) * N_HEADS;
}

static uint64_t stream(const char *from, size_t bytes) {
    uint64_t sums[16] = {0};
    const uint64_t *words = (const uint64_t *)(const void *)from;
    for (size_t i = 0; i + 16 <= bytes / 8; i += 16) {
        for (size_t j = 0; j < 16; j++) {
            sums[j] ^= words[i + j];
        }
    }
    uint64_t all = 0;
    for (size_t j = 0; j < 16; j++) {
        all ^= sums[j];
    }
    return all;
}

static void decode_tile(const struct decode *decode, struct ck_tile *k, struct ck_tile *v,
                        const float *queries, float *scores, float *sums) {
    struct ck_range ranges[CK_FEW_ROWS];
    struct ck_softmax states[CK_FEW_ROWS];
    float factors[CK_FEW_ROWS];
    for (int32_t r = 0; r < decode->n_rows; r++) {
        ranges[r] = (struct ck_range){.end = CK_TILE};
        states[r] = (struct ck_softmax){.maximum = -INFINITY};
        factors[r] = 1;
    }
    if (decode->what != VALUES) {
        kernels->scores[decode->type](k, queries, decode->n_rows, scores);
    }
    if (decode->what == WHOLE) {
        kernels->weigh(scores, ranges, decode->n_rows, CK_TILE, 0, states, factors);
    }
    if (decode->what != SCORES) {
        kernels->values[decode->type](v, scores, factors, decode->n_rows, sums);
    }
}

static void decode_all(const struct decode *decode, const char *k, const char *v,
                       const int32_t *cells, const float *queries, float *scores, float *sums) {
    size_t head_bytes = row_bytes(decode->type, decode->width);
    for (size_t head = 0; head < N_HEADS; head++) {
        for (int32_t first = 0; first < N_SEQUENCES * N_CELLS; first += CK_TILE) {
            bool last = first + CK_TILE == N_SEQUENCES * N_CELLS;
            struct ck_tile tile = {
                .rows = k + head * head_bytes,
                .stride = stride_of(decode),
                .width = decode->width,
                .n_cells = CK_TILE,
                .cells = cells + first,
                .upcoming_rows = k + head * head_bytes,
                .upcoming_bytes = head_bytes,
                .upcoming = cells + first + CK_TILE,
                .n_upcoming = last ? 0 : CK_TILE,
            };
            struct ck_tile v_tile = tile;
            v_tile.rows = v_tile.upcoming_rows = v + head * head_bytes;
            decode_tile(decode, &tile, &v_tile, queries, scores, sums);
        }
    }
}

static void *decode_thread(void *argument) {
    enum { N_PASSES = 12 };
    struct decode *decode = argument;
    size_t bytes = stride_of(decode) * N_SEQUENCES * N_CELLS;
    char *k = memory(bytes, 0), *v = memory(bytes, 0);
    float *queries = memory(CK_FEW_ROWS * (size_t)decode->width * 4, 0);
    float *scores = memory(CK_FEW_ROWS * CK_TILE * 4, 0);
    float *sums = memory(CK_FEW_ROWS * (size_t)decode->width * 4, 0);
    int32_t *cells = memory(N_SEQUENCES * N_CELLS * 4, 0);
    for (int32_t i = 0; i < N_SEQUENCES * N_CELLS; i++) {
        cells[i] = i % N_CELLS * N_SEQUENCES + i / N_CELLS;
    }
    static volatile uint64_t sink;
    double best = 1e9;
    for (int pass = 0; pass < N_PASSES; pass++) {
        double start = seconds();
        if (decode->what == STREAM) {
            sink = stream(k, bytes) ^ stream(v, bytes);
        } else {
            decode_all(decode, k, v, cells, queries, scores, sums);
        }
        double took = seconds() - start;
        best = took < best ? took : best;
    }
    (void)sink;
    double share = decode->what == SCORES || decode->what == VALUES ? 1 : 2;
    decode->gigabytes_per_second = share * (double)bytes / best * 1e-9;
    decode->nanoseconds_per_tile = best * 1e9 * CK_TILE / (N_SEQUENCES * N_CELLS * N_HEADS);
    free(k);
    free(v);
    free(queries);
    free(scores);
    free(sums);
    free(cells);
    return NULL;
}

/* The sum over both threads. */
static struct decode run_decode(struct decode decode) {
    struct decode each[N_THREADS];
    pthread_t threads[N_THREADS];
    for (int t = 0; t < N_THREADS; t++) {
        each[t] = decode;
        CHECK(pthread_create(&threads[t], NULL, decode_thread, &each[t]) == 0);
    }
    for (int t = 0; t < N_THREADS; t++) {
        CHECK(pthread_join(threads[t], NULL) == 0);
        decode.gigabytes_per_second += each[t].gigabytes_per_second;
        decode.nanoseconds_per_tile += each[t].nanoseconds_per_tile / N_THREADS;
    }
    return decode;
}

static void bench_decode(enum ck_row_type type, int32_t width, const int32_t *counts,
                         int32_t n_counts) {
    static const char *const names[] = {"", "scores", "values", "scores, weigh, values"};
    struct decode streamed =
        run_decode((struct decode){.type = type, .width = width, .what = STREAM});
    printf("  streaming read of as much %s, width %d: %.1f GB/s\n", type_names[type], width,
           streamed.gigabytes_per_second);
    for (int32_t i = 0; i < n_counts; i++) {
        for (int what = SCORES; what <= WHOLE; what++) {
            struct decode decode = {.type = type, .width = width, .n_rows = counts[i]};
            decode.what = what;
            decode = run_decode(decode);
            printf("  %-22s %2d rows, width %3d %8.0f ns %7.1f GB/s %4.0f %%\n", names[what],
                   counts[i], width, decode.nanoseconds_per_tile, decode.gigabytes_per_second,
                   100 * decode.gigabytes_per_second / streamed.gigabytes_per_second);
        }
    }
}

#if defined(__x86_64__)
#define PEAK(name, isa, vector, all, fma, lanes)                                                   \
    __attribute__((target(isa))) static double name(void) {                                        \
        enum { N = 12, ROUNDS = 2000000 };                                                         \
        vector sums[N];                                                                            \
        for (int i = 0; i < N; i++) {                                                              \
            sums[i] = all((float)i);                                                               \
        }                                                                                          \
        vector one = all(0.999F);                                                                  \
        double start = seconds();                                                                  \
        for (int round = 0; round < ROUNDS; round++) {                                             \
            _Pragma("GCC unroll 12") for (int i = 0; i < N; i++) {                                 \
                sums[i] = fma(sums[i], one, one);                                                  \
            }                                                                                      \
        }                                                                                          \
        double took = seconds() - start;                                                           \
        volatile vector sink = sums[0];                                                            \
        for (int i = 1; i < N; i++) {                                                              \
            sink = sums[i];                                                                        \
        }                                                                                          \
        (void)sink;                                                                                \
        return 2.0 * (lanes) * N * ROUNDS / took * 1e-9;                                           \
    }

PEAK(peak_avx2, "avx2,fma", __m256, _mm256_set1_ps, _mm256_fmadd_ps, 8)
PEAK(peak_avx512, "avx512f", __m512, _mm512_set1_ps, _mm512_fmadd_ps, 16)
#endif

/* GFLOP/s, or 0 where nobody has written how. */
static double peak(enum ck_isa isa) {
#if defined(__x86_64__)
    if (isa == CK_ISA_AVX2) {
        return peak_avx2();
    }
    if (isa == CK_ISA_AVX512) {
        return peak_avx512();
    }
#endif
    (void)isa;
    return 0;
}

#define BEST_OF(nanoseconds, n_calls, call)                                                        \
    do {                                                                                           \
        nanoseconds = 1e18;                                                                        \
        for (int pass = 0; pass < 7; pass++) {                                                     \
            double start = seconds();                                                              \
            for (int i = 0; i < (n_calls); i++) {                                                  \
                call;                                                                              \
            }                                                                                      \
            double each = (seconds() - start) * 1e9 / (n_calls);                                   \
            nanoseconds = each < nanoseconds ? each : nanoseconds;                                 \
        }                                                                                          \
    } while (0)

static void bench_multiply(int32_t n_rows, int32_t n_inner, int32_t n_columns, double best) {
    float *a = memory((size_t)(n_rows * n_inner) * 4, 0);
    float *b = memory((size_t)(n_inner * n_columns) * 4, 0);
    float *c = memory((size_t)(n_rows * n_columns) * 4, 0);
    double flops = 2.0 * n_rows * n_inner * n_columns, took;
    int n_calls = (int)(4e7 / flops) + 1;
    BEST_OF(took, n_calls,
            kernels->multiply(a, (size_t)n_inner, b, (size_t)n_columns, c, (size_t)n_columns, NULL,
                              n_rows, n_inner, n_columns));
    printf("  multiply %3dx%3dx%3d %26.0f ns %7.1f GFLOP/s %4.0f %%\n", n_rows, n_inner, n_columns,
           took, flops / took, best > 0 ? 100 * flops / took / best : 0);
    free(a);
    free(b);
    free(c);
}

static void bench_packs(enum ck_row_type type, int32_t width) {
    enum { N_CALLS = 2000 };
    int32_t cells[CK_TILE];
    for (int32_t c = 0; c < CK_TILE; c++) {
        cells[c] = c;
    }
    size_t n = (size_t)width * CK_TILE;
    char *rows = memory(row_bytes(type, width) * CK_TILE, 0);
    float *packed = memory(n * 4, 0);
    struct ck_tile tile = {
        .rows = rows,
        .stride = row_bytes(type, width),
        .width = width,
        .n_cells = CK_TILE,
        .cells = cells,
    };
    double took;
    BEST_OF(took, N_CALLS, kernels->pack_k[type](&tile, packed));
    printf("  pack_k, %4s, width %3d %23.0f ns\n", type_names[type], width, took);
    BEST_OF(took, N_CALLS, kernels->pack_v[type](&tile, packed));
    printf("  pack_v, %4s, width %3d %23.0f ns\n", type_names[type], width, took);
    free(rows);
    free(packed);
}

/* With the rows in the innermost cache: what is left once memory is no limit. */
static void bench_hot(enum ck_row_type type, int32_t width, int32_t n_rows) {
    enum { N_CALLS = 2000 };
    int32_t cells[CK_TILE];
    float factors[CK_FEW_ROWS] = {0};
    for (int32_t c = 0; c < CK_TILE; c++) {
        cells[c] = c;
    }
    size_t n = (size_t)width * CK_TILE;
    char *rows = memory(row_bytes(type, width) * CK_TILE, 0);
    float *queries = memory(n * 4, 0), *scores = memory(n * 4, 0);
    struct ck_tile tile = {
        .rows = rows,
        .stride = row_bytes(type, width),
        .width = width,
        .n_cells = CK_TILE,
        .cells = cells,
    };
    double took;
    BEST_OF(took, N_CALLS, kernels->scores[type](&tile, queries, n_rows, scores));
    printf("  scores, %4s, %2d rows of width %3d, in cache %5.0f ns\n", type_names[type], n_rows,
           width, took);
    BEST_OF(took, N_CALLS, kernels->values[type](&tile, scores, factors, n_rows, queries));
    printf("  values, %4s, %2d rows of width %3d, in cache %5.0f ns\n", type_names[type], n_rows,
           width, took);
    free(rows);
    free(queries);
    free(scores);
}

static void bench_weigh(int32_t n_rows, float soft_cap) {
    float *scores = memory(HOT_ROWS * CK_TILE * 4, 0);
    struct ck_range ranges[HOT_ROWS];
    struct ck_softmax states[HOT_ROWS];
    float factors[HOT_ROWS];
    for (int32_t r = 0; r < n_rows; r++) {
        ranges[r] = (struct ck_range){.end = CK_TILE};
        states[r] = (struct ck_softmax){.maximum = 1};
    }
    double took;
    BEST_OF(took, 20000 / n_rows,
            kernels->weigh(scores, ranges, n_rows, CK_TILE, soft_cap, states, factors));
    printf("  weigh, %3d rows%s %*.0f ns\n", n_rows, soft_cap > 0 ? ", soft cap" : "",
           soft_cap > 0 ? 21 : 31, took);
    free(scores);
}

static void bench_isa(enum ck_isa isa) {
    static const int32_t counts[] = {1, 2, 3, 4, 8, 16};
    static const enum ck_row_type types[] = {CK_ROW_F16, CK_ROW_Q8_0, CK_ROW_Q4_0};
    enum { N_TIMED_TYPES = sizeof types / sizeof *types };
    kernels = ck_kernels(isa);
    double best = peak(isa);
    printf("%s: %.1f GFLOP/s in fused multiply-adds\n", kernels->name, best);
    bench_multiply(96, 64, 64, best);
    bench_multiply(48, 64, 64, best);
    bench_multiply(16, 64, 64, best);
    bench_multiply(8, 64, 64, best);
    bench_multiply(3, 64, 64, best);
    bench_multiply(96, 128, 64, best);
    bench_multiply(96, 64, 128, best);
    bench_multiply(96, 64, 80, best);
    bench_multiply(96, 64, 256, best);
    for (int32_t t = 0; t < N_TIMED_TYPES; t++) {
        bench_packs(types[t], 64);
        bench_packs(types[t], 128);
        for (int32_t i = 0; i < (int32_t)(sizeof counts / sizeof *counts); i++) {
            bench_hot(types[t], 64, counts[i]);
        }
    }
    bench_weigh(1, 0);
    bench_weigh(4, 0);
    bench_weigh(96, 0);
    bench_weigh(4, 30);
    bench_decode(CK_ROW_F16, 64, counts, sizeof counts / sizeof *counts);
    for (int32_t t = 1; t < N_TIMED_TYPES; t++) {
        bench_decode(types[t], 64, counts + 2, 1);
    }
    for (int32_t t = 0; t < N_TIMED_TYPES; t++) {
        bench_decode(types[t], 96, counts + 2, 1);
        bench_decode(types[t], 128, counts + 2, 2);
    }
}

void bench(const char *isa_name) {
    for (int isa = 0; isa < CK_N_ISAS; isa++) {
        bool wanted = !isa_name || strcmp(isa_name, ck_isa_name((enum ck_isa)isa)) == 0;
        if (wanted && ck_isa_is_available((enum ck_isa)isa)) {
            bench_isa((enum ck_isa)isa);
        }
    }
}
