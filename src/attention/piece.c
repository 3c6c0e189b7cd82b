/* The queries of a piece that read one K/V head are its rows: `group` heads of each query, query by
 * query. Cells are taken a tile at a time. With few rows each tile is read as it is stored, all
 * heads of a cell in turn, so that its bytes are fetched together; with many, each head's tiles are
 * unpacked once for all its rows. */
#include "piece.h"

#include <math.h>
#include <string.h>

enum {
    FLOATS_PER_LINE = 16, /* of the scratch, whose parts start at multiples of 64 bytes */
    /* The most rows that are worth reading a tile as it is stored, by the width of V. */
    FEW_NARROW = 8,
    FEW_WIDE = 12,
    WIDE = 128,
};

/* What one call works with. */
struct work {
    const struct ck_attention *attention;
    const struct ck_view *views; /* [n_views] the piece's */
    const int32_t *parts;        /* [n_views] their parts */
    const int32_t *cells;        /* the segment's */
    const int32_t *upcoming;     /* [n_upcoming] the first cells of the thread's next piece */
    int32_t n_upcoming;
    int32_t begin, end; /* of the piece, as the views count cells */
    int32_t n_views;
    int32_t group;  /* query heads of a K/V head */
    int32_t n_rows; /* n_views * group */

    /* in the scratch; [n_kv_heads] of each of the first three with few rows, else one */
    float *queries;            /* [n_rows][k.width], scaled */
    float *sums;               /* [n_rows][v.width] */
    struct ck_softmax *states; /* [n_rows] */
    float *scores;             /* [n_rows][CK_TILE], then weights */
    float *factors;            /* [n_rows] */
    struct ck_range *ranges;   /* [n_rows] what each row sees of the tile */
    float *packed_k;           /* [k.width][CK_TILE] */
    float *packed_v;           /* [CK_TILE][v.width] */
};

static int32_t at_most(int32_t n, int32_t limit) {
    return n < limit ? n : limit;
}

/* ---- scratch ---- */

static size_t few_rows(int32_t width_v) {
    return width_v >= WIDE ? FEW_WIDE : FEW_NARROW;
}

static size_t in_lines(size_t floats) {
    return (floats + FLOATS_PER_LINE - 1) / FLOATS_PER_LINE * FLOATS_PER_LINE;
}

static float *take(float **scratch, size_t floats) {
    float *taken = *scratch;
    *scratch += in_lines(floats);
    return taken;
}

/* Row states: queries, sums and softmax. */
static size_t state_floats(size_t n_rows, int32_t width_k, int32_t width_v) {
    return in_lines(n_rows * (size_t)width_k) + in_lines(n_rows * (size_t)width_v) +
           in_lines(n_rows * 2);
}

size_t ck_piece_scratch_floats(int32_t n_queries, int32_t n_heads, int32_t n_kv_heads,
                               int32_t width_k, int32_t width_v) {
    const size_t group = (size_t)(n_heads / n_kv_heads);
    const size_t few = few_rows(width_v) * (size_t)n_kv_heads;
    const size_t many = (size_t)at_most(n_queries, CK_MAX_QUERIES) * group;
    const size_t states = few > many ? few : many;
    return state_floats(states, width_k, width_v) + in_lines(many * CK_TILE) + in_lines(many) +
           in_lines(many * 2) + in_lines((size_t)width_k * CK_TILE) +
           in_lines((size_t)width_v * CK_TILE);
}

static void lay_out(struct work *work, bool is_few, float *scratch) {
    const struct ck_attention *attention = work->attention;
    const size_t n_rows = (size_t)work->n_rows;
    const size_t n_states = is_few ? n_rows * (size_t)attention->n_kv_heads : n_rows;
    work->queries = take(&scratch, n_states * (size_t)attention->k.width);
    work->sums = take(&scratch, n_states * (size_t)attention->v.width);
    work->states = (struct ck_softmax *)take(&scratch, n_states * 2);
    work->scores = take(&scratch, n_rows * CK_TILE);
    work->factors = take(&scratch, n_rows);
    work->ranges = (struct ck_range *)take(&scratch, n_rows * 2);
    work->packed_k = take(&scratch, (size_t)attention->k.width * CK_TILE);
    work->packed_v = take(&scratch, (size_t)attention->v.width * CK_TILE);
}

/* ---- rows ---- */

static const float *query_of(const struct ck_attention *attention, int32_t query, int32_t head) {
    return (const float *)(attention->queries + (size_t)query * attention->query_stride +
                           (size_t)head * attention->head_stride);
}

/* The rows of one K/V head: nothing seen yet. */
static void start_rows(const struct work *work, int32_t kv_head, float *queries, float *sums,
                       struct ck_softmax *states) {
    const struct ck_attention *attention = work->attention;
    const int32_t width = attention->k.width;
    for (int32_t r = 0; r < work->n_rows; r++) {
        const float *query = query_of(attention, work->views[r / work->group].query,
                                      kv_head * work->group + r % work->group);
        for (int32_t i = 0; i < width; i++) {
            queries[(size_t)r * (size_t)width + (size_t)i] = query[i] * attention->scale;
        }
        states[r] = (struct ck_softmax){.maximum = -INFINITY};
    }
    memset(sums, 0, (size_t)work->n_rows * (size_t)attention->v.width * sizeof *sums);
}

/* The attention of one head from its sum and softmax; the sink takes part in the latter. */
static void finish(const struct ck_attention *attention, const float *sums, struct ck_softmax state,
                   int32_t query, int32_t head) {
    const int32_t width = attention->v.width;
    float *out = attention->out +
                 ((size_t)query * (size_t)attention->n_heads + (size_t)head) * (size_t)width;
    float factor = 1.0f;
    if (attention->sinks != NULL) {
        const float sink = attention->sinks[head];
        const float maximum = fmaxf(state.maximum, sink);
        factor = expf(state.maximum - maximum);
        state.sum = state.sum * factor + expf(sink - maximum);
    }
    factor /= state.sum;
    for (int32_t i = 0; i < width; i++) {
        out[i] = sums[i] * factor;
    }
}

static float *part_of(const struct ck_attention *attention, int32_t part, int32_t head) {
    return attention->parts + ((size_t)part * (size_t)attention->n_heads + (size_t)head) *
                                  ck_part_floats(attention->v.width);
}

static void end_rows(const struct work *work, int32_t kv_head, const float *sums,
                     const struct ck_softmax *states) {
    const struct ck_attention *attention = work->attention;
    const size_t width = (size_t)attention->v.width;
    for (int32_t r = 0; r < work->n_rows; r++) {
        const int32_t view = r / work->group, head = kv_head * work->group + r % work->group;
        if (work->parts[view] == CK_NO_PART) {
            finish(attention, sums + (size_t)r * width, states[r], work->views[view].query, head);
            continue;
        }
        float *part = part_of(attention, work->parts[view], head);
        part[0] = states[r].maximum;
        part[1] = states[r].sum;
        memcpy(part + 2, sums + (size_t)r * width, width * sizeof *part);
    }
}

/* ---- tiles ---- */

/* What is read after a piece's last tile of one head. */
struct upcoming {
    int32_t kv_head;
    const int32_t *cells;
    int32_t n_cells;
};

/* A head's part of the cells from `cell` on, as the views count them; `then` follows the piece. */
static struct ck_tile tile_at(const struct work *work, const struct ck_rows *rows, int32_t kv_head,
                              struct upcoming then, int32_t cell) {
    const int32_t n = at_most(work->end - cell, CK_TILE);
    struct ck_tile tile = {
        .rows = rows->data + (size_t)kv_head * rows->head_bytes,
        .stride = rows->stride,
        .width = rows->width,
        .cells = work->cells + cell,
        .n_cells = n,
        .upcoming = work->cells + cell + n,
        .n_upcoming = at_most(work->end - cell - n, CK_TILE),
    };
    tile.upcoming_rows = tile.rows;
    tile.upcoming_bytes = rows->head_bytes;
    if (tile.n_upcoming == 0) {
        tile.upcoming_rows = rows->data + (size_t)then.kv_head * rows->head_bytes;
        tile.upcoming = then.cells;
        tile.n_upcoming = then.n_cells;
    }
    return tile;
}

/* The same where all heads of a tile are read in turn: each asks for all heads of its share of the
 * upcoming cells, as heads may share lines of the caches. */
static struct ck_tile shared_tile_at(const struct work *work, const struct ck_rows *rows,
                                     int32_t kv_head, int32_t cell) {
    const int32_t n_heads = work->attention->n_kv_heads;
    const struct upcoming then = {kv_head, work->upcoming, work->n_upcoming};
    struct ck_tile tile = tile_at(work, rows, kv_head, then, cell);
    const int32_t first = tile.n_upcoming * kv_head / n_heads;
    tile.n_upcoming = tile.n_upcoming * (kv_head + 1) / n_heads - first;
    tile.upcoming += first;
    tile.upcoming_rows = rows->data;
    tile.upcoming_bytes = rows->head_bytes * (size_t)n_heads;
    return tile;
}

/* What the rows see of the tile of n cells at `cell`. */
static void find_ranges(const struct work *work, int32_t cell, int32_t n) {
    for (int32_t i = 0; i < work->n_views; i++) {
        const struct ck_view *view = &work->views[i];
        struct ck_range range = {
            .begin = view->begin > cell ? at_most(view->begin - cell, n) : 0,
            .end = view->end > cell ? at_most(view->end - cell, n) : 0,
        };
        range.end = range.end > range.begin ? range.end : range.begin;
        for (int32_t g = 0; g < work->group; g++) {
            work->ranges[i * work->group + g] = range;
        }
    }
}

/* Rows [first, last) are those between the first and the last that see any of the tile. */
static void find_seeing(const struct work *work, int32_t *first, int32_t *last) {
    *first = 0;
    *last = work->n_rows;
    while (*first < *last && work->ranges[*first].begin == work->ranges[*first].end) {
        ++*first;
    }
    while (*last > *first && work->ranges[*last - 1].begin == work->ranges[*last - 1].end) {
        --*last;
    }
}

/* Whether rows [first, last) see the whole tile. */
static bool see_all(const struct work *work, int32_t first, int32_t last, int32_t n) {
    for (int32_t r = first; r < last; r++) {
        if (work->ranges[r].begin > 0 || work->ranges[r].end < n) {
            return false;
        }
    }
    return true;
}

/* ---- few rows ---- */

/* Each query's values from the cells that it sees alone: the others may hold NaN, and NaN times a
 * weight of 0 is NaN. */
static void add_seen_values(const struct work *work, const struct ck_tile *v, int32_t first,
                            int32_t last, float *sums) {
    const struct ck_attention *attention = work->attention;
    for (int32_t r = first; r < last; r += work->group) {
        const struct ck_range range = work->ranges[r];
        if (range.begin == range.end) {
            continue;
        }
        struct ck_tile seen = *v;
        seen.cells += range.begin;
        seen.n_cells = range.end - range.begin;
        seen.n_upcoming = 0;
        for (int32_t done = 0; done < work->group; done += CK_FEW_ROWS) {
            const size_t row = (size_t)(r + done);
            attention->kernels->values[attention->v.type](
                &seen, work->scores + row * CK_TILE + range.begin, work->factors + row,
                at_most(work->group - done, CK_FEW_ROWS), sums + row * (size_t)v->width);
        }
    }
}

static void compute_few(const struct work *work) {
    const struct ck_attention *attention = work->attention;
    const struct ck_kernels *kernels = attention->kernels;
    const size_t n_queries = (size_t)work->n_rows * (size_t)attention->k.width;
    const size_t n_sums = (size_t)work->n_rows * (size_t)attention->v.width;
    for (int32_t h = 0; h < attention->n_kv_heads; h++) {
        start_rows(work, h, work->queries + (size_t)h * n_queries, work->sums + (size_t)h * n_sums,
                   work->states + h * work->n_rows);
    }
    for (int32_t cell = work->begin; cell < work->end; cell += CK_TILE) {
        const int32_t n = at_most(work->end - cell, CK_TILE);
        find_ranges(work, cell, n);
        int32_t first, last;
        find_seeing(work, &first, &last);
        if (first == last) {
            continue;
        }
        const bool all = see_all(work, 0, work->n_rows, n);
        for (int32_t h = 0; h < attention->n_kv_heads; h++) {
            const struct ck_tile k = shared_tile_at(work, &attention->k, h, cell);
            const struct ck_tile v = shared_tile_at(work, &attention->v, h, cell);
            float *sums = work->sums + (size_t)h * n_sums;
            kernels->scores[attention->k.type](&k, work->queries + (size_t)h * n_queries,
                                               work->n_rows, work->scores);
            kernels->weigh(work->scores, work->ranges, work->n_rows, n, attention->soft_cap,
                           work->states + h * work->n_rows, work->factors);
            if (all) {
                kernels->values[attention->v.type](&v, work->scores, work->factors, work->n_rows,
                                                   sums);
            } else {
                add_seen_values(work, &v, 0, work->n_rows, sums);
            }
        }
    }
    for (int32_t h = 0; h < attention->n_kv_heads; h++) {
        end_rows(work, h, work->sums + (size_t)h * n_sums, work->states + h * work->n_rows);
    }
}

/* ---- many rows ---- */

static void compute_tile(const struct work *work, int32_t kv_head, int32_t cell) {
    const struct ck_attention *attention = work->attention;
    const struct ck_kernels *kernels = attention->kernels;
    struct upcoming then = {0, work->upcoming, work->n_upcoming};
    if (kv_head + 1 < attention->n_kv_heads) { /* the piece again, for the next head */
        then = (struct upcoming){kv_head + 1, work->cells + work->begin,
                                 at_most(work->end - work->begin, CK_TILE)};
    }
    const struct ck_tile k = tile_at(work, &attention->k, kv_head, then, cell);
    const struct ck_tile v = tile_at(work, &attention->v, kv_head, then, cell);
    const size_t width_k = (size_t)k.width, width_v = (size_t)v.width;
    int32_t first, last;
    find_ranges(work, cell, k.n_cells);
    find_seeing(work, &first, &last);
    if (first == last) {
        return;
    }
    const size_t row = (size_t)first;
    const int32_t n_rows = last - first;
    float *scores = work->scores + row * CK_TILE;
    kernels->pack_k[attention->k.type](&k, work->packed_k);
    kernels->multiply(work->queries + row * width_k, width_k, work->packed_k, CK_TILE, scores,
                      CK_TILE, NULL, n_rows, k.width, (k.n_cells + 7) / 8 * 8);
    kernels->weigh(scores, work->ranges + row, n_rows, k.n_cells, attention->soft_cap,
                   work->states + row, work->factors + row);
    if (kernels->pack_v[attention->v.type](&v, work->packed_v) ||
        see_all(work, first, last, v.n_cells)) {
        kernels->multiply(scores, CK_TILE, work->packed_v, width_v, work->sums + row * width_v,
                          width_v, work->factors + row, n_rows, v.n_cells, v.width);
    } else {
        add_seen_values(work, &v, first, last, work->sums);
    }
}

static void compute_many(const struct work *work) {
    for (int32_t h = 0; h < work->attention->n_kv_heads; h++) {
        start_rows(work, h, work->queries, work->sums, work->states);
        for (int32_t cell = work->begin; cell < work->end; cell += CK_TILE) {
            compute_tile(work, h, cell);
        }
        end_rows(work, h, work->sums, work->states);
    }
}

/* ---- the whole ---- */

static const int32_t *cells_of(const struct ck_sight *sight, const struct ck_piece *piece) {
    return sight->cells + sight->segments[piece->segment].first_cell;
}

void ck_piece_compute(const struct ck_attention *attention, const struct ck_sight *sight,
                      const struct ck_plan *plan, int32_t i, int32_t upcoming, float *scratch) {
    const struct ck_piece *piece = &plan->pieces[i];
    struct work work = {
        .attention = attention,
        .views = sight->views + piece->first_view,
        .parts = plan->part_of_entry + piece->first_entry,
        .cells = cells_of(sight, piece),
        .begin = piece->begin,
        .end = piece->end,
        .n_views = piece->n_views,
        .group = attention->n_heads / attention->n_kv_heads,
    };
    work.n_rows = work.n_views * work.group;
    if (upcoming < plan->n_pieces) {
        const struct ck_piece *next = &plan->pieces[upcoming];
        work.upcoming = cells_of(sight, next) + next->begin;
        work.n_upcoming = at_most(next->end - next->begin, CK_TILE);
    }
    const bool is_few = (size_t)work.n_rows <= few_rows(attention->v.width);
    lay_out(&work, is_few, scratch);
    if (is_few) {
        compute_few(&work);
    } else {
        compute_many(&work);
    }
}

void ck_parts_merge(const struct ck_attention *attention, const struct ck_plan *plan, int32_t query,
                    int32_t head) {
    const int32_t width = attention->v.width;
    float *sums = part_of(attention, plan->first_part[query], head) + 2;
    struct ck_softmax state = {.maximum = sums[-2], .sum = sums[-1]};
    for (int32_t p = plan->first_part[query] + 1; p < plan->first_part[query + 1]; p++) {
        const float *part = part_of(attention, p, head);
        const float maximum = fmaxf(state.maximum, part[0]);
        if (maximum == -INFINITY) {
            continue; /* neither has seen anything */
        }
        const float keep = expf(state.maximum - maximum), add = expf(part[0] - maximum);
        state = (struct ck_softmax){maximum, state.sum * keep + part[1] * add};
        for (int32_t i = 0; i < width; i++) {
            sums[i] = sums[i] * keep + part[2 + i] * add;
        }
    }
    finish(attention, sums, state, query, head);
}
