/* What ck_cells is made of. For this room and its tests only. */
#ifndef CELLKV_CELLS_CELLS_STRUCT_H
#define CELLKV_CELLS_CELLS_STRUCT_H

#include <assert.h>

#include "cells.h"
#include "sequences.h"
#include "sight.h"
#include "table.h"

/* The largest position a token may have: its sequence's next_pos then still has a successor. */
#define CK_LAST_POSITION (INT32_MAX - 2)

enum ck_step_state {
    CK_STEP_NONE,     /* neither declared nor placed, or used up */
    CK_STEP_DECLARED, /* slots are set */
    CK_STEP_PLACED    /* all is set, and nothing has changed since: it can be undone */
};

/* A step's tokens, in order. */
struct ck_step_buffer {
    enum ck_step_state state;
    int32_t n_tokens; /* 0 iff there is no step */
    int32_t room;     /* of each array */
    int32_t *slots;   /* owns the memory of all three */
    int32_t *positions;
    int32_t *cells;
};

/* Scratch of ck_sight_build; see there. */
struct ck_sight_scratch {
    int32_t *group_of_cell; /* [capacity], made on first use; all 0 between calls */
    struct ck_sight_group *groups;
    struct ck_sight_member *members;
    int32_t *pairs;
    int32_t n_groups, n_members, n_pairs;
    int32_t room_groups, room_members, room_pairs;
};

struct ck_cells {
    struct ck_table table;
    struct ck_sequences sequences;
    struct ck_step_buffer step;   /* the declaration, or the placed step */
    struct ck_step_buffer before; /* what `step` was before begin_step; else room for the next */
    bool can_roll_back;           /* `before` is what begin_step found */
    bool is_contiguous;           /* see struct ck_cells_config, */
    int32_t ring;                 /* likewise, */
    int32_t window;               /* and likewise */
    int32_t written;              /* with a ring: see ring.h; 0 when the sequence is empty */
    struct ck_sight_scratch sight;
};

/* Any changing verb, once it is certain to succeed: the declaration and the undo are gone. */
void ck_cells_cancel_step(struct ck_cells *cells);

/* A sequence's claims on cells [first, last) of its list are dropped; returns how many cells became
 * free. The list is left for the caller to close up. */
int32_t ck_cells_let_go(struct ck_cells *cells, const struct ck_sequence *sequence, int32_t first,
                        int32_t last);

/* Whether a sequence may keep just its first `n` cells, which are all it has at positions < pos:
 * CELLKV_OK or CELLKV_ERROR_TRIMMED. */
cellkv_status ck_cells_check_trimmed(const struct ck_cells *cells,
                                     const struct ck_sequence *sequence, int32_t n, int32_t pos);

/* Positions of the sequence below this may be gone. */
int32_t ck_cells_trimmed(const struct ck_cells *cells, const struct ck_sequence *sequence);

/* The list's first `n` cells stay; the claims on the others have been dropped. */
void ck_cells_keep_first(struct ck_cells *cells, struct ck_sequence *sequence, int32_t n);

/* The sequence of a handle, or NULL with the refusal's message recorded. */
struct ck_sequence *ck_cells_find(const struct ck_cells *cells, int64_t handle);

void ck_step_buffer_release(struct ck_step_buffer *buffer);
void ck_sight_scratch_release(struct ck_sight_scratch *scratch);
size_t ck_sight_scratch_bytes(const struct ck_cells *cells);

/* Whether every invariant of the structure holds; prints the one that does not. O(everything). */
bool ck_cells_valid(const struct ck_cells *cells);

/* In builds with CELLKV_CHECKS, and where that is fast: ck_cells_valid after each mutation, sight
 * against its definition after each build. */
#ifdef CELLKV_CHECKS
void ck_cells_check(const struct ck_cells *cells);
void ck_sight_check(const struct ck_sight *sight, const struct ck_cells *cells, int32_t first,
                    int32_t window);
#else
static inline void ck_cells_check(const struct ck_cells *cells) {
    (void)cells;
}
static inline void ck_sight_check(const struct ck_sight *sight, const struct ck_cells *cells,
                                  int32_t first, int32_t window) {
    (void)sight;
    (void)cells;
    (void)first;
    (void)window;
}
#endif

#endif
