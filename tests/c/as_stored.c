/* For the Python tests' oracle: what ggml makes of rows that it writes in a quantized type. It may
 * round differently on other CPUs, and attention's own error is judged beside what is stored. */
#include <stdlib.h>

#include <cellkv/status.h>
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>

/* Writes floats [n_rows][width] into rows of a ggml type, as a step does, and copies the bytes to
 * `stored`, [n_rows][bytes of a row]. Returns whether it could. */
CELLKV_API bool test_as_stored(int32_t type, const float *values, int64_t width, int64_t n_rows,
                               void *stored);

static struct ggml_cgraph *write_all(struct ggml_context *context, struct ggml_tensor *rows,
                                     struct ggml_tensor *values, struct ggml_tensor *places) {
    struct ggml_cgraph *graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, ggml_set_rows(context, rows, values, places));
    return graph;
}

static void count_up(struct ggml_tensor *places) {
    int64_t *numbers = malloc(ggml_nbytes(places));
    for (int64_t i = 0; i < places->ne[0]; i++) {
        numbers[i] = i;
    }
    ggml_backend_tensor_set(places, numbers, 0, ggml_nbytes(places));
    free(numbers);
}

bool test_as_stored(int32_t type, const float *values, int64_t width, int64_t n_rows,
                    void *stored) {
    const struct ggml_init_params params = {
        .mem_size = 8 * ggml_tensor_overhead() + ggml_graph_overhead(), .no_alloc = true};
    struct ggml_context *context = ggml_init(params);
    ggml_backend_t cpu =
        ggml_backend_dev_init(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), NULL);
    struct ggml_tensor *rows = ggml_new_tensor_2d(context, (enum ggml_type)type, width, n_rows);
    struct ggml_tensor *from = ggml_new_tensor_2d(context, GGML_TYPE_F32, width, n_rows);
    struct ggml_tensor *places = ggml_new_tensor_1d(context, GGML_TYPE_I64, n_rows);
    struct ggml_cgraph *graph = write_all(context, rows, from, places);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(context, cpu);
    ggml_backend_tensor_set(from, values, 0, ggml_nbytes(from));
    count_up(places);
    const bool written = ggml_backend_graph_compute(cpu, graph) == GGML_STATUS_SUCCESS;
    ggml_backend_tensor_get(rows, stored, 0, ggml_nbytes(rows));
    ggml_backend_buffer_free(buffer);
    ggml_backend_free(cpu);
    ggml_free(context);
    return written;
}
