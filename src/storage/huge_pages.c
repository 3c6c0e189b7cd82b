#define _DEFAULT_SOURCE /* madvise */
#include "huge_pages.h"

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

/* Bytes; a smaller block may be memory that the allocator had already, and keeps whole. */
enum { WORTH_IT = 8 << 20 };

void ck_prefer_huge_pages(void *memory, size_t size) {
#ifdef MADV_HUGEPAGE
    const long page = sysconf(_SC_PAGESIZE);
    if (page <= 0) {
        return;
    }
    const uintptr_t mask = (uintptr_t)page - 1;
    const uintptr_t begin = ((uintptr_t)memory + mask) & ~mask;
    const uintptr_t end = ((uintptr_t)memory + size) & ~mask;
    if (end > begin && end - begin >= WORTH_IT) {
        (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* advice: may be declined */
    }
#else
    (void)memory;
    (void)size;
#endif
}
