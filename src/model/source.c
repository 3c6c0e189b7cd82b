#include "source.h"

#include <string.h>

#include "cells/error.h"
#include "gguf_scan.h"

static size_t read_callback(void *file, void *bytes, uint64_t offset, size_t size) {
    return ck_file_read(file, offset, size, bytes) ? size : 0;
}

cellkv_status ck_source_open(const char *path, bool map, struct ck_source *source) {
    *source = (struct ck_source){0};
    cellkv_status status = ck_file_open(path, map, &source->file);
    if (status == CELLKV_OK) {
        status = ck_gguf_scan(source->file);
    }
    if (status == CELLKV_OK) {
        const struct gguf_init_params params = {.no_alloc = true};
        source->gguf = gguf_init_from_callback(read_callback, source->file, 0,
                                               ck_file_size(source->file), params);
        if (source->gguf == NULL) {
            status = ck_fail(CELLKV_ERROR_BAD_FILE, "ggml's reader refuses the file");
        }
    }
    if (status != CELLKV_OK) {
        ck_source_close(source);
    }
    return status;
}

void ck_source_close(struct ck_source *source) {
    gguf_free(source->gguf);
    ck_file_close(source->file);
    *source = (struct ck_source){0};
}

struct ck_stored_tensor ck_source_tensor(const struct ck_source *source, int64_t tensor) {
    return (struct ck_stored_tensor){
        .name = gguf_get_tensor_name(source->gguf, tensor),
        .type = gguf_get_tensor_type(source->gguf, tensor),
        .ne = gguf_get_tensor_ne(source->gguf, tensor),
        .n_bytes = gguf_get_tensor_size(source->gguf, tensor),
    };
}

static uint64_t file_offset(const struct ck_source *source, int64_t tensor) {
    return gguf_get_data_offset(source->gguf) + gguf_get_tensor_offset(source->gguf, tensor);
}

const uint8_t *ck_source_mapping(const struct ck_source *source, int64_t tensor) {
    const uint8_t *mapping = source->file != NULL ? ck_file_mapping(source->file) : NULL;
    return mapping != NULL ? mapping + file_offset(source, tensor) : NULL;
}

cellkv_status ck_source_read(const struct ck_source *source, int64_t tensor, void *bytes) {
    const struct ck_stored_tensor stored = ck_source_tensor(source, tensor);
    if (source->file == NULL) {
        memcpy(bytes, source->arrays[tensor].data, stored.n_bytes);
    } else if (!ck_file_read(source->file, file_offset(source, tensor), stored.n_bytes, bytes)) {
        return ck_fail(CELLKV_ERROR_FILE, "%s: its bytes cannot be read", stored.name);
    }
    return CELLKV_OK;
}
