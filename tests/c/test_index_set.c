/* The index set against a naive one. */
#include "cells/index_set.h"

#include "check.h"

struct pair {
    struct ck_index_set set;
    bool *naive;
    int32_t n;
};

static struct pair new_pair(int32_t n) {
    struct pair pair = {.naive = calloc((size_t)n, 1), .n = n};
    CHECK(pair.naive && ck_index_set_init(&pair.set, n));
    return pair;
}

static void free_pair(struct pair *pair) {
    ck_index_set_release(&pair->set);
    free(pair->naive);
}

static void check_pair(const struct pair *pair) {
    int32_t count = 0, highest = -1, next = -1;
    for (int32_t i = pair->n - 1; i >= 0; i--) {
        CHECK_EQUAL(ck_index_set_contains(&pair->set, i), pair->naive[i]);
        if (pair->naive[i]) {
            highest = highest < 0 ? i : highest;
            next = i;
            count++;
        }
        CHECK_EQUAL(ck_index_set_next(&pair->set, i), next);
    }
    CHECK_EQUAL(ck_index_set_next(&pair->set, pair->n), -1);
    CHECK_EQUAL(ck_index_set_highest(&pair->set), highest);
    CHECK_EQUAL(pair->set.count, count);
}

static void put(struct pair *pair, int32_t i, bool in) {
    if (in) {
        ck_index_set_insert(&pair->set, i);
    } else {
        ck_index_set_remove(&pair->set, i);
    }
    pair->naive[i] = in;
}

static const int32_t sizes[] = {1,   2,    63,   64,   65,   127,           128,
                                129, 4095, 4096, 4097, 8192, 262144 / 8 + 1};
enum { N_SIZES = sizeof sizes / sizeof *sizes };

static void test_new_set_is_empty_and_filled_set_is_full(void) {
    for (int s = 0; s < N_SIZES; s++) {
        struct pair pair = new_pair(sizes[s]);
        check_pair(&pair);
        ck_index_set_fill(&pair.set);
        memset(pair.naive, 1, (size_t)pair.n);
        check_pair(&pair);
        for (int32_t i = 0; i < pair.n; i++) {
            put(&pair, i, false);
        }
        check_pair(&pair);
        free_pair(&pair);
    }
}

/* Bursts of insertions and removals in stretches, so that words become empty and full again. */
static void test_random_histories_match_a_naive_set(void) {
    struct dice dice = {1};
    for (int s = 0; s < N_SIZES; s++) {
        struct pair pair = new_pair(sizes[s]);
        for (int round = 0; round < 24; round++) {
            bool in = roll(&dice, 2);
            int32_t first = (int32_t)roll(&dice, (uint32_t)pair.n);
            int32_t length = (int32_t)roll(&dice, (uint32_t)pair.n) / 2 + 1;
            for (int32_t i = first; i < pair.n && i < first + length; i++) {
                if (roll(&dice, 8)) {
                    put(&pair, i, in);
                }
            }
            check_pair(&pair);
        }
        free_pair(&pair);
    }
}

static void test_inserting_and_removing_twice_counts_once(void) {
    struct pair pair = new_pair(200);
    for (int repeat = 0; repeat < 2; repeat++) {
        put(&pair, 130, true);
        check_pair(&pair);
    }
    for (int repeat = 0; repeat < 2; repeat++) {
        put(&pair, 130, false);
        check_pair(&pair);
    }
    free_pair(&pair);
}

static void test_largest_set_reaches_its_ends(void) {
    struct ck_index_set set;
    CHECK(ck_index_set_init(&set, 1 << 30));
    CHECK_EQUAL(set.n_levels, CK_INDEX_SET_LEVELS);
    ck_index_set_insert(&set, (1 << 30) - 1);
    CHECK_EQUAL(ck_index_set_next(&set, 0), (1 << 30) - 1);
    ck_index_set_insert(&set, 0);
    CHECK_EQUAL(ck_index_set_next(&set, 1), (1 << 30) - 1);
    ck_index_set_remove(&set, (1 << 30) - 1);
    CHECK_EQUAL(ck_index_set_highest(&set), 0);
    ck_index_set_release(&set);
}

int main(void) {
    RUN(test_new_set_is_empty_and_filled_set_is_full);
    RUN(test_random_histories_match_a_naive_set);
    RUN(test_inserting_and_removing_twice_counts_once);
    RUN(test_largest_set_reaches_its_ends);
    return 0;
}
