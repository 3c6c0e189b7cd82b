/* What a device can do, where ggml's own answer is not the whole truth (read in v0.20.2). */
#include "device.h"

#include <stddef.h>
#include <string.h>

ck_function ck_registry_function(ggml_backend_reg_t registry, const char *name) {
    void *address = ggml_backend_reg_get_proc_address(registry, name);
    ck_function function;
    memcpy(&function, &address, sizeof function); /* C has no cast for it, POSIX has the promise */
    return function;
}

static bool is_of(ggml_backend_dev_t device, const char *registry) {
    return strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), registry) == 0;
}

bool ck_device_is_remote(ggml_backend_dev_t device) {
    return is_of(device, "RPC");
}

const char *ck_device_name(ggml_backend_dev_t device) {
    return ck_device_is_remote(device) ? ggml_backend_dev_description(device)
                                       : ggml_backend_dev_name(device);
}

bool ck_is_custom(const struct ggml_tensor *op) {
    return op->op == GGML_OP_CUSTOM || op->op == GGML_OP_MAP_CUSTOM1 ||
           op->op == GGML_OP_MAP_CUSTOM2 || op->op == GGML_OP_MAP_CUSTOM3;
}

/* A remote device says yes to everything, and its server ends when it cannot. What a server's
 * device is, the protocol does not tell: as good as our own CPU it has to be. */
static bool remote_supports(const struct ggml_tensor *op) {
    ggml_backend_dev_t cpu = ck_device_cpu();
    return !ck_is_custom(op) && (cpu == NULL || ggml_backend_dev_supports_op(cpu, op));
}

/* Metal looks at the width of K only; these are the pairs it has kernels for. */
bool ck_metal_attends(int64_t head_dim_k, int64_t head_dim_v) {
    static const int16_t widths[][2] = {{32, 32},   {40, 40},   {48, 48},   {64, 64},   {72, 72},
                                        {80, 80},   {96, 96},   {112, 112}, {128, 128}, {192, 128},
                                        {192, 192}, {256, 256}, {320, 256}, {512, 512}, {576, 512}};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        if (widths[i][0] == head_dim_k && widths[i][1] == head_dim_v) {
            return true;
        }
    }
    return false;
}

bool ck_device_supports(ggml_backend_dev_t device, const struct ggml_tensor *op) {
    if (ck_device_is_remote(device)) {
        return remote_supports(op);
    }
    if (op->op == GGML_OP_FLASH_ATTN_EXT && is_of(device, "MTL") &&
        !ck_metal_attends(op->src[1]->ne[0], op->src[2]->ne[0])) {
        return false;
    }
    return ggml_backend_dev_supports_op(device, op);
}
