/* The cell table: what each cell holds, and which cells are free. */
#ifndef CELLKV_CELLS_TABLE_H
#define CELLKV_CELLS_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "index_set.h"

/* Cells [256 b, 256 b + 256) are block b; the last one is shorter where capacity ends within it. A
 * sequence is kept in blocks of its own where there are any. */
enum { CK_BLOCK = 256 };

/* Invariants:
 *   owners[c]  = how many sequences' lists have c
 *   free       = { c : owners[c] == 0 },  used = its complement in [0, capacity)
 *   freed      = cells that were freed since the last take and not written since: used ones, too
 *   n_used[b]  = how many cells of block b are in `used`
 *   free_blocks = { b : n_used[b] == 0 }
 * Two sets instead of one because the lowest free and the highest used cell are both asked for.
 * Bytes for each cell: 4 position, 2 owners, 4 taken, 3 sets of 1/8 and a bit, next to nothing for
 * its share of a block; sight's scratch adds 4. `taken` is allocated in full, so that letting go of
 * cells can never fail. */
struct ck_table {
    int32_t capacity;
    int32_t *positions; /* [capacity]; of a free cell: anything */
    uint16_t *owners;   /* [capacity] */
    struct ck_index_set free;
    struct ck_index_set used;
    struct ck_index_set freed;
    struct ck_index_set free_blocks;
    uint16_t *n_used; /* [free_blocks.n] */
    int32_t *taken;   /* [capacity], the first n_taken: what the last take gave */
    int32_t n_taken;
};

bool ck_table_init(struct ck_table *table, int32_t capacity); /* false: out of memory */
void ck_table_release(struct ck_table *table);                /* also of a zeroed one */
size_t ck_table_bytes(const struct ck_table *table);

/* A free cell gets its first owner. */
void ck_table_claim(struct ck_table *table, int32_t cell, int32_t position);

/* Takes a claim back as if it had never been: the row has not been written. */
void ck_table_unclaim(struct ck_table *table, int32_t cell);

/* One more sequence owns the cell. */
void ck_table_share(struct ck_table *table, int32_t cell);

/* One owner lets go; returns whether it was the last, so that the cell is free now. */
bool ck_table_let_go(struct ck_table *table, int32_t cell);

/* The first cell of a block that is wholly free and lies wholly below `limit`: of block `preferred`
 * (>= 0; there may be none such) if that is one, else of the lowest that is; -1: none is. */
int32_t ck_table_free_block(const struct ck_table *table, int32_t preferred, int32_t limit);

/* One past the highest used cell. */
int32_t ck_table_extent(const struct ck_table *table);

#endif
