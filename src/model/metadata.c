#include "metadata.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cells/error.h"

#define MAX_KEY 128

static void whole_key(const struct ck_metadata *metadata, const char *key, char whole[MAX_KEY]) {
    if (metadata->prefix != NULL) {
        snprintf(whole, MAX_KEY, "%s.%s", metadata->prefix, key);
    } else {
        snprintf(whole, MAX_KEY, "%s", key);
    }
}

static int64_t find(const struct ck_metadata *metadata, const char *key) {
    char whole[MAX_KEY];
    whole_key(metadata, key, whole);
    return gguf_find_key(metadata->gguf, whole);
}

static bool ok(const struct ck_metadata *metadata) {
    return metadata->status == CELLKV_OK;
}

void ck_metadata_refuse(struct ck_metadata *metadata, const char *key, const char *reason) {
    if (!ok(metadata)) {
        return;
    }
    char whole[MAX_KEY];
    whole_key(metadata, key, whole);
    metadata->status = ck_fail(CELLKV_ERROR_BAD_METADATA, "%s: %s", whole, reason);
}

bool ck_metadata_has(const struct ck_metadata *metadata, const char *key) {
    return find(metadata, key) >= 0;
}

/* The key's index; -1, having failed, when it is absent. */
static int64_t require(struct ck_metadata *metadata, const char *key) {
    const int64_t id = ok(metadata) ? find(metadata, key) : -1;
    if (id < 0) {
        ck_metadata_refuse(metadata, key, "missing");
    }
    return id;
}

/* Element i of integers of any width; false: not integers, or beyond an int64. */
static bool integer_at(enum gguf_type type, const void *data, size_t i, int64_t *value) {
    switch (type) {
    case GGUF_TYPE_UINT8:
        *value = ((const uint8_t *)data)[i];
        return true;
    case GGUF_TYPE_INT8:
        *value = ((const int8_t *)data)[i];
        return true;
    case GGUF_TYPE_UINT16:
        *value = ((const uint16_t *)data)[i];
        return true;
    case GGUF_TYPE_INT16:
        *value = ((const int16_t *)data)[i];
        return true;
    case GGUF_TYPE_UINT32:
        *value = ((const uint32_t *)data)[i];
        return true;
    case GGUF_TYPE_INT32:
        *value = ((const int32_t *)data)[i];
        return true;
    case GGUF_TYPE_UINT64:
        *value = (int64_t)((const uint64_t *)data)[i];
        return ((const uint64_t *)data)[i] <= INT64_MAX;
    case GGUF_TYPE_INT64:
        *value = ((const int64_t *)data)[i];
        return true;
    default:
        return false;
    }
}

static int32_t check_integer(struct ck_metadata *metadata, const char *key, bool is_integer,
                             int64_t value, int32_t min, int32_t max) {
    char reason[96];
    if (!is_integer) {
        ck_metadata_refuse(metadata, key, "an integer was expected");
        return 0;
    }
    if (value < min || value > max) {
        snprintf(reason, sizeof reason, "%" PRId64 " is outside %" PRId32 " .. %" PRId32, value,
                 min, max);
        ck_metadata_refuse(metadata, key, reason);
        return 0;
    }
    return (int32_t)value;
}

int32_t ck_metadata_int(struct ck_metadata *metadata, const char *key, int32_t min, int32_t max) {
    const int64_t id = require(metadata, key);
    if (id < 0) {
        return 0;
    }
    const enum gguf_type type = gguf_get_kv_type(metadata->gguf, id);
    const bool scalar = type != GGUF_TYPE_ARRAY && type != GGUF_TYPE_STRING;
    int64_t value = 0;
    const bool is_integer =
        scalar && integer_at(type, gguf_get_val_data(metadata->gguf, id), 0, &value);
    return check_integer(metadata, key, is_integer, value, min, max);
}

int32_t ck_metadata_int_or(struct ck_metadata *metadata, const char *key, int32_t min, int32_t max,
                           int32_t fallback) {
    return ck_metadata_has(metadata, key) ? ck_metadata_int(metadata, key, min, max) : fallback;
}

bool ck_metadata_is_array(const struct ck_metadata *metadata, const char *key) {
    const int64_t id = find(metadata, key);
    return id >= 0 && gguf_get_kv_type(metadata->gguf, id) == GGUF_TYPE_ARRAY;
}

/* The index of a key with an array of one entry per layer; -1, having failed, otherwise. */
static int64_t require_layers(struct ck_metadata *metadata, const char *key, int32_t n_layers) {
    const int64_t id = require(metadata, key);
    if (id >= 0 && gguf_get_arr_n(metadata->gguf, id) != (size_t)n_layers) {
        ck_metadata_refuse(metadata, key, "an array of one entry per layer was expected");
        return -1;
    }
    return id;
}

int32_t ck_metadata_layer_int(struct ck_metadata *metadata, const char *key, int32_t layer,
                              int32_t n_layers, int32_t min, int32_t max) {
    if (!ck_metadata_is_array(metadata, key)) {
        return ck_metadata_int(metadata, key, min, max);
    }
    const int64_t id = require_layers(metadata, key, n_layers);
    if (id < 0) {
        return 0;
    }
    const enum gguf_type type = gguf_get_arr_type(metadata->gguf, id);
    int64_t value = 0;
    const bool is_integer =
        type != GGUF_TYPE_STRING &&
        integer_at(type, gguf_get_arr_data(metadata->gguf, id), (size_t)layer, &value);
    return check_integer(metadata, key, is_integer, value, min, max);
}

bool ck_metadata_layer_bool(struct ck_metadata *metadata, const char *key, int32_t layer,
                            int32_t n_layers) {
    if (!ck_metadata_is_array(metadata, key)) {
        return ck_metadata_bool_or(metadata, key, false);
    }
    const int64_t id = require_layers(metadata, key, n_layers);
    if (id >= 0 && gguf_get_arr_type(metadata->gguf, id) == GGUF_TYPE_BOOL) {
        return ((const int8_t *)gguf_get_arr_data(metadata->gguf, id))[layer] != 0;
    }
    return ck_metadata_layer_int(metadata, key, layer, n_layers, 0, 1) != 0;
}

int32_t ck_metadata_layer_int_or(struct ck_metadata *metadata, const char *key, int32_t layer,
                                 int32_t n_layers, int32_t min, int32_t max, int32_t fallback) {
    if (!ck_metadata_has(metadata, key)) {
        return fallback;
    }
    return ck_metadata_layer_int(metadata, key, layer, n_layers, min, max);
}

float ck_metadata_float(struct ck_metadata *metadata, const char *key, float min, float max) {
    const int64_t id = require(metadata, key);
    if (id < 0) {
        return 0;
    }
    double value = 0;
    switch (gguf_get_kv_type(metadata->gguf, id)) {
    case GGUF_TYPE_FLOAT32:
        value = (double)gguf_get_val_f32(metadata->gguf, id);
        break;
    case GGUF_TYPE_FLOAT64:
        value = gguf_get_val_f64(metadata->gguf, id);
        break;
    default:
        ck_metadata_refuse(metadata, key, "a float was expected");
        return 0;
    }
    if (!(value >= (double)min && value <= (double)max)) { /* a NaN, too */
        char reason[96];
        snprintf(reason, sizeof reason, "%g is outside %g .. %g", value, (double)min, (double)max);
        ck_metadata_refuse(metadata, key, reason);
        return 0;
    }
    return (float)value;
}

float ck_metadata_float_or(struct ck_metadata *metadata, const char *key, float min, float max,
                           float fallback) {
    return ck_metadata_has(metadata, key) ? ck_metadata_float(metadata, key, min, max) : fallback;
}

bool ck_metadata_bool_or(struct ck_metadata *metadata, const char *key, bool fallback) {
    const int64_t id = ok(metadata) ? find(metadata, key) : -1;
    if (id < 0) {
        return fallback;
    }
    if (gguf_get_kv_type(metadata->gguf, id) == GGUF_TYPE_BOOL) {
        return *(const int8_t *)gguf_get_val_data(metadata->gguf, id) != 0;
    }
    return ck_metadata_int(metadata, key, 0, 1) != 0;
}

const char *ck_metadata_string(struct ck_metadata *metadata, const char *key) {
    const int64_t id = require(metadata, key);
    if (id < 0) {
        return "";
    }
    if (gguf_get_kv_type(metadata->gguf, id) == GGUF_TYPE_STRING) {
        return gguf_get_val_str(metadata->gguf, id);
    }
    ck_metadata_refuse(metadata, key, "a string was expected");
    return "";
}

const char *ck_metadata_string_or(struct ck_metadata *metadata, const char *key,
                                  const char *fallback) {
    return ck_metadata_has(metadata, key) ? ck_metadata_string(metadata, key) : fallback;
}
