/* Looks through a GGUF file before ggml's reader gets it: everything that reader would trust, abort
 * on, or refuse without saying where. */
#ifndef CELLKV_MODEL_GGUF_SCAN_H
#define CELLKV_MODEL_GGUF_SCAN_H

#include <cellkv/status.h>

#include "file.h"

/* Whether the file is a whole GGUF file: header, keys and tensor list well-formed, every tensor's
 * bytes inside the file.
 * Returns CELLKV_OK; CELLKV_ERROR_BAD_FILE, whose message names the place, the key or the tensor;
 * CELLKV_ERROR_BAD_TENSOR: a type that this ggml does not know, or rows that do not divide into its
 * blocks. */
cellkv_status ck_gguf_scan(struct ck_file *file);

/* Copies text for use in a message: at most size - 1 bytes, anything unprintable as '?'. */
void ck_printable(const char *text, size_t length, char *copy, size_t size);

#endif
