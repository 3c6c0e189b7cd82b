#include "device.h"

#include <stdio.h>

#include <cellkv/executor.h>

#include "cells/error.h"

int32_t cellkv_device_count(void) {
    return (int32_t)ggml_backend_dev_count();
}

const char *cellkv_device_name(int32_t i) {
    if (i < 0 || i >= cellkv_device_count()) {
        return NULL;
    }
    return ggml_backend_dev_name(ggml_backend_dev_get((size_t)i));
}

static ggml_backend_dev_t best_device(void) {
    static const enum ggml_backend_dev_type preference[] = {
        GGML_BACKEND_DEVICE_TYPE_GPU,
        GGML_BACKEND_DEVICE_TYPE_IGPU,
        GGML_BACKEND_DEVICE_TYPE_CPU,
    };
    for (size_t i = 0; i < sizeof preference / sizeof *preference; i++) {
        ggml_backend_dev_t device = ggml_backend_dev_by_type(preference[i]);
        if (device != NULL) {
            return device;
        }
    }
    return NULL;
}

static cellkv_status fail_unknown(const char *name) {
    char known[256] = "";
    int used = 0;
    for (int32_t i = 0; i < cellkv_device_count() && used < (int)sizeof known; i++) {
        used += snprintf(known + used, sizeof known - (size_t)used, "%s%s", i > 0 ? ", " : "",
                         cellkv_device_name(i));
    }
    return ck_fail(CELLKV_ERROR_UNKNOWN_DEVICE, "no device is named %s; there are: %s",
                   name != NULL ? name : "(any)", known);
}

cellkv_status ck_device_find(const char *name, ggml_backend_dev_t *device) {
    ggml_backend_dev_t found = name != NULL ? ggml_backend_dev_by_name(name) : best_device();
    if (found == NULL) {
        return fail_unknown(name);
    }
    *device = found;
    return CELLKV_OK;
}
