/* The sequences: slots, the handles that name them, and each one's list of cells. */
#ifndef CELLKV_CELLS_SEQUENCES_H
#define CELLKV_CELLS_SEQUENCES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "table.h"

/* A handle is slot | serial << 16, with a serial that the process never gives again: whether it is
 * alive is one comparison with the handle that its slot holds. Since serials start at 1 and slots
 * end at 65534, no small number, -1 or INT32_MAX is ever a handle. */
struct ck_sequence {
    int64_t handle; /* 0: the slot is free */
    int32_t *cells; /* [n], strictly ascending in position */
    int32_t n;
    int32_t room; /* of `cells` */
    union {
        int32_t trimmed;   /* open: positions below it may be missing because of trims; 0: none */
        int32_t next_free; /* free: the next free slot, -1: none */
    };
    int32_t mark; /* scratch of one call, 0 between calls */
};

/* Slots [0, n_touched) have been open once; the free ones among them form a list. */
struct ck_sequences {
    struct ck_sequence *slots; /* [max_seqs] */
    int32_t max_seqs;
    int32_t n_touched;
    int32_t n_open;
    int32_t first_free; /* -1: none */
};

bool ck_sequences_init(struct ck_sequences *sequences, int32_t max_seqs); /* false: out of memory */
void ck_sequences_release(struct ck_sequences *sequences);                /* also of zeroed ones */
size_t ck_sequences_bytes(const struct ck_sequences *sequences);

/* Opens an empty sequence; NULL: all slots are open. Cost: O(1). */
struct ck_sequence *ck_sequences_open(struct ck_sequences *sequences);

/* Frees the slot; the list's cells are no concern of this call. */
void ck_sequences_close(struct ck_sequences *sequences, struct ck_sequence *sequence);

/* The sequence of a handle, or NULL: closed, another cache's or no handle at all. */
struct ck_sequence *ck_sequences_find(const struct ck_sequences *sequences, int64_t handle);

/* ---- one sequence ---- */

/* Makes room for `n` cells in all; false: out of memory, nothing changed. */
bool ck_sequence_make_room(struct ck_sequence *sequence, int64_t n);

/* Gives memory back after the list became much shorter. */
void ck_sequence_shrink(struct ck_sequence *sequence);

/* The index of the first of its cells at a position >= `position`; n if there is none. */
int32_t ck_sequence_search(const struct ck_sequence *sequence, const struct ck_table *table,
                           int64_t position);

/* The largest position of its first `n` cells + 1, or 0. */
int32_t ck_sequence_end(const struct ck_sequence *sequence, const struct ck_table *table,
                        int32_t n);

/* Its next token's position. */
int32_t ck_sequence_next_pos(const struct ck_sequence *sequence, const struct ck_table *table);

#endif
