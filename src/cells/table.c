#include "table.h"

#include <assert.h>

#include <cellkv/cache.h>

#include "memory.h"

bool ck_table_init(struct ck_table *table, int32_t capacity) {
    assert(capacity >= 1 && capacity <= CELLKV_MAX_CAPACITY);
    *table = (struct ck_table){.capacity = capacity};
    table->positions = ck_calloc((size_t)capacity, sizeof *table->positions);
    table->owners = ck_calloc((size_t)capacity, sizeof *table->owners);
    table->taken = ck_calloc((size_t)capacity, sizeof *table->taken);
    if (!table->positions || !table->owners || !table->taken ||
        !ck_index_set_init(&table->free, capacity) || !ck_index_set_init(&table->used, capacity) ||
        !ck_index_set_init(&table->freed, capacity)) {
        ck_table_release(table);
        return false;
    }
    ck_index_set_fill(&table->free);
    return true;
}

void ck_table_release(struct ck_table *table) {
    ck_free(table->positions);
    ck_free(table->owners);
    ck_free(table->taken);
    ck_index_set_release(&table->free);
    ck_index_set_release(&table->used);
    ck_index_set_release(&table->freed);
    *table = (struct ck_table){0};
}

size_t ck_table_bytes(const struct ck_table *table) {
    size_t cell = sizeof *table->positions + sizeof *table->owners + sizeof *table->taken;
    return (size_t)table->capacity * cell + ck_index_set_bytes(&table->free) +
           ck_index_set_bytes(&table->used) + ck_index_set_bytes(&table->freed);
}

void ck_table_claim(struct ck_table *table, int32_t cell, int32_t position) {
    assert(table->owners[cell] == 0);
    table->positions[cell] = position;
    table->owners[cell] = 1;
    ck_index_set_remove(&table->free, cell);
    ck_index_set_insert(&table->used, cell);
}

void ck_table_unclaim(struct ck_table *table, int32_t cell) {
    assert(table->owners[cell] == 1);
    table->owners[cell] = 0;
    ck_index_set_remove(&table->used, cell);
    ck_index_set_insert(&table->free, cell);
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

int32_t ck_table_extent(const struct ck_table *table) {
    return ck_index_set_highest(&table->used) + 1;
}
