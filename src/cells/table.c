#include "table.h"

#include <assert.h>

#include <cellkv/cache.h>

#include "memory.h"

static int32_t count_blocks(int32_t capacity) {
    return (capacity - 1) / CK_BLOCK + 1;
}

bool ck_table_init(struct ck_table *table, int32_t capacity) {
    assert(capacity >= 1 && capacity <= CELLKV_MAX_CAPACITY);
    const int32_t n_blocks = count_blocks(capacity);
    *table = (struct ck_table){.capacity = capacity};
    table->positions = ck_calloc((size_t)capacity, sizeof *table->positions);
    table->owners = ck_calloc((size_t)capacity, sizeof *table->owners);
    table->taken = ck_calloc((size_t)capacity, sizeof *table->taken);
    table->n_used = ck_calloc((size_t)n_blocks, sizeof *table->n_used);
    if (!table->positions || !table->owners || !table->taken || !table->n_used ||
        !ck_index_set_init(&table->free, capacity) || !ck_index_set_init(&table->used, capacity) ||
        !ck_index_set_init(&table->freed, capacity) ||
        !ck_index_set_init(&table->free_blocks, n_blocks)) {
        ck_table_release(table);
        return false;
    }
    ck_index_set_fill(&table->free);
    ck_index_set_fill(&table->free_blocks);
    return true;
}

void ck_table_release(struct ck_table *table) {
    ck_free(table->positions);
    ck_free(table->owners);
    ck_free(table->taken);
    ck_free(table->n_used);
    ck_index_set_release(&table->free);
    ck_index_set_release(&table->used);
    ck_index_set_release(&table->freed);
    ck_index_set_release(&table->free_blocks);
    *table = (struct ck_table){0};
}

size_t ck_table_bytes(const struct ck_table *table) {
    size_t cell = sizeof *table->positions + sizeof *table->owners + sizeof *table->taken;
    return (size_t)table->capacity * cell + (size_t)table->free_blocks.n * sizeof *table->n_used +
           ck_index_set_bytes(&table->free) + ck_index_set_bytes(&table->used) +
           ck_index_set_bytes(&table->freed) + ck_index_set_bytes(&table->free_blocks);
}

void ck_table_claim(struct ck_table *table, int32_t cell, int32_t position) {
    assert(table->owners[cell] == 0);
    table->positions[cell] = position;
    table->owners[cell] = 1;
    ck_index_set_remove(&table->free, cell);
    ck_index_set_insert(&table->used, cell);
    if (table->n_used[cell / CK_BLOCK]++ == 0) {
        ck_index_set_remove(&table->free_blocks, cell / CK_BLOCK);
    }
}

void ck_table_unclaim(struct ck_table *table, int32_t cell) {
    assert(table->owners[cell] == 1);
    table->owners[cell] = 0;
    ck_index_set_remove(&table->used, cell);
    ck_index_set_insert(&table->free, cell);
    if (--table->n_used[cell / CK_BLOCK] == 0) {
        ck_index_set_insert(&table->free_blocks, cell / CK_BLOCK);
    }
}

void ck_table_share(struct ck_table *table, int32_t cell) {
    assert(table->owners[cell] >= 1 && table->owners[cell] < UINT16_MAX);
    table->owners[cell]++;
}

bool ck_table_let_go(struct ck_table *table, int32_t cell) {
    assert(table->owners[cell] >= 1);
    if (table->owners[cell] > 1) {
        table->owners[cell]--;
        return false;
    }
    ck_table_unclaim(table, cell);
    ck_index_set_insert(&table->freed, cell);
    return true;
}

static bool is_free_block(const struct ck_table *table, int32_t block, int32_t limit) {
    if (block >= table->free_blocks.n || !ck_index_set_contains(&table->free_blocks, block)) {
        return false;
    }
    const int32_t begin = block * CK_BLOCK;
    const int32_t left = table->capacity - begin;
    return begin + (left < CK_BLOCK ? left : CK_BLOCK) <= limit;
}

int32_t ck_table_free_block(const struct ck_table *table, int32_t preferred, int32_t limit) {
    if (is_free_block(table, preferred, limit)) {
        return preferred * CK_BLOCK;
    }
    const int32_t lowest = ck_index_set_next(&table->free_blocks, 0);
    return lowest >= 0 && is_free_block(table, lowest, limit) ? lowest * CK_BLOCK : -1;
}

int32_t ck_table_extent(const struct ck_table *table) {
    return ck_index_set_highest(&table->used) + 1;
}
