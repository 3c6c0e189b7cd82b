/* cellkv: many token sequences served from one KV cache, in one forward.
 *
 * cache.h     the cells: sequences that share rows, and the verbs on them
 * device.h    where rows and weights are: GPUs, other machines
 * executor.h  runs a step of any program (a ggml graph builder) over a cache
 * model.h     decoders read from GGUF files, each one a program
 * status.h    what calls return */
#ifndef CELLKV_CELLKV_H
#define CELLKV_CELLKV_H

#include "cache.h"    /* IWYU pragma: export */
#include "device.h"   /* IWYU pragma: export */
#include "executor.h" /* IWYU pragma: export */
#include "model.h"    /* IWYU pragma: export */
#include "status.h"   /* IWYU pragma: export */
#include "version.h"  /* IWYU pragma: export */

#endif
