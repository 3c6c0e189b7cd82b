/* How sight is found: the step's sequences are the members, each with the range of its list that
 * its queries see. Cells are sorted into groups by which members' ranges they are in, by refining:
 * at first all cells are one group; each member in turn splits every group it meets into what it
 * has of it and what it has not. The groups that are left are the segments. */
#include "sight.h"

#include "cells_struct.h"
#include "error.h"
#include "memory.h"

/* One of the step's sequences. */
struct ck_sight_member {
    int32_t slot;
    int32_t low, high;   /* its queries see positions [low, high] */
    int32_t first, last; /* which are cells [first, last) of its list */
    int32_t first_pair;  /* its segments are pairs [first_pair, first_pair + n_pairs) */
    int32_t n_pairs;
};

/* A set of cells that the same members have. Group 0 is that of all cells that nobody has had yet.
 */
struct ck_sight_group {
    int32_t n_cells;    /* of group 0: minus the cells that have left it */
    int32_t split_by;   /* the last member that split it, */
    int32_t split_into; /* and the group of what that member has of it */
    int32_t segment;    /* what it becomes; -1: not yet */
    int32_t owner;      /* the member whose list gives the segment's order, the first that has it */
    int32_t last_member; /* the last member that was told of the segment */
    int32_t n_listed;    /* cells listed so far */
};

void ck_sight_scratch_release(struct ck_sight_scratch *scratch) {
    ck_free(scratch->group_of_cell);
    ck_free(scratch->groups);
    ck_free(scratch->members);
    ck_free(scratch->pairs);
    *scratch = (struct ck_sight_scratch){0};
}

size_t ck_sight_scratch_bytes(const struct ck_cells *cells) {
    const struct ck_sight_scratch *scratch = &cells->sight;
    size_t n_cells = scratch->group_of_cell ? (size_t)cells->table.capacity : 0;
    return n_cells * sizeof *scratch->group_of_cell +
           (size_t)scratch->room_groups * sizeof *scratch->groups +
           (size_t)scratch->room_members * sizeof *scratch->members +
           (size_t)scratch->room_pairs * sizeof *scratch->pairs;
}

/* ---- members ---- */

static bool add_member(struct ck_sight_scratch *scratch, struct ck_sight_member member) {
    if (!CK_RESERVE(scratch->members, &scratch->room_members, (int64_t)scratch->n_members + 1)) {
        return false;
    }
    scratch->members[scratch->n_members++] = member;
    return true;
}

/* In the order of their first queries. A sequence's `mark` is its member's index + 1 from here
 * until clean_up. */
static bool find_members(struct ck_cells *cells, int32_t first, int32_t n_queries, int32_t window) {
    struct ck_sight_scratch *scratch = &cells->sight;
    for (int32_t i = first; i < first + n_queries; i++) {
        int32_t slot = cells->step.slots[i], position = cells->step.positions[i];
        struct ck_sequence *sequence = &cells->sequences.slots[slot];
        if (sequence->mark == 0) {
            int32_t low = window > 0 && position >= window ? position - window + 1 : 0;
            if (!add_member(scratch, (struct ck_sight_member){.slot = slot, .low = low})) {
                return false;
            }
            sequence->mark = scratch->n_members;
        }
        scratch->members[sequence->mark - 1].high = position;
    }
    for (int32_t k = 0; k < scratch->n_members; k++) {
        struct ck_sight_member *member = &scratch->members[k];
        const struct ck_sequence *sequence = &cells->sequences.slots[member->slot];
        member->first = ck_sequence_search(sequence, &cells->table, member->low);
        member->last = ck_sequence_search(sequence, &cells->table, (int64_t)member->high + 1);
    }
    return true;
}

static const int32_t *list_of(const struct ck_cells *cells, const struct ck_sight_member *member) {
    return cells->sequences.slots[member->slot].cells;
}

/* Scratch is as it was between calls, also where a build broke off. */
static void clean_up(struct ck_cells *cells) {
    struct ck_sight_scratch *scratch = &cells->sight;
    for (int32_t k = 0; k < scratch->n_members; k++) {
        const struct ck_sight_member *member = &scratch->members[k];
        const int32_t *list = list_of(cells, member);
        for (int32_t i = member->first; i < member->last; i++) {
            scratch->group_of_cell[list[i]] = 0;
        }
        cells->sequences.slots[member->slot].mark = 0;
    }
    scratch->n_members = scratch->n_groups = scratch->n_pairs = 0;
}

/* ---- groups ---- */

static bool add_group(struct ck_sight_scratch *scratch) {
    if (!CK_RESERVE(scratch->groups, &scratch->room_groups, (int64_t)scratch->n_groups + 1)) {
        return false;
    }
    scratch->groups[scratch->n_groups++] =
        (struct ck_sight_group){.split_by = -1, .segment = -1, .last_member = -1};
    return true;
}

/* Splits every group by what member k has of it. */
static bool refine(struct ck_cells *cells, int32_t k) {
    struct ck_sight_scratch *scratch = &cells->sight;
    const struct ck_sight_member *member = &scratch->members[k];
    const int32_t *list = list_of(cells, member);
    for (int32_t i = member->first; i < member->last; i++) {
        int32_t *group = &scratch->group_of_cell[list[i]];
        if (scratch->groups[*group].split_by != k) {
            if (!add_group(scratch)) {
                return false;
            }
            scratch->groups[*group].split_by = k;
            scratch->groups[*group].split_into = scratch->n_groups - 1;
        }
        scratch->groups[*group].n_cells--;
        *group = scratch->groups[*group].split_into;
        scratch->groups[*group].n_cells++;
    }
    return true;
}

static bool make_groups(struct ck_cells *cells) {
    struct ck_sight_scratch *scratch = &cells->sight;
    if (!add_group(scratch)) {
        return false;
    }
    for (int32_t k = 0; k < scratch->n_members; k++) {
        if (!refine(cells, k)) {
            return false;
        }
    }
    return true;
}

/* ---- segments ---- */

static bool make_room_for_segments(struct ck_sight *sight, const struct ck_sight_scratch *scratch) {
    int32_t n_cells = -scratch->groups[0].n_cells; /* >= 1: a query sees its own cell */
    return CK_RESERVE(sight->cells, &sight->cap_cells, n_cells) &&
           CK_RESERVE(sight->segments, &sight->cap_segments, scratch->n_groups);
}

static bool add_pair(struct ck_sight_scratch *scratch, struct ck_sight_member *member,
                     int32_t segment) {
    if (!CK_RESERVE(scratch->pairs, &scratch->room_pairs, (int64_t)scratch->n_pairs + 1)) {
        return false;
    }
    scratch->pairs[scratch->n_pairs++] = segment;
    member->n_pairs++;
    return true;
}

/* The group's first cell in the first list that has any: it becomes a segment. */
static void start_segment(struct ck_sight *sight, struct ck_sight_group *group, int32_t k) {
    group->segment = sight->n_segments++;
    group->owner = k;
    sight->segments[group->segment] =
        (struct ck_segment){.first_cell = sight->n_cells, .n_cells = group->n_cells};
    sight->n_cells += group->n_cells;
}

/* Lists what member k is the first to have, and tells k of every segment that it has. Segments come
 * in order of their first member, whose first query sees them all, and then of position. */
static bool list_segments(struct ck_sight *sight, struct ck_cells *cells, int32_t k) {
    struct ck_sight_scratch *scratch = &cells->sight;
    struct ck_sight_member *member = &scratch->members[k];
    const int32_t *list = list_of(cells, member);
    member->first_pair = scratch->n_pairs;
    for (int32_t i = member->first; i < member->last; i++) {
        struct ck_sight_group *group = &scratch->groups[scratch->group_of_cell[list[i]]];
        if (group->segment < 0) {
            start_segment(sight, group, k);
        }
        if (group->owner == k) {
            int32_t first_cell = sight->segments[group->segment].first_cell;
            sight->cells[first_cell + group->n_listed++] = list[i];
        }
        if (group->last_member != k) {
            group->last_member = k;
            if (!add_pair(scratch, member, group->segment)) {
                return false;
            }
        }
    }
    return true;
}

static bool make_segments(struct ck_sight *sight, struct ck_cells *cells) {
    if (!make_room_for_segments(sight, &cells->sight)) {
        return false;
    }
    for (int32_t k = 0; k < cells->sight.n_members; k++) {
        if (!list_segments(sight, cells, k)) {
            return false;
        }
    }
    return true;
}

/* ---- views ---- */

/* How many of the segment's cells, from the start, are at positions < `position`. */
static int32_t count_before(const struct ck_sight *sight, const struct ck_cells *cells,
                            const struct ck_segment *segment, int64_t position) {
    const int32_t *list = sight->cells + segment->first_cell;
    int32_t low = 0, high = segment->n_cells;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (cells->table.positions[list[middle]] < position) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static struct ck_view find_view(const struct ck_sight *sight, const struct ck_cells *cells,
                                const struct ck_segment *segment, int32_t position,
                                int32_t window) {
    struct ck_view view = {.end = count_before(sight, cells, segment, (int64_t)position + 1)};
    if (window > 0) {
        view.begin = count_before(sight, cells, segment, (int64_t)position - window + 1);
    }
    return view;
}

/* What visit_views does with each view that is not empty. */
typedef void (*take_view)(struct ck_sight *sight, struct ck_segment *segment, struct ck_view view);

static void count_view(struct ck_sight *sight, struct ck_segment *segment, struct ck_view view) {
    (void)sight;
    (void)view;
    segment->n_views++;
}

static void store_view(struct ck_sight *sight, struct ck_segment *segment, struct ck_view view) {
    sight->views[segment->first_view + segment->n_views++] = view;
}

/* Visits the views in order of query. */
static void visit_views(struct ck_sight *sight, const struct ck_cells *cells, int32_t first,
                        int32_t window, take_view take) {
    const struct ck_sight_scratch *scratch = &cells->sight;
    for (int32_t query = 0; query < sight->n_queries; query++) {
        int32_t slot = cells->step.slots[first + query];
        int32_t position = cells->step.positions[first + query];
        const struct ck_sight_member *member =
            &scratch->members[cells->sequences.slots[slot].mark - 1];
        for (int32_t i = 0; i < member->n_pairs; i++) {
            struct ck_segment *segment = &sight->segments[scratch->pairs[member->first_pair + i]];
            struct ck_view view = find_view(sight, cells, segment, position, window);
            view.query = query;
            if (view.begin < view.end) {
                take(sight, segment, view);
            }
        }
    }
}

static bool make_views(struct ck_sight *sight, const struct ck_cells *cells, int32_t first,
                       int32_t window) {
    visit_views(sight, cells, first, window, count_view);
    int64_t n_views = 0;
    for (int32_t s = 0; s < sight->n_segments; s++) {
        n_views += sight->segments[s].n_views;
    }
    if (!CK_RESERVE(sight->views, &sight->cap_views, n_views)) {
        return false;
    }
    for (int32_t s = 0; s < sight->n_segments; s++) {
        sight->segments[s].first_view = sight->n_views;
        sight->n_views += sight->segments[s].n_views;
        sight->segments[s].n_views = 0;
    }
    visit_views(sight, cells, first, window, store_view);
    return true;
}

/* ---- the whole ---- */

static bool make_scratch(struct ck_cells *cells) {
    if (!cells->sight.group_of_cell) {
        cells->sight.group_of_cell =
            ck_calloc((size_t)cells->table.capacity, sizeof *cells->sight.group_of_cell);
    }
    return cells->sight.group_of_cell != NULL;
}

cellkv_status ck_sight_build(struct ck_sight *sight, struct ck_cells *cells, int32_t first,
                             int32_t n_queries, int32_t window) {
    assert(cells->step.state == CK_STEP_PLACED && first >= 0 && n_queries >= 1);
    assert(n_queries <= cells->step.n_tokens - first);
    sight->n_queries = n_queries;
    sight->n_segments = sight->n_cells = sight->n_views = 0;
    bool is_made = make_scratch(cells) && find_members(cells, first, n_queries, window) &&
                   make_groups(cells) && make_segments(sight, cells) &&
                   make_views(sight, cells, first, window);
    clean_up(cells);
    if (!is_made) {
        sight->n_queries = sight->n_segments = sight->n_cells = sight->n_views = 0;
        return ck_fail_memory("a step's sight");
    }
    ck_sight_check(sight, cells, first, window);
    return CELLKV_OK;
}

void ck_sight_free(struct ck_sight *sight) {
    ck_free(sight->segments);
    ck_free(sight->cells);
    ck_free(sight->views);
    *sight = (struct ck_sight){0};
}
