#include "memory.h"

#include <stdlib.h>
#include <string.h>

#ifdef CELLKV_CHECKS

static _Thread_local int successes_left = -1; /* < 0: no failure is planned */
static _Thread_local bool has_failed;

bool cellkv_test_fail_allocation_after(int n) {
    bool failed = has_failed;
    successes_left = n < 0 ? -1 : n;
    has_failed = false;
    return failed;
}

bool ck_allocation_should_fail(void) {
    if (successes_left < 0) {
        return false;
    }
    if (successes_left-- > 0) {
        return false;
    }
    has_failed = true; /* successes_left is -1 now: the rest succeeds */
    return true;
}

#else

bool ck_allocation_should_fail(void) {
    return false;
}

#endif

/* A size of 0 is asked for as 1, so that NULL always means failure. */

void *ck_malloc(size_t size) {
    return ck_allocation_should_fail() ? NULL : malloc(size ? size : 1);
}

void *ck_calloc(size_t count, size_t size) {
    if (ck_allocation_should_fail() || (size && count > SIZE_MAX / size)) {
        return NULL;
    }
    return count && size ? calloc(count, size) : calloc(1, 1);
}

void *ck_realloc_array(void *block, size_t count, size_t size) {
    if (ck_allocation_should_fail() || (size && count > SIZE_MAX / size)) {
        return NULL;
    }
    return realloc(block, count && size ? count * size : 1);
}

char *ck_strdup(const char *text) {
    size_t size = strlen(text) + 1;
    char *copy = ck_malloc(size);
    return copy ? memcpy(copy, text, size) : NULL;
}

void ck_free(void *block) {
    free(block);
}

void *ck_make_room(void *block, int32_t *room, int64_t need, size_t size) {
    if (need <= *room) {
        return block;
    }
    int64_t wanted = need + need / 2;
    if (wanted > INT32_MAX) {
        wanted = need;
    }
    if (wanted > INT32_MAX) {
        return NULL;
    }
    void *grown = ck_realloc_array(block, (size_t)wanted, size);
    if (grown) {
        *room = (int32_t)wanted;
    }
    return grown;
}

bool ck_reserve(void *array, int32_t *room, int64_t need, size_t size) {
    void *block; /* copied, for the variable is a pointer of another type */
    memcpy(&block, array, sizeof block);
    block = ck_make_room(block, room, need, size);
    if (block) {
        memcpy(array, &block, sizeof block);
    }
    return block != NULL;
}
