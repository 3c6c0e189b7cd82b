/* The cell table without tensors, for programs that keep K and V themselves: a cell's index is the
 * row to write to and to read from.
 *
 *     ./cells_alone */
#include <cellkv/cellkv.h>
#include <stdio.h>
#include <stdlib.h>

enum { CAPACITY = 12 };

static void check(cellkv_status status) {
    if (status != CELLKV_OK) {
        fprintf(stderr, "%s: %s\n", cellkv_status_text(status), cellkv_last_error());
        exit(1);
    }
}

/* A step of n tokens: admission, then a cell for each token. */
static void step(cellkv_cache *cache, int32_t n, const int64_t *seqs) {
    int32_t rows[CAPACITY];
    check(cellkv_cache_declare(cache, seqs, n, NULL));
    check(cellkv_cache_place(cache, NULL, n, rows));
    printf("write rows ");
    for (int32_t i = 0; i < n; i++) {
        printf(" %d", (int)rows[i]);
    }
    printf("\n");
    /* Here the caller computes: token i's K and V go to rows[i] of each layer, and its query
     * attends the rows of seqs[i] that cellkv_cache_read_cells lists. */
}

/* What a query at the sequence's end sees. */
static void show(cellkv_cache *cache, const char *name, int64_t seq) {
    int32_t rows[CAPACITY], positions[CAPACITY], length = 0;
    check(cellkv_cache_read_cells(cache, seq, rows, positions, CAPACITY, &length));
    printf("%s reads rows", name);
    for (int32_t i = 0; i < length; i++) {
        printf(" %d", (int)rows[i]);
    }
    printf("\n");
}

int main(void) {
    cellkv_cache *cache = NULL;
    cellkv_cache_config config = cellkv_cache_config_default();
    config.backend = "cells";
    config.capacity = CAPACITY;
    config.initial_rows = 0;
    check(cellkv_cache_new(&config, &cache));

    int64_t a = 0, b = 0;
    check(cellkv_cache_open(cache, &a));
    step(cache, 6, (int64_t[]){a, a, a, a, a, a});

    /* b shares a's first four rows; then both go on in one step. */
    check(cellkv_cache_clone(cache, a, 4, &b));
    step(cache, 3, (int64_t[]){a, b, b});
    show(cache, "a", a);
    show(cache, "b", b);

    /* The last step's second and third token are taken back, as after a rejected draft. */
    check(cellkv_cache_undo_step(cache, 1));
    show(cache, "b", b);

    /* Of a's rows those come free that b does not share: the next step takes them. */
    check(cellkv_cache_rewind(cache, a, 2));
    step(cache, 4, (int64_t[]){b, b, a, b});
    show(cache, "a", a);
    show(cache, "b", b);

    /* A step that does not fit is refused whole. */
    int64_t too_many[CAPACITY];
    for (int i = 0; i < CAPACITY; i++) {
        too_many[i] = a;
    }
    int32_t shortfall = 0;
    if (cellkv_cache_declare(cache, too_many, CAPACITY, &shortfall) == CELLKV_ERROR_OUT_OF_CELLS) {
        printf("12 more tokens: %d cells are missing\n", (int)shortfall);
    }
    check(cellkv_cache_close(cache, b));
    cellkv_cache_free(cache);
    return 0;
}
