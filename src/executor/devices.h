/* The backends that one executor computes on: the device of the cache's rows, and the CPU. */
#ifndef CELLKV_EXECUTOR_DEVICES_H
#define CELLKV_EXECUTOR_DEVICES_H

#include <ggml-backend.h>

#include <cellkv/status.h>

enum { CK_MAX_BACKENDS = 2 };

struct ck_devices {
    ggml_backend_t backends[CK_MAX_BACKENDS]; /* in order of priority, the CPU last */
    int n_backends;
    ggml_backend_t rows_backend; /* the one of the rows' device */
    int32_t n_threads;
    ggml_threadpool_t threads;
    void (*free_threads)(ggml_threadpool_t threads);
};

/* Starts backends for `rows_device` and the CPU; n_threads as cellkv_executor_config has it.
 * Returns CELLKV_OK, CELLKV_ERROR_UNKNOWN_DEVICE (ggml has no CPU device) or
 * CELLKV_ERROR_OUT_OF_MEMORY; on failure there is nothing to free. */
cellkv_status ck_devices_start(struct ck_devices *devices, ggml_backend_dev_t rows_device,
                               int32_t n_threads);
void ck_devices_stop(struct ck_devices *devices);

/* Has every backend that can ask `should_abort` between nodes. */
void ck_devices_set_abort(const struct ck_devices *devices, ggml_abort_callback should_abort,
                          void *context);

#endif
