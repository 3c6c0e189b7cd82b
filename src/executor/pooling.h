/* Mean pooling: the results of a step's outputs, averaged for each sequence as they are read out.
 */
#ifndef CELLKV_EXECUTOR_POOLING_H
#define CELLKV_EXECUTOR_POOLING_H

#include <stdint.h>

#include <cellkv/status.h>

#include "cells/cells.h"

struct ck_pooling {
    int32_t *rows;        /* [n_outputs] the result row that each output goes into */
    float *shares;        /* [n_outputs] and its share of it: 1 / outputs of that row */
    int32_t *row_of_slot; /* scratch: [the largest slot + 1] */
    int32_t *counts;      /* scratch: [n_rows] */
    float *result;        /* [n_result] one output's, as read out */
    int32_t n_rows;
    int32_t room_rows, room_shares, room_slots, room_counts,
        room_result; /* the arrays are reused */
};

/* Assigns result rows to the sequences of the placed step's outputs, in order of appearance.
 * Returns CELLKV_OK or CELLKV_ERROR_OUT_OF_MEMORY. Cost: O(n_outputs). */
cellkv_status ck_pooling_begin(struct ck_pooling *pooling, const struct ck_step *placed,
                               const int32_t *outputs, int32_t n_outputs, int32_t n_result);

/* Adds pooling->result, which is output i's, to its row of `results` [n_rows, n_result]. */
void ck_pooling_add(const struct ck_pooling *pooling, int32_t i, int32_t n_result, float *results);

void ck_pooling_free(struct ck_pooling *pooling);

#endif
