/* Devices: what holds weights and K/V rows, and computes with them.
 *
 * A text names them wherever a configuration has a `device`:
 *
 *   "CPU", "MTL0", "CUDA0", ...    a device of ggml's registry
 *   "rpc://host:port"              the first device that a server at this address lends (see below)
 *   "rpc://host:port/1"            its second one
 *   "CUDA0,rpc://host:port"        several: the layers are split between them in this order, as
 *                                  evenly as can be, the first ones having one more
 *   "CUDA0=20,CPU=12"              the same with the number of layers for each
 *   NULL                           the best one of this machine: a GPU, else the CPU
 *
 * A layer's K/V rows, its weights and its attention are on its device. What a device cannot compute
 * runs on the CPU, except attention: that is refused when the executor is made.
 *
 * Servers speak the protocol of ggml's RPC. It has no authentication and no encryption, and a
 * server serves one process at a time. ggml ends the calling process when a server that is in use
 * goes away: contain that by serving from a child process. All objects of a process share one
 * connection to a server, on which calls of this library take turns. */
#ifndef CELLKV_DEVICE_H
#define CELLKV_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_backend_device;

/** The most devices that one text may name. */
#define CELLKV_MAX_DEVICES 15

/** How many devices ggml's registry has in this process: those of this machine, and those of the
 *  servers that were named so far.
 *
 *  Threads: any.
 */
CELLKV_API int32_t cellkv_device_count(void);

/** The name of device i, as texts take it.
 *
 *  @return    a string owned by ggml; NULL when i is out of range
 *  Threads: any.
 */
CELLKV_API const char *cellkv_device_name(int32_t i);

/** Finds the device of each layer. Servers that are named for the first time are connected to.
 *
 *  @param devices    a text as above, or NULL; borrowed
 *  @param n_layers   >= 1
 *  @param of_layer   [n_layers], receives ggml's devices (ggml_backend_dev_t), which live as long
 *                    as the process
 *  @return    CELLKV_OK;
 *             CELLKV_ERROR_INVALID_ARGUMENT: of_layer is NULL, n_layers < 1, the text is malformed,
 *             names more devices than there are layers or than CELLKV_MAX_DEVICES, or layers that
 *             do not add up to n_layers;
 *             CELLKV_ERROR_UNKNOWN_DEVICE: a name is none (the message lists those there are), or
 *             the server lends no such device;
 *             CELLKV_ERROR_UNSUPPORTED: a server is named, and this ggml was built without RPC;
 *             CELLKV_ERROR_NETWORK: nobody speaks this version of the protocol there, or the server
 *             does not answer within some seconds because it serves somebody else;
 *             CELLKV_ERROR_OUT_OF_MEMORY
 *  On failure: of_layer is unspecified.  Threads: any.
 */
CELLKV_API cellkv_status cellkv_devices_of_layers(const char *devices, int32_t n_layers,
                                                  struct ggml_backend_device **of_layer);

/** Waits for this thread's turn on servers, if any of the devices is one's: for programs whose own
 *  ggml calls touch memory there (weights, say) while other threads may. ggml does not guard the
 *  connection. No other call of this library may be made before cellkv_devices_leave.
 *
 *  @param of_layer   [n_layers], as cellkv_devices_of_layers gives them; borrowed
 *  Threads: any.
 */
CELLKV_API void cellkv_devices_enter(struct ggml_backend_device *const *of_layer, int32_t n_layers);

/** Ends the turn.
 *
 *  @param of_layer   [n_layers], the same devices
 *  @pre       cellkv_devices_enter by this thread
 */
CELLKV_API void cellkv_devices_leave(struct ggml_backend_device *const *of_layer, int32_t n_layers);

/** What a server lends, and to whom. Start from cellkv_rpc_server_config_default(). */
typedef struct cellkv_rpc_server_config {
    size_t size;        /* sizeof(cellkv_rpc_server_config) */
    const char *host;   /* the IPv4 address to listen on, in numbers */
    int32_t port;       /* 1 .. 65535 */
    bool allow_remote;  /* an address that is not a loopback one is refused without it: whoever can
                           reach it can read and write all that the server holds */
    const char *device; /* one device; NULL: the best one of this machine */
    int32_t n_threads;  /* of the CPU device, 1 .. 512; 0: one per core, at most 16 */
} cellkv_rpc_server_config;

/** The best device on 127.0.0.1, port 50052.
 *
 *  Threads: any.
 */
CELLKV_API cellkv_rpc_server_config cellkv_rpc_server_config_default(void);

/** Serves a device to one client after another, for ever. Clients are trusted: a malformed request
 *  can end the process, so that it should do nothing else.
 *
 *  @param config   borrowed
 *  @return    only on failure:
 *             CELLKV_ERROR_INVALID_ARGUMENT: NULL, a wrong `size`, a field outside its range, or a
 *             host that is no loopback address without allow_remote;
 *             CELLKV_ERROR_UNKNOWN_DEVICE;
 *             CELLKV_ERROR_UNSUPPORTED: this ggml was built without RPC;
 *             CELLKV_ERROR_NETWORK: it cannot listen there, or no longer
 *  Threads: any; it keeps the one that calls.
 */
CELLKV_API cellkv_status cellkv_rpc_server_run(const cellkv_rpc_server_config *config);

#ifdef __cplusplus
}
#endif

#endif
