#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include "error.h"

enum { LONGEST_MESSAGE = 512 };

static _Thread_local char last_error[LONGEST_MESSAGE];

const char *cellkv_status_text(cellkv_status status) {
    switch ((int)status) {
#define STATUS_TEXT(name, value, exception, text)                                                  \
    case value:                                                                                    \
        return text;
        CELLKV_STATUS_LIST(STATUS_TEXT)
#undef STATUS_TEXT
    default:
        return "unknown status";
    }
}

const char *cellkv_status_name(cellkv_status status) {
    switch ((int)status) {
#define STATUS_NAME(name, value, exception, text)                                                  \
    case value:                                                                                    \
        return #name;
        CELLKV_STATUS_LIST(STATUS_NAME)
#undef STATUS_NAME
    default:
        return NULL;
    }
}

const char *cellkv_last_error(void) {
    return last_error;
}

cellkv_status ck_fail(cellkv_status status, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(last_error, sizeof last_error, format, values);
    va_end(values);
    return status;
}

cellkv_status ck_fail_null(const char *what) {
    return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "%s is NULL", what);
}

cellkv_status ck_fail_memory(const char *what) {
    return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "no memory for %s", what);
}
