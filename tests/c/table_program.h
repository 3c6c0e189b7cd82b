/* A program for tests: token t's q, k and v in each layer are rows of given tables, and a result
 * row is every layer's attention output, one after the other. So an oracle needs nothing but
 * attention. */
#ifndef TABLE_PROGRAM_H
#define TABLE_PROGRAM_H

#include <cellkv/cellkv.h>

#ifdef __cplusplus
extern "C" {
#endif

struct table_layer {
    cellkv_layer shape; /* its types are ignored */
    int32_t n_heads;
    const float *q;     /* [n_vocab, n_heads, head_dim_k] */
    const float *k;     /* [n_vocab, n_kv_heads, head_dim_k] */
    const float *v;     /* [n_vocab, n_kv_heads, head_dim_v] */
    const float *sinks; /* [n_heads], or NULL */
    float scale;
    float soft_cap;
};

struct table_program;

/* Copies each layer's tables to its device (a text as in cellkv/device.h; NULL: the CPU). NULL if
 * it cannot. The caller's reference is dropped by table_program_free; executors hold their own. */
CELLKV_API struct table_program *table_program_new(const char *devices, int32_t n_vocab,
                                                   const struct table_layer *layers,
                                                   int32_t n_layers);
CELLKV_API void table_program_free(struct table_program *program);

/* Lives as long as the program. */
CELLKV_API const cellkv_program *table_program_interface(const struct table_program *program);

/* How many table programs are alive in this process: for tests of reference counts. */
CELLKV_API int32_t table_program_alive(void);

/* Makes build misbehave from now on, to see what an executor says to it. */
enum table_fault {
    TABLE_FAULT_NONE,
    TABLE_FAULT_SKIP_LAYER,    /* the last layer is never attended */
    TABLE_FAULT_TWICE,         /* layer 0 is attended twice */
    TABLE_FAULT_LAYER_OUTSIDE, /* layer n_layers is attended */
    TABLE_FAULT_NO_RESULT,     /* no result is named */
    TABLE_FAULT_RESULT_SHAPE,  /* the result has a row too many floats */
    TABLE_FAULT_Q_SHAPE,       /* q lacks a head dimension */
    TABLE_FAULT_NO_HEADS,      /* q has none */
    TABLE_FAULT_NULL_K,        /* k is NULL */
    TABLE_FAULT_V_TYPE,        /* v is f16 */
    TABLE_FAULT_PARAMS,        /* scale is NaN */
    TABLE_FAULT_SINKS,         /* sinks of the wrong length */
    TABLE_FAULT_NO_DATA,       /* a leaf that has no data */
    TABLE_FAULT_GIVES_UP       /* build returns CELLKV_ERROR_UNSUPPORTED */
};
CELLKV_API void table_program_set_fault(struct table_program *program, enum table_fault fault);

#ifdef __cplusplus
}
#endif

#endif
