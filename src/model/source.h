/* Where a model's metadata and tensors come from: a GGUF file, or the caller's arrays. */
#ifndef CELLKV_MODEL_SOURCE_H
#define CELLKV_MODEL_SOURCE_H

#include <stdbool.h>
#include <stdint.h>

#include <gguf.h>

#include <cellkv/model.h>

#include "file.h"

struct ck_source {
    struct gguf_context *gguf;        /* keys and the tensor list; no data */
    struct ck_file *file;             /* the data; NULL: it is in `arrays` */
    const cellkv_model_array *arrays; /* [number of tensors], borrowed */
};

/* One tensor as it is stored. */
struct ck_stored_tensor {
    const char *name;
    enum ggml_type type;
    const int64_t *ne; /* [GGML_MAX_DIMS] */
    size_t n_bytes;
};

/* Statuses: those of cellkv_model_load that concern the file. */
cellkv_status ck_source_open(const char *path, bool map, struct ck_source *source);

/* Statuses: those of cellkv_model_from_arrays that concern the form of values and arrays. */
cellkv_status ck_source_from_arrays(const cellkv_model_value *values, int32_t n_values,
                                    const cellkv_model_array *arrays, int32_t n_arrays,
                                    struct ck_source *source);

void ck_source_close(struct ck_source *source);

struct ck_stored_tensor ck_source_tensor(const struct ck_source *source, int64_t tensor);

/* The tensor's bytes where the file is mapped; NULL: they must be read. */
const uint8_t *ck_source_mapping(const struct ck_source *source, int64_t tensor);

/* Copies the tensor's bytes. Returns CELLKV_OK or CELLKV_ERROR_FILE. */
cellkv_status ck_source_read(const struct ck_source *source, int64_t tensor, void *bytes);

#endif
