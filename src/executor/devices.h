/* The backends that one executor computes on: the devices of the cache's rows, and the CPU. */
#ifndef CELLKV_EXECUTOR_DEVICES_H
#define CELLKV_EXECUTOR_DEVICES_H

#include <stdbool.h>
#include <stdint.h>

#include <ggml-backend.h>

#include <cellkv/device.h>
#include <cellkv/status.h>

#include "storage/storage.h"

enum { CK_MAX_BACKENDS = CELLKV_MAX_DEVICES + 1 };

struct ck_devices {
    ggml_backend_t backends[CK_MAX_BACKENDS]; /* in order of priority, the CPU last */
    int n_backends;
    ggml_backend_t *of_layer; /* [n_layers] the one of the layer's rows */
    bool is_split;            /* they are not all the same */
    int32_t n_threads;
    ggml_threadpool_t threads;
    void (*free_threads)(ggml_threadpool_t threads);
};

/* Starts backends for the devices of the storage's layers and the CPU; n_threads as
 * cellkv_executor_config has it.
 * Returns CELLKV_OK, CELLKV_ERROR_UNKNOWN_DEVICE (ggml has no CPU device) or
 * CELLKV_ERROR_OUT_OF_MEMORY; on failure there is nothing to free. */
cellkv_status ck_devices_start(struct ck_devices *devices, const struct ck_storage *storage,
                               int32_t n_layers, int32_t n_threads);
void ck_devices_stop(struct ck_devices *devices);

/* The CPU's. */
static inline ggml_backend_t ck_devices_cpu(const struct ck_devices *devices) {
    return devices->backends[devices->n_backends - 1];
}

/* Has every backend that can ask `should_abort` between nodes. */
void ck_devices_set_abort(const struct ck_devices *devices, ggml_abort_callback should_abort,
                          void *context);

#endif
