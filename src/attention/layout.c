/* How a layout is found: first which blocks of rows each query reads, then pieces by going through
 * the queries once, each joining the open piece where that is not dearer than staying apart. */
#include "layout.h"

#include <assert.h>
#include <string.h>

#include "cells/error.h"
#include "cells/memory.h"
#include "storage/storage.h"

/* Costs are in units of one query looking at one block of rows that it sees nothing of, which is
 * what a layout saves; what a query does see costs the same in every layout. That is so on the CPU,
 * where ggml looks at the mask first, for each head and row; other devices may compute what they
 * then mask, which makes pieces worth more. */
enum {
    /* A call of its own: a few nodes more, each a barrier for the threads, or a device's launch. */
    CALL_COST = 4,
    /* Copying a block of K and of V. Measured on the CPU with 9 query heads on 3 of K and V, width
     * 64, f16: less than looking at it. Where memory is slower it may be 4 or so. */
    GATHER_COST = 1,
    /* Each block between a piece's own that it looks past: ggml gives each thread a range of the
     * rows where there is one query, and to such a thread nothing to do. */
    GAP_COST = 4,
    /* Each run of a copy: two nodes. */
    RUN_COST = 1,
    /* The pieces must save a quarter of what one call costs: an estimate of less is not worth more
     * nodes, and a graph that changes when any one sequence gets a block. */
    WORTH_NUMERATOR = 3,
    WORTH_DENOMINATOR = 4,
};

/* Half-precision bit patterns. */
enum { HALF_ZERO = 0x0000, HALF_MINUS_INFINITY = 0xfc00 };

/* ---- which blocks each query reads ---- */

static bool reserve_scratch(struct ck_layout *layout, int32_t n_queries, int32_t n_blocks) {
    const int64_t size = ((int64_t)n_queries + 2) * n_blocks;
    if (!CK_RESERVE(layout->blocks, &layout->room_blocks, size) ||
        !CK_RESERVE(layout->counts, &layout->room_counts, n_blocks)) {
        return false;
    }
    memset(layout->blocks, 0, (size_t)size);
    memset(layout->counts, 0, (size_t)n_blocks * sizeof *layout->counts);
    return true;
}

static void mark(const struct ck_layout *layout, int32_t query, int32_t n_blocks) {
    uint8_t *blocks = layout->blocks + (size_t)query * (size_t)n_blocks;
    for (int32_t b = 0; b < n_blocks; b++) {
        blocks[b] |= layout->counts[b] > 0;
    }
}

/* counts[b]: how many of the segment's cells [begin, end) are in block b. From view to view only
 * the cells at the ends come and go; those of one sequence move forward. */
static void mark_segment(const struct ck_layout *layout, const struct ck_sight *sight,
                         const struct ck_segment *segment, int32_t n_blocks) {
    const int32_t *rows = sight->cells + segment->first_cell;
    const struct ck_view *views = sight->views + segment->first_view;
    int32_t *counts = layout->counts;
    int32_t begin = views[0].begin, end = views[0].begin;
    for (int32_t v = 0; v < segment->n_views; v++) {
        while (end < views[v].end) {
            counts[rows[end++] / CK_ROW_PADDING]++;
        }
        while (begin > views[v].begin) {
            counts[rows[--begin] / CK_ROW_PADDING]++;
        }
        while (end > views[v].end) {
            counts[rows[--end] / CK_ROW_PADDING]--;
        }
        while (begin < views[v].begin) {
            counts[rows[begin++] / CK_ROW_PADDING]--;
        }
        mark(layout, views[v].query, n_blocks);
    }
    while (begin < end) {
        counts[rows[begin++] / CK_ROW_PADDING]--;
    }
}

/* ---- what reading them costs ---- */

/* Some of the blocks: all are in [first, end). */
struct reach {
    int32_t first, end;
    int32_t n_blocks;
    int32_t n_runs;
};

static struct reach measure(const uint8_t *blocks, int32_t n_blocks) {
    struct reach reach = {.first = n_blocks};
    for (int32_t b = 0; b < n_blocks; b++) {
        if (blocks[b]) {
            reach.first = b < reach.first ? b : reach.first;
            reach.n_runs += b == 0 || !blocks[b - 1];
            reach.n_blocks++;
            reach.end = b + 1;
        }
    }
    return reach;
}

/* What pieces may be, and what the cost of a call is taken for. */
struct terms {
    enum ck_layout_limit limit;
    int64_t call_cost;
};

static int64_t cost_in_place(const struct reach *reach, int32_t n_queries,
                             const struct terms *terms) {
    const int64_t n_gaps = reach->end - reach->first - reach->n_blocks;
    return terms->call_cost + (int64_t)n_queries * (reach->n_blocks + GAP_COST * n_gaps);
}

static int64_t cost_gathered(const struct reach *reach, int32_t n_queries,
                             const struct terms *terms) {
    return terms->call_cost + ((int64_t)n_queries + GATHER_COST) * reach->n_blocks +
           (int64_t)RUN_COST * reach->n_runs;
}

static bool should_gather(const struct reach *reach, int32_t n_queries, const struct terms *terms) {
    return terms->limit == CK_LAYOUT_COPIES &&
           cost_gathered(reach, n_queries, terms) < cost_in_place(reach, n_queries, terms);
}

static int64_t cost_of(const struct reach *reach, int32_t n_queries, const struct terms *terms) {
    return should_gather(reach, n_queries, terms) ? cost_gathered(reach, n_queries, terms)
                                                  : cost_in_place(reach, n_queries, terms);
}

/* ---- pieces ---- */

static bool add_run(struct ck_layout *layout, struct ck_layout_piece *piece, int32_t first_block,
                    int32_t end_block) {
    if (!CK_RESERVE(layout->runs, &layout->room_runs, (int64_t)layout->n_runs + 1)) {
        return false;
    }
    const int32_t n_rows = (end_block - first_block) * CK_ROW_PADDING;
    layout->runs[layout->n_runs++] = (struct ck_row_run){
        .first_row = first_block * CK_ROW_PADDING, .n_rows = n_rows, .first_column = piece->extent};
    piece->n_runs++;
    piece->extent += n_rows;
    return true;
}

static bool add_runs(struct ck_layout *layout, struct ck_layout_piece *piece, const uint8_t *blocks,
                     const struct reach *reach) {
    for (int32_t b = reach->first, first = b; b < reach->end; b++) {
        if (!blocks[b]) {
            first = b + 1;
        } else if ((b + 1 == reach->end || !blocks[b + 1]) &&
                   !add_run(layout, piece, first, b + 1)) {
            return false;
        }
    }
    return true;
}

/* A piece of the queries after the last piece's; `blocks`: what they read, NULL: all of `reach`. */
static bool add_piece(struct ck_layout *layout, int32_t n_queries, const struct reach *reach,
                      const uint8_t *blocks) {
    if (!CK_RESERVE(layout->pieces, &layout->room_pieces, (int64_t)layout->n_pieces + 1)) {
        return false;
    }
    struct ck_layout_piece piece = {.first_query = layout->n_queries,
                                    .n_queries = n_queries,
                                    .first_run = layout->n_runs,
                                    .mask_offset = layout->mask_size};
    if (!(blocks != NULL ? add_runs(layout, &piece, blocks, reach)
                         : add_run(layout, &piece, reach->first, reach->end))) {
        return false;
    }
    layout->pieces[layout->n_pieces++] = piece;
    layout->n_queries += n_queries;
    layout->mask_size += (int64_t)n_queries * piece.extent;
    return true;
}

static void clear(struct ck_layout *layout) {
    layout->n_queries = layout->n_pieces = layout->n_runs = 0;
    layout->mask_size = 0;
}

/* The piece whose queries are being collected. */
struct open_piece {
    int32_t n_queries;
    struct reach reach;
    uint8_t *blocks;
};

/* What the open piece would read with a query more. */
static void unite(uint8_t *both, const uint8_t *open, const uint8_t *more, int32_t n_blocks) {
    for (int32_t b = 0; b < n_blocks; b++) {
        both[b] = open[b] | more[b];
    }
}

static bool close_piece(struct ck_layout *layout, const struct open_piece *open,
                        const struct terms *terms, int64_t *cost) {
    *cost += cost_of(&open->reach, open->n_queries, terms);
    const bool gather = should_gather(&open->reach, open->n_queries, terms);
    return add_piece(layout, open->n_queries, &open->reach, gather ? open->blocks : NULL);
}

/* Makes the pieces from the blocks marked, and tells what they cost; stops where there are too
 * many. */
static bool make_pieces(struct ck_layout *layout, int32_t n_queries, int32_t n_blocks,
                        const struct terms *terms, int32_t max_pieces, int64_t *cost) {
    const uint8_t *query = layout->blocks;
    uint8_t *both = layout->blocks + ((size_t)n_queries + 1) * (size_t)n_blocks;
    struct open_piece open = {.blocks = both - n_blocks};
    *cost = 0;
    for (int32_t q = 0; q < n_queries; q++, query += n_blocks) {
        unite(both, open.blocks, query, n_blocks);
        const struct reach own = measure(query, n_blocks), united = measure(both, n_blocks);
        if (open.n_queries > 0 &&
            cost_of(&united, open.n_queries + 1, terms) >
                cost_of(&open.reach, open.n_queries, terms) + cost_of(&own, 1, terms)) {
            if (!close_piece(layout, &open, terms, cost)) {
                return false;
            }
            open.n_queries = 0;
        }
        memcpy(open.blocks, open.n_queries > 0 ? both : query, (size_t)n_blocks);
        open.reach = open.n_queries > 0 ? united : own;
        open.n_queries++;
        if (layout->n_pieces == max_pieces || layout->n_runs > CK_MAX_LAYOUT_RUNS) {
            return true;
        }
    }
    return close_piece(layout, &open, terms, cost);
}

/* ---- the whole ---- */

static bool is_whole(const struct ck_layout *layout, int32_t n_queries) {
    return layout->n_queries == n_queries && layout->n_runs <= CK_MAX_LAYOUT_RUNS;
}

/* Makes at most so many pieces, and tells what they cost. Where there would be more, calls are
 * taken to be dearer, until enough queries join: in the end all do. */
static bool make_few_pieces(struct ck_layout *layout, int32_t n_queries, int32_t n_blocks,
                            enum ck_layout_limit limit, int32_t max_pieces, int64_t *cost) {
    enum { DEARER = 4 };
    struct terms terms = {.limit = limit, .call_cost = CALL_COST};
    const int64_t dearest = (int64_t)n_queries * n_blocks * (GAP_COST + 1) * DEARER;
    bool has_memory = make_pieces(layout, n_queries, n_blocks, &terms, max_pieces, cost);
    while (has_memory && !is_whole(layout, n_queries) && terms.call_cost < dearest) {
        terms.call_cost *= DEARER;
        clear(layout);
        has_memory = make_pieces(layout, n_queries, n_blocks, &terms, max_pieces, cost);
    }
    *cost -= layout->n_pieces * (terms.call_cost - CALL_COST);
    return has_memory;
}

/* Whether there are pieces that are worth it: false, too, where there is no memory. */
static bool cut(struct ck_layout *layout, const struct ck_sight *sight, int32_t n_blocks,
                enum ck_layout_limit limit, int32_t max_pieces, bool *has_memory) {
    const struct reach all = {.end = n_blocks, .n_blocks = n_blocks};
    const struct terms terms = {.limit = limit, .call_cost = CALL_COST};
    const int64_t cost_of_one = cost_in_place(&all, sight->n_queries, &terms);
    int64_t cost;
    *has_memory = reserve_scratch(layout, sight->n_queries, n_blocks);
    for (int32_t s = 0; *has_memory && s < sight->n_segments; s++) {
        mark_segment(layout, sight, &sight->segments[s], n_blocks);
    }
    *has_memory = *has_memory &&
                  make_few_pieces(layout, sight->n_queries, n_blocks, limit, max_pieces, &cost);
    return *has_memory && is_whole(layout, sight->n_queries) &&
           cost * WORTH_DENOMINATOR <= cost_of_one * WORTH_NUMERATOR;
}

cellkv_status ck_layout_build(struct ck_layout *layout, const struct ck_sight *sight,
                              int32_t extent, enum ck_layout_limit limit, int32_t max_pieces) {
    assert(extent > 0 && extent % CK_ROW_PADDING == 0 && max_pieces >= 1);
    const int32_t n_blocks = extent / CK_ROW_PADDING;
    const struct reach all = {.end = n_blocks, .n_blocks = n_blocks};
    bool has_memory = true;
    clear(layout);
    if (limit != CK_LAYOUT_ONE_CALL &&
        cut(layout, sight, n_blocks, limit, max_pieces, &has_memory)) {
        return CELLKV_OK;
    }
    clear(layout);
    has_memory = has_memory && add_piece(layout, sight->n_queries, &all, NULL);
    return has_memory ? CELLKV_OK : ck_fail_memory("a step's layout");
}

void ck_layout_free(struct ck_layout *layout) {
    ck_free(layout->pieces);
    ck_free(layout->runs);
    ck_free(layout->blocks);
    ck_free(layout->counts);
    *layout = (struct ck_layout){0};
}

/* ---- as a part of a graph's shape ---- */

static bool is_same_piece(const struct ck_layout_piece *a, const struct ck_layout_piece *b) {
    return a->n_queries == b->n_queries && a->n_runs == b->n_runs && a->extent == b->extent;
}

bool ck_layout_equal(const struct ck_layout *a, const struct ck_layout *b) {
    bool is_equal =
        a->n_queries == b->n_queries && a->n_pieces == b->n_pieces && a->n_runs == b->n_runs;
    for (int32_t i = 0; is_equal && i < a->n_pieces; i++) {
        is_equal = is_same_piece(&a->pieces[i], &b->pieces[i]);
    }
    for (int32_t i = 0; is_equal && i < a->n_runs; i++) {
        is_equal =
            a->runs[i].first_row == b->runs[i].first_row && a->runs[i].n_rows == b->runs[i].n_rows;
    }
    return is_equal;
}

cellkv_status ck_layout_copy(struct ck_layout *copy, const struct ck_layout *layout) {
    *copy = (struct ck_layout){0};
    if (!CK_RESERVE(copy->pieces, &copy->room_pieces, layout->n_pieces) ||
        !CK_RESERVE(copy->runs, &copy->room_runs, layout->n_runs)) {
        ck_layout_free(copy);
        return ck_fail_memory("a graph's layout");
    }
    memcpy(copy->pieces, layout->pieces, (size_t)layout->n_pieces * sizeof *copy->pieces);
    memcpy(copy->runs, layout->runs, (size_t)layout->n_runs * sizeof *copy->runs);
    copy->n_queries = layout->n_queries;
    copy->n_pieces = layout->n_pieces;
    copy->n_runs = layout->n_runs;
    copy->mask_size = layout->mask_size;
    return CELLKV_OK;
}

/* ---- masks ---- */

static const struct ck_row_run *find_run(const struct ck_layout *layout,
                                         const struct ck_layout_piece *piece, int32_t row) {
    const struct ck_row_run *runs = layout->runs + piece->first_run;
    int32_t low = 0, high = piece->n_runs - 1; /* the last run that begins at the row or before */
    while (low < high) {
        const int32_t middle = low + (high - low + 1) / 2;
        if (runs[middle].first_row <= row) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    assert(row >= runs[low].first_row && row < runs[low].first_row + runs[low].n_rows);
    return &runs[low];
}

static void render_view(const struct ck_layout *layout, const struct ck_layout_piece *piece,
                        const int32_t *rows, const struct ck_view *view, ggml_fp16_t *mask_row) {
    const struct ck_row_run *run = &layout->runs[piece->first_run];
    for (int32_t i = view->begin; i < view->end; i++) {
        /* Seldom: cells come in order of position, which mostly is that of rows. */
        if (rows[i] < run->first_row || rows[i] >= run->first_row + run->n_rows) {
            run = find_run(layout, piece, rows[i]);
        }
        mask_row[rows[i] - run->first_row + run->first_column] = HALF_ZERO;
    }
}

void ck_layout_render_mask(const struct ck_layout *layout, const struct ck_sight *sight,
                           ggml_fp16_t *mask) {
    for (int64_t i = 0; i < layout->mask_size; i++) {
        mask[i] = HALF_MINUS_INFINITY;
    }
    for (int32_t s = 0; s < sight->n_segments; s++) {
        const struct ck_segment *segment = &sight->segments[s];
        const struct ck_layout_piece *piece = layout->pieces;
        for (int32_t v = segment->first_view; v < segment->first_view + segment->n_views; v++) {
            const struct ck_view *view = &sight->views[v];
            while (view->query >= piece->first_query + piece->n_queries) {
                piece++;
            }
            const int64_t row = view->query - piece->first_query;
            render_view(layout, piece, sight->cells + segment->first_cell, view,
                        mask + piece->mask_offset + row * piece->extent);
        }
    }
}
