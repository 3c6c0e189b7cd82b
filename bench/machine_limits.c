/* What a machine can do at most: reading memory, and f32 multiply-adds. Attention is held against
 * these in bench_attention.py, which compiles and runs this file (limits.py).
 *
 *     cc -O3 -march=native -ffp-contract=fast machine_limits.c -o machine_limits -lpthread
 *     ./machine_limits N_THREADS read MEGABYTES ...
 *     ./machine_limits N_THREADS multiply-add
 *
 * The threads read each number of megabytes in equal parts, over and over: what fits into a cache
 * comes from there. Prints medians of many runs. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512F__)
enum { LANES = 16, N_SUMS = 16 };
#elif defined(__AVX__)
enum { LANES = 8, N_SUMS = 12 };
#elif defined(__aarch64__)
enum { LANES = 4, N_SUMS = 16 };
#else
enum { LANES = 4, N_SUMS = 12 };
#endif
typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));

enum { N_RUNS = 25, N_FMA = 200000, N_STREAMS = 4, MAX_THREADS = 64 };

struct work {
    int n_threads;
    const lanes *data; /* NULL: multiply-adds */
    size_t n;          /* lanes to read, a multiple of n_threads * N_STREAMS */
    atomic_int arrived;
    double seconds[N_RUNS];
};

struct worker {
    pthread_t thread;
    int index;
    struct work *work;
    volatile float sink; /* keeps the compiler from dropping the work */
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Returns when all threads have called it `turn` times. They spin: waking takes too long. */
static void meet(struct work *work, int turn) {
    atomic_fetch_add(&work->arrived, 1);
    while (atomic_load_explicit(&work->arrived, memory_order_acquire) < turn * work->n_threads) {
    }
}

static float total(const lanes *sums, int n) {
    float all = 0;
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < LANES; j++) {
            all += sums[i][j];
        }
    }
    return all;
}

static float read_part(const lanes *data, size_t n) {
    lanes sums[N_STREAMS];
    memset(sums, 0, sizeof sums);
    for (size_t i = 0; i < n; i += N_STREAMS) {
        for (int j = 0; j < N_STREAMS; j++) {
            sums[j] += data[i + (size_t)j];
        }
    }
    return total(sums, N_STREAMS);
}

static float multiply_add(void) {
    lanes sums[N_SUMS];
    lanes factor;
    lanes term;
    for (int j = 0; j < LANES; j++) {
        factor[j] = 0.999F;
        term[j] = 0.001F;
    }
    for (int i = 0; i < N_SUMS; i++) {
        sums[i] = term * (float)i;
    }
    for (long k = 0; k < N_FMA; k++) {
        for (int i = 0; i < N_SUMS; i++) {
            sums[i] = sums[i] * factor + term;
        }
    }
    return total(sums, N_SUMS);
}

static void *run(void *argument) {
    struct worker *worker = argument;
    struct work *work = worker->work;
    const size_t part = work->n / (size_t)work->n_threads;
    for (int i = 0; i < N_RUNS; i++) {
        meet(work, 2 * i + 1);
        const double start = now();
        if (work->data != NULL) {
            worker->sink += read_part(work->data + part * (size_t)worker->index, part);
        } else {
            worker->sink += multiply_add();
        }
        meet(work, 2 * i + 2);
        if (worker->index == 0) {
            work->seconds[i] = now() - start;
        }
    }
    return NULL;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_seconds(struct work *work) {
    static struct worker workers[MAX_THREADS];
    atomic_store(&work->arrived, 0);
    for (int i = 0; i < work->n_threads; i++) {
        workers[i].index = i;
        workers[i].work = work;
        if (i > 0 && pthread_create(&workers[i].thread, NULL, run, &workers[i]) != 0) {
            fprintf(stderr, "no thread\n");
            exit(1);
        }
    }
    run(&workers[0]);
    for (int i = 1; i < work->n_threads; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    qsort(work->seconds, N_RUNS, sizeof work->seconds[0], by_size);
    return work->seconds[N_RUNS / 2];
}

static void print_reading(int n_threads, double megabytes) {
    const size_t unit = (size_t)n_threads * N_STREAMS;
    const size_t n = ((size_t)(megabytes * 1e6) / sizeof(lanes) / unit + 1) * unit;
    lanes *data = aligned_alloc(sizeof(lanes) * N_STREAMS, n * sizeof(lanes));
    if (data == NULL) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    memset(data, 0, n * sizeof(lanes));
    struct work work = {.n_threads = n_threads, .data = data, .n = n};
    printf("read %g MB: %.2f GB/s\n", megabytes,
           (double)(n * sizeof(lanes)) / median_seconds(&work) / 1e9);
    free(data);
}

static void print_multiply_adds(int n_threads) {
    struct work work = {.n_threads = n_threads};
    const double n_flops = 2.0 * LANES * N_SUMS * N_FMA * n_threads;
    printf("multiply-add: %.2f GFLOP/s\n", n_flops / median_seconds(&work) / 1e9);
}

int main(int argc, char **argv) {
    const int n_threads = argc > 2 ? atoi(argv[1]) : 0;
    if (n_threads < 1 || n_threads > MAX_THREADS) {
        fprintf(stderr, "usage: %s N_THREADS multiply-add | N_THREADS read MEGABYTES ...\n",
                argv[0]);
        return 2;
    }
    if (strcmp(argv[2], "multiply-add") == 0) {
        print_multiply_adds(n_threads);
    }
    for (int i = 3; i < argc; i++) {
        print_reading(n_threads, atof(argv[i]));
    }
    return 0;
}
