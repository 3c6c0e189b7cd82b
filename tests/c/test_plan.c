/* Plans: every cell that a query sees is in exactly one of its pieces, and parts are numbered so
 * that merging finds them. */
#include "attention/kernels/kernels.h"
#include "attention/plan.h"
#include "check.h"

enum { MAX_SEGMENTS = 12, MAX_CELLS = 1500, MAX_QUERIES = 150 };

/* A sight with room for its arrays. */
struct example {
    struct ck_sight sight;
    struct ck_segment segments[MAX_SEGMENTS];
    struct ck_view views[MAX_SEGMENTS * MAX_QUERIES];
    int32_t cells[MAX_SEGMENTS * MAX_CELLS];
};

static struct example example;

static void add_segment(int32_t n_cells) {
    struct ck_sight *sight = &example.sight;
    sight->segments[sight->n_segments++] = (struct ck_segment){
        .first_cell = sight->n_cells, .n_cells = n_cells, .first_view = sight->n_views};
    for (int32_t i = 0; i < n_cells; i++) {
        sight->cells[sight->n_cells + i] = sight->n_cells + i;
    }
    sight->n_cells += n_cells;
}

static void add_view(int32_t query, int32_t begin, int32_t end) {
    struct ck_sight *sight = &example.sight;
    sight->views[sight->n_views++] = (struct ck_view){query, begin, end};
    sight->segments[sight->n_segments - 1].n_views++;
}

static void start_example(int32_t n_queries) {
    example.sight = (struct ck_sight){.n_queries = n_queries,
                                      .segments = example.segments,
                                      .views = example.views,
                                      .cells = example.cells};
}

/* Each query sees a range of the first segment; of each other, some queries see some. */
static void make_random_example(struct dice *dice) {
    const int32_t n_queries = 1 + (int32_t)roll(dice, MAX_QUERIES);
    start_example(n_queries);
    const int32_t n_segments = 1 + (int32_t)roll(dice, MAX_SEGMENTS);
    for (int32_t s = 0; s < n_segments; s++) {
        const uint32_t n_cells = 1 + roll(dice, MAX_CELLS);
        const uint32_t sees = s == 0 ? 1 : 1 + roll(dice, 4);
        add_segment((int32_t)n_cells);
        for (int32_t q = 0; q < n_queries; q++) {
            if (roll(dice, sees) == 0 || (q == 0 && sees > 1)) {
                const int32_t begin = (int32_t)roll(dice, n_cells);
                add_view(q, begin, begin + 1 + (int32_t)roll(dice, n_cells - (uint32_t)begin));
            }
        }
    }
}

/* How often the pieces have query q see cell c of segment s: counted by brute force. */
static int32_t seen[MAX_QUERIES][MAX_CELLS];

static void check_coverage(const struct ck_plan *plan) {
    const struct ck_sight *sight = &example.sight;
    for (int32_t s = 0; s < sight->n_segments; s++) {
        memset(seen, 0, sizeof seen);
        for (int32_t i = 0; i < plan->n_pieces; i++) {
            const struct ck_piece *piece = &plan->pieces[i];
            for (int32_t v = piece->first_view;
                 piece->segment == s && v < piece->first_view + piece->n_views; v++) {
                const struct ck_view *view = &sight->views[v];
                for (int32_t c = piece->begin; c < piece->end; c++) {
                    seen[view->query][c] += c >= view->begin && c < view->end;
                }
            }
        }
        const struct ck_segment *segment = &sight->segments[s];
        for (int32_t v = segment->first_view; v < segment->first_view + segment->n_views; v++) {
            const struct ck_view *view = &sight->views[v];
            for (int32_t c = view->begin; c < view->end; c++) {
                CHECK_EQUAL(seen[view->query][c]--, 1);
            }
        }
        for (int32_t q = 0; q < sight->n_queries; q++) {
            for (int32_t c = 0; c < MAX_CELLS; c++) {
                CHECK_EQUAL(seen[q][c], 0);
            }
        }
    }
}

static void check_pieces(const struct ck_plan *plan) {
    const struct ck_sight *sight = &example.sight;
    for (int32_t i = 0; i < plan->n_pieces; i++) {
        const struct ck_piece *piece = &plan->pieces[i];
        const struct ck_segment *segment = &sight->segments[piece->segment];
        CHECK(piece->n_views >= 1 && piece->n_views <= CK_MAX_QUERIES);
        CHECK(piece->first_view >= segment->first_view);
        CHECK(piece->first_view + piece->n_views <= segment->first_view + segment->n_views);
        CHECK(piece->begin >= 0 && piece->begin < piece->end && piece->end <= segment->n_cells);
    }
}

static void check_parts(const struct ck_plan *plan) {
    const struct ck_sight *sight = &example.sight;
    static int32_t n_pieces[MAX_QUERIES], next[MAX_QUERIES];
    memset(n_pieces, 0, sizeof n_pieces);
    for (int32_t i = 0; i < plan->n_pieces; i++) {
        for (int32_t v = 0; v < plan->pieces[i].n_views; v++) {
            n_pieces[sight->views[plan->pieces[i].first_view + v].query]++;
        }
    }
    CHECK_EQUAL(plan->first_part[0], 0);
    CHECK_EQUAL(plan->first_part[plan->n_queries], plan->n_parts);
    for (int32_t q = 0; q < plan->n_queries; q++) {
        const int32_t n = plan->first_part[q + 1] - plan->first_part[q];
        CHECK(n_pieces[q] >= 1);
        CHECK_EQUAL(n, n_pieces[q] > 1 ? n_pieces[q] : 0);
        next[q] = plan->first_part[q];
    }
    for (int32_t i = 0; i < plan->n_pieces; i++) {
        const struct ck_piece *piece = &plan->pieces[i];
        for (int32_t v = 0; v < piece->n_views; v++) {
            const int32_t q = sight->views[piece->first_view + v].query;
            const int32_t part = plan->part_of_entry[piece->first_entry + v];
            CHECK_EQUAL(part, n_pieces[q] > 1 ? next[q]++ : CK_NO_PART);
        }
    }
}

static void test_random_sights_are_covered_exactly(void) {
    struct dice dice = {2};
    struct ck_plan plan = {0};
    for (int i = 0; i < 60; i++) {
        make_random_example(&dice);
        CHECK_OK(ck_plan_build(&plan, &example.sight, 1 + (int32_t)roll(&dice, 8)));
        check_coverage(&plan);
        check_pieces(&plan);
        check_parts(&plan);
    }
    ck_plan_free(&plan);
}

static void test_a_short_sequence_is_one_piece_without_parts(void) {
    struct ck_plan plan = {0};
    start_example(1);
    add_segment(40);
    add_view(0, 0, 40);
    CHECK_OK(ck_plan_build(&plan, &example.sight, 8));
    CHECK_EQUAL(plan.n_pieces, 1);
    CHECK_EQUAL(plan.n_parts, 0);
    ck_plan_free(&plan);
}

static void test_a_long_sequence_is_work_for_every_thread(void) {
    struct ck_plan plan = {0};
    start_example(1);
    add_segment(MAX_CELLS);
    add_view(0, 0, MAX_CELLS);
    for (int32_t n_threads = 1; n_threads <= 4; n_threads++) {
        CHECK_OK(ck_plan_build(&plan, &example.sight, n_threads));
        CHECK(plan.n_pieces >= n_threads);
        CHECK_EQUAL(plan.n_parts, plan.n_pieces);
    }
    ck_plan_free(&plan);
}

static void test_queries_that_share_cells_read_them_in_one_piece(void) {
    struct ck_plan plan = {0};
    start_example(CK_MAX_QUERIES);
    add_segment(CK_TILE);
    for (int32_t q = 0; q < CK_MAX_QUERIES; q++) {
        add_view(q, 0, CK_TILE);
    }
    CHECK_OK(ck_plan_build(&plan, &example.sight, 4));
    CHECK_EQUAL(plan.n_pieces, 1);
    CHECK_EQUAL(plan.pieces[0].n_views, CK_MAX_QUERIES);
    ck_plan_free(&plan);
}

int main(void) {
    RUN(test_random_sights_are_covered_exactly);
    RUN(test_a_short_sequence_is_one_piece_without_parts);
    RUN(test_a_long_sequence_is_work_for_every_thread);
    RUN(test_queries_that_share_cells_read_them_in_one_piece);
    return 0;
}
