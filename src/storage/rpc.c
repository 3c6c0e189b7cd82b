#define _POSIX_C_SOURCE  200112L /* getaddrinfo, clock_gettime */
#define _DARWIN_C_SOURCE         /* SO_NOSIGPIPE */

#include "rpc.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "cells/error.h"
#include "device.h"

/* Writing to who has hung up must not end the process: said for each call, or for the socket. */
#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

/* ggml's RPC protocol, as of version 5: the client begins with a byte for the command, the size of
 * what follows, and its capabilities, none of which we have. The server answers with a size, its
 * version and its own capabilities. */
enum {
    HELLO = 14,
    N_CAPABILITIES = 24,
    VERSION_MAJOR = 5,
    VERSION_MINOR = 0, /* at most */
    TIMEOUT_MS = 5000
};

enum { MAX_HOST = 255 };

struct address {
    const char *text; /* as it was given */
    char host[MAX_HOST + 1];
    char port[6];
    long index; /* of the server's device */
    struct sockaddr_in resolved;
    char endpoint[INET_ADDRSTRLEN + 6]; /* resolved, as ggml takes it: one server, one text */
};

typedef ggml_backend_reg_t (*add_server_t)(const char *endpoint);

static ggml_backend_reg_t find_registered(const char *name) {
    ck_registry_enter();
    ggml_backend_reg_t found = ggml_backend_reg_by_name(name);
    ck_registry_leave();
    return found;
}

ck_function ck_rpc_function(const char *name) {
    ggml_backend_reg_t rpc = find_registered("RPC");
    return rpc != NULL ? ck_registry_function(rpc, name) : NULL;
}

/* ---- addresses ---- */

/* A decimal number in [least, most] that ends at `end`; -1: it is none. */
static long parse_number(const char *text, const char *end, long least, long most) {
    char *behind;
    if (*text < '0' || *text > '9') {
        return -1;
    }
    errno = 0;
    const long number = strtol(text, &behind, 10);
    return errno == 0 && behind == end && number >= least && number <= most ? number : -1;
}

static cellkv_status parse_address(const char *text, struct address *address) {
    const char *end = text + strlen(text);
    const char *slash = strchr(text, '/');
    const char *port_end = slash != NULL ? slash : end;
    const char *colon = strchr(text, ':');
    if (colon != NULL && colon > text && colon - text <= MAX_HOST && colon < port_end) {
        const long port = parse_number(colon + 1, port_end, 1, 65535);
        address->index = slash != NULL ? parse_number(slash + 1, end, 0, INT32_MAX) : 0;
        if (port > 0 && address->index >= 0) {
            snprintf(address->host, sizeof address->host, "%.*s", (int)(colon - text), text);
            snprintf(address->port, sizeof address->port, "%u", (unsigned)(uint16_t)port);
            address->text = text;
            return CELLKV_OK;
        }
    }
    return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT,
                   "%s%s is no address: rpc://host:port or rpc://host:port/index is expected",
                   CK_RPC_SCHEME, text);
}

static cellkv_status resolve(struct address *address) {
    const struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    char numbers[INET_ADDRSTRLEN];
    if (getaddrinfo(address->host, address->port, &hints, &found) != 0) {
        return ck_fail(CELLKV_ERROR_NETWORK, "rpc://%s: no such host", address->text);
    }
    memcpy(&address->resolved, found->ai_addr, sizeof address->resolved);
    freeaddrinfo(found);
    inet_ntop(AF_INET, &address->resolved.sin_addr, numbers, sizeof numbers);
    snprintf(address->endpoint, sizeof address->endpoint, "%s:%s", numbers, address->port);
    return CELLKV_OK;
}

/* ---- whether a server answers ---- */

/* ggml ends the process when what answers at an address is not a server of its own version, and
 * waits for ever for one that does not answer. So we ask first, on a connection of our own. */

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static bool wait_for(int fd, short events, int64_t deadline) {
    struct pollfd poller = {.fd = fd, .events = events};
    for (;;) {
        const int64_t left = deadline - now_ms();
        const int n = poll(&poller, 1, left > 0 ? (int)left : 0);
        if (n == 1 || n == 0 || errno != EINTR) {
            return n == 1;
        }
    }
}

/* A connected socket, which does not block; -1: there is none to be had. */
static int connect_to(const struct sockaddr_in *address, int64_t deadline) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    int error = -1;
#ifdef SO_NOSIGPIPE
    setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &(int){1}, sizeof(int));
#endif
    if (fd >= 0 && fcntl(fd, F_SETFL, O_NONBLOCK) == 0) {
        error = connect(fd, (const struct sockaddr *)address, sizeof *address) == 0 ? 0 : errno;
        socklen_t size = sizeof error;
        if (error == EINPROGRESS && wait_for(fd, POLLOUT, deadline)) {
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
        }
    }
    if (error != 0 && fd >= 0) {
        close(fd);
    }
    return error == 0 ? fd : -1;
}

static bool read_all(int fd, void *bytes, size_t n, int64_t deadline) {
    for (uint8_t *to = bytes; n > 0;) {
        const ssize_t got = wait_for(fd, POLLIN, deadline) ? recv(fd, to, n, 0) : -1;
        if (got <= 0) {
            return false;
        }
        to += got;
        n -= (size_t)got;
    }
    return true;
}

static bool say_hello(int fd, int64_t deadline) {
    uint8_t request[1 + sizeof(uint64_t) + N_CAPABILITIES] = {HELLO};
    const uint64_t size = N_CAPABILITIES;
    memcpy(request + 1, &size, sizeof size);
    if (send(fd, request, sizeof request, MSG_NOSIGNAL) != (ssize_t)sizeof request) {
        return false;
    }
    uint8_t version[4 + N_CAPABILITIES];
    uint64_t answered;
    if (!read_all(fd, &answered, sizeof answered, deadline) || answered != sizeof version ||
        !read_all(fd, version, sizeof version, deadline)) {
        return false;
    }
    return version[0] == VERSION_MAJOR && version[1] <= VERSION_MINOR;
}

static cellkv_status check_server(const struct address *address) {
    const int64_t deadline = now_ms() + TIMEOUT_MS;
    const int fd = connect_to(&address->resolved, deadline);
    if (fd < 0) {
        return ck_fail(CELLKV_ERROR_NETWORK, "rpc://%s: no connection", address->text);
    }
    const bool answers = say_hello(fd, deadline);
    close(fd);
    if (answers) {
        return CELLKV_OK;
    }
    return ck_fail(CELLKV_ERROR_NETWORK,
                   "rpc://%s: what listens there does not speak version %d.%d of ggml's RPC, or "
                   "serves somebody else",
                   address->text, VERSION_MAJOR, VERSION_MINOR);
}

/* Whether this process has a connection to the address: ggml keeps one while any of the server's
 * buffers lives, and does not tell. */
static bool is_connected_to(const struct address *address) {
    enum { MAX_FD = 1 << 16 };
    const struct sockaddr_in *wanted = &address->resolved;
    const long n_fds = sysconf(_SC_OPEN_MAX);
    for (int fd = 0; fd < MAX_FD && fd < n_fds; fd++) {
        struct sockaddr_in peer;
        socklen_t size = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &size) == 0 && peer.sin_family == AF_INET &&
            peer.sin_port == wanted->sin_port && peer.sin_addr.s_addr == wanted->sin_addr.s_addr) {
            return true;
        }
    }
    return false;
}

/* ---- servers ---- */

/* The server's entry in ggml's registry; NULL: it has not been asked for yet. */
static ggml_backend_reg_t find_server(const struct address *address) {
    char name[sizeof address->endpoint + sizeof "RPC[]"];
    snprintf(name, sizeof name, "RPC[%s]", address->endpoint);
    return find_registered(name);
}

static cellkv_status add_server(const struct address *address, ggml_backend_reg_t *server) {
    const add_server_t add = (add_server_t)ck_rpc_function("ggml_backend_rpc_add_server");
    *server = add(address->endpoint);
    if (*server == NULL) {
        return ck_fail(CELLKV_ERROR_NETWORK, "rpc://%s: the server lends no device", address->text);
    }
    ck_registry_enter();
    ggml_backend_register(*server);
    ck_registry_leave();
    return CELLKV_OK;
}

cellkv_status ck_rpc_find(const char *text, ggml_backend_dev_t *device) {
    struct address address;
    cellkv_status status = parse_address(text, &address);
    if (status != CELLKV_OK) {
        return status;
    }
    if (ck_rpc_function("ggml_backend_rpc_add_server") == NULL) {
        return ck_fail(CELLKV_ERROR_UNSUPPORTED, "rpc://%s: this ggml was built without RPC", text);
    }
    status = resolve(&address);
    if (status != CELLKV_OK) {
        return status;
    }
    ggml_backend_reg_t server = find_server(&address);
    /* A server that is known may be gone by now, and something else listen in its place. */
    if (server == NULL || !is_connected_to(&address)) {
        status = check_server(&address);
    }
    if (status == CELLKV_OK && server == NULL) {
        status = add_server(&address, &server);
    }
    if (status != CELLKV_OK) {
        return status;
    }
    const size_t n = ggml_backend_reg_dev_count(server);
    if ((size_t)address.index >= n) {
        return ck_fail(CELLKV_ERROR_UNKNOWN_DEVICE, "rpc://%s lends %zu devices, %ld is none",
                       address.endpoint, n, address.index);
    }
    *device = ggml_backend_reg_dev_get(server, (size_t)address.index);
    return CELLKV_OK;
}
