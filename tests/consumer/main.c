/* A program outside the tree: its own ggml calls and cellkv's must resolve to one ggml. */
#include <cellkv/cellkv.h>
#include <ggml.h>
#include <stdio.h>
#include <string.h>

int main(void) {
    if (strcmp(cellkv_version(), CELLKV_VERSION) != 0) {
        fprintf(stderr, "header %s, library %s\n", CELLKV_VERSION, cellkv_version());
        return 1;
    }
    cellkv_cache_config config = cellkv_cache_config_default();
    config.backend = "cells";
    cellkv_cache *cache = NULL;
    int64_t seq = 0;
    if (cellkv_cache_new(&config, &cache) != CELLKV_OK ||
        cellkv_cache_open(cache, &seq) != CELLKV_OK) {
        fprintf(stderr, "%s\n", cellkv_last_error());
        return 1;
    }
    cellkv_cache_free(cache);
    printf("C: cellkv %s on ggml %s\n", cellkv_version(), ggml_version());
    return 0;
}
