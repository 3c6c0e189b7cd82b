/* Which cells are given: blocks of a sequence's own, as far as the rows go. */
#include "cells/cache_object.h"
#include "cells/cells_struct.h"

#include "small_cache.h"

enum { B = CK_BLOCK };

/* A step, in a cache whose storage has so many rows. */
static void step_at(cellkv_cache *cache, const int64_t *seqs, int32_t n, int32_t rows) {
    CHECK_OK(ck_cells_begin_step(cache->cells, seqs, NULL, n, rows));
}

static void extend_at(cellkv_cache *cache, int64_t seq, int32_t n, int32_t rows) {
    int64_t seqs[MAX_TOKENS];
    for (int32_t i = 0; i < n; i++) {
        seqs[i] = seq;
    }
    step_at(cache, seqs, n, rows);
}

static int64_t open_at(cellkv_cache *cache, int32_t n, int32_t rows) {
    int64_t seq = open_sequence(cache);
    extend_at(cache, seq, n, rows);
    return seq;
}

/* The cell of the sequence's token that is `back` before its last. */
static int32_t cell_of(cellkv_cache *cache, int64_t seq, int32_t back) {
    int32_t cells[MAX_TOKENS], length;
    CHECK_OK(cellkv_cache_read_cells(cache, seq, cells, NULL, MAX_TOKENS, &length));
    CHECK(back < length);
    return cells[length - 1 - back];
}

static int32_t last_cell(cellkv_cache *cache, int64_t seq) {
    return cell_of(cache, seq, 0);
}

/* Its last `n` tokens lie side by side from `first` on. */
static void check_run(cellkv_cache *cache, int64_t seq, int32_t first, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        CHECK_EQUAL(cell_of(cache, seq, n - 1 - i), first + i);
    }
}

/* No cell of a block is owned by two of the sequences. */
static void check_apart(cellkv_cache *cache, const int64_t *seqs, int32_t n) {
    int32_t cells[MAX_TOKENS], length, owner_of_block[64] = {0};
    for (int32_t s = 0; s < n; s++) {
        CHECK_OK(cellkv_cache_read_cells(cache, seqs[s], cells, NULL, MAX_TOKENS, &length));
        for (int32_t i = 0; i < length; i++) {
            int32_t *owner = &owner_of_block[cells[i] / B];
            CHECK(*owner == 0 || *owner == s + 1);
            *owner = s + 1;
        }
    }
}

/* What the rows become: doubled until the extent fits. */
static int32_t grown(cellkv_cache *cache, int32_t rows) {
    cellkv_cache_stats stats = stats_of(cache);
    while (rows < stats.extent) {
        rows *= 2;
    }
    return rows < stats.capacity ? rows : stats.capacity;
}

/* ---- beside the last cell, else a block, else anywhere ---- */

static void test_a_token_goes_beside_its_sequences_last(void) {
    const int32_t rows = 4 * B;
    cellkv_cache *cache = new_cache(rows, 3);
    int64_t a = open_at(cache, 10, rows), b = open_at(cache, 1, rows);
    for (int32_t i = 0; i < 20; i++) {
        step_at(cache, (int64_t[]){b, a, b}, 3, rows);
    }
    check_run(cache, a, 0, 30);
    check_run(cache, b, B, 41);
    CHECK_OK(cellkv_cache_rewind(cache, a, 25)); /* a lower cell that is free changes nothing */
    CHECK_OK(cellkv_cache_remove(cache, b, 3, 9));
    step_at(cache, (int64_t[]){b, a}, 2, rows);
    CHECK_EQUAL(last_cell(cache, a), 25);
    CHECK_EQUAL(last_cell(cache, b), B + 41);
    cellkv_cache_free(cache);
}

static void test_a_full_block_is_followed_by_the_next_one_if_that_is_free(void) {
    const int32_t rows = 8 * B;
    cellkv_cache *cache = new_cache(rows, 4);
    int64_t a = open_at(cache, B, rows), b = open_at(cache, B, rows);
    CHECK_OK(cellkv_cache_close(cache, a)); /* block 0 is free, and lower */
    extend_at(cache, b, B + 1, rows);
    check_run(cache, b, B, 2 * B + 1);
    CHECK_EQUAL(last_cell(cache, open_at(cache, 1, rows)), 0);
    cellkv_cache_free(cache);
}

static void test_else_the_lowest_free_block_is_taken(void) {
    const int32_t rows = 8 * B;
    cellkv_cache *cache = new_cache(rows, 8);
    int64_t seqs[5];
    for (int32_t i = 0; i < 5; i++) {
        seqs[i] = open_at(cache, B, rows);
        CHECK_EQUAL(last_cell(cache, seqs[i]), i * B + B - 1);
    }
    CHECK_OK(cellkv_cache_close(cache, seqs[1]));
    extend_at(cache, seqs[2], 1, rows); /* block 3 is not free; 1, 5, 6 and 7 are */
    CHECK_EQUAL(last_cell(cache, seqs[2]), B);
    extend_at(cache, seqs[2], B, rows); /* block 2 is its own, but not free */
    CHECK_EQUAL(last_cell(cache, seqs[2]), 5 * B);
    cellkv_cache_free(cache);
}

static void test_a_free_cell_of_another_sequences_block_is_no_block(void) {
    const int32_t rows = 4 * B;
    cellkv_cache *cache = new_cache(rows, 4);
    int64_t a = open_at(cache, B, rows), b = open_at(cache, 2, rows);
    CHECK_OK(cellkv_cache_remove(cache, b, 0, 1)); /* cell B, right after a's last */
    extend_at(cache, a, 2, rows);
    check_run(cache, a, 2 * B, 2);
    cellkv_cache_free(cache);
}

static void test_a_block_that_another_token_of_the_step_took_is_not_free(void) {
    const int32_t rows = 4 * B;
    cellkv_cache *cache = new_cache(rows, 4);
    int64_t a = open_sequence(cache), b = open_sequence(cache), c = open_sequence(cache);
    step_at(cache, (int64_t[]){c, a, b, a, c}, 5, rows);
    check_run(cache, c, 0, 2);
    check_run(cache, a, B, 2);
    check_run(cache, b, 2 * B, 1);
    cellkv_cache_free(cache);
}

static void test_without_a_free_block_the_lowest_free_cell_is_taken(void) {
    cellkv_cache *cache = new_cache(2 * B, 4);
    int64_t a = open_at(cache, 3, 2 * B), b = open_at(cache, 3, 2 * B), c = open_sequence(cache);
    step_at(cache, (int64_t[]){c, b, c}, 3, 2 * B);
    check_run(cache, c, 3, 2);
    check_run(cache, b, B, 4);
    extend_at(cache, a, 2, 2 * B); /* its next cell is c's */
    check_run(cache, a, 5, 2);
    cellkv_cache_free(cache);
}

static void test_a_block_is_free_again_once_its_last_cell_is(void) {
    const int32_t rows = 2 * B;
    cellkv_cache *cache = new_cache(rows, 4);
    int64_t a = open_at(cache, 2, rows), b = open_at(cache, 2, rows);
    int64_t copy = clone(cache, a, 1);
    CHECK_OK(cellkv_cache_close(cache, a)); /* cell 0 is the clone's, too */
    int64_t c = open_at(cache, 1, rows);
    CHECK_EQUAL(last_cell(cache, c), 1);
    CHECK_OK(cellkv_cache_close(cache, c));
    CHECK_OK(cellkv_cache_close(cache, copy));
    extend_at(cache, b, B - 2, rows);
    extend_at(cache, b, 1, rows);
    CHECK_EQUAL(last_cell(cache, b), 0);
    cellkv_cache_free(cache);
}

static void test_a_clone_goes_on_in_a_block_of_its_own(void) {
    const int32_t rows = 4 * B;
    cellkv_cache *cache = new_cache(rows, 4);
    int64_t a = open_at(cache, 10, rows);
    int64_t whole = clone(cache, a, CELLKV_UNSET), part = clone(cache, a, 4);
    step_at(cache, (int64_t[]){a, whole, part, whole, part}, 5, rows);
    check_run(cache, a, 0, 11);
    check_run(cache, whole, B, 2);
    check_run(cache, part, 2 * B, 2);
    cellkv_cache_free(cache);
}

/* ---- rows do not grow for it ---- */

static void test_no_block_past_the_rows_is_taken_while_cells_below_are_free(void) {
    const int32_t rows = 2 * B;
    cellkv_cache *cache = new_cache(16 * B, 4);
    int64_t seqs[] = {open_at(cache, 1, rows), open_at(cache, 1, rows), open_at(cache, 1, rows)};
    CHECK_EQUAL(last_cell(cache, seqs[2]), 1);
    while (used_cells(cache) + 3 <= rows) {
        step_at(cache, seqs, 3, rows);
    }
    CHECK_EQUAL(used_cells(cache), 510);
    CHECK(stats_of(cache).extent <= rows);
    step_at(cache, seqs, 2, rows); /* to the last one */
    CHECK_EQUAL(stats_of(cache).extent, rows);
    cellkv_cache_free(cache);
}

static void test_a_block_that_the_rows_end_in_is_not_free(void) {
    const int32_t rows = B + 44;
    cellkv_cache *cache = new_cache(16 * B, 4);
    int64_t a = open_at(cache, 1, rows), b = open_at(cache, 1, rows);
    CHECK_EQUAL(last_cell(cache, b), 1);
    extend_at(cache, a, B - 2, rows); /* the lowest free ones, and then */
    check_run(cache, a, 2, B - 2);
    extend_at(cache, a, 44, rows); /* whatever is left */
    check_run(cache, a, B, 44);
    CHECK_EQUAL(stats_of(cache).extent, rows);
    cellkv_cache_free(cache);
}

static void test_where_rows_must_grow_the_step_may_use_what_doubling_them_gives(void) {
    cellkv_cache *cache = new_cache(16 * B, 4);
    int64_t a = open_at(cache, 200, B), b = open_sequence(cache);
    extend_at(cache, b, 56, B); /* fits exactly */
    CHECK_EQUAL(grown(cache, B), B);
    CHECK_OK(cellkv_cache_rewind(cache, b, 0));
    extend_at(cache, b, 57, B);
    check_run(cache, b, B, 57);
    CHECK_EQUAL(grown(cache, B), 2 * B);
    extend_at(cache, a, 1200, 2 * B); /* needs 1457 of them */
    CHECK_EQUAL(grown(cache, 2 * B), 8 * B);
    CHECK_EQUAL(cell_of(cache, a, 1199), 200);
    CHECK_EQUAL(cell_of(cache, a, 1199 - 56), 2 * B);
    cellkv_cache_free(cache);
}

/* Whatever is opened, closed, rewound and extended: the rows are the first rows, doubled until all
 * cells that were ever used at once fit, as they would be with no cell left out. */
static void test_rows_grow_as_if_the_lowest_cells_were_taken(void) {
    enum { CAPACITY = 5000, N_SEQS = 12 };
    for (uint64_t seed = 0; seed < 8; seed++) {
        struct dice dice = {seed};
        cellkv_cache *cache = new_cache(CAPACITY, N_SEQS);
        int64_t seqs[N_SEQS];
        int32_t rows = 1 + (int32_t)roll(&dice, 700), expected = rows;
        for (int32_t s = 0; s < N_SEQS; s++) {
            seqs[s] = open_sequence(cache);
        }
        for (int32_t i = 0; i < 300; i++) {
            int64_t *seq = &seqs[roll(&dice, N_SEQS)];
            int32_t n = 1 + (int32_t)roll(&dice, roll(&dice, 4) ? 300 : 5);
            if (roll(&dice, 3) == 0) {
                CHECK_OK(cellkv_cache_rewind(
                    cache, *seq, (int32_t)roll(&dice, (uint32_t)next_pos_of(cache, *seq) + 1)));
            } else if (n <= CAPACITY - used_cells(cache)) {
                extend_at(cache, *seq, n, rows);
            }
            rows = grown(cache, rows);
            while (expected < used_cells(cache)) {
                expected *= 2;
            }
            CHECK_EQUAL(rows, expected < CAPACITY ? expected : CAPACITY);
        }
        cellkv_cache_free(cache);
    }
}

static void test_every_cell_of_the_capacity_is_given_in_the_end(void) {
    const int32_t capacities[] = {1, 2, 100, B - 1, B, B + 1, 1000, 4 * B};
    for (int32_t i = 0; i < 8; i++) {
        const int32_t capacity = capacities[i];
        cellkv_cache *cache = new_cache(capacity, 5);
        struct dice dice = {(uint64_t)i};
        int64_t seqs[5];
        for (int32_t s = 0; s < 5; s++) {
            seqs[s] = open_sequence(cache);
        }
        for (int32_t rows = 1; used_cells(cache) < capacity; rows = grown(cache, rows)) {
            step_at(cache, &seqs[roll(&dice, 5)], 1, rows);
        }
        CHECK_EQUAL(stats_of(cache).extent, capacity);
        CHECK_REFUSED(ck_cells_begin_step(cache->cells, seqs, NULL, 1, capacity),
                      CELLKV_ERROR_OUT_OF_CELLS, "0 of");
        cellkv_cache_free(cache);
    }
}

static void test_a_last_block_that_capacity_cuts_short_is_a_block(void) {
    const int32_t capacity = 2 * B + 10;
    cellkv_cache *cache = new_cache(capacity, 4);
    open_at(cache, 1, capacity);
    open_at(cache, 1, capacity);
    int64_t c = open_at(cache, 10, capacity);
    check_run(cache, c, 2 * B, 10);
    extend_at(cache, c, 1, capacity);
    CHECK_EQUAL(last_cell(cache, c), 1);
    cellkv_cache_free(cache);
}

/* ---- sequences side by side ---- */

static void test_interleaved_sequences_stay_in_blocks_of_their_own(void) {
    enum { N = 16, LENGTH = 600 };
    const int32_t rows = N * 3 * B;
    cellkv_cache *cache = new_cache(rows, N);
    int64_t seqs[N];
    for (int32_t s = 0; s < N; s++) {
        seqs[s] = open_sequence(cache);
    }
    for (int32_t i = 0; i < LENGTH; i++) {
        step_at(cache, seqs, N, rows);
    }
    check_apart(cache, seqs, N);
    cellkv_cache_free(cache);
}

/* The rows grow as they must, from one block. */
static void test_sequences_that_are_prefilled_and_then_decoded_stay_apart(void) {
    enum { N = 16, LENGTH = 512, N_STEPS = 200 };
    cellkv_cache *cache = new_cache(64 * B, N);
    int64_t seqs[N];
    int32_t rows = B;
    for (int32_t s = 0; s < N; s++) {
        seqs[s] = open_at(cache, LENGTH, rows);
        rows = grown(cache, rows);
    }
    CHECK_EQUAL(rows, N * LENGTH);
    for (int32_t i = 0; i < N_STEPS; i++) {
        step_at(cache, seqs, N, rows);
        rows = grown(cache, rows);
    }
    CHECK_EQUAL(rows, 2 * N * LENGTH);
    check_apart(cache, seqs, N);
    cellkv_cache_free(cache);
}

static void test_cells_alone_have_the_rows_that_doubling_one_gives(void) {
    cellkv_cache *cache = new_cache(16 * B, 4);
    int64_t a = open_with(cache, 200), b = open_with(cache, 50), c = open_with(cache, 50);
    check_run(cache, b, 200, 50);
    check_run(cache, c, B, 50); /* 300 cells need 512 rows */
    extend(cache, a, 1);
    CHECK_EQUAL(last_cell(cache, a), 250);
    CHECK_OK(cellkv_cache_close(cache, b));
    CHECK_OK(cellkv_cache_remove(cache, a, 0, 199)); /* few are left, but c's are past 256 */
    extend(cache, c, 1);
    CHECK_EQUAL(last_cell(cache, c), B + 50);
    cellkv_cache_free(cache);
}

/* ---- the same again ---- */

/* Two sequences at the ends of their blocks, a third that has none, and rows that have to grow. */
struct scene {
    cellkv_cache *cache;
    int64_t seqs[3];
    int64_t step[200];
    int32_t rows;
};

enum { N_STEP = 200 };

static struct scene new_scene(void) {
    struct scene scene = {.cache = new_cache(16 * B, 4), .rows = 2 * B};
    scene.seqs[0] = open_at(scene.cache, B - 3, scene.rows);
    scene.seqs[1] = open_at(scene.cache, B - 50, scene.rows);
    scene.seqs[2] = open_sequence(scene.cache);
    for (int32_t i = 0; i < N_STEP; i++) {
        scene.step[i] = scene.seqs[i % 3];
    }
    return scene;
}

static void place_scene(struct scene *scene, int32_t *cells) {
    step_at(scene->cache, scene->step, N_STEP, scene->rows);
    memcpy(cells, ck_cells_step(scene->cache->cells).cells, N_STEP * sizeof *cells);
}

static void test_an_undone_step_takes_the_same_cells_again(void) {
    for (int32_t n_keep = 0; n_keep < N_STEP; n_keep += 33) {
        struct scene scene = new_scene();
        int32_t cells[N_STEP];
        place_scene(&scene, cells);
        CHECK_EQUAL(grown(scene.cache, scene.rows), 4 * B);
        scene.rows = grown(scene.cache, scene.rows); /* they stay, whatever is undone */
        CHECK_OK(cellkv_cache_undo_step(scene.cache, n_keep));
        step_at(scene.cache, scene.step + n_keep, N_STEP - n_keep, scene.rows);
        const int32_t *again = ck_cells_step(scene.cache->cells).cells;
        CHECK(memcmp(again, cells + n_keep, (size_t)(N_STEP - n_keep) * sizeof *cells) == 0);
        cellkv_cache_free(scene.cache);
    }
}

static void test_a_step_that_was_rolled_back_takes_the_same_cells_again(void) {
    for (int32_t grows = 0; grows < 2; grows++) { /* did the rows grow before the failure? */
        struct scene scene = new_scene();
        int32_t cells[N_STEP], again[N_STEP], n_free = stats_of(scene.cache).free_cells;
        place_scene(&scene, cells);
        scene.rows = grows ? grown(scene.cache, scene.rows) : scene.rows;
        ck_cells_rollback_step(scene.cache->cells);
        CHECK_EQUAL(stats_of(scene.cache).free_cells, n_free);
        CHECK(ck_cells_valid(scene.cache->cells));
        place_scene(&scene, again);
        CHECK(memcmp(again, cells, sizeof cells) == 0);
        cellkv_cache_free(scene.cache);
    }
}

static void test_a_refused_step_leaves_every_cell_free(void) {
    struct scene scene = new_scene(), other = new_scene();
    int32_t cells[N_STEP], expected[N_STEP], positions[N_STEP] = {B - 3, B - 50, 0, 7};
    CHECK_REFUSED(
        ck_cells_begin_step(scene.cache->cells, scene.step, positions, N_STEP, scene.rows),
        CELLKV_ERROR_BAD_POSITION, "token 3 ");
    CHECK(ck_cells_valid(scene.cache->cells));
    place_scene(&scene, cells);
    place_scene(&other, expected);
    CHECK(memcmp(cells, expected, sizeof cells) == 0);
    cellkv_cache_free(scene.cache);
    cellkv_cache_free(other.cache);
}

int main(void) {
    RUN(test_a_token_goes_beside_its_sequences_last);
    RUN(test_a_full_block_is_followed_by_the_next_one_if_that_is_free);
    RUN(test_else_the_lowest_free_block_is_taken);
    RUN(test_a_free_cell_of_another_sequences_block_is_no_block);
    RUN(test_a_block_that_another_token_of_the_step_took_is_not_free);
    RUN(test_without_a_free_block_the_lowest_free_cell_is_taken);
    RUN(test_a_block_is_free_again_once_its_last_cell_is);
    RUN(test_a_clone_goes_on_in_a_block_of_its_own);
    RUN(test_no_block_past_the_rows_is_taken_while_cells_below_are_free);
    RUN(test_a_block_that_the_rows_end_in_is_not_free);
    RUN(test_where_rows_must_grow_the_step_may_use_what_doubling_them_gives);
    RUN(test_rows_grow_as_if_the_lowest_cells_were_taken);
    RUN(test_every_cell_of_the_capacity_is_given_in_the_end);
    RUN(test_a_last_block_that_capacity_cuts_short_is_a_block);
    RUN(test_interleaved_sequences_stay_in_blocks_of_their_own);
    RUN(test_sequences_that_are_prefilled_and_then_decoded_stay_apart);
    RUN(test_cells_alone_have_the_rows_that_doubling_one_gives);
    RUN(test_an_undone_step_takes_the_same_cells_again);
    RUN(test_a_step_that_was_rolled_back_takes_the_same_cells_again);
    RUN(test_a_refused_step_leaves_every_cell_free);
    return 0;
}
