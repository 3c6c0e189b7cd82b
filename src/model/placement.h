/* Where weights live: in buffers of the model's device, or of the CPU for what that device cannot
 * compute with. */
#ifndef CELLKV_MODEL_PLACEMENT_H
#define CELLKV_MODEL_PLACEMENT_H

#include <stdbool.h>
#include <stdint.h>

#include <ggml-backend.h>

#include "weights.h"

/* One kind of place, in order of preference. */
enum ck_home_kind {
    CK_HOME_REPACKED,      /* the device's buffer type "CPU_REPACK" */
    CK_HOME_DEVICE_MAPPED, /* the mapped file, as the device's memory */
    CK_HOME_DEVICE,        /* the device's own buffer type */
    CK_HOME_CPU_MAPPED,
    CK_HOME_CPU,
    CK_N_HOMES
};

struct ck_home {
    ggml_backend_dev_t device; /* NULL: there is no such place */
    bool mapped;
    ggml_backend_buffer_type_t type; /* NULL if mapped */
    ggml_backend_buffer_t probe;     /* a buffer to ask supports_op with; the file's, if mapped */
    int64_t n_tensors;
    struct ggml_context *context; /* of its tensors */
    void *context_memory;
    ggml_backend_buffer_t buffer; /* their bytes; NULL if mapped: they are in `probe` */
};

struct ck_homes {
    struct ck_home homes[CK_N_HOMES];
    int64_t mapped_bytes;
    int64_t repacked_bytes;
};

/* Finds a home for each weight, brings its bytes there and fills its slot. The source's file must
 * stay open while the homes do if mapped_bytes > 0.
 * Returns CELLKV_OK; CELLKV_ERROR_BAD_TENSOR: no device can compute with a weight of this type;
 * CELLKV_ERROR_FILE; CELLKV_ERROR_OUT_OF_MEMORY. On failure there is nothing to free. */
cellkv_status ck_homes_place(struct ck_homes *homes, const struct ck_weights *weights,
                             ggml_backend_dev_t device, bool repack);

void ck_homes_free(struct ck_homes *homes);

#endif
