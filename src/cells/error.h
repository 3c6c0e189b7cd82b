/* How a call refuses: a status, and the details in words for cellkv_last_error(). */
#ifndef CELLKV_CELLS_ERROR_H
#define CELLKV_CELLS_ERROR_H

#include <cellkv/status.h>

#if defined(__GNUC__)
#define CK_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define CK_PRINTF(text, first)
#endif

/* Records the details, printf-like, and returns `status`: `return ck_fail(CELLKV_ERROR_..., ...)`.
 */
cellkv_status ck_fail(cellkv_status status, const char *format, ...) CK_PRINTF(2, 3);

/* For "x is NULL", the commonest refusal. */
cellkv_status ck_fail_null(const char *what);

/* For memory that could not be had; `what` says for what. */
cellkv_status ck_fail_memory(const char *what);

#endif
