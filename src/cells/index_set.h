/* A set of indices in [0, n): a bitset whose words are summed up by bits one level higher, up to a
 * single word, so that every question is answered in as many steps as there are levels. */
#ifndef CELLKV_CELLS_INDEX_SET_H
#define CELLKV_CELLS_INDEX_SET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CK_INDEX_SET_LEVELS = 5 }; /* 64^5 = 2^30 = CELLKV_MAX_CAPACITY */

/* Bit i of level 0 says whether i is in. Bit w of level k + 1 says whether word w of level k has
 * any bit. */
struct ck_index_set {
    int32_t n;     /* indices are below it; >= 1 */
    int32_t count; /* how many are in */
    int32_t n_levels;
    uint64_t *levels[CK_INDEX_SET_LEVELS]; /* levels[0] owns the memory of all */
};

/* Makes an empty set; false: out of memory. n in 1 .. 2^30. */
bool ck_index_set_init(struct ck_index_set *set, int32_t n);
void ck_index_set_release(struct ck_index_set *set); /* also of a zeroed one */
size_t ck_index_set_bytes(const struct ck_index_set *set);

void ck_index_set_fill(struct ck_index_set *set);              /* all of [0, n). Cost: O(n / 64) */
void ck_index_set_insert(struct ck_index_set *set, int32_t i); /* in already: fine */
void ck_index_set_remove(struct ck_index_set *set, int32_t i); /* not in: fine */
bool ck_index_set_contains(const struct ck_index_set *set, int32_t i);

/* The lowest index in the set that is >= i, or -1. i >= 0; may be n or more. */
int32_t ck_index_set_next(const struct ck_index_set *set, int32_t i);

/* The highest index in the set, or -1. */
int32_t ck_index_set_highest(const struct ck_index_set *set);

#endif
