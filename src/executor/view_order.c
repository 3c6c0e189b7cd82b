#include "view_order.h"

#include <stdbool.h>
#include <string.h>

#include <ggml.h>

/* What ggml's scheduler takes for a view. */
static bool is_view(const struct ggml_tensor *node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE ||
           node->op == GGML_OP_TRANSPOSE;
}

/* A view reads nothing but its source, so anywhere behind that is right. Few stand elsewhere. */
void ck_order_views(struct ggml_cgraph *graph) {
    struct ggml_tensor **nodes = ggml_graph_nodes(graph);
    const int n = ggml_graph_n_nodes(graph);
    for (int i = 1; i < n; i++) {
        struct ggml_tensor *node = nodes[i];
        int source = i - 1;
        while (is_view(node) && source >= 0 && nodes[source] != node->src[0]) {
            source--;
        }
        if (source < 0 || source == i - 1) {
            continue; /* of a leaf, or where it belongs */
        }
        struct ggml_tensor **to = &nodes[source + 1];
        memmove(to + 1, to, (size_t)(i - source - 1) * sizeof(*to));
        *to = node;
    }
}
