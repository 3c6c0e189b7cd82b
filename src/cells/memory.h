/* All memory of the library's own comes from here, so that tests can make any allocation fail. */
#ifndef CELLKV_CELLS_MEMORY_H
#define CELLKV_CELLS_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cellkv/version.h>

void *ck_malloc(size_t size);
void *ck_calloc(size_t count, size_t size);                     /* NULL on overflow, too */
void *ck_realloc_array(void *block, size_t count, size_t size); /* NULL: block unchanged */
char *ck_strdup(const char *text);
void ck_free(void *block); /* NULL is fine */

/* Makes room for `need` (>= 1) elements in an array that has room for *room: returns the array,
 * perhaps moved, or NULL with everything unchanged. Amortised O(1) for each element. */
void *ck_make_room(void *block, int32_t *room, int64_t need, size_t size);

/* The same for an array's variable, which takes the new place: false, and nothing has changed, if
 * there is no memory. */
#define CK_RESERVE(array, room, need) ck_reserve(&(array), (room), (need), sizeof *(array))
bool ck_reserve(void *array, int32_t *room, int64_t need, size_t size); /* by the macro */

/* Whether an allocation that is not ours to make (a backend buffer, say) should fail now: counts
 * like one of ours. Always false in builds without CELLKV_CHECKS. */
bool ck_allocation_should_fail(void);

/* Test hook, in builds with CELLKV_CHECKS only: this thread's allocations succeed `n` more times,
 * then one fails, then they succeed again; n < 0: all succeed. Returns whether the one
 * failure of the previous setting has come to pass. */
#ifdef CELLKV_CHECKS
CELLKV_API bool cellkv_test_fail_allocation_after(int n);
#endif

#endif
