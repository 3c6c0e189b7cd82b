/* Typed look-ups in a model's metadata. A key that is absent, of another type or out of range fails
 * with CELLKV_ERROR_BAD_METADATA, named. The first failure stays in `status`, look-ups after it
 * give the fallback or 0: a reader asks for everything, then looks once. */
#ifndef CELLKV_MODEL_METADATA_H
#define CELLKV_MODEL_METADATA_H

#include <stdbool.h>
#include <stdint.h>

#include <gguf.h>

#include <cellkv/status.h>

struct ck_metadata {
    const struct gguf_context *gguf;
    const char *prefix; /* put before each key with a dot: "llama"; NULL: keys are whole */
    cellkv_status status;
};

bool ck_metadata_has(const struct ck_metadata *metadata, const char *key);

/* Integers of any width. */
int32_t ck_metadata_int(struct ck_metadata *metadata, const char *key, int32_t min, int32_t max);
int32_t ck_metadata_int_or(struct ck_metadata *metadata, const char *key, int32_t min, int32_t max,
                           int32_t fallback);

/* One layer's entry of a key that holds either one integer for all layers or an array of one per
 * layer. */
int32_t ck_metadata_layer_int(struct ck_metadata *metadata, const char *key, int32_t layer,
                              int32_t n_layers, int32_t min, int32_t max);
int32_t ck_metadata_layer_int_or(struct ck_metadata *metadata, const char *key, int32_t layer,
                                 int32_t n_layers, int32_t min, int32_t max, int32_t fallback);

/* The same of bools (or integers 0 and 1). */
bool ck_metadata_layer_bool(struct ck_metadata *metadata, const char *key, int32_t layer,
                            int32_t n_layers);

/* Whether the key is there and holds an array. */
bool ck_metadata_is_array(const struct ck_metadata *metadata, const char *key);

/* Finite floats. */
float ck_metadata_float(struct ck_metadata *metadata, const char *key, float min, float max);
float ck_metadata_float_or(struct ck_metadata *metadata, const char *key, float min, float max,
                           float fallback);

/* A bool, or an integer 0 or 1. */
bool ck_metadata_bool_or(struct ck_metadata *metadata, const char *key, bool fallback);

/* Lives as long as the gguf context. */
const char *ck_metadata_string(struct ck_metadata *metadata, const char *key);
const char *ck_metadata_string_or(struct ck_metadata *metadata, const char *key,
                                  const char *fallback);

/* Fails with `reason` for a value that is well-formed but cannot be served. */
void ck_metadata_refuse(struct ck_metadata *metadata, const char *key, const char *reason);

#endif
