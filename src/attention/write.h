/* The first half of update-and-attend, which all strategies share: a step's K and V go into the
 * rows of its cells. */
#ifndef CELLKV_ATTENTION_WRITE_H
#define CELLKV_ATTENTION_WRITE_H

#include <ggml.h>

/* Writes K or V of the step's tokens, F32 [width, n_heads, n_tokens] with contiguous heads, into
 * `stored` [width * n_heads, rows] at `rows`, I64 [n_tokens]. What reads the result runs after. */
struct ggml_tensor *ck_write_rows(struct ggml_context *context, struct ggml_tensor *stored,
                                  struct ggml_tensor *tokens, struct ggml_tensor *rows);

#endif
