#include "devices.h"

#include <string.h>

#include <ggml-cpu.h>

#include "cells/error.h"
#include "cells/memory.h"
#include "storage/device.h"

enum {
    /* How long idle threads wait for the next graph before they sleep, in ggml's unit: a few
     * milliseconds, enough to sample and come back. ggml's default of 50 keeps the cores busy for a
     * third of a second after each step, at the cost of whatever else runs there. */
    POLL = 1,
};

typedef ggml_threadpool_t (*new_threads_t)(struct ggml_threadpool_params *params);
typedef void (*free_threads_t)(ggml_threadpool_t threads);
typedef void (*set_threads_t)(ggml_backend_t backend, ggml_threadpool_t threads);

static ck_function find_function(ggml_backend_dev_t device, const char *name) {
    return ck_registry_function(ggml_backend_dev_backend_reg(device), name);
}

/* Threads that live as long as the executor: ggml would otherwise start new ones for each graph. */
static void start_threads(struct ck_devices *devices, ggml_backend_dev_t cpu) {
    const ggml_backend_set_n_threads_t set_n_threads =
        (ggml_backend_set_n_threads_t)find_function(cpu, "ggml_backend_set_n_threads");
    const new_threads_t new_threads = (new_threads_t)find_function(cpu, "ggml_threadpool_new");
    const set_threads_t set_threads =
        (set_threads_t)find_function(cpu, "ggml_backend_cpu_set_threadpool");
    devices->free_threads = (free_threads_t)find_function(cpu, "ggml_threadpool_free");

    ggml_backend_t backend = ck_devices_cpu(devices);
    if (set_n_threads != NULL) {
        set_n_threads(backend, devices->n_threads);
    }
    if (new_threads == NULL || set_threads == NULL || devices->free_threads == NULL) {
        return;
    }
    struct ggml_threadpool_params params = ggml_threadpool_params_default(devices->n_threads);
    params.poll = POLL;
    devices->threads = new_threads(&params);
    set_threads(backend, devices->threads);
}

static ggml_backend_t find_backend(const struct ck_devices *devices, ggml_backend_dev_t device) {
    for (int i = 0; i < devices->n_backends; i++) {
        if (ggml_backend_get_device(devices->backends[i]) == device) {
            return devices->backends[i];
        }
    }
    return NULL;
}

static cellkv_status start_backend(struct ck_devices *devices, ggml_backend_dev_t device) {
    ggml_backend_t backend =
        ck_allocation_should_fail() ? NULL : ggml_backend_dev_init(device, NULL);
    if (backend == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "device %s cannot be started",
                       ck_device_name(device));
    }
    devices->backends[devices->n_backends++] = backend;
    return CELLKV_OK;
}

/* In the order of the layers, the CPU last. */
static cellkv_status start_backends(struct ck_devices *devices, const struct ck_storage *storage,
                                    int32_t n_layers, ggml_backend_dev_t cpu) {
    cellkv_status status = CELLKV_OK;
    for (int32_t l = 0; l < n_layers && status == CELLKV_OK; l++) {
        ggml_backend_dev_t device = ck_storage_device(storage, l);
        if (device != cpu && find_backend(devices, device) == NULL) {
            status = start_backend(devices, device);
        }
    }
    return status == CELLKV_OK ? start_backend(devices, cpu) : status;
}

cellkv_status ck_devices_start(struct ck_devices *devices, const struct ck_storage *storage,
                               int32_t n_layers, int32_t n_threads) {
    *devices = (struct ck_devices){.n_threads = n_threads > 0 ? n_threads : ck_default_threads()};
    ggml_backend_dev_t cpu = ck_device_cpu();
    if (cpu == NULL) {
        return ck_fail(CELLKV_ERROR_UNKNOWN_DEVICE, "this ggml has no CPU device");
    }
    devices->of_layer = ck_calloc((size_t)n_layers, sizeof *devices->of_layer);
    if (devices->of_layer == NULL) {
        return ck_fail_memory("the layers' backends");
    }
    cellkv_status status = start_backends(devices, storage, n_layers, cpu);
    if (status != CELLKV_OK) {
        ck_devices_stop(devices);
        return status;
    }
    for (int32_t l = 0; l < n_layers; l++) {
        devices->of_layer[l] = find_backend(devices, ck_storage_device(storage, l));
        devices->is_split = devices->is_split || devices->of_layer[l] != devices->of_layer[0];
    }
    start_threads(devices, cpu);
    return CELLKV_OK;
}

void ck_devices_stop(struct ck_devices *devices) {
    for (int i = 0; i < devices->n_backends; i++) {
        ggml_backend_free(devices->backends[i]);
    }
    if (devices->threads != NULL) {
        devices->free_threads(devices->threads);
    }
    ck_free(devices->of_layer);
    *devices = (struct ck_devices){0};
}

void ck_devices_set_abort(const struct ck_devices *devices, ggml_abort_callback should_abort,
                          void *context) {
    for (int i = 0; i < devices->n_backends; i++) {
        ggml_backend_dev_t device = ggml_backend_get_device(devices->backends[i]);
        const ggml_backend_set_abort_callback_t set_abort =
            (ggml_backend_set_abort_callback_t)find_function(device,
                                                             "ggml_backend_set_abort_callback");
        if (set_abort != NULL) {
            set_abort(devices->backends[i], should_abort, context);
        }
    }
}
