#include "sequences.h"

#include <assert.h>

#include <cellkv/cache.h>

#include "memory.h"
#include "registry.h"

enum { SLOT_BITS = 16, SLOT_MASK = (1 << SLOT_BITS) - 1 };

/* Lists grow by a 32nd: their slack is what is paid beyond 4 bytes for each of a sequence's cells.
 * A grown cell costs 32 moved indices then, and that only if the block has to move. */
enum { SMALLEST_HEADROOM = 16, HEADROOM_SHARE = 32 };

bool ck_sequences_init(struct ck_sequences *sequences, int32_t max_seqs) {
    assert(max_seqs >= 1 && max_seqs <= CELLKV_MAX_SEQS);
    *sequences = (struct ck_sequences){.max_seqs = max_seqs, .first_free = -1};
    sequences->slots = ck_calloc((size_t)max_seqs, sizeof *sequences->slots);
    return sequences->slots != NULL;
}

void ck_sequences_release(struct ck_sequences *sequences) {
    for (int32_t slot = 0; slot < sequences->n_touched; slot++) {
        ck_free(sequences->slots[slot].cells);
    }
    ck_free(sequences->slots);
    *sequences = (struct ck_sequences){.first_free = -1};
}

size_t ck_sequences_bytes(const struct ck_sequences *sequences) {
    size_t bytes = (size_t)sequences->max_seqs * sizeof *sequences->slots;
    for (int32_t slot = 0; slot < sequences->n_touched; slot++) {
        bytes += (size_t)sequences->slots[slot].room * sizeof(int32_t);
    }
    return bytes;
}

struct ck_sequence *ck_sequences_open(struct ck_sequences *sequences) {
    int32_t slot = sequences->first_free;
    if (slot >= 0) {
        sequences->first_free = sequences->slots[slot].next_free;
    } else if (sequences->n_touched < sequences->max_seqs) {
        slot = sequences->n_touched++;
    } else {
        return NULL;
    }
    sequences->n_open++;
    struct ck_sequence *sequence = &sequences->slots[slot];
    *sequence = (struct ck_sequence){.handle = ck_registry_next_serial() << SLOT_BITS | slot};
    return sequence;
}

void ck_sequences_close(struct ck_sequences *sequences, struct ck_sequence *sequence) {
    ck_free(sequence->cells);
    *sequence = (struct ck_sequence){.next_free = sequences->first_free};
    sequences->first_free = (int32_t)(sequence - sequences->slots);
    sequences->n_open--;
}

struct ck_sequence *ck_sequences_find(const struct ck_sequences *sequences, int64_t handle) {
    int32_t slot = (int32_t)(handle & SLOT_MASK);
    if (handle <= 0 || slot >= sequences->n_touched) {
        return NULL;
    }
    struct ck_sequence *sequence = &sequences->slots[slot];
    return sequence->handle == handle ? sequence : NULL;
}

static int64_t headroom(int64_t n) {
    int64_t share = n / HEADROOM_SHARE;
    return share > SMALLEST_HEADROOM ? share : SMALLEST_HEADROOM;
}

static bool set_room(struct ck_sequence *sequence, int64_t room) {
    int32_t *cells = ck_realloc_array(sequence->cells, (size_t)room, sizeof *cells);
    if (!cells) {
        return false;
    }
    sequence->cells = cells;
    sequence->room = (int32_t)room;
    return true;
}

bool ck_sequence_make_room(struct ck_sequence *sequence, int64_t n) {
    return n <= sequence->room || set_room(sequence, n + headroom(n));
}

void ck_sequence_shrink(struct ck_sequence *sequence) {
    int64_t room = sequence->n + headroom(sequence->n);
    if (sequence->room > 2 * room) {
        (void)set_room(sequence, room); /* a refusal leaves the larger block, which serves */
    }
}

int32_t ck_sequence_search(const struct ck_sequence *sequence, const struct ck_table *table,
                           int64_t position) {
    int32_t low = 0, high = sequence->n;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (table->positions[sequence->cells[middle]] < position) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

int32_t ck_sequence_end(const struct ck_sequence *sequence, const struct ck_table *table,
                        int32_t n) {
    return n > 0 ? table->positions[sequence->cells[n - 1]] + 1 : 0;
}

int32_t ck_sequence_next_pos(const struct ck_sequence *sequence, const struct ck_table *table) {
    return ck_sequence_end(sequence, table, sequence->n);
}
