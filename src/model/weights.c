#include "weights.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cells/memory.h"

/* What ggml's CPU multiplies by and gathers rows from; a device may take fewer (placement.c asks).
 */
static bool is_matrix_type(enum ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16:
    case GGML_TYPE_Q1_0:
    case GGML_TYPE_Q2_0:
    case GGML_TYPE_Q4_0:
    case GGML_TYPE_Q4_1:
    case GGML_TYPE_Q5_0:
    case GGML_TYPE_Q5_1:
    case GGML_TYPE_Q8_0:
    case GGML_TYPE_Q2_K:
    case GGML_TYPE_Q3_K:
    case GGML_TYPE_Q4_K:
    case GGML_TYPE_Q5_K:
    case GGML_TYPE_Q6_K:
    case GGML_TYPE_IQ1_S:
    case GGML_TYPE_IQ1_M:
    case GGML_TYPE_IQ2_XXS:
    case GGML_TYPE_IQ2_XS:
    case GGML_TYPE_IQ2_S:
    case GGML_TYPE_IQ3_XXS:
    case GGML_TYPE_IQ3_S:
    case GGML_TYPE_IQ4_NL:
    case GGML_TYPE_IQ4_XS:
    case GGML_TYPE_TQ1_0:
    case GGML_TYPE_TQ2_0:
    case GGML_TYPE_MXFP4:
    case GGML_TYPE_NVFP4:
        return true;
    default:
        return false;
    }
}

static bool is_vector_type(enum ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

void ck_weights_begin(struct ck_weights *weights, const struct ck_source *source,
                      const char *architecture) {
    *weights = (struct ck_weights){.source = source, .architecture = architecture};
    weights->known = ck_calloc((size_t)gguf_get_n_tensors(source->gguf) + 1, sizeof(bool));
    if (weights->known == NULL) {
        weights->status = ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "listing the weights");
    }
}

void ck_weights_end(struct ck_weights *weights) {
    ck_free(weights->items);
    ck_free(weights->known);
    *weights = (struct ck_weights){0};
}

static bool ok(const struct ck_weights *weights) {
    return weights->status == CELLKV_OK;
}

static void check_shape(struct ck_weights *weights, const struct ck_stored_tensor *stored,
                        const int64_t wanted[3]) {
    const int64_t *ne = stored->ne;
    if (ne[0] == wanted[0] && ne[1] == wanted[1] && ne[2] == wanted[2] && ne[3] == 1) {
        return;
    }
    weights->status =
        ck_fail(CELLKV_ERROR_BAD_TENSOR,
                "%s has shape [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "]; [%" PRId64
                ", %" PRId64 ", %" PRId64 ", 1] was expected",
                stored->name, ne[0], ne[1], ne[2], ne[3], wanted[0], wanted[1], wanted[2]);
}

static void check_type(struct ck_weights *weights, const struct ck_stored_tensor *stored,
                       enum ck_use use) {
    if (use == CK_USE_VECTOR ? is_vector_type(stored->type) : is_matrix_type(stored->type)) {
        return;
    }
    weights->status =
        ck_fail(CELLKV_ERROR_BAD_TENSOR, "%s has type %s; %s was expected", stored->name,
                ggml_type_name(stored->type),
                use == CK_USE_VECTOR ? "f32, f16 or bf16" : "a floating-point or quantized type");
}

static void append(struct ck_weights *weights, const struct ck_weight *weight) {
    if (weights->n == weights->capacity) {
        const int64_t capacity = weights->capacity > 0 ? 2 * weights->capacity : 64;
        struct ck_weight *items = ck_realloc_array(weights->items, (size_t)capacity, sizeof *items);
        if (items == NULL) {
            weights->status = ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "listing the weights");
            return;
        }
        weights->items = items;
        weights->capacity = capacity;
    }
    weights->items[weights->n++] = *weight;
}

/* The tensor of this name; -1: none, or an earlier failure. */
static int64_t find(struct ck_weights *weights, const char *name) {
    const int64_t tensor = ok(weights) ? gguf_find_tensor(weights->source->gguf, name) : -1;
    if (tensor >= 0) {
        weights->known[tensor] = true;
    }
    return tensor;
}

static void want(struct ck_weights *weights, const struct ck_weight *weight,
                 const int64_t shape[3]) {
    const struct ck_stored_tensor stored = ck_source_tensor(weights->source, weight->tensor);
    check_shape(weights, &stored, shape);
    if (ok(weights)) {
        check_type(weights, &stored, weight->use);
    }
    if (ok(weights)) {
        append(weights, weight);
    }
}

static void fail_missing(struct ck_weights *weights, const char *name) {
    if (ok(weights)) {
        weights->status = ck_fail(CELLKV_ERROR_MISSING_TENSOR, "%s", name);
    }
}

#define FORMAT_NAME(text, format)                                                                  \
    char text[GGML_MAX_NAME];                                                                      \
    do {                                                                                           \
        va_list arguments;                                                                         \
        va_start(arguments, format);                                                               \
        vsnprintf(text, sizeof text, format, arguments);                                           \
        va_end(arguments);                                                                         \
    } while (0)

void ck_want(struct ck_weights *weights, struct ggml_tensor **slot, enum ck_use use, int64_t ne0,
             int64_t ne1, const char *name, ...) {
    FORMAT_NAME(text, name);
    const int64_t tensor = find(weights, text);
    if (tensor < 0) {
        fail_missing(weights, text);
    } else {
        want(weights, &(struct ck_weight){tensor, use, weights->layer, slot},
             (const int64_t[]){ne0, ne1, 1});
    }
}

bool ck_want_optional(struct ck_weights *weights, struct ggml_tensor **slot, enum ck_use use,
                      int64_t ne0, int64_t ne1, const char *name, ...) {
    FORMAT_NAME(text, name);
    const int64_t tensor = find(weights, text);
    if (tensor >= 0) {
        want(weights, &(struct ck_weight){tensor, use, weights->layer, slot},
             (const int64_t[]){ne0, ne1, 1});
    }
    return tensor >= 0;
}

void ck_want_experts(struct ck_weights *weights, struct ggml_tensor **slot, int64_t ne0,
                     int64_t ne1, int64_t n_experts, const char *name, ...) {
    FORMAT_NAME(text, name);
    const int64_t tensor = find(weights, text);
    if (tensor < 0) {
        fail_missing(weights, text);
    } else {
        want(weights, &(struct ck_weight){tensor, CK_USE_EXPERTS, weights->layer, slot},
             (const int64_t[]){ne0, ne1, n_experts});
    }
}

void ck_require(struct ck_weights *weights, const char *name, ...) {
    FORMAT_NAME(text, name);
    if (find(weights, text) < 0) {
        fail_missing(weights, text);
    }
}

void ck_ignore(struct ck_weights *weights, const char *name, ...) {
    FORMAT_NAME(text, name);
    find(weights, text);
}

void ck_weights_refuse_unknown(struct ck_weights *weights) {
    const int64_t n = gguf_get_n_tensors(weights->source->gguf);
    for (int64_t i = 0; i < n && ok(weights); i++) {
        if (!weights->known[i]) {
            weights->status =
                ck_fail(CELLKV_ERROR_BAD_TENSOR, "%s is no tensor of the architecture %s",
                        gguf_get_tensor_name(weights->source->gguf, i), weights->architecture);
        }
    }
}

int64_t ck_weights_length(struct ck_weights *weights, const char *name, int dimension) {
    const int64_t tensor = find(weights, name);
    if (tensor < 0) {
        fail_missing(weights, name);
        return 0;
    }
    return gguf_get_tensor_ne(weights->source->gguf, tensor)[dimension];
}
