/* SPDX-License-Identifier: MIT */
#ifndef CELLKV_VERSION_H
#define CELLKV_VERSION_H

#define CELLKV_VERSION_MAJOR 0
#define CELLKV_VERSION_MINOR 1
#define CELLKV_VERSION_PATCH 0
#define CELLKV_VERSION       "0.1.0"

/* The library is compiled with hidden visibility: only what bears CELLKV_API is exported. */
#if defined(__GNUC__)
#define CELLKV_API __attribute__((visibility("default")))
#else
#define CELLKV_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** Tells the version of the library that is linked, as CELLKV_VERSION tells the header's.
 *
 *  @return    a static string such as "0.1.0"; never NULL
 *  Cost: O(1).  Threads: any.
 */
CELLKV_API const char *cellkv_version(void);

#ifdef __cplusplus
}
#endif

#endif
