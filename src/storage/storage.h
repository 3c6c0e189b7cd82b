/* The K/V tensors whose rows are the cells.
 *
 * Per layer K [n_kv_heads * head_dim_k, rows] and V [n_kv_heads * head_dim_v, rows]. `rows` is the
 * logical count; beneath it the tensors are padded to CK_ROW_PADDING, so that attention can read
 * whole blocks. Every row is zero until it is written, padding included. A layer with a ring (kind
 * sequence, see cells/ring.h) never has more rows than that. */
#ifndef CELLKV_STORAGE_STORAGE_H
#define CELLKV_STORAGE_STORAGE_H

#include <stdint.h>

#include <ggml-backend.h>
#include <ggml.h>

#include <cellkv/cache.h>

#include "cells/cache_object.h"

/* ggml's attention kernels want the rows they read in multiples of this (CUDA's needs it). */
enum { CK_ROW_PADDING = 256 };

static inline int32_t ck_pad_rows(int32_t rows) {
    return (rows + CK_ROW_PADDING - 1) / CK_ROW_PADDING * CK_ROW_PADDING;
}

/* The builder of backend "ggml" (see cells/registry.h). */
cellkv_status ck_storage_build(const cellkv_cache_config *config, cellkv_cache *cache);

/* Makes room for cells [0, n_rows): grows by doubling up to the rows of the longest layer, keeping
 * every row's bytes.
 * Returns CELLKV_OK, or CELLKV_ERROR_OUT_OF_MEMORY with nothing changed. */
cellkv_status ck_storage_reserve(struct ck_storage *storage, int32_t n_rows);

/* Zeroes these rows, ascending, of every layer; not for kind sequence. Rows not allocated yet are
 * passed over. */
void ck_storage_zero_rows(struct ck_storage *storage, const int32_t *rows, int32_t n_rows);

/* Kind sequence, whose next token stands at `end`: zeroes what positions in [end, freed_end) have
 * left behind, some of which were freed, in rows that hold no position below `end`. `written` as
 * ck_cells_written. Rows not allocated yet are passed over. */
void ck_storage_zero_positions(struct ck_storage *storage, int32_t end, int32_t freed_end,
                               int32_t written);

struct ggml_tensor *ck_storage_k(const struct ck_storage *storage, int32_t layer);
struct ggml_tensor *ck_storage_v(const struct ck_storage *storage, int32_t layer);
ggml_backend_dev_t ck_storage_device(const struct ck_storage *storage, int32_t layer);

/* [n_layers] The same as an array. Around everything that touches rows: cellkv_devices_enter and
 * _leave with it; building and freeing a storage do that themselves. */
ggml_backend_dev_t const *ck_storage_devices(const struct ck_storage *storage);

/* Counts the times that the tensors were replaced: graphs built before a change are void. */
int64_t ck_storage_generation(const struct ck_storage *storage);

#endif
