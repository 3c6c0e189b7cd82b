/* A source made of the caller's values and arrays: checked here, then described as if they had been
 * read from a GGUF file, so that one loader serves both. */
#include <math.h>
#include <string.h>

#include <ggml.h>

#include "cells/error.h"
#include "cells/memory.h"
#include "gguf_scan.h"
#include "source.h"

#define MAX_INTEGER 9007199254740992.0 /* 2^53 */

static cellkv_status check_value(const struct gguf_context *gguf, const cellkv_model_value *value,
                                 int32_t i) {
    if (value->key == NULL || value->key[0] == '\0') {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "value %d has no key", i);
    }
    char key[80];
    ck_printable(value->key, strlen(value->key), key, sizeof key);
    if (strcmp(value->key, GGUF_KEY_GENERAL_ALIGNMENT) == 0) {
        return ck_fail(CELLKV_ERROR_BAD_METADATA, "%s has no meaning for arrays", key);
    }
    if (gguf_find_key(gguf, value->key) >= 0) {
        return ck_fail(CELLKV_ERROR_BAD_METADATA, "%s is given twice", key);
    }
    if (value->string != NULL || value->is_float) {
        return CELLKV_OK;
    }
    if (!(fabs(value->number) <= MAX_INTEGER) || value->number != floor(value->number)) {
        return ck_fail(CELLKV_ERROR_BAD_METADATA, "%s: %g is no integer within 2^53", key,
                       value->number);
    }
    return CELLKV_OK;
}

static void set_value(struct gguf_context *gguf, const cellkv_model_value *value) {
    if (value->string != NULL) {
        gguf_set_val_str(gguf, value->key, value->string);
    } else if (value->is_float) {
        gguf_set_val_f32(gguf, value->key, (float)value->number);
    } else {
        gguf_set_val_i64(gguf, value->key, (int64_t)value->number);
    }
}

static cellkv_status check_array(const struct gguf_context *gguf, const cellkv_model_array *array,
                                 int32_t i) {
    if (array->name == NULL || array->data == NULL) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "array %d has no %s", i,
                       array->name == NULL ? "name" : "data");
    }
    char name[GGML_MAX_NAME];
    const size_t length = strlen(array->name);
    ck_printable(array->name, length, name, sizeof name);
    if (length == 0 || length >= GGML_MAX_NAME) {
        return ck_fail(CELLKV_ERROR_BAD_TENSOR, "array %d: a name has 1 to %d bytes: %s", i,
                       GGML_MAX_NAME - 1, name);
    }
    if (gguf_find_tensor(gguf, array->name) >= 0) {
        return ck_fail(CELLKV_ERROR_BAD_TENSOR, "%s is given twice", name);
    }
    if (array->n_dims < 1 || array->n_dims > 3) {
        return ck_fail(CELLKV_ERROR_BAD_TENSOR, "%s: %d dimensions; 1 to 3 were expected", name,
                       array->n_dims);
    }
    int64_t elements = 1;
    for (int32_t d = 0; d < array->n_dims; d++) {
        if (array->shape[d] < 1 || array->shape[d] > INT64_MAX / 64 / elements) {
            return ck_fail(CELLKV_ERROR_BAD_TENSOR, "%s: an impossible shape", name);
        }
        elements *= array->shape[d];
    }
    return CELLKV_OK;
}

/* gguf copies the description, not the context: one tensor's room is enough. */
static cellkv_status add_array(struct gguf_context *gguf, const cellkv_model_array *array) {
    const size_t size = ggml_tensor_overhead();
    void *memory = ck_malloc(size);
    if (memory == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "describing %s", array->name);
    }
    struct ggml_context *context = ggml_init(
        (struct ggml_init_params){.mem_size = size, .mem_buffer = memory, .no_alloc = true});
    struct ggml_tensor *tensor =
        ggml_new_tensor(context, GGML_TYPE_F32, array->n_dims, array->shape);
    ggml_set_name(tensor, array->name);
    gguf_add_tensor(gguf, tensor);
    ggml_free(context);
    ck_free(memory);
    return CELLKV_OK;
}

cellkv_status ck_source_from_arrays(const cellkv_model_value *values, int32_t n_values,
                                    const cellkv_model_array *arrays, int32_t n_arrays,
                                    struct ck_source *source) {
    *source = (struct ck_source){.gguf = gguf_init_empty(), .arrays = arrays};
    cellkv_status status = CELLKV_OK;
    for (int32_t i = 0; i < n_values && status == CELLKV_OK; i++) {
        status = check_value(source->gguf, &values[i], i);
        if (status == CELLKV_OK) {
            set_value(source->gguf, &values[i]);
        }
    }
    for (int32_t i = 0; i < n_arrays && status == CELLKV_OK; i++) {
        status = check_array(source->gguf, &arrays[i], i);
        if (status == CELLKV_OK) {
            status = add_array(source->gguf, &arrays[i]);
        }
    }
    if (status != CELLKV_OK) {
        ck_source_close(source);
    }
    return status;
}
