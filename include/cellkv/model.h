/* Models: decoders read from GGUF files, or given as arrays. Each one is a program (executor.h) and
 * uses nothing but the public executor API. */
#ifndef CELLKV_MODEL_H
#define CELLKV_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cache.h"
#include "executor.h"
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A model: weights and hyperparameters, immutable, shared by any number of executors. */
typedef struct cellkv_model cellkv_model;

/** How a model is loaded. Start from cellkv_model_config_default(). */
typedef struct cellkv_model_config {
    size_t size;        /* sizeof(cellkv_model_config) */
    const char *device; /* the devices of the layers, as a text (device.h); NULL: the best one. The
                           embedding is with the first layer, the head with the last */
    bool use_mmap; /* map the file instead of reading it, where the device can use host memory */
    bool repack;   /* CPU: hold weights in the layout of ggml's fastest kernels where one exists
                      for their type (a second copy of those weights) */
} cellkv_model_config;

/** The best device, mapped, repacked.
 *
 *  Threads: any.
 */
CELLKV_API cellkv_model_config cellkv_model_config_default(void);

/** Loads a GGUF file. Architectures: "llama" (SmolLM2, Llama 2 and 3, Mistral), "gemma2", "gemma3"
 *  (text only), "qwen2" (Qwen 2 and 2.5), "qwen3" and "qwen3moe".
 *
 *  @param path     borrowed
 *  @param config   borrowed; NULL: the default
 *  @param model    receives the model, the caller's to free
 *  @return    CELLKV_OK;
 *             CELLKV_ERROR_INVALID_ARGUMENT: NULL, or a wrong `size`;
 *             CELLKV_ERROR_FILE: the file cannot be opened or read;
 *             CELLKV_ERROR_BAD_FILE: not GGUF, damaged or truncated (the message says where);
 *             CELLKV_ERROR_UNKNOWN_ARCHITECTURE (the message names it);
 *             CELLKV_ERROR_BAD_METADATA: a key missing, of another type, or with an impossible or
 *             unsupported value (the message names it);
 *             CELLKV_ERROR_MISSING_TENSOR, CELLKV_ERROR_BAD_TENSOR (the message names it and what
 *             was expected; a tensor that the architecture does not use is refused, too: the model
 *             would be served wrongly without it);
 *             the statuses of cellkv_devices_of_layers; CELLKV_ERROR_OUT_OF_MEMORY
 *  On failure: *model is unchanged.  Threads: any.
 */
CELLKV_API cellkv_status cellkv_model_load(const char *path, const cellkv_model_config *config,
                                           cellkv_model **model);

/** One metadata entry of a model given as arrays: the keys are those of the GGUF format. */
typedef struct cellkv_model_value {
    const char *key;    /* "llama.block_count", ... */
    const char *string; /* the value, if it is a string; else NULL */
    double number;      /* the value otherwise; integers are exact up to 2^53 */
    bool is_float;      /* whether the number is a float32 rather than an integer */
} cellkv_model_value;

/** One tensor of a model given as arrays: names and shapes are those of the GGUF format. */
typedef struct cellkv_model_array {
    const char *name;  /* "token_embd.weight", ... */
    const float *data; /* float32, copied */
    int32_t n_dims;    /* 1 to 3 */
    int64_t shape[3];  /* elements per dimension, the contiguous one first (ggml's order) */
} cellkv_model_array;

/** Makes a model from arrays.
 *
 *  @param values    [n_values], borrowed
 *  @param arrays    [n_arrays], borrowed
 *  @param config    borrowed; NULL: the default
 *  @param model     receives the model, the caller's to free
 *  @return    as cellkv_model_load, but for the file's
 *  On failure: *model is unchanged.  Threads: any.
 */
CELLKV_API cellkv_status cellkv_model_from_arrays(
    const cellkv_model_value *values, int32_t n_values, const cellkv_model_array *arrays,
    int32_t n_arrays, const cellkv_model_config *config, cellkv_model **model);

/** Drops the caller's reference; NULL is fine. The memory goes when no executor uses the model
 *  either.
 *
 *  Threads: any.
 */
CELLKV_API void cellkv_model_free(cellkv_model *model);

/** A model's figures. */
typedef struct cellkv_model_info {
    size_t size;              /* set to sizeof(cellkv_model_info) by the caller */
    const char *architecture; /* the model's string */
    int32_t n_vocab;
    int32_t n_layers;
    int32_t n_embd;    /* width of the hidden state */
    int32_t n_heads;   /* query heads of the first layer */
    int32_t n_context; /* context length it was trained for; 0: not stated */
    int64_t n_parameters;
    int64_t weight_bytes;       /* of all tensors, as stored */
    int64_t mapped_bytes;       /* of weights used where the file is mapped */
    int64_t repacked_bytes;     /* of weights held in another layout */
    const cellkv_layer *layers; /* [n_layers]; their types are F16 */
    const char *devices;        /* of the layers, as a text (device.h) */
} cellkv_model_info;

/** Reads the model's figures. Pointers in it live as long as the model.
 *
 *  @param info   its `size` must be set
 *  @return    CELLKV_OK; CELLKV_ERROR_INVALID_ARGUMENT: NULL, or a wrong size
 *  Threads: any.
 */
CELLKV_API cellkv_status cellkv_model_get_info(const cellkv_model *model, cellkv_model_info *info);

/** What a model's result rows are. */
typedef enum cellkv_output {
    CELLKV_OUTPUT_LOGITS = 0, /* [n_vocab] */
    CELLKV_OUTPUT_HIDDEN = 1 /* [n_embd]: the hidden state after the last norm, what logits are made
                                of. With cellkv_step.pooling, the embedding of a text */
} cellkv_output;

/** The model as a program.
 *
 *  @param program   receives the program; it lives as long as the model
 *  @return    CELLKV_OK; CELLKV_ERROR_INVALID_ARGUMENT: NULL, or an output that is none
 *  Threads: any.
 */
CELLKV_API cellkv_status cellkv_model_program(cellkv_model *model, cellkv_output output,
                                              cellkv_program *program);

/** Makes a cache for a model: `config` with the model's layers, in the given types, each with its
 *  layer's weights unless config->device says otherwise.
 *
 *  @param config    its layers are ignored; borrowed
 *  @param type_k    type of every layer's K
 *  @param type_v    type of every layer's V
 *  @param cache     receives the cache, the caller's to free
 *  @return    as cellkv_cache_new
 *  Threads: any.
 */
CELLKV_API cellkv_status cellkv_model_new_cache(const cellkv_model *model,
                                                const cellkv_cache_config *config,
                                                cellkv_type type_k, cellkv_type type_v,
                                                cellkv_cache **cache);

#ifdef __cplusplus
}
#endif

#endif
