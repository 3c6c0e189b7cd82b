/* A file that is only read: mapped into memory, or read piece by piece. */
#ifndef CELLKV_MODEL_FILE_H
#define CELLKV_MODEL_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cellkv/status.h>

struct ck_file;

/* Opens a regular file; with `map`, maps it if the system can (else it is read).
 * Returns CELLKV_OK, CELLKV_ERROR_FILE or CELLKV_ERROR_OUT_OF_MEMORY. */
cellkv_status ck_file_open(const char *path, bool map, struct ck_file **file);
void ck_file_close(struct ck_file *file); /* NULL is fine */

uint64_t ck_file_size(const struct ck_file *file);

/* The mapped bytes; NULL: the file is read, not mapped. */
const uint8_t *ck_file_mapping(const struct ck_file *file);

/* Copies bytes out of the file; false when it does not have them (any more). */
bool ck_file_read(struct ck_file *file, uint64_t offset, size_t size, void *bytes);

#endif
