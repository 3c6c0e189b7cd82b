/* What the Gemmas have in common: a scaled embedding, norms before and after attention and
 * feed-forward, a GELU gate, and layers of which most look back no farther than a window. */
#ifndef CELLKV_MODEL_GEMMA_H
#define CELLKV_MODEL_GEMMA_H

#include "decoder.h"

/* What tells the generations apart and is not in their files. */
struct ck_gemma {
    int32_t period;              /* of so many layers, the last has no window */
    int32_t window;              /* of the others, where the file does not say; 0: none */
    int32_t n_layers_of_largest; /* whose scores are scaled by the hidden width per head */
};

void ck_gemma_read(struct ck_decoder *decoder, struct ck_metadata *metadata,
                   const struct ck_gemma *gemma);

/* All weights but head norms. */
void ck_gemma_want(struct ck_decoder *decoder, struct ck_weights *weights);

#endif
