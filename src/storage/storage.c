#include "storage.h"

#include <assert.h>

#include <ggml-alloc.h>

#include "cells/error.h"
#include "cells/memory.h"
#include "cells/ring.h"
#include "cells/table.h"
#include "storage/device.h"
#include "storage/huge_pages.h"

_Static_assert((int)CK_ROW_PADDING == (int)CK_BLOCK, "attention reads a block of cells, or none");
_Static_assert((int)CELLKV_TYPE_F32 == (int)GGML_TYPE_F32, "types are ggml's");
_Static_assert((int)CELLKV_TYPE_F16 == (int)GGML_TYPE_F16, "types are ggml's");
_Static_assert((int)CELLKV_TYPE_BF16 == (int)GGML_TYPE_BF16, "types are ggml's");
_Static_assert((int)CELLKV_TYPE_Q8_0 == (int)GGML_TYPE_Q8_0, "types are ggml's");
_Static_assert((int)CELLKV_TYPE_Q4_0 == (int)GGML_TYPE_Q4_0, "types are ggml's");

/* Neighbouring layers of one device. */
struct range {
    ggml_backend_dev_t device;
    int32_t first, end; /* layers [first, end) */
};

/* A range's tensors. */
struct part {
    struct ggml_context *context;
    ggml_backend_buffer_t buffer;
};

/* One generation of tensors. */
struct tensors {
    struct part *parts;     /* [n_ranges]; NULL: nothing is allocated */
    struct ggml_tensor **k; /* [n_layers] */
    struct ggml_tensor **v; /* [n_layers] */
};

struct ck_storage {
    ggml_backend_dev_t *devices; /* [n_layers] */
    struct range *ranges;
    int32_t n_ranges;
    int32_t n_layers;
    const cellkv_layer *layers; /* the cache's, */
    const int32_t *rings;       /* likewise */
    int32_t most_rows;          /* that any layer may have */
    int32_t rows;               /* logical; the tensors have padded_rows(rows) */
    struct tensors tensors;
    int64_t n_growths;
    int64_t generation;
};

static int32_t at_most(int64_t n, int32_t limit) {
    return n < limit ? (int32_t)n : limit;
}

/* The rows of a layer's tensors where the longest have `rows`. */
static int32_t padded_rows(const struct ck_storage *storage, int32_t layer, int32_t rows) {
    const int32_t ring = storage->rings[layer];
    return ck_pad_rows(ring > 0 ? at_most(rows, ring) : rows);
}

/* ---- tensors ---- */

static void tensors_free(const struct ck_storage *storage, struct tensors *tensors) {
    for (int32_t r = 0; tensors->parts != NULL && r < storage->n_ranges; r++) {
        ggml_backend_buffer_free(tensors->parts[r].buffer);
        ggml_free(tensors->parts[r].context);
    }
    ck_free(tensors->parts);
    ck_free(tensors->k);
    ck_free(tensors->v);
    *tensors = (struct tensors){0};
}

/* Whether all layers' rows together stay far from overflowing a size: no type takes more than 4
 * bytes for a value. */
static bool size_is_sane(const struct ck_storage *storage, int32_t rows) {
    double bytes = 0;
    for (int32_t l = 0; l < storage->n_layers; l++) {
        const cellkv_layer *layer = &storage->layers[l];
        bytes += 4.0 * layer->n_kv_heads * ((double)layer->head_dim_k + layer->head_dim_v) *
                 padded_rows(storage, l, rows);
    }
    return bytes < (double)(SIZE_MAX / 4);
}

static struct ggml_tensor *new_rows(struct ggml_context *context, cellkv_type type, int64_t width,
                                    int64_t n_rows, const char *name, int32_t layer) {
    struct ggml_tensor *tensor = ggml_new_tensor_2d(context, (enum ggml_type)type, width, n_rows);
    ggml_format_name(tensor, "cells.%s.%d", name, layer);
    return tensor;
}

static bool part_describe(const struct ck_storage *storage, const struct range *range, int32_t rows,
                          struct tensors *tensors, struct part *part) {
    const size_t n = (size_t)(range->end - range->first);
    struct ggml_init_params params = {.mem_size = 2 * n * ggml_tensor_overhead(), .no_alloc = true};
    part->context = ck_allocation_should_fail() ? NULL : ggml_init(params);
    if (part->context == NULL) {
        return false;
    }
    for (int32_t l = range->first; l < range->end; l++) {
        const cellkv_layer *layer = &storage->layers[l];
        const int64_t heads = layer->n_kv_heads;
        const int64_t n_rows = padded_rows(storage, l, rows);
        tensors->k[l] =
            new_rows(part->context, layer->type_k, heads * layer->head_dim_k, n_rows, "k", l);
        tensors->v[l] =
            new_rows(part->context, layer->type_v, heads * layer->head_dim_v, n_rows, "v", l);
    }
    return true;
}

/* Zeroed. */
static bool part_allocate(const struct range *range, struct part *part) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(range->device);
    if (type != NULL && !ck_allocation_should_fail()) {
        part->buffer = ggml_backend_alloc_ctx_tensors_from_buft(part->context, type);
    }
    if (part->buffer == NULL) {
        return false;
    }
    if (ggml_backend_buffer_is_host(part->buffer)) {
        ck_prefer_huge_pages(ggml_backend_buffer_get_base(part->buffer),
                             ggml_backend_buffer_get_size(part->buffer));
    }
    ggml_backend_buffer_clear(part->buffer, 0);
    return true;
}

static bool tensors_new(const struct ck_storage *storage, int32_t rows, struct tensors *tensors) {
    const size_t n = (size_t)storage->n_layers;
    *tensors = (struct tensors){
        .parts = ck_calloc((size_t)storage->n_ranges, sizeof *tensors->parts),
        .k = ck_calloc(n, sizeof *tensors->k),
        .v = ck_calloc(n, sizeof *tensors->v),
    };
    bool made = tensors->parts != NULL && tensors->k != NULL && tensors->v != NULL &&
                size_is_sane(storage, rows);
    for (int32_t r = 0; r < storage->n_ranges && made; r++) {
        made = part_describe(storage, &storage->ranges[r], rows, tensors, &tensors->parts[r]) &&
               part_allocate(&storage->ranges[r], &tensors->parts[r]);
    }
    if (!made) {
        tensors_free(storage, tensors);
    }
    return made;
}

/* Copies all of `from` into the first rows of `to`, through views made in `context`. */
static void copy_rows(struct ggml_context *context, struct ggml_tensor *from,
                      struct ggml_tensor *to) {
    struct ggml_tensor *head = ggml_view_2d(context, to, to->ne[0], from->ne[1], to->nb[1], 0);
    ggml_backend_view_init(head);
    ggml_backend_tensor_copy(from, head);
}

static bool tensors_copy(const struct ck_storage *storage, const struct tensors *from,
                         struct tensors *to) {
    struct ggml_init_params params = {
        .mem_size = 2 * (size_t)storage->n_layers * ggml_tensor_overhead(), .no_alloc = true};
    struct ggml_context *views = ck_allocation_should_fail() ? NULL : ggml_init(params);
    if (views == NULL) {
        return false;
    }
    for (int32_t l = 0; l < storage->n_layers; l++) {
        copy_rows(views, from->k[l], to->k[l]);
        copy_rows(views, from->v[l], to->v[l]);
    }
    ggml_free(views);
    return true;
}

/* ---- growth ---- */

static int32_t grown_rows(const struct ck_storage *storage, int32_t n_rows) {
    int64_t rows = storage->rows > 0 ? storage->rows : 1;
    while (rows < n_rows) {
        rows *= 2;
    }
    return at_most(rows, storage->most_rows);
}

/* Replaces the tensors by ones of so many rows: allocate all, copy all, then swap. */
static cellkv_status replace_tensors(struct ck_storage *storage, int32_t rows) {
    struct tensors grown;
    if (!tensors_new(storage, rows, &grown)) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "K/V rows: cannot allocate %d rows on %s%s",
                       ck_pad_rows(rows), ck_device_name(storage->devices[0]),
                       storage->n_ranges > 1 ? " and others" : "");
    }
    if (storage->tensors.parts != NULL && !tensors_copy(storage, &storage->tensors, &grown)) {
        tensors_free(storage, &grown);
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "K/V rows: cannot grow to %d rows",
                       ck_pad_rows(rows));
    }
    tensors_free(storage, &storage->tensors);
    storage->tensors = grown;
    storage->generation++;
    return CELLKV_OK;
}

/* Whether any layer's tensors are too short for so many rows. */
static bool is_short(const struct ck_storage *storage, int32_t rows) {
    if (storage->rows == 0) {
        return true;
    }
    for (int32_t l = 0; l < storage->n_layers; l++) {
        if (padded_rows(storage, l, rows) > padded_rows(storage, l, storage->rows)) {
            return true;
        }
    }
    return false;
}

static cellkv_status set_rows(struct ck_storage *storage, int32_t rows) {
    if (is_short(storage, rows)) {
        cellkv_status status = replace_tensors(storage, rows);
        if (status != CELLKV_OK) {
            return status;
        }
    }
    storage->rows = rows;
    return CELLKV_OK;
}

cellkv_status ck_storage_reserve(struct ck_storage *storage, int32_t n_rows) {
    n_rows = at_most(n_rows, storage->most_rows); /* the others lie in rings */
    if (n_rows <= storage->rows) {
        return CELLKV_OK;
    }
    const bool grows = storage->rows > 0;
    cellkv_status status = set_rows(storage, grown_rows(storage, n_rows));
    storage->n_growths += grows && status == CELLKV_OK;
    return status;
}

/* ---- rows ---- */

static void zero_run(struct ck_storage *storage, int32_t layer, int32_t first, int32_t n) {
    struct ggml_tensor *both[2] = {storage->tensors.k[layer], storage->tensors.v[layer]};
    for (int i = 0; i < 2; i++) {
        ggml_backend_tensor_memset(both[i], 0, (size_t)first * both[i]->nb[1],
                                   (size_t)n * both[i]->nb[1]);
    }
}

void ck_storage_zero_rows(struct ck_storage *storage, const int32_t *rows, int32_t n_rows) {
    int32_t n = n_rows;
    while (n > 0 && rows[n - 1] >= storage->rows) {
        n--;
    }
    for (int32_t begin = 0, end; begin < n; begin = end) {
        end = begin + 1;
        while (end < n && rows[end] == rows[end - 1] + 1) {
            end++;
        }
        for (int32_t l = 0; l < storage->n_layers; l++) {
            zero_run(storage, l, rows[begin], end - begin);
        }
    }
}

/* The rows of positions [first, last). */
static void zero_in_ring(struct ck_storage *storage, int32_t layer, int32_t first, int32_t last) {
    const int32_t ring = storage->rings[layer];
    if (ring > 0 && last - first > ring) {
        first = last - ring; /* the earlier ones lie in the same rows */
    }
    while (first < last) {
        const int32_t row = ck_ring_row(ring, first);
        const int32_t n = ring > 0 ? at_most(last - first, ring - row) : last - first;
        zero_run(storage, layer, row, n);
        first += n;
    }
}

/* In a ring, positions from max(ring, written) on have never been written, or lie in rows that hold
 * others by now: either their own last ones, which are among those that are zeroed, or positions
 * below `end`. Those from `end` on up to there are in rows of their own. */
void ck_storage_zero_positions(struct ck_storage *storage, int32_t end, int32_t freed_end,
                               int32_t written) {
    for (int32_t l = 0; l < storage->n_layers; l++) {
        const int32_t ring = storage->rings[l];
        int32_t last = freed_end;
        if (ring == 0 || ring > storage->rows) { /* not all allocated: nothing came round yet */
            last = at_most(last, storage->rows);
        }
        if (ring > 0) {
            last = at_most(last, written > ring ? written : ring);
        }
        zero_in_ring(storage, l, end, last);
    }
}

struct ggml_tensor *ck_storage_k(const struct ck_storage *storage, int32_t layer) {
    return storage->tensors.k[layer];
}

struct ggml_tensor *ck_storage_v(const struct ck_storage *storage, int32_t layer) {
    return storage->tensors.v[layer];
}

ggml_backend_dev_t ck_storage_device(const struct ck_storage *storage, int32_t layer) {
    return storage->devices[layer];
}

ggml_backend_dev_t const *ck_storage_devices(const struct ck_storage *storage) {
    return storage->devices;
}

int64_t ck_storage_generation(const struct ck_storage *storage) {
    return storage->generation;
}

/* ---- what cells know of it ---- */

static void storage_free(struct ck_storage *storage) {
    if (storage == NULL) {
        return;
    }
    cellkv_devices_enter(storage->devices, storage->n_layers);
    tensors_free(storage, &storage->tensors);
    cellkv_devices_leave(storage->devices, storage->n_layers);
    ck_free(storage->ranges);
    ck_free(storage->devices);
    ck_free(storage);
}

static int32_t storage_rows(const struct ck_storage *storage) {
    return storage->rows;
}

static int64_t storage_bytes(const struct ck_storage *storage) {
    int64_t bytes = 0;
    for (int32_t r = 0; storage->tensors.parts != NULL && r < storage->n_ranges; r++) {
        bytes += (int64_t)ggml_backend_buffer_get_size(storage->tensors.parts[r].buffer);
    }
    return bytes;
}

static int64_t storage_n_growths(const struct ck_storage *storage) {
    return storage->n_growths;
}

static const struct ck_storage_class storage_class = {
    .free = storage_free,
    .rows = storage_rows,
    .bytes = storage_bytes,
    .n_growths = storage_n_growths,
};

static int32_t most_rows(const cellkv_cache *cache, int32_t capacity) {
    int32_t most = 1;
    for (int32_t l = 0; l < cache->n_layers; l++) {
        const int32_t rows = cache->rings[l] > 0 ? cache->rings[l] : capacity;
        most = rows > most ? rows : most;
    }
    return most;
}

/* Finds the layers' devices and their ranges. */
static cellkv_status find_devices(struct ck_storage *storage, const char *devices) {
    const size_t n = (size_t)storage->n_layers;
    storage->devices = ck_calloc(n, sizeof *storage->devices);
    storage->ranges = ck_calloc(n, sizeof *storage->ranges);
    if (storage->devices == NULL || storage->ranges == NULL) {
        return ck_fail_memory("the layers' devices");
    }
    cellkv_status status = cellkv_devices_of_layers(devices, storage->n_layers, storage->devices);
    for (int32_t l = 0; l < storage->n_layers && status == CELLKV_OK; l++) {
        if (l == 0 || storage->devices[l] != storage->devices[l - 1]) {
            storage->ranges[storage->n_ranges++] = (struct range){storage->devices[l], l, l};
        }
        storage->ranges[storage->n_ranges - 1].end = l + 1;
    }
    return status;
}

static cellkv_status allocate_first_rows(struct ck_storage *storage, int32_t rows) {
    if (rows == 0) {
        return CELLKV_OK;
    }
    cellkv_devices_enter(storage->devices, storage->n_layers);
    const cellkv_status status = set_rows(storage, at_most(rows, storage->most_rows));
    cellkv_devices_leave(storage->devices, storage->n_layers);
    return status;
}

cellkv_status ck_storage_build(const cellkv_cache_config *config, cellkv_cache *cache) {
    struct ck_storage *storage = ck_calloc(1, sizeof *storage);
    if (storage == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "K/V rows: no memory");
    }
    storage->n_layers = cache->n_layers;
    storage->layers = cache->layers;
    storage->rings = cache->rings;
    storage->most_rows = most_rows(cache, config->capacity);
    cellkv_status status = find_devices(storage, config->device);
    if (status == CELLKV_OK) {
        status = allocate_first_rows(storage, config->initial_rows);
    }
    if (status != CELLKV_OK) {
        storage_free(storage);
        return status;
    }
    cache->storage = storage;
    cache->storage_class = &storage_class;
    return CELLKV_OK;
}
