#include "gguf_scan.h"

#include <inttypes.h>
#include <string.h>

#include <gguf.h>

#include "cells/error.h"

/* ggml's reader compares every name with every other: more than this is an attack, not a model. */
#define MAX_KEYS        (1 << 16)
#define MAX_TENSORS     (1 << 16)
#define MAX_NAME_LENGTH 65535
#define MAX_ELEMENTS    (INT64_MAX / 4096) /* bytes of any type still fit an int64 */

/* Walks through the file. The first failure stays in `status`; reads after it give zeros. */
struct scan {
    struct ck_file *file;
    uint64_t at;
    cellkv_status status;
    char name[80]; /* of the key or tensor at hand, for messages */
    uint64_t alignment;
    uint64_t data_size;  /* of the tensors so far, each padded to the alignment */
    uint64_t data_limit; /* bytes there can be at most */
};

void ck_printable(const char *text, size_t length, char *copy, size_t size) {
    size_t n = length < size ? length : size - 1;
    for (size_t i = 0; i < n; i++) {
        copy[i] = (char)(text[i] >= ' ' && text[i] <= '~' ? text[i] : '?');
    }
    copy[n] = '\0';
}

static bool ok(const struct scan *scan) {
    return scan->status == CELLKV_OK;
}

static void fail(struct scan *scan, const char *what) {
    if (ok(scan)) {
        scan->status = ck_fail(CELLKV_ERROR_BAD_FILE, "%s%s%s, at byte %" PRIu64, scan->name,
                               scan->name[0] != '\0' ? ": " : "", what, scan->at);
    }
}

static uint64_t pad(const struct scan *scan, uint64_t size) {
    return (size + scan->alignment - 1) & ~(scan->alignment - 1);
}

static uint64_t remaining(const struct scan *scan) {
    return ck_file_size(scan->file) - scan->at;
}

static void take(struct scan *scan, size_t size, void *bytes) {
    memset(bytes, 0, size);
    if (!ok(scan)) {
        return;
    }
    if (size > remaining(scan) || !ck_file_read(scan->file, scan->at, size, bytes)) {
        fail(scan, "the file ends too early");
        return;
    }
    scan->at += size;
}

static void skip(struct scan *scan, uint64_t count, uint64_t size) {
    if (!ok(scan)) {
        return;
    }
    if (count > remaining(scan) / size) {
        fail(scan, "the file ends too early");
    } else {
        scan->at += count * size;
    }
}

static uint32_t take_u32(struct scan *scan) {
    uint32_t value;
    take(scan, sizeof value, &value);
    return value;
}

static uint64_t take_u64(struct scan *scan) {
    uint64_t value;
    take(scan, sizeof value, &value);
    return value;
}

static void skip_string(struct scan *scan) {
    skip(scan, take_u64(scan), 1);
}

/* A key or a tensor's name, kept for messages. */
static void take_name(struct scan *scan, uint64_t max_length) {
    scan->name[0] = '\0';
    const uint64_t length = take_u64(scan);
    if (length > max_length) {
        fail(scan, "a name is too long");
    }
    char text[sizeof scan->name];
    const size_t n = length < sizeof text ? (size_t)length : sizeof text - 1;
    take(scan, n, text);
    skip(scan, length - n, 1);
    if (ok(scan)) {
        ck_printable(text, n, scan->name, sizeof scan->name);
    }
}

/* Bytes of one element; 0: a string, or not a type. */
static uint64_t value_size(uint32_t type) {
    switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_BOOL:
        return 1;
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16:
        return 2;
    case GGUF_TYPE_UINT32:
    case GGUF_TYPE_INT32:
    case GGUF_TYPE_FLOAT32:
        return 4;
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
    case GGUF_TYPE_FLOAT64:
        return 8;
    default:
        return 0;
    }
}

static void scan_elements(struct scan *scan, uint32_t type, uint64_t count) {
    if (value_size(type) != 0) {
        skip(scan, count, value_size(type));
    } else if (type != GGUF_TYPE_STRING) {
        fail(scan, "a value of unknown type");
    } else {
        for (uint64_t i = 0; i < count && ok(scan); i++) {
            skip_string(scan);
        }
    }
}

static void scan_alignment(struct scan *scan, uint32_t type) {
    const uint64_t alignment = type == GGUF_TYPE_UINT32 ? take_u32(scan) : 0;
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        fail(scan, "not a power of two in 32 bits");
    }
    scan->alignment = alignment;
}

static void scan_key(struct scan *scan) {
    take_name(scan, MAX_NAME_LENGTH);
    if (ok(scan) && scan->name[0] == '\0') {
        fail(scan, "an empty key");
    }
    const uint32_t type = take_u32(scan);
    if (strcmp(scan->name, GGUF_KEY_GENERAL_ALIGNMENT) == 0) {
        scan_alignment(scan, type);
    } else if (type == GGUF_TYPE_ARRAY) {
        const uint32_t element_type = take_u32(scan);
        scan_elements(scan, element_type, take_u64(scan));
    } else {
        scan_elements(scan, type, 1);
    }
}

/* The tensor's elements, and those of a row; 0 after a failure. */
static int64_t scan_shape(struct scan *scan, int64_t *row) {
    const uint32_t n_dims = take_u32(scan);
    if (n_dims > GGML_MAX_DIMS) {
        fail(scan, "too many dimensions");
    }
    int64_t elements = 1;
    *row = 1;
    for (uint32_t i = 0; i < n_dims && ok(scan); i++) {
        const uint64_t length = take_u64(scan);
        if (length == 0 || length > (uint64_t)(MAX_ELEMENTS / elements)) {
            fail(scan, "an impossible shape");
        } else {
            elements *= (int64_t)length;
        }
        if (i == 0) {
            *row = (int64_t)length;
        }
    }
    return ok(scan) ? elements : 0;
}

static uint64_t tensor_bytes(struct scan *scan, uint32_t type, int64_t elements, int64_t row) {
    if (!ok(scan)) {
        return 0;
    }
    const int64_t block = type < GGML_TYPE_COUNT ? ggml_blck_size((enum ggml_type)type) : 0;
    if (block == 0) {
        scan->status = ck_fail(CELLKV_ERROR_BAD_TENSOR, "%s: type %" PRIu32 " is not known to ggml",
                               scan->name, type);
        return 0;
    }
    if (row % block != 0) {
        scan->status = ck_fail(CELLKV_ERROR_BAD_TENSOR,
                               "%s: rows of %" PRId64 " are no multiple of the %" PRId64
                               " elements of a %s block",
                               scan->name, row, block, ggml_type_name((enum ggml_type)type));
        return 0;
    }
    return (uint64_t)(elements / block) * ggml_type_size((enum ggml_type)type);
}

static void scan_tensor(struct scan *scan) {
    take_name(scan, GGML_MAX_NAME - 1);
    int64_t row;
    const int64_t elements = scan_shape(scan, &row);
    const uint64_t bytes = tensor_bytes(scan, take_u32(scan), elements, row);
    const uint64_t offset = take_u64(scan);
    if (!ok(scan)) {
        return;
    }
    if (offset != scan->data_size) {
        fail(scan, "its data does not follow the tensor before it");
    } else if (offset > scan->data_limit || bytes > scan->data_limit - offset) {
        scan->status = ck_fail(CELLKV_ERROR_BAD_FILE,
                               "%s: the file ends inside or before this tensor's data", scan->name);
    } else {
        scan->data_size = pad(scan, offset + bytes);
    }
}

static void scan_head(struct scan *scan, uint64_t *n_tensors, uint64_t *n_keys) {
    char magic[4];
    take(scan, sizeof magic, magic);
    if (memcmp(magic, GGUF_MAGIC, sizeof magic) != 0) {
        fail(scan, "not a GGUF file");
    }
    const uint32_t version = take_u32(scan);
    if (version != 2 && version != GGUF_VERSION) {
        fail(scan, "a GGUF version other than 2 and 3 in this machine's byte order");
    }
    *n_tensors = take_u64(scan);
    *n_keys = take_u64(scan);
    if (*n_tensors > MAX_TENSORS || *n_keys > MAX_KEYS) {
        fail(scan, "an impossible number of keys or tensors");
    }
}

static void scan_tensors(struct scan *scan, uint64_t n_tensors, uint64_t data_limit) {
    scan->data_limit = data_limit;
    scan->data_size = 0;
    for (uint64_t i = 0; i < n_tensors && ok(scan); i++) {
        scan_tensor(scan);
    }
}

/* Where the data begins is known only behind the list: a second walk checks each tensor's end. */
static void scan_tensors_and_data(struct scan *scan, uint64_t n_tensors) {
    const uint64_t list = scan->at;
    const uint64_t size = ck_file_size(scan->file);
    scan_tensors(scan, n_tensors, INT64_MAX);
    const uint64_t data = pad(scan, scan->at);
    scan->at = list;
    scan_tensors(scan, n_tensors, data < size ? size - data : 0);
}

cellkv_status ck_gguf_scan(struct ck_file *file) {
    struct scan scan = {.file = file, .alignment = GGUF_DEFAULT_ALIGNMENT};
    uint64_t n_tensors, n_keys;
    scan_head(&scan, &n_tensors, &n_keys);
    for (uint64_t i = 0; i < n_keys && ok(&scan); i++) {
        scan_key(&scan);
    }
    scan_tensors_and_data(&scan, n_tensors);
    return scan.status;
}
