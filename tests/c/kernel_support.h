/* What check_kernels and its benchmark share: memory that ends where reading on is an error, rows
 * in all the ways they can be stored, and their values in double. */
#ifndef KERNEL_SUPPORT_H
#define KERNEL_SUPPORT_H

#include <math.h>

#include "attention/kernels/kernels.h"

#include "check.h"

/* Memory whose end is a page that cannot be touched. */
struct fence {
    char *end;
    size_t size;
};

struct fence fence_new(size_t size);
void fence_free(struct fence *fence);

/* The last bytes before the fence, all 0xff: NaN in every type. What lies before them is guarded.
 */
void *fence_take(const struct fence *fence, size_t bytes);

/* Nothing before the bytes that were taken has been written. */
void fence_check(const struct fence *fence, size_t bytes);

static const char *const type_names[CK_N_ROW_TYPES] = {"f32", "f16", "bf16", "q8_0", "q4_0"};

bool is_in_blocks(enum ck_row_type type);
size_t row_bytes(enum ck_row_type type, int32_t n); /* of n elements, or of whole blocks */
double stored_value(const char *row, enum ck_row_type type, int32_t i);

/* A row of moderate values, some of f16's below its normal numbers. */
void store_random(struct dice *dice, char *row, enum ck_row_type type, int32_t width);

float random_float(struct dice *dice, float limit); /* in [-limit, limit] */

/* A tile in rows that are NaN wherever the tile does not reach; the last row ends at the fence. */
struct rows {
    struct ck_tile tile;
    int32_t cells[CK_TILE];
    int32_t upcoming[CK_TILE];
    double *values; /* [n_cells][width] */
};

void rows_new(struct rows *rows, const struct fence *fence, struct dice *dice,
              enum ck_row_type type, int32_t width, int32_t n_cells);
void rows_free(struct rows *rows);

/* Times every kernel of an isa, or of all that are available where the name is NULL. */
void bench(const char *isa_name);

#endif
