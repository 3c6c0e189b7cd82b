/* Assertions for test programs: the first that fails ends the program and says where. */
#ifndef CHECK_H
#define CHECK_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cellkv/status.h>

#define CHECK(condition) check_that((condition), #condition, __FILE__, __LINE__)

#define CHECK_EQUAL(actual, expected)                                                              \
    check_equal((long long)(actual), (long long)(expected), #actual, __FILE__, __LINE__)

#define CHECK_OK(call) check_status((call), CELLKV_OK, NULL, #call, __FILE__, __LINE__)

/* The call is refused with this status, and the message has these words. */
#define CHECK_REFUSED(call, status, words)                                                         \
    check_status((call), (status), (words), #call, __FILE__, __LINE__)

#define RUN(test)                                                                                  \
    do {                                                                                           \
        printf("%s\n", #test);                                                                     \
        fflush(stdout);                                                                            \
        test();                                                                                    \
    } while (0)

static inline void check_that(bool holds, const char *what, const char *file, int line) {
    if (!holds) {
        fprintf(stderr, "%s:%d: not so: %s\n", file, line, what);
        exit(1);
    }
}

static inline void check_equal(long long actual, long long expected, const char *what,
                               const char *file, int line) {
    if (actual != expected) {
        fprintf(stderr, "%s:%d: %s is %lld, expected %lld\n", file, line, what, actual, expected);
        exit(1);
    }
}

static inline void check_status(cellkv_status actual, cellkv_status expected, const char *words,
                                const char *what, const char *file, int line) {
    if (actual != expected) {
        fprintf(stderr, "%s:%d: %s came to %s, expected %s; last error: %s\n", file, line, what,
                cellkv_status_name(actual), cellkv_status_name(expected), cellkv_last_error());
        exit(1);
    }
    if (words && !strstr(cellkv_last_error(), words)) {
        fprintf(stderr, "%s:%d: %s says \"%s\", expected \"%s\" in it\n", file, line, what,
                cellkv_last_error(), words);
        exit(1);
    }
}

/* A small generator of its own, so that a failing history is the same everywhere. */
struct dice {
    uint64_t state;
};

static inline uint32_t roll(struct dice *dice, uint32_t n) { /* in [0, n) */
    uint64_t z = dice->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)((z ^ z >> 31) >> 32) % n;
}

#endif
