/* How sight is cut: each segment's views into blocks of queries, each block's cells into ranges, so
 * small that no thread is left with much when the others have finished, and not smaller. */
#include "plan.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "attention/kernels/kernels.h"
#include "cells/error.h"
#include "cells/memory.h"

enum {
    /* Pieces to cut for each thread; but with many threads few, for the sake of parts. */
    PIECES_PER_THREAD = 16,
    FEWEST_PER_THREAD = 4,
    MANY_PIECES = 64,
    /* The fewest cells of a piece that was cut: each costs its queries a part. The more threads,
     * the smaller. */
    MIN_CELLS = 2 * CK_TILE,
    ENOUGH_CELLS = 8 * CK_TILE,
    MAX_ENTRIES = 1 << 30, /* parts are counted by powers of 2 in an int32 */
    READ_COST = 2,         /* of reading a cell, in units of one query's attention to it */
};

/* A segment's views [first_view, first_view + n_views), and the cells that any of them sees. */
struct ck_block {
    int32_t segment;
    int32_t first_view, n_views;
    int32_t begin, end;
    int64_t cost;
};

/* ---- blocks ---- */

static struct ck_block make_block(const struct ck_sight *sight, int32_t segment, int32_t first,
                                  int32_t n) {
    struct ck_block block = {
        .segment = segment, .first_view = first, .n_views = n, .begin = INT32_MAX};
    for (int32_t i = first; i < first + n; i++) {
        const struct ck_view *view = &sight->views[i];
        block.begin = view->begin < block.begin ? view->begin : block.begin;
        block.end = view->end > block.end ? view->end : block.end;
        block.cost += view->end - view->begin;
    }
    block.cost += (int64_t)READ_COST * (block.end - block.begin);
    return block;
}

static bool add_block(struct ck_plan *plan, const struct ck_block *block) {
    if (!CK_RESERVE(plan->blocks, &plan->room_blocks, (int64_t)plan->n_blocks + 1)) {
        return false;
    }
    plan->blocks[plan->n_blocks++] = *block;
    return true;
}

static bool make_blocks(struct ck_plan *plan, const struct ck_sight *sight) {
    for (int32_t s = 0; s < sight->n_segments; s++) {
        const struct ck_segment *segment = &sight->segments[s];
        for (int32_t done = 0; done < segment->n_views; done += CK_MAX_QUERIES) {
            const int32_t left = segment->n_views - done;
            const int32_t n = left < CK_MAX_QUERIES ? left : CK_MAX_QUERIES;
            const struct ck_block block = make_block(sight, s, segment->first_view + done, n);
            if (!add_block(plan, &block)) {
                return false;
            }
        }
    }
    return true;
}

/* ---- pieces ---- */

static bool add_piece(struct ck_plan *plan, const struct ck_piece *piece) {
    if (!CK_RESERVE(plan->pieces, &plan->room_pieces, (int64_t)plan->n_pieces + 1)) {
        return false;
    }
    plan->pieces[plan->n_pieces++] = *piece;
    return true;
}

/* The views of the block that see any of the piece's cells, without those before the first and
 * after the last. */
static void trim_views(const struct ck_sight *sight, struct ck_piece *piece) {
    const struct ck_view *views = sight->views;
    int32_t first = piece->first_view, last = piece->first_view + piece->n_views;
    while (first < last && (views[first].end <= piece->begin || views[first].begin >= piece->end)) {
        first++;
    }
    while (last > first &&
           (views[last - 1].end <= piece->begin || views[last - 1].begin >= piece->end)) {
        last--;
    }
    piece->first_view = first;
    piece->n_views = last - first;
}

static int64_t in_tiles(int64_t n_cells) {
    return (n_cells + CK_TILE - 1) / CK_TILE * CK_TILE;
}

static int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

/* Cuts a block into ranges of whole tiles, each of about the wanted cost. */
static bool cut_block(struct ck_plan *plan, const struct ck_sight *sight,
                      const struct ck_block *block, int64_t wanted_cost, int32_t n_threads) {
    const int64_t n_cells = block->end - block->begin;
    const int64_t n_ranges = (block->cost + wanted_cost - 1) / wanted_cost;
    const int64_t fewest = clamp(in_tiles(n_cells / n_threads), MIN_CELLS, ENOUGH_CELLS);
    const int64_t range = clamp(in_tiles((n_cells + n_ranges - 1) / n_ranges), fewest, INT32_MAX);
    for (int64_t begin = block->begin; begin < block->end; begin += range) {
        struct ck_piece piece = {
            .segment = block->segment,
            .begin = (int32_t)begin,
            .end = (int32_t)(begin + range < block->end ? begin + range : block->end),
            .first_view = block->first_view,
            .n_views = block->n_views,
        };
        trim_views(sight, &piece);
        if (piece.n_views > 0 && !add_piece(plan, &piece)) {
            return false;
        }
    }
    return true;
}

static bool make_pieces(struct ck_plan *plan, const struct ck_sight *sight, int32_t n_threads) {
    int64_t cost = 0;
    for (int32_t i = 0; i < plan->n_blocks; i++) {
        cost += plan->blocks[i].cost;
    }
    const int64_t wanted_pieces = clamp(MANY_PIECES, (int64_t)n_threads * FEWEST_PER_THREAD,
                                        (int64_t)n_threads * PIECES_PER_THREAD);
    const int64_t wanted_cost = cost / wanted_pieces + 1;
    for (int32_t i = 0; i < plan->n_blocks; i++) {
        if (!cut_block(plan, sight, &plan->blocks[i], wanted_cost, n_threads)) {
            return false;
        }
    }
    return true;
}

/* ---- order ---- */

/* By the rows they read first: pieces of interleaved sequences then walk through memory together.
 * Of one prompt's blocks the last sees most, and goes first. */
static int compare_pieces(const void *left, const void *right) {
    const struct ck_piece *a = left, *b = right;
    if (a->first_row != b->first_row) {
        return a->first_row < b->first_row ? -1 : 1;
    }
    return a->first_view > b->first_view ? -1 : a->first_view < b->first_view;
}

static int64_t count_entries(const struct ck_plan *plan) {
    int64_t n = 0;
    for (int32_t i = 0; i < plan->n_pieces; i++) {
        n += plan->pieces[i].n_views;
    }
    return n;
}

static void order_pieces(struct ck_plan *plan, const struct ck_sight *sight) {
    for (int32_t i = 0; i < plan->n_pieces; i++) {
        struct ck_piece *piece = &plan->pieces[i];
        const struct ck_segment *segment = &sight->segments[piece->segment];
        piece->first_row = sight->cells[segment->first_cell + piece->begin];
    }
    qsort(plan->pieces, (size_t)plan->n_pieces, sizeof *plan->pieces, compare_pieces);
    for (int32_t i = 0, n = 0; i < plan->n_pieces; i++) {
        plan->pieces[i].first_entry = n;
        n += plan->pieces[i].n_views;
    }
}

/* ---- parts ---- */

/* cursor[q] = in how many pieces query q is. */
static void count_pieces(struct ck_plan *plan, const struct ck_sight *sight) {
    memset(plan->cursor, 0, (size_t)plan->n_queries * sizeof *plan->cursor);
    for (int32_t i = 0; i < plan->n_pieces; i++) {
        const struct ck_view *views = sight->views + plan->pieces[i].first_view;
        for (int32_t v = 0; v < plan->pieces[i].n_views; v++) {
            plan->cursor[views[v].query]++;
        }
    }
}

/* Lays the queries' parts out; cursor[q] is the first from here on. */
static void place_parts(struct ck_plan *plan) {
    plan->n_parts = 0;
    for (int32_t q = 0; q < plan->n_queries; q++) {
        const int32_t n = plan->cursor[q] > 1 ? plan->cursor[q] : 0;
        plan->first_part[q] = plan->n_parts;
        plan->cursor[q] = n > 0 ? plan->n_parts : CK_NO_PART;
        plan->n_parts += n;
    }
    plan->first_part[plan->n_queries] = plan->n_parts;
}

static bool number_parts(struct ck_plan *plan, const struct ck_sight *sight) {
    const struct ck_piece *last = &plan->pieces[plan->n_pieces - 1];
    const int32_t n_entries = last->first_entry + last->n_views;
    if (!CK_RESERVE(plan->part_of_entry, &plan->room_entries, n_entries) ||
        !CK_RESERVE(plan->first_part, &plan->room_first, (int64_t)plan->n_queries + 1) ||
        !CK_RESERVE(plan->cursor, &plan->room_cursor, plan->n_queries)) {
        return false;
    }
    count_pieces(plan, sight);
    place_parts(plan);
    for (int32_t i = 0; i < plan->n_pieces; i++) {
        const struct ck_piece *piece = &plan->pieces[i];
        for (int32_t v = 0; v < piece->n_views; v++) {
            int32_t *cursor = &plan->cursor[sight->views[piece->first_view + v].query];
            plan->part_of_entry[piece->first_entry + v] =
                *cursor == CK_NO_PART ? CK_NO_PART : (*cursor)++;
        }
    }
    return true;
}

/* ---- the whole ---- */

cellkv_status ck_plan_build(struct ck_plan *plan, const struct ck_sight *sight, int32_t n_threads) {
    plan->n_queries = sight->n_queries;
    plan->n_blocks = plan->n_pieces = plan->n_parts = 0;
    if (!make_blocks(plan, sight) || !make_pieces(plan, sight, n_threads) ||
        count_entries(plan) > MAX_ENTRIES) {
        return ck_fail_memory("a step's plan");
    }
    order_pieces(plan, sight);
    return number_parts(plan, sight) ? CELLKV_OK : ck_fail_memory("a step's plan");
}

void ck_plan_free(struct ck_plan *plan) {
    ck_free(plan->blocks);
    ck_free(plan->pieces);
    ck_free(plan->part_of_entry);
    ck_free(plan->first_part);
    ck_free(plan->cursor);
    *plan = (struct ck_plan){0};
}
