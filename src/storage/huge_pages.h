/* Attention reads rows all over the K/V tensors: with 4 KiB pages, many of its reads look up a page
 * first. */
#ifndef CELLKV_STORAGE_HUGE_PAGES_H
#define CELLKV_STORAGE_HUGE_PAGES_H

#include <stddef.h>

/* Asks the system for huge pages in a large block of memory, best before it is touched. It may
 * decline, and where it has no such word nothing happens. */
void ck_prefer_huge_pages(void *memory, size_t size);

#endif
