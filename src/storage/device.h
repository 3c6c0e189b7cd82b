/* Devices by ggml's registry. */
#ifndef CELLKV_STORAGE_DEVICE_H
#define CELLKV_STORAGE_DEVICE_H

#include <ggml-backend.h>

#include <cellkv/status.h>

/* The device of this name; NULL: the best available (a GPU, else the CPU).
 * Returns CELLKV_OK or CELLKV_ERROR_UNKNOWN_DEVICE, whose message lists the devices there are. */
cellkv_status ck_device_find(const char *name, ggml_backend_dev_t *device);

#endif
