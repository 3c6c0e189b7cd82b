/* The same as main.c, from C++. */
#include <cellkv/cellkv.h>
#include <cstdio>
#include <cstring>
#include <ggml.h>

int main() {
    if (std::strcmp(cellkv_version(), CELLKV_VERSION) != 0) {
        std::fprintf(stderr, "header %s, library %s\n", CELLKV_VERSION, cellkv_version());
        return 1;
    }
    cellkv_cache_config config = cellkv_cache_config_default();
    config.backend = "cells";
    cellkv_cache *cache = nullptr;
    int64_t seq = 0;
    if (cellkv_cache_new(&config, &cache) != CELLKV_OK ||
        cellkv_cache_open(cache, &seq) != CELLKV_OK) {
        std::fprintf(stderr, "%s\n", cellkv_last_error());
        return 1;
    }
    cellkv_cache_free(cache);
    std::printf("C++: cellkv %s on ggml %s\n", cellkv_version(), ggml_version());
    return 0;
}
