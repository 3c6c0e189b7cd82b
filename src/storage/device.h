/* Devices by name, and what they can be trusted to do. */
#ifndef CELLKV_STORAGE_DEVICE_H
#define CELLKV_STORAGE_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include <ggml-backend.h>

#include <cellkv/device.h>

/* The one device of this name; NULL: the best of this machine. Statuses: those of
 * cellkv_devices_of_layers. */
cellkv_status ck_device_find(const char *name, ggml_backend_dev_t *device);

/* What messages call the device: a remote one by its server's address. Owned by ggml. */
const char *ck_device_name(ggml_backend_dev_t device);

/* Whether the device is in another process, behind a connection. */
bool ck_device_is_remote(ggml_backend_dev_t device);

/* Whether the device runs the op, which ggml's own answer does not always tell. */
bool ck_device_supports(ggml_backend_dev_t device, const struct ggml_tensor *op);

/* ggml's custom ops are functions of this process: only the CPU calls them. */
bool ck_is_custom(const struct ggml_tensor *op);

/* Whether Metal has a kernel of flash attention for these widths of K and V. */
bool ck_metal_attends(int64_t head_dim_k, int64_t head_dim_v);

/* The CPU's device; NULL: this ggml has none. */
ggml_backend_dev_t ck_device_cpu(void);

/* Around uses of ggml's registry, which can grow and does not guard its readers against that. The
 * innermost lock of all. */
void ck_registry_enter(void);
void ck_registry_leave(void);

/* What a backend offers beyond ggml's common interface is asked for by name: one loaded at run time
 * is then as good as a linked one. The caller knows the function's type. NULL: not offered. */
typedef void (*ck_function)(void);
ck_function ck_registry_function(ggml_backend_reg_t registry, const char *name);

/* Threads for the CPU where none are asked for: one per core, at most 16. */
int32_t ck_default_threads(void);

#endif
