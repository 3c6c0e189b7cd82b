/* Layouts: every cell that a query sees is open to it in its piece's mask, once, and no other; and
 * pieces are made where they are cheaper than one call, no more. */
#include "attention/layout.h"
#include "cells/cache_object.h"
#include "cells/memory.h"
#include "small_cache.h"
#include "storage/storage.h"

enum {
    BLOCK = CK_ROW_PADDING,
    MAX_BLOCKS = 40,
    MAX_ROWS = MAX_BLOCKS * BLOCK,
    MAX_SEGMENTS = 12,
    MAX_QUERIES = CK_MAX_LAYOUT_PIECES + 1,
    MAX_OPEN = 20,
    IS_SEEN = 0,
};

/* A sight with room for its arrays. */
struct example {
    struct ck_sight sight;
    struct ck_segment segments[MAX_SEGMENTS];
    struct ck_view views[MAX_SEGMENTS * MAX_QUERIES];
    int32_t cells[MAX_ROWS];
};

static struct example example;

static void start_example(int32_t n_queries) {
    example.sight = (struct ck_sight){.n_queries = n_queries,
                                      .segments = example.segments,
                                      .views = example.views,
                                      .cells = example.cells};
}

static void add_segment(void) {
    struct ck_sight *sight = &example.sight;
    CHECK(sight->n_segments < MAX_SEGMENTS);
    sight->segments[sight->n_segments++] =
        (struct ck_segment){.first_cell = sight->n_cells, .first_view = sight->n_views};
}

static void add_cells(int32_t first_row, int32_t n) {
    struct ck_sight *sight = &example.sight;
    for (int32_t i = 0; i < n; i++) {
        sight->cells[sight->n_cells++] = first_row + i;
    }
    sight->segments[sight->n_segments - 1].n_cells += n;
}

static void add_view(int32_t query, int32_t begin, int32_t end) {
    struct ck_sight *sight = &example.sight;
    sight->views[sight->n_views++] = (struct ck_view){query, begin, end};
    sight->segments[sight->n_segments - 1].n_views++;
}

static void see_all(int32_t query) {
    add_view(query, 0, example.sight.segments[example.sight.n_segments - 1].n_cells);
}

/* One query that sees these rows. */
static void add_sequence(int32_t query, int32_t first_row, int32_t n) {
    add_segment();
    add_cells(first_row, n);
    see_all(query);
}

/* Segments of random runs of rows, none twice; each query sees one of the first segments, and
 * perhaps something of others. */
static int32_t make_random_example(struct dice *dice) {
    static bool taken[MAX_BLOCKS * 4]; /* quarters of blocks */
    const int32_t n_queries = 1 + (int32_t)roll(dice, 150);
    const uint32_t n_segments = 1 + roll(dice, MAX_SEGMENTS);
    const uint32_t n_quarters = MAX_SEGMENTS * 2 + roll(dice, MAX_BLOCKS * 4 - MAX_SEGMENTS * 2);
    memset(taken, 0, sizeof taken);
    start_example(n_queries);
    for (uint32_t s = 0; s < n_segments; s++) {
        add_segment();
        const uint32_t wanted = 1 + roll(dice, n_quarters / n_segments);
        for (uint32_t at = roll(dice, n_quarters), tried = 0, n = 0;
             n == 0 || (n < wanted && tried < n_quarters); tried++) {
            at = roll(dice, 8) == 0 ? roll(dice, n_quarters) : (at + 1) % n_quarters;
            if (!taken[at]) {
                taken[at] = true;
                const int32_t skipped = (int32_t)roll(dice, BLOCK / 4);
                add_cells((int32_t)at * BLOCK / 4 + skipped, BLOCK / 4 - skipped);
                n++;
            }
        }
        const uint32_t n_cells = (uint32_t)example.sight.segments[s].n_cells;
        const uint32_t own = (uint32_t)n_queries * s / n_segments;
        const uint32_t end = (uint32_t)n_queries * (s + 1) / n_segments;
        for (uint32_t q = 0; q < (uint32_t)n_queries; q++) {
            if ((q >= own && q < end) || roll(dice, 20) == 0 || (q == 0 && own == end)) {
                const uint32_t begin = roll(dice, 2) == 0 ? 0 : roll(dice, n_cells);
                add_view((int32_t)q, (int32_t)begin,
                         (int32_t)(begin + 1 + roll(dice, n_cells - begin)));
            }
        }
    }
    return ((int32_t)n_quarters + 3) / 4 * BLOCK;
}

/* ---- against the definition ---- */

static void check_shape(const struct ck_layout *layout, int32_t n_queries, int32_t extent) {
    int32_t n_done = 0, n_runs = 0;
    int64_t mask_size = 0;
    CHECK(layout->n_pieces >= 1 && layout->n_pieces <= CK_MAX_LAYOUT_PIECES);
    CHECK(layout->n_runs <= CK_MAX_LAYOUT_RUNS);
    CHECK_EQUAL(layout->n_queries, n_queries);
    for (int32_t p = 0; p < layout->n_pieces; p++) {
        const struct ck_layout_piece *piece = &layout->pieces[p];
        CHECK_EQUAL(piece->first_query, n_done);
        CHECK_EQUAL(piece->first_run, n_runs);
        CHECK_EQUAL(piece->mask_offset, mask_size);
        CHECK(piece->n_queries >= 1 && piece->n_runs >= 1);
        int32_t n_rows = 0;
        for (int32_t r = n_runs; r < n_runs + piece->n_runs; r++) {
            const struct ck_row_run *run = &layout->runs[r];
            CHECK_EQUAL(run->first_column, n_rows);
            CHECK(run->first_row >= 0 && run->first_row % BLOCK == 0);
            CHECK(run->n_rows > 0 && run->n_rows % BLOCK == 0);
            CHECK(run->first_row + run->n_rows <= extent);
            CHECK(r == n_runs || run->first_row > run[-1].first_row + run[-1].n_rows);
            n_rows += run->n_rows;
        }
        CHECK_EQUAL(piece->extent, n_rows);
        n_done += piece->n_queries;
        n_runs += piece->n_runs;
        mask_size += (int64_t)piece->n_queries * piece->extent;
    }
    CHECK_EQUAL(n_done, n_queries);
    CHECK_EQUAL(n_runs, layout->n_runs);
    CHECK_EQUAL(mask_size, layout->mask_size);
    CHECK(mask_size <= (int64_t)n_queries * extent);
}

/* [query][row] */
static bool is_seen[MAX_QUERIES][MAX_ROWS];

static void look(const struct ck_sight *sight) {
    memset(is_seen, 0, sizeof is_seen);
    for (int32_t s = 0; s < sight->n_segments; s++) {
        const struct ck_segment *segment = &sight->segments[s];
        for (int32_t v = 0; v < segment->n_views; v++) {
            const struct ck_view *view = &sight->views[segment->first_view + v];
            for (int32_t c = view->begin; c < view->end; c++) {
                is_seen[view->query][sight->cells[segment->first_cell + c]] = true;
            }
        }
    }
}

static int32_t count_seen(int32_t query) {
    int32_t n = 0;
    for (int32_t row = 0; row < MAX_ROWS; row++) {
        n += is_seen[query][row];
    }
    return n;
}

/* The mask opens exactly the columns of the rows that each query sees, and those are all its rows.
 */
static void check_mask(const struct ck_layout *layout, const struct ck_sight *sight) {
    ggml_fp16_t *mask = malloc((size_t)layout->mask_size * sizeof *mask);
    ck_layout_render_mask(layout, sight, mask);
    look(sight);
    const ggml_fp16_t *entry = mask;
    for (int32_t p = 0; p < layout->n_pieces; p++) {
        const struct ck_layout_piece *piece = &layout->pieces[p];
        for (int32_t q = piece->first_query; q < piece->first_query + piece->n_queries; q++) {
            int32_t n_open = 0;
            for (int32_t r = piece->first_run; r < piece->first_run + piece->n_runs; r++) {
                const struct ck_row_run *run = &layout->runs[r];
                for (int32_t row = run->first_row; row < run->first_row + run->n_rows; row++) {
                    CHECK_EQUAL(*entry == IS_SEEN, is_seen[q][row]);
                    CHECK(*entry == IS_SEEN || *entry == 0xfc00); /* 0 or -inf */
                    n_open += *entry++ == IS_SEEN;
                }
            }
            CHECK_EQUAL(n_open, count_seen(q));
        }
    }
    free(mask);
}

static void build_and_check(struct ck_layout *layout, const struct ck_sight *sight, int32_t extent,
                            enum ck_layout_limit limit) {
    CHECK_OK(ck_layout_build(layout, sight, extent, limit, CK_MAX_LAYOUT_PIECES));
    check_shape(layout, sight->n_queries, extent);
    check_mask(layout, sight);
    CHECK(limit == CK_LAYOUT_COPIES || layout->n_runs == layout->n_pieces);
    CHECK(limit != CK_LAYOUT_ONE_CALL || layout->n_runs == 1);
}

static void test_random_sights_are_seen_exactly(void) {
    struct dice dice = {3};
    struct ck_layout layout = {0}, again = {0};
    int32_t n_whole = 0, n_pieces = 0, n_gathered = 0;
    for (int i = 0; i < 300; i++) {
        const int32_t extent = make_random_example(&dice);
        build_and_check(&layout, &example.sight, extent, CK_LAYOUT_ONE_CALL);
        build_and_check(&layout, &example.sight, extent, CK_LAYOUT_IN_PLACE);
        build_and_check(&layout, &example.sight, extent, CK_LAYOUT_COPIES);
        CHECK_OK(ck_layout_build(&again, &example.sight, extent, CK_LAYOUT_COPIES,
                                 CK_MAX_LAYOUT_PIECES));
        CHECK(ck_layout_equal(&layout, &again));
        n_whole += layout.n_pieces == 1;
        n_pieces += layout.n_pieces > 1;
        n_gathered += layout.n_runs > layout.n_pieces;
    }
    CHECK(n_whole > 10 && n_pieces > 10 && n_gathered > 10); /* the examples are rich enough */
    ck_layout_free(&layout);
    ck_layout_free(&again);
}

/* ---- where pieces are made ---- */

static void test_a_single_sequence_is_one_piece(void) {
    struct ck_layout layout = {0};
    start_example(1);
    add_sequence(0, 0, 1000);
    build_and_check(&layout, &example.sight, 4 * BLOCK, CK_LAYOUT_COPIES);
    CHECK_EQUAL(layout.n_pieces, 1);
    CHECK_EQUAL(layout.pieces[0].extent, 4 * BLOCK);
    start_example(64); /* its prefill crosses into another block */
    add_segment();
    add_cells(0, 800);
    for (int32_t q = 0; q < 64; q++) {
        add_view(q, 0, 800 - 63 + q);
    }
    build_and_check(&layout, &example.sight, 4 * BLOCK, CK_LAYOUT_COPIES);
    CHECK_EQUAL(layout.n_pieces, 1);
    ck_layout_free(&layout);
}

static void test_a_short_sequence_among_others_reads_its_own_run(void) {
    struct ck_layout layout = {0};
    start_example(1);
    add_sequence(0, 20 * BLOCK + 7, 300);
    build_and_check(&layout, &example.sight, 32 * BLOCK, CK_LAYOUT_COPIES);
    CHECK_EQUAL(layout.n_pieces, 1);
    CHECK_EQUAL(layout.runs[0].first_row, 20 * BLOCK);
    CHECK_EQUAL(layout.runs[0].n_rows, 2 * BLOCK);
    ck_layout_free(&layout);
}

static void test_sequences_apart_are_a_piece_each(void) {
    cellkv_cache *cache = new_cache(16 * 1024 + 16, MAX_OPEN);
    int64_t seqs[16];
    for (int s = 0; s < 16; s++) {
        seqs[s] = open_with(cache, 1023);
        extend(cache, seqs[s], 1);
    }
    for (int s = 0; s < 16; s++) { /* the 1024th again, one step for all */
        CHECK_OK(cellkv_cache_rewind(cache, seqs[s], 1023));
    }
    CHECK_OK(ck_cells_begin_step(cache->cells, seqs, NULL, 16, 0));
    struct ck_sight sight = {0};
    struct ck_layout layout = {0};
    CHECK_OK(ck_sight_build(&sight, cache->cells, 0, 16, 0));
    CHECK_OK(ck_layout_build(&layout, &sight, ck_pad_rows(ck_cells_extent(cache->cells)),
                             CK_LAYOUT_COPIES, CK_MAX_LAYOUT_PIECES));
    check_shape(&layout, 16, 16 * 1024);
    CHECK_EQUAL(layout.n_pieces, 16);
    for (int32_t p = 0; p < 16; p++) {
        CHECK_EQUAL(layout.pieces[p].n_runs, 1);
        CHECK_EQUAL(layout.pieces[p].extent, 1024);
    }
    ck_sight_free(&sight);
    ck_layout_free(&layout);
    cellkv_cache_free(cache);
}

/* A prefix of `shared` blocks, two queries, each with n_own blocks of its own somewhere. */
static void make_clones(int32_t shared, int32_t n_own, int32_t own0, int32_t own1) {
    start_example(2);
    add_segment();
    add_cells(0, shared * BLOCK);
    see_all(0);
    see_all(1);
    add_sequence(0, own0 * BLOCK, n_own * BLOCK - 100);
    add_sequence(1, own1 * BLOCK, n_own * BLOCK - 100);
}

static void test_clones_of_a_long_prefix_are_one_piece_where_that_is_cheaper(void) {
    struct ck_layout layout = {0};
    make_clones(8, 1, 8, 9); /* together 10 blocks, twice; apart 9 and 10, and another call */
    build_and_check(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_COPIES);
    CHECK_EQUAL(layout.n_pieces, 1);
    CHECK_EQUAL(layout.pieces[0].extent, 10 * BLOCK);
    make_clones(1, 6, 1, 20); /* each would have to read the other's */
    build_and_check(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_COPIES);
    CHECK_EQUAL(layout.n_pieces, 2);
    ck_layout_free(&layout);
}

/* Queries that see four blocks from the first on and the start of another. */
static void make_two_runs(int32_t n_queries, int32_t other_block) {
    start_example(n_queries);
    add_segment();
    add_cells(0, 4 * BLOCK);
    add_cells(other_block * BLOCK, n_queries);
    for (int32_t q = 0; q < n_queries; q++) {
        add_view(q, 0, 4 * BLOCK + 1 + q);
    }
}

static void test_runs_are_copied_unless_little_is_between_them(void) {
    struct ck_layout layout = {0};
    make_two_runs(1, 5); /* a block between: one query looks at it */
    build_and_check(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_COPIES);
    CHECK_EQUAL(layout.n_runs, 1);
    CHECK_EQUAL(layout.pieces[0].extent, 6 * BLOCK);
    make_two_runs(20, 5); /* but not many */
    build_and_check(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_COPIES);
    CHECK_EQUAL(layout.n_pieces, 1);
    CHECK_EQUAL(layout.n_runs, 2);
    CHECK_EQUAL(layout.pieces[0].extent, 5 * BLOCK);
    make_two_runs(1, 6); /* nor one at more of them */
    build_and_check(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_COPIES);
    CHECK_EQUAL(layout.n_runs, 2);
    build_and_check(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_IN_PLACE);
    CHECK_EQUAL(layout.n_runs, 1);
    CHECK_EQUAL(layout.pieces[0].extent, 7 * BLOCK);
    ck_layout_free(&layout);
}

static void test_sequences_in_the_same_blocks_are_one_call(void) {
    struct ck_layout layout = {0};
    start_example(2);
    for (int32_t q = 0; q < 2; q++) { /* every other row */
        add_segment();
        for (int32_t i = 0; i < 1024; i++) {
            add_cells(2 * i + q, 1);
        }
        see_all(q);
    }
    build_and_check(&layout, &example.sight, 2048, CK_LAYOUT_COPIES);
    CHECK_EQUAL(layout.n_pieces, 1);
    CHECK_EQUAL(layout.runs[0].first_row, 0);
    CHECK_EQUAL(layout.runs[0].n_rows, 2048);
    ck_layout_free(&layout);
}

/* Queries by turns of two sequences, far from each other. */
static void take_turns(int32_t n_queries) {
    start_example(n_queries);
    for (int32_t s = 0; s < 2; s++) {
        add_segment();
        add_cells(s * 30 * BLOCK, BLOCK);
        for (int32_t q = s; q < n_queries; q += 2) {
            see_all(q);
        }
    }
}

static void test_more_pieces_than_the_limit_are_joined(void) {
    struct ck_layout layout = {0};
    take_turns(CK_MAX_LAYOUT_PIECES);
    build_and_check(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_COPIES);
    CHECK_EQUAL(layout.n_pieces, CK_MAX_LAYOUT_PIECES);
    take_turns(CK_MAX_LAYOUT_PIECES + 1);
    build_and_check(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_COPIES);
    CHECK(layout.mask_size <= (CK_MAX_LAYOUT_PIECES + 1) * 2 * BLOCK);
    const int64_t n_one_call = 64LL * MAX_ROWS;
    take_turns(64);
    for (int32_t most = 1; most <= 64; most *= 2) {
        CHECK_OK(ck_layout_build(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_IN_PLACE, most));
        check_shape(&layout, 64, MAX_ROWS);
        check_mask(&layout, &example.sight);
        CHECK(layout.n_pieces <= most);
        CHECK(layout.mask_size <= n_one_call);
    }
    CHECK_EQUAL(layout.n_pieces, 64);
    ck_layout_free(&layout);
}

static void test_a_window_reads_only_its_own_blocks(void) {
    struct ck_layout layout = {0};
    start_example(2);
    add_sequence(0, 0, 10 * BLOCK);
    example.views[0].begin = 9 * BLOCK + 5;
    add_sequence(1, 20 * BLOCK, 10 * BLOCK);
    example.views[1].begin = 9 * BLOCK + 5;
    build_and_check(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_COPIES);
    CHECK_EQUAL(layout.n_pieces, 2);
    CHECK_EQUAL(layout.pieces[0].extent, BLOCK);
    CHECK_EQUAL(layout.runs[1].first_row, 29 * BLOCK);
    ck_layout_free(&layout);
}

/* ---- as values ---- */

static void test_copies_are_equal_and_outlive_the_next_build(void) {
    struct ck_layout layout = {0}, copy;
    take_turns(4);
    build_and_check(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_COPIES);
    CHECK_OK(ck_layout_copy(&copy, &layout));
    CHECK(ck_layout_equal(&copy, &layout));
    check_shape(&copy, 4, MAX_ROWS);
    check_mask(&copy, &example.sight);
    example.cells[0] = 2 * BLOCK; /* one block elsewhere */
    build_and_check(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_COPIES);
    CHECK(!ck_layout_equal(&copy, &layout));
    build_and_check(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_ONE_CALL);
    CHECK(!ck_layout_equal(&copy, &layout));
    ck_layout_free(&copy);
    ck_layout_free(&layout);
}

/* Where the library counts its allocations, see cells/memory.h. */
static void test_without_memory_the_build_is_refused(void) {
#ifdef CELLKV_CHECKS
    struct ck_layout layout = {0}, copy;
    take_turns(4);
    for (int n = 0;; n++) {
        cellkv_test_fail_allocation_after(n);
        cellkv_status status = ck_layout_build(&layout, &example.sight, MAX_ROWS, CK_LAYOUT_COPIES,
                                               CK_MAX_LAYOUT_PIECES);
        if (status == CELLKV_OK) {
            status = ck_layout_copy(&copy, &layout);
        }
        if (!cellkv_test_fail_allocation_after(-1)) {
            CHECK_OK(status);
            break;
        }
        CHECK_REFUSED(status, CELLKV_ERROR_OUT_OF_MEMORY, "layout");
    }
    ck_layout_free(&copy);
    ck_layout_free(&layout);
#endif
}

int main(void) {
    RUN(test_random_sights_are_seen_exactly);
    RUN(test_a_single_sequence_is_one_piece);
    RUN(test_a_short_sequence_among_others_reads_its_own_run);
    RUN(test_sequences_apart_are_a_piece_each);
    RUN(test_clones_of_a_long_prefix_are_one_piece_where_that_is_cheaper);
    RUN(test_runs_are_copied_unless_little_is_between_them);
    RUN(test_sequences_in_the_same_blocks_are_one_call);
    RUN(test_more_pieces_than_the_limit_are_joined);
    RUN(test_a_window_reads_only_its_own_blocks);
    RUN(test_copies_are_equal_and_outlive_the_next_build);
    RUN(test_without_memory_the_build_is_refused);
    return 0;
}
