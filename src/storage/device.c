#define _POSIX_C_SOURCE 200809L /* recursive mutexes */

#include "device.h"

#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cells/error.h"
#include "cells/memory.h"
#include "rpc.h"

enum { MAX_DEFAULT_THREADS = 16 };

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;

void ck_registry_enter(void) {
    pthread_mutex_lock(&registry);
}

void ck_registry_leave(void) {
    pthread_mutex_unlock(&registry);
}

/* A process has one connection to each server, and ggml does not guard it. Recursive: what runs in
 * a step, a program's build or a caller's should_abort, may free or make things on a server, too.
 */
static pthread_mutex_t servers;
static pthread_once_t servers_once = PTHREAD_ONCE_INIT;

static void make_servers(void) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&servers, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

static void servers_enter(void) {
    pthread_once(&servers_once, make_servers);
    pthread_mutex_lock(&servers);
}

static void servers_leave(void) {
    pthread_mutex_unlock(&servers);
}

static ggml_backend_dev_t cpu;
static pthread_once_t cpu_once = PTHREAD_ONCE_INIT;

static void find_cpu(void) {
    ck_registry_enter();
    cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ck_registry_leave();
}

ggml_backend_dev_t ck_device_cpu(void) {
    pthread_once(&cpu_once, find_cpu);
    return cpu;
}

int32_t ck_default_threads(void) {
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (cores < 1) {
        return 1;
    }
    return cores < MAX_DEFAULT_THREADS ? (int32_t)cores : MAX_DEFAULT_THREADS;
}

/* ---- what there is ---- */

int32_t cellkv_device_count(void) {
    ck_registry_enter();
    const int32_t n = (int32_t)ggml_backend_dev_count();
    ck_registry_leave();
    return n;
}

const char *cellkv_device_name(int32_t i) {
    const char *name = NULL;
    ck_registry_enter();
    if (i >= 0 && (size_t)i < ggml_backend_dev_count()) {
        name = ggml_backend_dev_name(ggml_backend_dev_get((size_t)i));
    }
    ck_registry_leave();
    return name;
}

/* ---- by name ---- */

/* A remote device calls itself a GPU, and is used by those who name it only. */
static ggml_backend_dev_t best_of_type(enum ggml_backend_dev_type type) {
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (ggml_backend_dev_type(device) == type && !ck_device_is_remote(device)) {
            return device;
        }
    }
    return NULL;
}

static ggml_backend_dev_t best_device(void) {
    static const enum ggml_backend_dev_type preference[] = {
        GGML_BACKEND_DEVICE_TYPE_GPU,
        GGML_BACKEND_DEVICE_TYPE_IGPU,
        GGML_BACKEND_DEVICE_TYPE_CPU,
    };
    ggml_backend_dev_t device = NULL;
    for (size_t i = 0; i < sizeof preference / sizeof *preference && device == NULL; i++) {
        device = best_of_type(preference[i]);
    }
    return device;
}

static cellkv_status fail_unknown(const char *name) {
    char known[256] = "";
    int used = 0;
    for (size_t i = 0; i < ggml_backend_dev_count() && used < (int)sizeof known; i++) {
        used += snprintf(known + used, sizeof known - (size_t)used, "%s%s", i > 0 ? ", " : "",
                         ggml_backend_dev_name(ggml_backend_dev_get(i)));
    }
    return ck_fail(CELLKV_ERROR_UNKNOWN_DEVICE, "no device is named %s; there are: %s",
                   name != NULL ? name : "(any)", known);
}

static cellkv_status find_local(const char *name, ggml_backend_dev_t *device) {
    cellkv_status status = CELLKV_OK;
    ck_registry_enter();
    ggml_backend_dev_t found = name != NULL ? ggml_backend_dev_by_name(name) : best_device();
    if (found == NULL) {
        status = fail_unknown(name);
    } else {
        *device = found;
    }
    ck_registry_leave();
    return status;
}

cellkv_status ck_device_find(const char *name, ggml_backend_dev_t *device) {
    if (name == NULL || strncmp(name, CK_RPC_SCHEME, strlen(CK_RPC_SCHEME)) != 0) {
        return find_local(name, device);
    }
    servers_enter();
    const cellkv_status status = ck_rpc_find(name + strlen(CK_RPC_SCHEME), device);
    servers_leave();
    return status;
}

/* ---- by layer ---- */

/* One of the devices that a text names. */
struct share {
    ggml_backend_dev_t device;
    int32_t n_layers; /* 0: not said */
};

static cellkv_status fail_text(const char *devices, const char *why) {
    return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "devices \"%s\": %s", devices, why);
}

/* Reads "name" or "name=n", which it may write to. */
static cellkv_status read_share(const char *devices, char *text, struct share *share) {
    char *equals = strchr(text, '=');
    if (equals != NULL) {
        char *end;
        const long n = strtol(equals + 1, &end, 10);
        if (equals[1] < '0' || equals[1] > '9' || *end != '\0' || n < 1 || n > INT32_MAX) {
            return fail_text(devices, "behind = a number of layers is expected");
        }
        share->n_layers = (int32_t)n;
        *equals = '\0';
    }
    if (*text == '\0') {
        return fail_text(devices, "a name is missing");
    }
    return ck_device_find(text, &share->device);
}

static cellkv_status read_shares(const char *devices, char *text, struct share *shares, int *n) {
    cellkv_status status = CELLKV_OK;
    char *rest = text;
    for (*n = 0; rest != NULL && status == CELLKV_OK; ++*n) {
        char *entry = rest;
        char *comma = strchr(entry, ',');
        rest = comma != NULL ? comma + 1 : NULL;
        if (comma != NULL) {
            *comma = '\0';
        }
        if (*n == CELLKV_MAX_DEVICES) {
            return fail_text(devices, "more devices than one text may name");
        }
        shares[*n] = (struct share){0};
        status = read_share(devices, entry, &shares[*n]);
    }
    return status;
}

/* Gives every device its number of layers. */
static cellkv_status divide(const char *devices, struct share *shares, int n, int32_t n_layers) {
    int64_t sum = 0;
    int n_said = 0;
    for (int i = 0; i < n; i++) {
        sum += shares[i].n_layers;
        n_said += shares[i].n_layers > 0;
    }
    if (n_said == n && sum == n_layers) {
        return CELLKV_OK;
    }
    if (n_said == n) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "devices \"%s\": %lld layers; there are %d",
                       devices, (long long)sum, n_layers);
    }
    if (n_said > 0) {
        return fail_text(devices, "the number of layers is expected for all or for none");
    }
    if (n > n_layers) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "devices \"%s\": %d for %d layers", devices,
                       n, n_layers);
    }
    for (int i = 0; i < n; i++) {
        shares[i].n_layers = n_layers / n + (i < n_layers % n);
    }
    return CELLKV_OK;
}

static cellkv_status find_named(const char *devices, int32_t n_layers,
                                ggml_backend_dev_t *of_layer) {
    struct share shares[CELLKV_MAX_DEVICES];
    int n;
    char *text = ck_strdup(devices);
    if (text == NULL) {
        return ck_fail_memory("a list of devices");
    }
    cellkv_status status = read_shares(devices, text, shares, &n);
    ck_free(text);
    if (status == CELLKV_OK) {
        status = divide(devices, shares, n, n_layers);
    }
    for (int i = 0, l = 0; i < n && status == CELLKV_OK; i++) {
        for (int32_t k = 0; k < shares[i].n_layers; k++) {
            of_layer[l++] = shares[i].device;
        }
    }
    return status;
}

static bool any_remote(struct ggml_backend_device *const *devices, int32_t n) {
    for (int32_t i = 0; devices != NULL && i < n; i++) {
        if (devices[i] != NULL && ck_device_is_remote(devices[i])) {
            return true;
        }
    }
    return false;
}

void cellkv_devices_enter(struct ggml_backend_device *const *of_layer, int32_t n_layers) {
    if (any_remote(of_layer, n_layers)) {
        servers_enter();
    }
}

void cellkv_devices_leave(struct ggml_backend_device *const *of_layer, int32_t n_layers) {
    if (any_remote(of_layer, n_layers)) {
        servers_leave();
    }
}

cellkv_status cellkv_devices_of_layers(const char *devices, int32_t n_layers,
                                       struct ggml_backend_device **of_layer) {
    if (of_layer == NULL) {
        return ck_fail_null("of_layer");
    }
    if (n_layers < 1) {
        return ck_fail(CELLKV_ERROR_INVALID_ARGUMENT, "n_layers is %d, expected >= 1", n_layers);
    }
    if (devices != NULL) {
        return find_named(devices, n_layers, of_layer);
    }
    ggml_backend_dev_t best = NULL;
    cellkv_status status = ck_device_find(NULL, &best);
    for (int32_t l = 0; l < n_layers && status == CELLKV_OK; l++) {
        of_layer[l] = best;
    }
    return status;
}
