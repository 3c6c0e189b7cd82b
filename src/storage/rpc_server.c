/* The other end: lending a device. */
#include <cellkv/device.h>

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <ggml.h>

#include "cells/error.h"
#include "device.h"
#include "rpc.h"

enum { DEFAULT_PORT = 50052 };

typedef void (*start_server_t)(const char *endpoint, const char *cache_dir, size_t n_threads,
                               size_t n_devices, ggml_backend_dev_t *devices);

cellkv_rpc_server_config cellkv_rpc_server_config_default(void) {
    return (cellkv_rpc_server_config){
        .size = sizeof(cellkv_rpc_server_config), .host = "127.0.0.1", .port = DEFAULT_PORT};
}

static cellkv_status check_host(const cellkv_rpc_server_config *config, struct in_addr *host) {
    enum { LOOPBACK = 127 };
    if (config->host == NULL) {
        return ck_fail_null("config.host");
    }
    if (inet_pton(AF_INET, config->host, host) != 1) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "config.host is %s, an IPv4 address expected",
                       config->host);
    }
    if (ntohl(host->s_addr) >> 24 != LOOPBACK && !config->allow_remote) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT,
                       "config.host %s is no loopback address: the protocol has no authentication, "
                       "so that takes allow_remote",
                       config->host);
    }
    return CELLKV_OK;
}

static cellkv_status check_config(const cellkv_rpc_server_config *config, struct in_addr *host) {
    if (config == NULL) {
        return ck_fail_null("config");
    }
    if (config->size != sizeof *config) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "config.size is %zu, expected %zu",
                       config->size, sizeof *config);
    }
    if (config->port < 1 || config->port > UINT16_MAX) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "config.port is %d, expected 1 .. %d",
                       config->port, UINT16_MAX);
    }
    if (config->n_threads < 0 || config->n_threads > GGML_MAX_N_THREADS) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "config.n_threads is %d, expected 0 .. %d",
                       config->n_threads, GGML_MAX_N_THREADS);
    }
    return check_host(config, host);
}

/* ggml says on stderr alone that it cannot listen, not why: we try first. */
static cellkv_status try_port(const cellkv_rpc_server_config *config, struct in_addr host) {
    const struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_addr = host, .sin_port = htons((uint16_t)config->port)};
    const int reuse = 1;
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    const bool can = fd >= 0 &&
                     setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse) == 0 &&
                     bind(fd, (const struct sockaddr *)&address, sizeof address) == 0;
    const int error = errno;
    if (fd >= 0) {
        close(fd);
    }
    if (can) {
        return CELLKV_OK;
    }
    return ck_fail(CELLKV_ERROR_NETWORK, "cannot listen on %s:%d: %s", config->host, config->port,
                   strerror(error));
}

cellkv_status cellkv_rpc_server_run(const cellkv_rpc_server_config *config) {
    struct in_addr host;
    cellkv_status status = check_config(config, &host);
    if (status != CELLKV_OK) {
        return status;
    }
    const start_server_t start = (start_server_t)ck_rpc_function("ggml_backend_rpc_start_server");
    if (start == NULL) {
        return ck_fail(CELLKV_ERROR_UNSUPPORTED, "this ggml was built without RPC");
    }
    ggml_backend_dev_t device;
    status = ck_device_find(config->device, &device);
    if (status == CELLKV_OK) {
        status = try_port(config, host);
    }
    if (status != CELLKV_OK) {
        return status;
    }
    char endpoint[INET_ADDRSTRLEN + sizeof ":65535"];
    snprintf(endpoint, sizeof endpoint, "%s:%d", config->host, config->port);
    start(endpoint, NULL,
          (size_t)(config->n_threads > 0 ? config->n_threads : ck_default_threads()), 1, &device);
    return ck_fail(CELLKV_ERROR_NETWORK, "the server on %s ended", endpoint);
}
