/* Devices that servers lend, by ggml's RPC. */
#ifndef CELLKV_STORAGE_RPC_H
#define CELLKV_STORAGE_RPC_H

#include <ggml-backend.h>

#include <cellkv/status.h>

#include "device.h"

#define CK_RPC_SCHEME "rpc://"

/* The device of an address, "host:port" or "host:port/index". The server's devices are registered
 * with ggml when it is first asked for; the caller holds ggml's registry.
 * Returns CELLKV_OK, CELLKV_ERROR_INVALID_ARGUMENT, CELLKV_ERROR_UNSUPPORTED,
 * CELLKV_ERROR_UNKNOWN_DEVICE or CELLKV_ERROR_NETWORK. */
cellkv_status ck_rpc_find(const char *address, ggml_backend_dev_t *device);

/* A function of ggml's RPC by name; NULL: this ggml was built without it. */
ck_function ck_rpc_function(const char *name);

#endif
