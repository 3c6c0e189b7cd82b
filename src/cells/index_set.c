#include "index_set.h"

#include <string.h>

#include "memory.h"

static int lowest_bit(uint64_t word) {
#if defined(__GNUC__)
    return __builtin_ctzll(word);
#else
    int bit = 0;
    while (!(word >> bit & 1)) {
        bit++;
    }
    return bit;
#endif
}

static int highest_bit(uint64_t word) {
#if defined(__GNUC__)
    return 63 - __builtin_clzll(word);
#else
    int bit = 63;
    while (!(word >> bit & 1)) {
        bit--;
    }
    return bit;
#endif
}

/* The highest bit that a level has, and how many words that takes. */
static int32_t last_bit(int32_t n, int level) {
    return (n - 1) >> (6 * level);
}

static int32_t level_words(int32_t n, int level) {
    return (last_bit(n, level) >> 6) + 1;
}

static size_t all_words(int32_t n, int n_levels) {
    size_t words = 0;
    for (int level = 0; level < n_levels; level++) {
        words += (size_t)level_words(n, level);
    }
    return words;
}

bool ck_index_set_init(struct ck_index_set *set, int32_t n) {
    int n_levels = 1;
    while (level_words(n, n_levels - 1) > 1) {
        n_levels++;
    }
    uint64_t *words = ck_calloc(all_words(n, n_levels), sizeof *words);
    if (!words) {
        return false;
    }
    *set = (struct ck_index_set){.n = n, .n_levels = n_levels};
    for (int level = 0; level < n_levels; level++) {
        set->levels[level] = words;
        words += level_words(n, level);
    }
    return true;
}

void ck_index_set_release(struct ck_index_set *set) {
    ck_free(set->levels[0]);
    *set = (struct ck_index_set){0};
}

size_t ck_index_set_bytes(const struct ck_index_set *set) {
    return all_words(set->n, set->n_levels) * sizeof(uint64_t);
}

void ck_index_set_fill(struct ck_index_set *set) {
    for (int level = 0; level < set->n_levels; level++) {
        int32_t words = level_words(set->n, level);
        memset(set->levels[level], 0xff, (size_t)words * sizeof(uint64_t));
        set->levels[level][words - 1] >>= 63 - (last_bit(set->n, level) & 63);
    }
    set->count = set->n;
}

void ck_index_set_insert(struct ck_index_set *set, int32_t i) {
    if (ck_index_set_contains(set, i)) {
        return;
    }
    set->count++;
    for (int level = 0; level < set->n_levels; level++) {
        uint64_t *word = &set->levels[level][i >> 6];
        uint64_t before = *word;
        *word |= UINT64_C(1) << (i & 63);
        if (before) { /* the levels above know of this word already */
            return;
        }
        i >>= 6;
    }
}

void ck_index_set_remove(struct ck_index_set *set, int32_t i) {
    if (!ck_index_set_contains(set, i)) {
        return;
    }
    set->count--;
    for (int level = 0; level < set->n_levels; level++) {
        uint64_t *word = &set->levels[level][i >> 6];
        *word &= ~(UINT64_C(1) << (i & 63));
        if (*word) {
            return;
        }
        i >>= 6;
    }
}

bool ck_index_set_contains(const struct ck_index_set *set, int32_t i) {
    return set->levels[0][i >> 6] >> (i & 63) & 1;
}

int32_t ck_index_set_next(const struct ck_index_set *set, int32_t i) {
    for (int level = 0; level < set->n_levels; level++) {
        if (i > last_bit(set->n, level)) {
            return -1;
        }
        uint64_t word = set->levels[level][i >> 6] & UINT64_MAX << (i & 63);
        if (word) {
            i = (i & ~63) | lowest_bit(word);
            while (level-- > 0) {
                i = i << 6 | lowest_bit(set->levels[level][i]);
            }
            return i;
        }
        i = (i >> 6) + 1; /* whatever follows lies in later words */
    }
    return -1;
}

int32_t ck_index_set_highest(const struct ck_index_set *set) {
    if (set->count == 0) {
        return -1;
    }
    int32_t i = 0; /* the top level is one word */
    for (int level = set->n_levels - 1; level >= 0; level--) {
        i = i << 6 | highest_bit(set->levels[level][i]);
    }
    return i;
}
