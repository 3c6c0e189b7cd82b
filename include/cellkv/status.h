/* Status codes and the words that go with them.
 *
 * One list gives the enum, the short texts (src/cells/status.c) and the Python exceptions
 * (python/cellkv/errors.py; a test holds the two together). Values are pinned: never renumber,
 * never reuse. */
#ifndef CELLKV_STATUS_H
#define CELLKV_STATUS_H

#include "version.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(constant, value, Python exception, short text) */
#define CELLKV_STATUS_LIST(X)                                                                      \
    X(OK, 0, None, "ok")                                                                           \
    X(ERROR_INVALID_ARGUMENT, -1, InvalidArgumentError, "invalid argument")                        \
    X(ERROR_UNKNOWN_SEQUENCE, -2, UnknownSequenceError, "no such sequence in this cache")          \
    X(ERROR_NO_SLOT, -3, NoSlotError, "no free sequence slot")                                     \
    X(ERROR_OUT_OF_CELLS, -4, OutOfCellsError, "too few free cells")                               \
    X(ERROR_BAD_RANGE, -5, BadRangeError, "position outside the sequence")                         \
    X(ERROR_EMPTY_STEP, -6, EmptyStepError, "a step needs at least one token")                     \
    X(ERROR_NOT_DECLARED, -7, NotDeclaredError, "no declaration of this many tokens")              \
    X(ERROR_BAD_POSITION, -8, BadPositionError, "a token does not continue its sequence")          \
    X(ERROR_NOTHING_TO_UNDO, -9, NothingToUndoError, "no step to undo")                            \
    X(ERROR_BUSY, -10, BusyError, "a step runs or another thread is inside")                       \
    X(ERROR_NOT_WINDOWED, -11, NotWindowedError, "a layer has no window")                          \
    X(ERROR_TRIMMED, -12, TrimmedError, "the history needed was dropped")                          \
    X(ERROR_UNKNOWN_KEY, -13, UnknownKeyError, "no cache is published under this key")             \
    X(ERROR_NO_BUILDER, -14, NoBuilderError, "no builder for this backend and kind of cache")      \
    X(ERROR_OUT_OF_MEMORY, -15, OutOfMemoryError, "out of memory")                                 \
    X(ERROR_BAD_TOKEN, -16, BadTokenError, "token outside the vocabulary")                         \
    X(ERROR_UNKNOWN_DEVICE, -17, UnknownDeviceError, "no such device")                             \
    X(ERROR_UNSUPPORTED, -18, UnsupportedError, "not supported")                                   \
    X(ERROR_MISMATCH, -19, MismatchError, "cache and program do not fit each other")               \
    X(ERROR_NO_STORAGE, -20, NoStorageError, "the cache has no storage")                           \
    X(ERROR_BAD_GRAPH, -21, BadGraphError, "the program built no valid graph")                     \
    X(ERROR_ABORTED, -22, AbortedError, "the forward was aborted")                                 \
    X(ERROR_COMPUTE, -23, ComputeError, "the device failed to compute")                            \
    X(ERROR_FILE, -24, FileError, "the file cannot be read")                                       \
    X(ERROR_BAD_FILE, -25, BadFileError, "the file is damaged or not GGUF")                        \
    X(ERROR_UNKNOWN_ARCHITECTURE, -26, UnknownArchitectureError, "unknown model architecture")     \
    X(ERROR_BAD_METADATA, -27, BadMetadataError, "model metadata missing or unusable")             \
    X(ERROR_MISSING_TENSOR, -28, MissingTensorError, "the model lacks a tensor")                   \
    X(ERROR_BAD_TENSOR, -29, BadTensorError, "a tensor has the wrong shape or type")               \
    X(ERROR_NETWORK, -30, NetworkError, "nobody answers there, or no listening is possible")

/** What a call came to: CELLKV_OK, or one negative value per cause. */
typedef enum cellkv_status {
#define CELLKV_STATUS_ENUM(name, value, exception, text) CELLKV_##name = value,
    CELLKV_STATUS_LIST(CELLKV_STATUS_ENUM)
#undef CELLKV_STATUS_ENUM
} cellkv_status;

/** The short text of a status: "out of memory".
 *
 *  @return    a static string; "unknown status" for a value that is not in the list
 *  Threads: any.
 */
CELLKV_API const char *cellkv_status_text(cellkv_status status);

/** The name of a status, without its prefix: "ERROR_OUT_OF_MEMORY".
 *
 *  @return    a static string; NULL for a value that is not in the list
 *  Threads: any.
 */
CELLKV_API const char *cellkv_status_name(cellkv_status status);

/** The details of this thread's last refusal, in words: which token, which sequence, what was
 *  expected.
 *
 *  @return    a string owned by the thread, valid until its next failing call; "" before the
 *             first. A call that succeeds leaves it as it is
 *  Threads: each has its own.
 */
CELLKV_API const char *cellkv_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
