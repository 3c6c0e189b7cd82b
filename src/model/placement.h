/* Where weights live: in buffers of their layer's device, or of the CPU for what that device cannot
 * compute with. */
#ifndef CELLKV_MODEL_PLACEMENT_H
#define CELLKV_MODEL_PLACEMENT_H

#include <stdbool.h>
#include <stdint.h>

#include <ggml-backend.h>

#include <cellkv/device.h>

#include "weights.h"

/* One place. */
struct ck_home {
    ggml_backend_dev_t device;
    bool repacked;                   /* the device's buffer type "CPU_REPACK" */
    bool mapped;                     /* the mapped file, as the device's memory */
    ggml_backend_buffer_type_t type; /* NULL if mapped */
    ggml_backend_buffer_t probe;     /* a buffer to ask supports_op with; the file's, if mapped */
    int64_t n_tensors;
    struct ggml_context *context; /* of its tensors */
    void *context_memory;
    ggml_backend_buffer_t buffer; /* their bytes; NULL if mapped: they are in `probe` */
};

enum { CK_MAX_HOMES = 3 * (CELLKV_MAX_DEVICES + 1) };

struct ck_homes {
    struct ck_home homes[CK_MAX_HOMES]; /* those of a device in order of preference */
    int n_homes;
    ggml_backend_dev_t cpu;
    int64_t mapped_bytes;
    int64_t repacked_bytes;
};

/* Finds a home for each weight, on its layer's device `of_layer` if that can use it, brings its
 * bytes there and fills its slot. The source's file must stay open while the homes do if
 * mapped_bytes > 0. Returns CELLKV_OK; CELLKV_ERROR_BAD_TENSOR: no device can compute with a weight
 * of this type; CELLKV_ERROR_FILE; CELLKV_ERROR_OUT_OF_MEMORY. On failure there is nothing to free.
 */
cellkv_status ck_homes_place(struct ck_homes *homes, const struct ck_weights *weights,
                             ggml_backend_dev_t const *of_layer, int32_t n_layers, bool repack);

void ck_homes_free(struct ck_homes *homes);

#endif
