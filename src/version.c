/* SPDX-License-Identifier: MIT */
#include <cellkv/version.h>

const char *cellkv_version(void) {
    return CELLKV_VERSION;
}
