/* Where a graph's views stand among its nodes. */
#ifndef CELLKV_EXECUTOR_VIEW_ORDER_H
#define CELLKV_EXECUTOR_VIEW_ORDER_H

struct ggml_cgraph;

/* Puts each view right behind the node that it is a view of.
 *
 * ggml's scheduler gives a view to whichever device the nodes around it run on: views cost nothing,
 * and most devices pass over them. An RPC server does not: it refuses a graph with a view of
 * another server's memory, and ggml's client then ends the process. */
void ck_order_views(struct ggml_cgraph *graph);

#endif
