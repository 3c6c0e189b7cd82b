/* Sight against its definition, on hand-made and on random histories. */
#include "cells/cache_object.h"
#include "cells/cells_struct.h"
#include "cells/sight.h"

#include "small_cache.h"

enum { CAPACITY = 192, MAX_OPEN = 12 };

/* What every sequence owns, read through the public calls: position of each cell, or -1. */
struct ownership {
    int32_t n_seqs;
    int64_t seqs[MAX_OPEN];
    int32_t slots[MAX_OPEN];
    int32_t position[MAX_OPEN][CAPACITY];
};

static void read_ownership(cellkv_cache *cache, const int64_t *seqs, int32_t n_seqs,
                           struct ownership *ownership) {
    ownership->n_seqs = n_seqs;
    for (int32_t s = 0; s < n_seqs; s++) {
        int32_t cells[CAPACITY], positions[CAPACITY], length = 0;
        CHECK_OK(cellkv_cache_read_cells(cache, seqs[s], cells, positions, CAPACITY, &length));
        ownership->seqs[s] = seqs[s];
        ownership->slots[s] = (int32_t)(seqs[s] & 0xffff);
        for (int32_t cell = 0; cell < CAPACITY; cell++) {
            ownership->position[s][cell] = -1;
        }
        for (int32_t i = 0; i < length; i++) {
            ownership->position[s][cells[i]] = positions[i];
        }
    }
}

static int32_t find_slot(const struct ownership *ownership, int32_t slot) {
    for (int32_t s = 0; s < ownership->n_seqs; s++) {
        if (ownership->slots[s] == slot) {
            return s;
        }
    }
    CHECK(!"the slot is open");
    return -1;
}

/* The definition: cell j is seen by query i iff they share a sequence and its position is in reach.
 * A step's cell belongs to its token's sequence only, so sharing is being owned by that sequence.
 */
static bool sees(const struct ownership *ownership, int32_t slot, int32_t position, int32_t cell,
                 int32_t window) {
    int32_t at = ownership->position[find_slot(ownership, slot)][cell];
    return at >= 0 && at <= position && (window == 0 || (int64_t)at > (int64_t)position - window);
}

/* Every (query, cell) pair is shown exactly as often as it should be: once or never. */
static void check_against_definition(const struct ck_sight *sight, struct ck_step step,
                                     const struct ownership *ownership, int32_t first,
                                     int32_t window) {
    static uint8_t shown[CAPACITY][CAPACITY]; /* [query][cell] */
    memset(shown, 0, sizeof shown);
    for (int32_t s = 0; s < sight->n_segments; s++) {
        const struct ck_segment *segment = &sight->segments[s];
        for (int32_t v = 0; v < segment->n_views; v++) {
            const struct ck_view *view = &sight->views[segment->first_view + v];
            for (int32_t i = view->begin; i < view->end; i++) {
                shown[view->query][sight->cells[segment->first_cell + i]]++;
            }
        }
    }
    for (int32_t query = 0; query < sight->n_queries; query++) {
        int32_t slot = step.slots[first + query], position = step.positions[first + query];
        for (int32_t cell = 0; cell < CAPACITY; cell++) {
            CHECK_EQUAL(shown[query][cell], sees(ownership, slot, position, cell, window));
        }
    }
}

static int32_t position_of(const struct ck_cells *cells, int32_t cell) {
    return cells->table.positions[cell];
}

static void check_segment_shape(const struct ck_sight *sight, const struct ck_cells *cells,
                                const struct ck_segment *segment) {
    CHECK(segment->n_cells >= 1 && segment->n_views >= 1);
    const int32_t *list = sight->cells + segment->first_cell;
    for (int32_t i = 1; i < segment->n_cells; i++) {
        CHECK(position_of(cells, list[i - 1]) < position_of(cells, list[i]));
    }
    const struct ck_view *views = sight->views + segment->first_view;
    for (int32_t v = 0; v < segment->n_views; v++) {
        CHECK(views[v].query >= 0 && views[v].query < sight->n_queries);
        CHECK(v == 0 || views[v - 1].query < views[v].query);
        CHECK(views[v].begin >= 0 && views[v].begin < views[v].end);
        CHECK(views[v].end <= segment->n_cells);
    }
}

/* Segments come by the first query that sees them, then by position, one after the other. */
static void check_order(const struct ck_sight *sight, const struct ck_cells *cells) {
    int32_t n_cells = 0, n_views = 0;
    for (int32_t s = 0; s < sight->n_segments; s++) {
        const struct ck_segment *segment = &sight->segments[s];
        CHECK_EQUAL(segment->first_cell, n_cells);
        CHECK_EQUAL(segment->first_view, n_views);
        n_cells += segment->n_cells;
        n_views += segment->n_views;
        if (s > 0) {
            const struct ck_segment *previous = segment - 1;
            int32_t before = sight->views[previous->first_view].query;
            int32_t now = sight->views[segment->first_view].query;
            CHECK(before <= now);
            CHECK(before < now || position_of(cells, sight->cells[previous->first_cell]) <
                                      position_of(cells, sight->cells[segment->first_cell]));
        }
    }
    CHECK_EQUAL(sight->n_cells, n_cells);
    CHECK_EQUAL(sight->n_views, n_views);
}

/* Each cell is listed once, and is seen by somebody. */
static void check_each_cell_once(const struct ck_sight *sight) {
    bool listed[CAPACITY] = {false};
    for (int32_t i = 0; i < sight->n_cells; i++) {
        CHECK(!listed[sight->cells[i]]);
        listed[sight->cells[i]] = true;
    }
    for (int32_t s = 0; s < sight->n_segments; s++) {
        const struct ck_segment *segment = &sight->segments[s];
        for (int32_t i = 0; i < segment->n_cells; i++) {
            bool is_seen = false;
            for (int32_t v = 0; v < segment->n_views; v++) {
                const struct ck_view *view = &sight->views[segment->first_view + v];
                is_seen = is_seen || (i >= view->begin && i < view->end);
            }
            CHECK(is_seen);
        }
    }
}

/* No two segments could be one: the sequences that see them differ. */
static void check_segments_differ(const struct ck_sight *sight, struct ck_step step,
                                  const struct ownership *ownership, int32_t first) {
    uint32_t viewers[CAPACITY] = {0};
    for (int32_t s = 0; s < sight->n_segments; s++) {
        const struct ck_segment *segment = &sight->segments[s];
        for (int32_t v = 0; v < segment->n_views; v++) {
            int32_t query = sight->views[segment->first_view + v].query;
            viewers[s] |= 1U << find_slot(ownership, step.slots[first + query]);
        }
        for (int32_t earlier = 0; earlier < s; earlier++) {
            CHECK(viewers[earlier] != viewers[s]);
        }
    }
}

static void check_sight(struct ck_sight *sight, cellkv_cache *cache, const int64_t *seqs,
                        int32_t n_seqs, int32_t first, int32_t n_queries, int32_t window) {
    static struct ownership ownership;
    read_ownership(cache, seqs, n_seqs, &ownership);
    CHECK_OK(ck_sight_build(sight, cache->cells, first, n_queries, window));
    CHECK_EQUAL(sight->n_queries, n_queries);
    struct ck_step step = ck_cells_step(cache->cells);
    check_against_definition(sight, step, &ownership, first, window);
    for (int32_t s = 0; s < sight->n_segments; s++) {
        check_segment_shape(sight, cache->cells, &sight->segments[s]);
    }
    check_order(sight, cache->cells);
    check_each_cell_once(sight);
    check_segments_differ(sight, step, &ownership, first);
    CHECK(ck_cells_valid(cache->cells)); /* the scratch is clean again */
}

static void place(cellkv_cache *cache, const int64_t *seqs, int32_t n) {
    CHECK_OK(ck_cells_begin_step(cache->cells, seqs, NULL, n, 0));
}

/* ---- hand-made ---- */

static void check_segment(const struct ck_sight *sight, int32_t s, int32_t n_cells,
                          int32_t n_views) {
    CHECK_EQUAL(sight->segments[s].n_cells, n_cells);
    CHECK_EQUAL(sight->segments[s].n_views, n_views);
}

static void test_separate_sequences_are_separate_segments(void) {
    cellkv_cache *cache = new_cache(CAPACITY, MAX_OPEN);
    int64_t seqs[] = {open_with(cache, 5), open_with(cache, 3), open_with(cache, 9)};
    struct ck_sight sight = {0};
    place(cache, (int64_t[]){seqs[1], seqs[0]}, 2); /* the third takes no part */
    check_sight(&sight, cache, seqs, 3, 0, 2, 0);
    CHECK_EQUAL(sight.n_segments, 2);
    check_segment(&sight, 0, 4, 1);
    check_segment(&sight, 1, 6, 1);
    ck_sight_free(&sight);
    cellkv_cache_free(cache);
}

static void test_prefill_is_one_segment_with_a_view_for_each_query(void) {
    cellkv_cache *cache = new_cache(CAPACITY, MAX_OPEN);
    int64_t seq = open_with(cache, 5);
    struct ck_sight sight = {0};
    place(cache, (int64_t[]){seq, seq, seq}, 3);
    check_sight(&sight, cache, &seq, 1, 0, 3, 0);
    CHECK_EQUAL(sight.n_segments, 1);
    check_segment(&sight, 0, 8, 3);
    for (int32_t i = 0; i < 3; i++) {
        CHECK_EQUAL(sight.views[i].begin, 0);
        CHECK_EQUAL(sight.views[i].end, 6 + i);
    }
    ck_sight_free(&sight);
    cellkv_cache_free(cache);
}

static void test_clones_share_the_segment_of_their_common_prefix(void) {
    cellkv_cache *cache = new_cache(CAPACITY, MAX_OPEN);
    int64_t seqs[9] = {open_with(cache, 20)};
    for (int i = 1; i < 9; i++) {
        seqs[i] = clone(cache, seqs[0], CELLKV_UNSET);
    }
    struct ck_sight sight = {0};
    place(cache, seqs + 1, 8);
    check_sight(&sight, cache, seqs, 9, 0, 8, 0);
    CHECK_EQUAL(sight.n_segments, 9);
    check_segment(&sight, 0, 20, 8); /* the prefix, seen by all */
    for (int s = 1; s < 9; s++) {
        check_segment(&sight, s, 1, 1); /* and each one's own token */
    }
    ck_sight_free(&sight);
    cellkv_cache_free(cache);
}

static void test_window_hides_cells_and_whole_segments(void) {
    cellkv_cache *cache = new_cache(CAPACITY, MAX_OPEN);
    int64_t seqs[] = {open_with(cache, 20), 0};
    seqs[1] = clone(cache, seqs[0], 10);
    struct ck_sight sight = {0};
    place(cache, seqs, 2);
    check_sight(&sight, cache, seqs, 2, 0, 2, 4);
    CHECK_EQUAL(sight.n_segments, 2);
    check_segment(&sight, 0, 4, 1); /* 17 .. 20 */
    check_segment(&sight, 1, 4, 1); /* 7 .. 10: the source owns 7 .. 9, but does not see them */
    ck_sight_free(&sight);
    cellkv_cache_free(cache);
}

static void test_prefill_wider_than_the_window_slides_within_itself(void) {
    cellkv_cache *cache = new_cache(CAPACITY, MAX_OPEN);
    int64_t seq = open_sequence(cache), step[30];
    for (int i = 0; i < 30; i++) {
        step[i] = seq;
    }
    struct ck_sight sight = {0};
    place(cache, step, 30);
    for (int32_t window = 1; window <= 31; window++) {
        check_sight(&sight, cache, &seq, 1, 0, 30, window);
        CHECK_EQUAL(sight.n_segments, 1);
    }
    ck_sight_free(&sight);
    cellkv_cache_free(cache);
}

static void test_slice_does_not_see_the_tokens_of_later_slices(void) {
    cellkv_cache *cache = new_cache(CAPACITY, MAX_OPEN);
    int64_t seqs[] = {open_with(cache, 3), open_with(cache, 2)}, step[12];
    for (int i = 0; i < 12; i++) {
        step[i] = seqs[i % 3 == 0];
    }
    struct ck_sight sight = {0};
    place(cache, step, 12);
    for (int32_t first = 0; first < 12; first += 4) {
        check_sight(&sight, cache, seqs, 2, first, 4, 0);
        check_sight(&sight, cache, seqs, 2, first, 4, 2);
    }
    ck_sight_free(&sight);
    cellkv_cache_free(cache);
}

static void test_holes_are_not_seen_and_later_cells_stay_in_order(void) {
    cellkv_cache *cache = new_cache(CAPACITY, MAX_OPEN);
    int64_t seqs[] = {open_with(cache, 12), 0};
    seqs[1] = clone(cache, seqs[0], CELLKV_UNSET);
    CHECK_OK(cellkv_cache_remove(cache, seqs[0], 2, 4));
    CHECK_OK(cellkv_cache_remove(cache, seqs[1], 6, 9));
    extend(cache, seqs[0], 3); /* shared runs are now 0..1, 4..5 and 9..11 */
    struct ck_sight sight = {0};
    place(cache, seqs, 2);
    check_sight(&sight, cache, seqs, 2, 0, 2, 0);
    CHECK_EQUAL(sight.n_segments, 3);
    check_segment(&sight, 0, 7, 2);
    check_segment(&sight, 1, 3 + 4, 1);
    check_segment(&sight, 2, 2 + 1, 1);
    ck_sight_free(&sight);
    cellkv_cache_free(cache);
}

static void test_same_history_gives_the_same_sight(void) {
    struct ck_sight sights[2] = {{0}, {0}};
    for (int i = 0; i < 2; i++) {
        cellkv_cache *cache = new_cache(CAPACITY, MAX_OPEN);
        int64_t seqs[] = {open_with(cache, 12), 0, 0};
        seqs[1] = clone(cache, seqs[0], 7);
        seqs[2] = clone(cache, seqs[1], 3);
        extend(cache, seqs[1], 4);
        place(cache, seqs, 3);
        CHECK_OK(ck_sight_build(&sights[i], cache->cells, 0, 3, 9));
        cellkv_cache_free(cache);
    }
    CHECK_EQUAL(sights[0].n_segments, sights[1].n_segments);
    CHECK_EQUAL(sights[0].n_cells, sights[1].n_cells);
    CHECK_EQUAL(sights[0].n_views, sights[1].n_views);
    CHECK(memcmp(sights[0].cells, sights[1].cells, (size_t)sights[0].n_cells * sizeof(int32_t)) ==
          0);
    CHECK(memcmp(sights[0].views, sights[1].views,
                 (size_t)sights[0].n_views * sizeof(struct ck_view)) == 0);
    ck_sight_free(&sights[0]);
    ck_sight_free(&sights[1]);
}

/* ---- random ---- */

struct world {
    cellkv_cache *cache;
    struct dice dice;
    int64_t seqs[MAX_OPEN];
    int32_t n_seqs;
};

static int64_t any(struct world *world) {
    return world->seqs[roll(&world->dice, (uint32_t)world->n_seqs)];
}

static int32_t up_to(struct world *world, int32_t most) {
    return (int32_t)roll(&world->dice, (uint32_t)most + 1);
}

static void change_something(struct world *world) {
    cellkv_cache *cache = world->cache;
    int64_t seq = any(world);
    int32_t end = next_pos_of(cache, seq), p0 = up_to(world, end), p1 = p0 + up_to(world, end - p0);
    switch (roll(&world->dice, 8)) {
    case 0:
    case 1:
    case 2:
        if (world->n_seqs < MAX_OPEN) {
            world->seqs[world->n_seqs++] = clone(cache, seq, roll(&world->dice, 2) ? end : p0);
        }
        break;
    case 3:
        if (world->n_seqs < MAX_OPEN) {
            world->seqs[world->n_seqs++] = open_sequence(cache);
        }
        break;
    case 4:
        CHECK_OK(cellkv_cache_rewind(cache, seq, end - up_to(world, end - p0)));
        break;
    case 5:
    case 6:
        CHECK_OK(cellkv_cache_remove(cache, seq, p0, p1 < p0 + 6 ? p1 : p0 + 6));
        break;
    default:
        if (world->n_seqs > 2) {
            CHECK_OK(cellkv_cache_close(cache, seq));
            for (int32_t s = 0; s < world->n_seqs; s++) {
                if (world->seqs[s] == seq) {
                    world->seqs[s] = world->seqs[--world->n_seqs];
                }
            }
        }
    }
}

/* A step of up to 24 tokens; where they do not fit, the longest sequence makes room. */
static int32_t place_something(struct world *world) {
    int64_t step[24], focus = any(world);
    int32_t n = 1 + up_to(world, 23);
    bool is_mixed = roll(&world->dice, 3) > 0;
    for (int32_t i = 0; i < n; i++) {
        step[i] = is_mixed ? any(world) : focus;
    }
    while (stats_of(world->cache).free_cells < n) {
        int32_t longest = 0;
        for (int32_t s = 1; s < world->n_seqs; s++) {
            if (length_of(world->cache, world->seqs[s]) >
                length_of(world->cache, world->seqs[longest])) {
                longest = s;
            }
        }
        CHECK_OK(cellkv_cache_rewind(world->cache, world->seqs[longest], 0));
    }
    place(world->cache, step, n);
    return n;
}

static void look_in_every_way(struct world *world, struct ck_sight *sight, int32_t n_tokens) {
    const int32_t windows[] = {0, 1, 2, 3, 7, 16, 64, INT32_MAX};
    for (size_t w = 0; w < sizeof windows / sizeof *windows; w++) {
        check_sight(sight, world->cache, world->seqs, world->n_seqs, 0, n_tokens, windows[w]);
        int32_t first = up_to(world, n_tokens - 1);
        check_sight(sight, world->cache, world->seqs, world->n_seqs, first,
                    1 + up_to(world, n_tokens - first - 1), windows[w]);
    }
}

static void test_random_histories_match_the_definition(void) {
    struct ck_sight sight = {0};
    int64_t most_segments = 0;
    for (uint64_t seed = 0; seed < 40; seed++) {
        struct world world = {.cache = new_cache(CAPACITY, MAX_OPEN), .dice = {seed}};
        world.seqs[world.n_seqs++] = open_sequence(world.cache);
        for (int round = 0; round < 25; round++) {
            for (uint32_t i = roll(&world.dice, 5); i > 0; i--) {
                change_something(&world);
            }
            look_in_every_way(&world, &sight, place_something(&world));
            most_segments = sight.n_segments > most_segments ? sight.n_segments : most_segments;
        }
        cellkv_cache_free(world.cache);
    }
    CHECK(most_segments > MAX_OPEN); /* the histories are rich enough to split segments */
    ck_sight_free(&sight);
}

int main(void) {
    RUN(test_separate_sequences_are_separate_segments);
    RUN(test_prefill_is_one_segment_with_a_view_for_each_query);
    RUN(test_clones_share_the_segment_of_their_common_prefix);
    RUN(test_window_hides_cells_and_whole_segments);
    RUN(test_prefill_wider_than_the_window_slides_within_itself);
    RUN(test_slice_does_not_see_the_tokens_of_later_slices);
    RUN(test_holes_are_not_seen_and_later_cells_stay_in_order);
    RUN(test_same_history_gives_the_same_sight);
    RUN(test_random_histories_match_the_definition);
    return 0;
}
