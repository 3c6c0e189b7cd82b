/* For tests and benchmarks alone: in builds with -Dtests=true. */
#include "executor_object.h"

CELLKV_API void cellkv_test_limit_layouts(cellkv_executor *executor, int32_t limit);
CELLKV_API void cellkv_test_count_layout(const cellkv_executor *executor, int32_t window,
                                         int32_t *n_pieces, int32_t *n_runs, int64_t *n_looked_at);

/* As if the devices had been probed with this result, an `enum ck_layout_limit`; dense only. With
 * CK_LAYOUT_ONE_CALL it is what layouts are measured against. */
void cellkv_test_limit_layouts(cellkv_executor *executor, int32_t limit) {
    executor->layout_limit = (enum ck_layout_limit)limit;
}

/* Of the last slice, for the cache's distinct windows in order of appearance; dense only.
 * *n_looked_at: rows, seen or not, once for each query. */
void cellkv_test_count_layout(const cellkv_executor *executor, int32_t window, int32_t *n_pieces,
                              int32_t *n_runs, int64_t *n_looked_at) {
    *n_looked_at = executor->scratch.layouts[window].mask_size;
    *n_pieces = executor->scratch.layouts[window].n_pieces;
    *n_runs = executor->scratch.layouts[window].n_runs;
}
