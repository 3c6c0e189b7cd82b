#define _POSIX_C_SOURCE   200809L
#define _FILE_OFFSET_BITS 64

#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cells/error.h"
#include "cells/memory.h"

struct ck_file {
    FILE *stream;
    uint64_t size;
    uint64_t at;      /* where the stream stands: reading on needs no seek */
    uint8_t *mapping; /* [size]; NULL: not mapped */
};

/* Without O_NONBLOCK, opening a pipe would wait for its writer; a regular file is read all the
 * same. */
static FILE *open_stream(const char *path) {
    const int descriptor = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0) {
        return NULL;
    }
    FILE *stream = fdopen(descriptor, "rb");
    if (stream == NULL) {
        close(descriptor);
    }
    return stream;
}

static cellkv_status measure(struct ck_file *file, const char *path) {
    struct stat info;
    if (fstat(fileno(file->stream), &info) != 0) {
        return ck_fail(CELLKV_ERROR_FILE, "%s: %s", path, strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) {
        return ck_fail(CELLKV_ERROR_FILE, "%s: not a regular file", path);
    }
    if ((uint64_t)info.st_size > SIZE_MAX) {
        return ck_fail(CELLKV_ERROR_FILE, "%s: too large for this machine", path);
    }
    file->size = (uint64_t)info.st_size;
    return CELLKV_OK;
}

static void try_map(struct ck_file *file) {
    if (file->size == 0) {
        return;
    }
    void *mapping = mmap(NULL, (size_t)file->size, PROT_READ, MAP_SHARED, fileno(file->stream), 0);
    if (mapping != MAP_FAILED) {
        file->mapping = mapping;
    }
}

cellkv_status ck_file_open(const char *path, bool map, struct ck_file **opened) {
    struct ck_file *file = ck_calloc(1, sizeof *file);
    if (file == NULL) {
        return ck_fail(CELLKV_ERROR_OUT_OF_MEMORY, "opening %s", path);
    }
    cellkv_status status = CELLKV_OK;
    file->stream = open_stream(path);
    if (file->stream == NULL) {
        status = ck_fail(CELLKV_ERROR_FILE, "%s: %s", path, strerror(errno));
    } else {
        status = measure(file, path);
    }
    if (status != CELLKV_OK) {
        ck_file_close(file);
        return status;
    }
    if (map) {
        try_map(file);
    }
    *opened = file;
    return CELLKV_OK;
}

void ck_file_close(struct ck_file *file) {
    if (file == NULL) {
        return;
    }
    if (file->mapping != NULL) {
        munmap(file->mapping, (size_t)file->size);
    }
    if (file->stream != NULL) {
        fclose(file->stream);
    }
    ck_free(file);
}

uint64_t ck_file_size(const struct ck_file *file) {
    return file->size;
}

const uint8_t *ck_file_mapping(const struct ck_file *file) {
    return file->mapping;
}

bool ck_file_read(struct ck_file *file, uint64_t offset, size_t size, void *bytes) {
    if (offset > file->size || size > file->size - offset) {
        return false;
    }
    if (file->mapping != NULL) {
        memcpy(bytes, file->mapping + offset, size);
        return true;
    }
    if (file->at != offset && fseeko(file->stream, (off_t)offset, SEEK_SET) != 0) {
        return false;
    }
    const size_t n_read = fread(bytes, 1, size, file->stream);
    file->at = offset + n_read;
    return n_read == size;
}
