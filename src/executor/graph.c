#include "graph.h"

#include <math.h>
#include <string.h>

#include "attention/dense.h"
#include "cells/error.h"
#include "cells/memory.h"
#include "storage/device.h"
#include "view_order.h"

enum {
    BASE_TENSORS = 256,
    TENSORS_PER_LAYER = 64,
};

/* ---- the program's side: executor.h ---- */

struct ggml_context *cellkv_graph_context(cellkv_graph *graph) {
    return graph->context;
}

int32_t cellkv_graph_n_tokens(const cellkv_graph *graph) {
    return graph->shape.n_tokens;
}

int32_t cellkv_graph_n_outputs(const cellkv_graph *graph) {
    return graph->shape.n_outputs;
}

struct ggml_tensor *cellkv_graph_tokens(cellkv_graph *graph) {
    return graph->tokens;
}

struct ggml_tensor *cellkv_graph_positions(cellkv_graph *graph) {
    return graph->positions;
}

struct ggml_tensor *cellkv_graph_outputs(cellkv_graph *graph) {
    return graph->outputs;
}

void cellkv_graph_set_result(cellkv_graph *graph, struct ggml_tensor *result) {
    graph->result = result;
}

/* Only the first failure counts: later ones follow from it. */
#define FAIL_ONCE(graph, code, ...)                                                                \
    ((graph)->status == CELLKV_OK ? (void)((graph)->status = ck_fail((code), __VA_ARGS__))         \
                                  : (void)0)

cellkv_status cellkv_graph_fail(cellkv_graph *graph, cellkv_status status, const char *message) {
    FAIL_ONCE(graph, status == CELLKV_OK ? CELLKV_ERROR_BAD_GRAPH : status, "program: %s",
              message != NULL ? message : "failed");
    return graph->status;
}

static void add_pin(cellkv_graph *graph, const struct ck_pin *pin) {
    if (!CK_RESERVE(graph->pins, &graph->room_pins, graph->n_pins + 1)) {
        FAIL_ONCE(graph, CELLKV_ERROR_OUT_OF_MEMORY, "graph: no memory");
        return;
    }
    graph->pins[graph->n_pins++] = *pin;
}

static bool is_layer(cellkv_graph *graph, const char *call, int32_t index) {
    const int32_t n_layers = graph->shared->program->n_layers;
    if (index >= 0 && index < n_layers) {
        return true;
    }
    FAIL_ONCE(graph, CELLKV_ERROR_BAD_GRAPH, "%s: layer %d is outside [0, %d)", call, index,
              n_layers);
    return false;
}

void cellkv_graph_place(cellkv_graph *graph, int32_t layer, struct ggml_tensor *tensor) {
    const struct ck_graph_context *shared = graph->shared;
    if (!is_layer(graph, "place", layer)) {
        return;
    }
    if (tensor == NULL || tensor->op == GGML_OP_NONE) {
        FAIL_ONCE(graph, CELLKV_ERROR_BAD_GRAPH, "place, layer %d: the tensor is %s", layer,
                  tensor == NULL ? "NULL" : "no op's result");
    } else if (shared->devices->is_split &&
               ck_device_supports(ggml_backend_get_device(shared->devices->of_layer[layer]),
                                  tensor)) {
        add_pin(graph, &(struct ck_pin){tensor, layer, false});
    }
}

/* ---- attend ---- */

static bool is_tokens_by_heads(const struct ggml_tensor *tensor, int64_t head_dim,
                               int64_t n_tokens) {
    return tensor != NULL && tensor->type == GGML_TYPE_F32 && tensor->ne[0] == head_dim &&
           tensor->ne[2] == n_tokens && tensor->ne[3] == 1 && tensor->nb[0] == sizeof(float);
}

static void fail_tensor(cellkv_graph *graph, int32_t layer, const char *what,
                        const struct ggml_tensor *tensor, int64_t head_dim, const char *n_heads) {
    if (tensor == NULL) {
        FAIL_ONCE(graph, CELLKV_ERROR_BAD_GRAPH, "attend, layer %d: %s is NULL", layer, what);
        return;
    }
    FAIL_ONCE(
        graph, CELLKV_ERROR_BAD_GRAPH,
        "attend, layer %d: %s is %s [%lld, %lld, %lld, %lld], expected f32 [%lld, %s, %d], each "
        "head contiguous",
        layer, what, ggml_type_name(tensor->type), (long long)tensor->ne[0],
        (long long)tensor->ne[1], (long long)tensor->ne[2], (long long)tensor->ne[3],
        (long long)head_dim, n_heads, graph->shape.n_tokens);
}

static bool check_qkv(cellkv_graph *graph, int32_t index, const cellkv_layer *layer,
                      const struct ggml_tensor *q, const struct ggml_tensor *k,
                      const struct ggml_tensor *v) {
    const int64_t n = graph->shape.n_tokens;
    if (!is_tokens_by_heads(q, layer->head_dim_k, n) || q->ne[1] < 1 || q->ne[1] > INT32_MAX ||
        q->ne[1] % layer->n_kv_heads != 0) {
        fail_tensor(graph, index, "q", q, layer->head_dim_k, "a multiple of the K/V heads");
    } else if (!is_tokens_by_heads(k, layer->head_dim_k, n) || k->ne[1] != layer->n_kv_heads) {
        fail_tensor(graph, index, "k", k, layer->head_dim_k, "the K/V heads");
    } else if (!is_tokens_by_heads(v, layer->head_dim_v, n) || v->ne[1] != layer->n_kv_heads) {
        fail_tensor(graph, index, "v", v, layer->head_dim_v, "the K/V heads");
    } else {
        return true;
    }
    return false;
}

static bool check_params(cellkv_graph *graph, int32_t index, const struct ggml_tensor *q,
                         const cellkv_attend_params *params) {
    if (params == NULL || !isfinite(params->scale) || !isfinite(params->soft_cap) ||
        params->soft_cap < 0) {
        FAIL_ONCE(graph, CELLKV_ERROR_BAD_GRAPH,
                  "attend, layer %d: params need a finite scale and a soft_cap >= 0", index);
        return false;
    }
    const struct ggml_tensor *sinks = params->sinks;
    if (sinks != NULL && (sinks->type != GGML_TYPE_F32 || ggml_nelements(sinks) != q->ne[1] ||
                          sinks->ne[0] != q->ne[1] || !ggml_is_contiguous(sinks))) {
        FAIL_ONCE(graph, CELLKV_ERROR_BAD_GRAPH, "attend, layer %d: sinks must be f32 [%lld]",
                  index, (long long)q->ne[1]);
        return false;
    }
    return true;
}

static bool check_layer(cellkv_graph *graph, int32_t index) {
    if (!is_layer(graph, "attend", index)) {
        return false;
    }
    if (graph->attended[index]) {
        FAIL_ONCE(graph, CELLKV_ERROR_BAD_GRAPH, "attend: layer %d is attended twice", index);
        return false;
    }
    return true;
}

/* Pins a node of attention, which becomes part of the graph even if nobody reads the result: the K
 * and V must be written. */
static void pin(cellkv_graph *graph, struct ggml_tensor *node, int32_t layer) {
    add_pin(graph, &(struct ck_pin){node, layer, true});
    ggml_build_forward_expand(graph->nodes, node);
}

struct pinner {
    cellkv_graph *graph;
    int32_t layer;
};

static void pin_node(void *taker, struct ggml_tensor *node) {
    const struct pinner *pinner = taker;
    pin(pinner->graph, node, pinner->layer);
}

/* Layers of one device share it. */
static struct ggml_tensor *mask_of_layer(struct pinner *pinner, int32_t window) {
    cellkv_graph *graph = pinner->graph;
    struct ck_mask *read = &graph->masks_read[window];
    ggml_backend_t backend = graph->shared->devices->of_layer[pinner->layer];
    if (read->backend != backend) {
        read->backend = backend;
        read->tensor = ck_dense_mask_at_device(graph->context, &graph->layouts[window],
                                               graph->masks[window], pin_node, pinner);
    }
    return read->tensor;
}

static struct ggml_tensor *attend_dense(cellkv_graph *graph, int32_t layer, struct ggml_tensor *q,
                                        struct ggml_tensor *k, struct ggml_tensor *v,
                                        const cellkv_attend_params *params) {
    const struct ck_graph_context *shared = graph->shared;
    const int32_t window = shared->windows->of_layer[layer];
    struct pinner pinner = {graph, layer};
    const struct ck_dense_op op = {
        .k_rows = ck_storage_k(shared->storage, layer),
        .v_rows = ck_storage_v(shared->storage, layer),
        .layer = &shared->layers[layer],
        .q = q,
        .k = k,
        .v = v,
        .rows = graph->rows[window],
        .mask = mask_of_layer(&pinner, window),
        .layout = &graph->layouts[window],
        .params = params,
    };
    return ck_dense_attend(graph->context, &op, pin_node, &pinner);
}

static struct ggml_tensor *attend_ragged(cellkv_graph *graph, int32_t layer, struct ggml_tensor *q,
                                         struct ggml_tensor *k, struct ggml_tensor *v,
                                         const cellkv_attend_params *params) {
    const struct ck_graph_context *shared = graph->shared;
    const int32_t window = shared->windows->of_layer[layer];
    const struct ck_window_step *step = &shared->steps[window];
    struct ck_ragged_layer *ragged = &graph->ragged[layer];
    *ragged = (struct ck_ragged_layer){
        .kernels = shared->kernels,
        .sight = &step->sight,
        .plan = &step->plan,
        .n_threads = shared->devices->n_threads,
        .max_parts = graph->shape.n_parts,
        .shape = shared->layers[layer],
    };
    const struct ck_ragged_nodes nodes = ck_ragged_attend(
        graph->context, ragged, ck_storage_k(shared->storage, layer),
        ck_storage_v(shared->storage, layer), q, k, v, graph->rows[window], params);
    pin(graph, nodes.write_k, layer);
    pin(graph, nodes.write_v, layer);
    pin(graph, nodes.compute, layer);
    pin(graph, nodes.merge, layer);
    return nodes.attention;
}

struct ggml_tensor *cellkv_attend(cellkv_graph *graph, int32_t layer, struct ggml_tensor *q,
                                  struct ggml_tensor *k, struct ggml_tensor *v,
                                  const cellkv_attend_params *params) {
    if (!check_layer(graph, layer)) {
        return NULL;
    }
    if (!check_qkv(graph, layer, &graph->shared->layers[layer], q, k, v) ||
        !check_params(graph, layer, q, params)) {
        return NULL;
    }
    graph->attended[layer] = true;
    return graph->ragged != NULL ? attend_ragged(graph, layer, q, k, v, params)
                                 : attend_dense(graph, layer, q, k, v, params);
}

/* ---- building ---- */

static size_t max_tensors(const cellkv_program *program) {
    if (program->max_tensors > 0) {
        return (size_t)program->max_tensors;
    }
    return BASE_TENSORS + TENSORS_PER_LAYER * (size_t)program->n_layers;
}

static struct ggml_tensor *as_input(struct ggml_tensor *tensor, const char *name) {
    ggml_set_input(tensor);
    ggml_set_name(tensor, name);
    return tensor;
}

static struct ggml_tensor *new_input(cellkv_graph *graph, enum ggml_type type, int64_t n,
                                     const char *name) {
    return as_input(ggml_new_tensor_1d(graph->context, type, n), name);
}

/* Windows without a ring write to the same rows. */
static void make_rows(cellkv_graph *graph) {
    const struct ck_windows *windows = graph->shared->windows;
    struct ggml_tensor *cells = NULL;
    for (int32_t w = 0; w < windows->n_windows; w++) {
        if (windows->rings[w] == 0 && cells != NULL) {
            graph->rows[w] = cells;
            continue;
        }
        graph->rows[w] = new_input(graph, GGML_TYPE_I64, graph->shape.n_tokens, "rows");
        if (windows->rings[w] == 0) {
            cells = graph->rows[w];
        }
    }
}

static void make_masks(cellkv_graph *graph) {
    for (int32_t w = 0; w < graph->shared->windows->n_windows; w++) {
        graph->masks[w] = as_input(ck_dense_new_mask(graph->context, &graph->layouts[w]), "mask");
    }
}

static void make_inputs(cellkv_graph *graph) {
    const struct ck_shape *shape = &graph->shape;
    graph->tokens = new_input(graph, GGML_TYPE_I32, shape->n_tokens, "tokens");
    graph->positions = new_input(graph, GGML_TYPE_I32, shape->n_tokens, "positions");
    make_rows(graph);
    if (shape->n_outputs > 0) {
        graph->outputs = new_input(graph, GGML_TYPE_I32, shape->n_outputs, "outputs");
    }
    if (graph->ragged == NULL) {
        make_masks(graph);
    }
}

static void check_result(cellkv_graph *graph) {
    const cellkv_program *program = graph->shared->program;
    const struct ggml_tensor *result = graph->result;
    if (graph->shape.n_outputs == 0) {
        graph->result = NULL;
        return;
    }
    if (result == NULL || result->type != GGML_TYPE_F32 || !ggml_is_contiguous(result) ||
        result->ne[0] != program->n_result || ggml_nrows(result) != graph->shape.n_outputs) {
        FAIL_ONCE(graph, CELLKV_ERROR_BAD_GRAPH,
                  "the program's result is %s, expected contiguous f32 [%d, %d]",
                  result == NULL ? "missing" : "of another shape or type", program->n_result,
                  graph->shape.n_outputs);
    }
}

static void check_attended(cellkv_graph *graph) {
    for (int32_t l = 0; l < graph->shared->program->n_layers; l++) {
        if (!graph->attended[l]) {
            FAIL_ONCE(graph, CELLKV_ERROR_BAD_GRAPH, "the program never attends layer %d", l);
        }
    }
}

static void run_build(cellkv_graph *graph) {
    const cellkv_program *program = graph->shared->program;
    const cellkv_status status = program->build(program->context, graph);
    if (status != CELLKV_OK) {
        FAIL_ONCE(graph, status, "the program's build gave up: %s", cellkv_status_text(status));
    }
    check_attended(graph);
    check_result(graph);
    if (graph->status != CELLKV_OK || graph->result == NULL) {
        return;
    }
    ggml_set_output(graph->result);
    ggml_build_forward_expand(graph->nodes, graph->result);
}

/* Whether some backend can run the node with its sources where they are. A custom op runs on the
 * CPU, and could not write to a tensor in another device's memory. */
static bool is_runnable(const struct ck_devices *devices, struct ggml_tensor *node) {
    const struct ggml_tensor *base = node->view_src;
    if (ck_is_custom(node) && base != NULL && base->buffer != NULL &&
        !ggml_backend_buffer_is_host(base->buffer)) {
        return false;
    }
    for (int i = 0; i < devices->n_backends; i++) {
        if (ck_device_supports(ggml_backend_get_device(devices->backends[i]), node)) {
            return true;
        }
    }
    return false;
}

static bool is_reachable(const struct ck_devices *devices, const struct ggml_tensor *tensor) {
    const struct ggml_tensor *base = tensor->view_src != NULL ? tensor->view_src : tensor;
    if (base->buffer == NULL) {
        return base->op != GGML_OP_NONE || (base->flags & GGML_TENSOR_FLAG_INPUT) != 0;
    }
    for (int i = 0; i < devices->n_backends; i++) {
        if (ggml_backend_supports_buft(devices->backends[i],
                                       ggml_backend_buffer_get_type(base->buffer))) {
            return true;
        }
    }
    return false;
}

/* Whether each layer's device can attend with just these heads, caps and sinks, which the probe
 * could not know. */
static void check_pins(cellkv_graph *graph) {
    const struct ck_graph_context *shared = graph->shared;
    for (int32_t i = 0; i < graph->n_pins; i++) {
        const struct ck_pin *pin = &graph->pins[i];
        if (!pin->is_attention) {
            continue;
        }
        ggml_backend_dev_t device = ggml_backend_get_device(shared->devices->of_layer[pin->layer]);
        if (!ck_device_supports(device, pin->node)) {
            const cellkv_layer *layer = &shared->layers[pin->layer];
            FAIL_ONCE(graph, CELLKV_ERROR_UNSUPPORTED,
                      "layer %d: %s cannot run %s over K of type %s, width %d, V of type %s, "
                      "width %d, as the program attends",
                      pin->layer, ck_device_name(device), ggml_op_desc(pin->node),
                      ggml_type_name((enum ggml_type)layer->type_k), layer->head_dim_k,
                      ggml_type_name((enum ggml_type)layer->type_v), layer->head_dim_v);
        }
    }
}

/* What the scheduler would end the process for is refused here. */
static void check_nodes(cellkv_graph *graph) {
    const struct ck_devices *devices = graph->shared->devices;
    for (int i = 0; i < ggml_graph_n_nodes(graph->nodes); i++) {
        struct ggml_tensor *node = ggml_graph_node(graph->nodes, i);
        if (!is_runnable(devices, node)) {
            FAIL_ONCE(graph, CELLKV_ERROR_BAD_GRAPH, "no device runs node %s (%s)", node->name,
                      ggml_op_desc(node));
        }
        for (int s = 0; s < GGML_MAX_SRC; s++) {
            if (node->src[s] != NULL && !is_reachable(devices, node->src[s])) {
                FAIL_ONCE(graph, CELLKV_ERROR_BAD_GRAPH,
                          "node %s (%s) reads %s, which has no data or is on another device",
                          node->name, ggml_op_desc(node), node->src[s]->name);
            }
        }
    }
}

/* The most inputs: tokens, positions, outputs, and each window's rows and mask. */
static size_t max_inputs(const struct ck_windows *windows) {
    return 3 + 2 * (size_t)windows->n_windows;
}

/* The tensors that layouts take, beyond what the program knows of. */
static size_t layout_tensors(const cellkv_graph *graph) {
    size_t n = 0;
    for (int32_t l = 0; graph->layouts != NULL && l < graph->shared->program->n_layers; l++) {
        n += ck_dense_extra_tensors(&graph->layouts[graph->shared->windows->of_layer[l]]);
    }
    return n;
}

/* The graph's nodes, not allocated yet. */
static cellkv_status describe(cellkv_graph *graph) {
    const size_t n = max_tensors(graph->shared->program) + max_inputs(graph->shared->windows) +
                     layout_tensors(graph);
    const struct ggml_init_params params = {
        .mem_size = n * ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false),
        .no_alloc = true,
    };
    graph->context = ck_allocation_should_fail() ? NULL : ggml_init(params);
    if (graph->context == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "graph: no memory for %zu tensors", n);
    }
    graph->context_size = params.mem_size;
    graph->nodes = ggml_new_graph_custom(graph->context, n, false);
    make_inputs(graph);
    run_build(graph);
    ck_order_views(graph->nodes);
    if (graph->status == CELLKV_OK) {
        check_pins(graph);
        check_nodes(graph);
    }
    return graph->status;
}

static cellkv_status new_empty(const struct ck_graph_context *shared, const struct ck_shape *shape,
                               cellkv_graph **out) {
    const size_t n_layers = (size_t)shared->program->n_layers;
    cellkv_graph *graph = ck_calloc(1, sizeof *graph);
    if (graph == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "graph: no memory");
    }
    graph->shared = shared;
    graph->shape = *shape;
    graph->rows = ck_calloc((size_t)shared->windows->n_windows, sizeof *graph->rows);
    graph->masks = ck_calloc((size_t)shared->windows->n_windows, sizeof *graph->masks);
    graph->masks_read = ck_calloc((size_t)shared->windows->n_windows, sizeof *graph->masks_read);
    graph->attended = ck_calloc(n_layers, sizeof *graph->attended);
    if (shared->kernels != NULL) {
        graph->ragged = ck_calloc(n_layers, sizeof *graph->ragged);
    }
    if (graph->rows == NULL || graph->masks == NULL || graph->masks_read == NULL ||
        graph->attended == NULL || (graph->ragged == NULL) != (shared->kernels == NULL)) {
        ck_graph_free(graph);
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "graph: no memory");
    }
    *out = graph;
    return CELLKV_OK;
}

/* Layouts of the graph's own: the executor's are built anew for each slice. */
static cellkv_status copy_layouts(cellkv_graph *graph) {
    const int32_t n = graph->shared->windows->n_windows;
    const struct ck_layout *layouts = graph->shape.layouts;
    if (layouts == NULL) {
        return CELLKV_OK;
    }
    graph->layouts = ck_calloc((size_t)n, sizeof *graph->layouts);
    graph->shape.layouts = graph->layouts;
    if (graph->layouts == NULL) {
        return ck_fail_memory("a graph's layouts");
    }
    cellkv_status status = CELLKV_OK;
    for (int32_t w = 0; w < n && status == CELLKV_OK; w++) {
        status = ck_layout_copy(&graph->layouts[w], &layouts[w]);
    }
    return status;
}

static cellkv_status describe_new(const struct ck_graph_context *shared,
                                  const struct ck_shape *shape, cellkv_graph **out) {
    cellkv_graph *graph = NULL;
    cellkv_status status = new_empty(shared, shape, &graph);
    if (status != CELLKV_OK) {
        return status;
    }
    status = copy_layouts(graph);
    if (status == CELLKV_OK) {
        status = describe(graph);
    }
    if (status != CELLKV_OK) {
        ck_graph_free(graph);
        return status;
    }
    *out = graph;
    return CELLKV_OK;
}

/* ---- allocating ---- */

static void pin_nodes(const cellkv_graph *graph, ggml_backend_sched_t scheduler) {
    const struct ck_devices *devices = graph->shared->devices;
    for (int32_t i = 0; i < graph->n_pins; i++) {
        ggml_backend_sched_set_tensor_backend(scheduler, graph->pins[i].node,
                                              devices->of_layer[graph->pins[i].layer]);
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph->nodes); i++) {
        struct ggml_tensor *node = ggml_graph_node(graph->nodes, i);
        if (ck_is_custom(node)) {
            ggml_backend_sched_set_tensor_backend(scheduler, node, ck_devices_cpu(devices));
        }
    }
}

static void count_strayed(cellkv_graph *graph) {
    for (int32_t i = 0; i < graph->n_pins; i++) {
        const struct ck_pin *pin = &graph->pins[i];
        graph->n_strayed += pin->is_attention &&
                            ggml_backend_sched_get_tensor_backend(graph->scheduler, pin->node) !=
                                graph->shared->devices->of_layer[pin->layer];
    }
}

/* A bound on the tensors that the scheduler will meet: the nodes, the leafs they read, and what is
 * pinned without being part of the graph. A leaf that several nodes read counts several times,
 * which leaves its hash table some air. */
static size_t count_tensors(const cellkv_graph *graph) {
    const int n_nodes = ggml_graph_n_nodes(graph->nodes);
    size_t n = (size_t)n_nodes + (size_t)graph->n_pins;
    for (int i = 0; i < n_nodes; i++) {
        const struct ggml_tensor *node = ggml_graph_node(graph->nodes, i);
        for (int s = 0; s < GGML_MAX_SRC; s++) {
            n += node->src[s] != NULL && node->src[s]->op == GGML_OP_NONE;
        }
    }
    return n;
}

/* A scheduler whose compute buffers fit the graph. Measuring rewrites the graph that is measured,
 * which is then of no further use. */
static ggml_backend_sched_t new_scheduler(cellkv_graph *measured) {
    const struct ck_devices *devices = measured->shared->devices;
    if (ck_allocation_should_fail()) {
        return NULL;
    }
    ggml_backend_sched_t scheduler =
        ggml_backend_sched_new((ggml_backend_t *)devices->backends, NULL, devices->n_backends,
                               count_tensors(measured), false, false);
    if (scheduler == NULL) {
        return NULL;
    }
    pin_nodes(measured, scheduler);
    if (ck_allocation_should_fail() || !ggml_backend_sched_reserve(scheduler, measured->nodes)) {
        ggml_backend_sched_free(scheduler);
        return NULL;
    }
    return scheduler;
}

static cellkv_status allocate(cellkv_graph *graph, ggml_backend_sched_t scheduler) {
    graph->scheduler = scheduler;
    pin_nodes(graph, scheduler);
    if (!ggml_backend_sched_alloc_graph(scheduler, graph->nodes)) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "graph: no memory for its compute buffers");
    }
    count_strayed(graph);
    return CELLKV_OK;
}

cellkv_status ck_graph_new(const struct ck_graph_context *shared, const struct ck_shape *shape,
                           cellkv_graph **out) {
    cellkv_graph *measured;
    cellkv_status status = describe_new(shared, shape, &measured);
    if (status != CELLKV_OK) {
        return status;
    }
    ggml_backend_sched_t scheduler = new_scheduler(measured);
    ck_graph_free(measured);
    if (scheduler == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY,
                       "graph: no memory for the compute buffers of %d tokens", shape->n_tokens);
    }

    cellkv_graph *graph;
    status = describe_new(shared, shape, &graph);
    if (status != CELLKV_OK) {
        ggml_backend_sched_free(scheduler);
        return status;
    }
    status = allocate(graph, scheduler);
    if (status != CELLKV_OK) {
        ck_graph_free(graph);
        return status;
    }
    *out = graph;
    return CELLKV_OK;
}

void ck_graph_free(cellkv_graph *graph) {
    if (graph == NULL) {
        return;
    }
    ggml_backend_sched_free(graph->scheduler);
    ggml_free(graph->context);
    for (int32_t w = 0; graph->layouts != NULL && w < graph->shared->windows->n_windows; w++) {
        ck_layout_free(&graph->layouts[w]);
    }
    ck_free(graph->layouts);
    ck_free(graph->rows);
    ck_free(graph->masks);
    ck_free(graph->masks_read);
    ck_free(graph->pins);
    ck_free(graph->attended);
    ck_free(graph->ragged);
    ck_free(graph);
}

void ck_graph_rewind(cellkv_graph *graph) {
    for (int32_t l = 0; graph->ragged != NULL && l < graph->shared->program->n_layers; l++) {
        atomic_store(&graph->ragged[l].next_piece, 0);
    }
}

int64_t ck_graph_bytes(const cellkv_graph *graph) {
    int64_t bytes = (int64_t)graph->context_size;
    const struct ck_devices *devices = graph->shared->devices;
    for (int i = 0; i < devices->n_backends; i++) {
        bytes +=
            (int64_t)ggml_backend_sched_get_buffer_size(graph->scheduler, devices->backends[i]);
    }
    return bytes;
}
