#include "architecture.h"

#include <stdio.h>
#include <string.h>

#include "cells/error.h"
#include "gguf_scan.h"

static const struct ck_architecture *const architectures[] = {
    &ck_architecture_llama, &ck_architecture_gemma2, &ck_architecture_gemma3,
    &ck_architecture_qwen2, &ck_architecture_qwen3,  &ck_architecture_qwen3moe,
};

enum { N_ARCHITECTURES = sizeof architectures / sizeof *architectures };

static cellkv_status fail_unknown(const char *name) {
    char printable[64], known[256] = "";
    size_t used = 0;
    for (size_t i = 0; i < N_ARCHITECTURES && used < sizeof known; i++) {
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i > 0 ? ", " : "",
                                 architectures[i]->name);
    }
    ck_printable(name, strlen(name), printable, sizeof printable);
    return ck_fail(CELLKV_ERROR_UNKNOWN_ARCHITECTURE, "%s; there are: %s", printable, known);
}

cellkv_status ck_architecture_find(const char *name, const struct ck_architecture **found) {
    for (size_t i = 0; i < N_ARCHITECTURES; i++) {
        if (strcmp(architectures[i]->name, name) == 0) {
            *found = architectures[i];
            return CELLKV_OK;
        }
    }
    return fail_unknown(name);
}
