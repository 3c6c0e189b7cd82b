#include "pooling.h"

#include "cells/error.h"
#include "cells/memory.h"

static int32_t largest_slot(const struct ck_step *placed, const int32_t *outputs, int32_t n) {
    int32_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        const int32_t slot = placed->slots[outputs[i]];
        largest = slot > largest ? slot : largest;
    }
    return largest;
}

cellkv_status ck_pooling_begin(struct ck_pooling *pooling, const struct ck_step *placed,
                               const int32_t *outputs, int32_t n_outputs, int32_t n_result) {
    const int64_t n_slots = (int64_t)largest_slot(placed, outputs, n_outputs) + 1;
    if (!CK_RESERVE(pooling->rows, &pooling->room_rows, n_outputs) ||
        !CK_RESERVE(pooling->shares, &pooling->room_shares, n_outputs) ||
        !CK_RESERVE(pooling->counts, &pooling->room_counts, n_outputs) ||
        !CK_RESERVE(pooling->row_of_slot, &pooling->room_slots, n_slots) ||
        !CK_RESERVE(pooling->result, &pooling->room_result, n_result)) {
        return ck_fail_memory("pooling");
    }
    for (int32_t i = 0; i < n_outputs; i++) {
        pooling->row_of_slot[placed->slots[outputs[i]]] = -1;
    }
    pooling->n_rows = 0;
    for (int32_t i = 0; i < n_outputs; i++) {
        int32_t *row = &pooling->row_of_slot[placed->slots[outputs[i]]];
        if (*row < 0) {
            *row = pooling->n_rows++;
            pooling->counts[*row] = 0;
        }
        pooling->rows[i] = *row;
        pooling->counts[*row]++;
    }
    for (int32_t i = 0; i < n_outputs; i++) {
        pooling->shares[i] = 1.0f / (float)pooling->counts[pooling->rows[i]];
    }
    return CELLKV_OK;
}

void ck_pooling_add(const struct ck_pooling *pooling, int32_t i, int32_t n_result, float *results) {
    float *row = results + (size_t)pooling->rows[i] * (size_t)n_result;
    for (int32_t j = 0; j < n_result; j++) {
        row[j] += pooling->shares[i] * pooling->result[j];
    }
}

void ck_pooling_free(struct ck_pooling *pooling) {
    ck_free(pooling->rows);
    ck_free(pooling->shares);
    ck_free(pooling->row_of_slot);
    ck_free(pooling->counts);
    ck_free(pooling->result);
    *pooling = (struct ck_pooling){0};
}
