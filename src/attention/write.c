#include "write.h"

struct ggml_tensor *ck_write_rows(struct ggml_context *context, struct ggml_tensor *stored,
                                  struct ggml_tensor *tokens, struct ggml_tensor *rows) {
    const int64_t n = tokens->ne[0] * tokens->ne[1];
    if (tokens->nb[1] != tokens->nb[0] * (size_t)tokens->ne[0]) {
        tokens = ggml_cont(context, tokens);
    }
    return ggml_set_rows(context, stored,
                         ggml_view_2d(context, tokens, n, tokens->ne[2], tokens->nb[2], 0), rows);
}
