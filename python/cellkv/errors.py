"""One exception class per status of the C library (status.h), and three of Python's own."""

from __future__ import annotations


class CellkvError(Exception):
    """What every refusal is; its message is the library's own words for this very case.

    `status` is the C status, None where the refusal is Python's own and never reached C. `name` is
    the status's name without its prefix. `n_done` is set by `Executor.run`: how many of the step's
    tokens had been computed.
    """

    status: int | None = None
    name: str = "UNKNOWN"
    n_done: int | None = None


class InvalidArgumentError(CellkvError, ValueError):
    """An argument is outside what the call can take."""

    status = -1
    name = "ERROR_INVALID_ARGUMENT"


class UnknownSequenceError(CellkvError, LookupError):
    """The handle is closed, foreign, or was never one."""

    status = -2
    name = "ERROR_UNKNOWN_SEQUENCE"


class NoSlotError(CellkvError):
    """As many sequences are open as the cache may have."""

    status = -3
    name = "ERROR_NO_SLOT"


class OutOfCellsError(CellkvError):
    """Too few cells are free for the step.

    `shortfall` is how many are missing; None where that cannot be told (a step run by an executor
    that knows its cache by key alone).
    """

    status = -4
    name = "ERROR_OUT_OF_CELLS"
    shortfall: int | None = None


class BadRangeError(CellkvError, ValueError):
    """A position lies outside the sequence, or a count outside the step."""

    status = -5
    name = "ERROR_BAD_RANGE"


class EmptyStepError(CellkvError, ValueError):
    """A step needs at least one token."""

    status = -6
    name = "ERROR_EMPTY_STEP"


class NotDeclaredError(CellkvError):
    """No step of this many tokens has been declared."""

    status = -7
    name = "ERROR_NOT_DECLARED"


class BadPositionError(CellkvError, ValueError):
    """A token's position does not continue its sequence."""

    status = -8
    name = "ERROR_BAD_POSITION"


class NothingToUndoError(CellkvError):
    """No step has been placed since the last other change."""

    status = -9
    name = "ERROR_NOTHING_TO_UNDO"


class BusyError(CellkvError):
    """A step runs, or another thread is inside the object."""

    status = -10
    name = "ERROR_BUSY"


class NotWindowedError(CellkvError):
    """A layer looks back without limit, so nothing can be trimmed."""

    status = -11
    name = "ERROR_NOT_WINDOWED"


class TrimmedError(CellkvError):
    """The history that would be needed was trimmed, or written over."""

    status = -12
    name = "ERROR_TRIMMED"


class UnknownKeyError(CellkvError, LookupError):
    """No cache is published under this key."""

    status = -13
    name = "ERROR_UNKNOWN_KEY"


class NoBuilderError(CellkvError):
    """Nothing builds this kind of cache for this backend."""

    status = -14
    name = "ERROR_NO_BUILDER"


class OutOfMemoryError(CellkvError, MemoryError):
    """The library or the device has no memory left."""

    status = -15
    name = "ERROR_OUT_OF_MEMORY"


class BadTokenError(CellkvError, ValueError):
    """A token lies outside the program's vocabulary."""

    status = -16
    name = "ERROR_BAD_TOKEN"


class UnknownDeviceError(CellkvError, LookupError):
    """No device of ggml's has this name."""

    status = -17
    name = "ERROR_UNKNOWN_DEVICE"


class UnsupportedError(CellkvError):
    """The device cannot store or compute this."""

    status = -18
    name = "ERROR_UNSUPPORTED"


class MismatchError(CellkvError):
    """The cache's layers are not the program's."""

    status = -19
    name = "ERROR_MISMATCH"


class NoStorageError(CellkvError):
    """The cache has cells alone, no rows to compute with."""

    status = -20
    name = "ERROR_NO_STORAGE"


class BadGraphError(CellkvError):
    """The program built no valid graph."""

    status = -21
    name = "ERROR_BAD_GRAPH"


class AbortedError(CellkvError):
    """The forward was stopped; its cells stay claimed until `Cache.undo_step`."""

    status = -22
    name = "ERROR_ABORTED"


class ComputeError(CellkvError):
    """The device failed; the step's cells stay claimed until `Cache.undo_step`."""

    status = -23
    name = "ERROR_COMPUTE"


class FileError(CellkvError, OSError):
    """The file cannot be opened or read."""

    status = -24
    name = "ERROR_FILE"


class BadFileError(CellkvError, ValueError):
    """The file is damaged, truncated, or not GGUF."""

    status = -25
    name = "ERROR_BAD_FILE"


class UnknownArchitectureError(CellkvError):
    """The library has no decoder for this architecture."""

    status = -26
    name = "ERROR_UNKNOWN_ARCHITECTURE"


class BadMetadataError(CellkvError, ValueError):
    """A model's metadata is missing, of another type, or unusable."""

    status = -27
    name = "ERROR_BAD_METADATA"


class MissingTensorError(CellkvError):
    """The model lacks a tensor."""

    status = -28
    name = "ERROR_MISSING_TENSOR"


class BadTensorError(CellkvError, ValueError):
    """A tensor has the wrong shape or type."""

    status = -29
    name = "ERROR_BAD_TENSOR"


class NetworkError(CellkvError, ConnectionError):
    """No server answers at the address, or none can listen there."""

    status = -30
    name = "ERROR_NETWORK"


class ClosedError(CellkvError, ValueError):
    """The object was closed; nothing can be asked of it."""

    name = "CLOSED"


class TokenizerError(CellkvError, ValueError):
    """The model's tokenizer or chat template is missing, malformed or of an unknown kind."""

    name = "TOKENIZER"


class WorkerDiedError(CellkvError):
    """The process of an isolated model is gone: killed, ended by ggml, or out of its time.

    The message says how it ended and what it wrote last. Nothing can be asked of its objects.
    """

    name = "WORKER_DIED"


BY_STATUS: dict[int, type[CellkvError]] = {
    error.status: error for error in CellkvError.__subclasses__() if error.status is not None
}
