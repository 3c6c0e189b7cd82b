"""Many token sequences served from one KV cache, in one forward.

`Cache` holds the cells and the sequences that own them, `Model` reads a decoder from a GGUF file,
`Executor` runs steps of many sequences' tokens, `Tokenizer` turns text into tokens and back.
`python -m cellkv demo` shows all four at work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _lib
from .cache import Cache, CacheKind, CacheStats, Layer, SequenceCells
from .errors import (
    AbortedError,
    BadFileError,
    BadGraphError,
    BadMetadataError,
    BadPositionError,
    BadRangeError,
    BadTensorError,
    BadTokenError,
    BusyError,
    CellkvError,
    ClosedError,
    ComputeError,
    EmptyStepError,
    FileError,
    InvalidArgumentError,
    MismatchError,
    MissingTensorError,
    NetworkError,
    NoBuilderError,
    NoSlotError,
    NoStorageError,
    NotDeclaredError,
    NothingToUndoError,
    NotWindowedError,
    OutOfCellsError,
    OutOfMemoryError,
    TokenizerError,
    TrimmedError,
    UnknownArchitectureError,
    UnknownDeviceError,
    UnknownKeyError,
    UnknownSequenceError,
    UnsupportedError,
    WorkerDiedError,
)
from .executor import Executor, ExecutorStats, Isa, Pooling, Strategy, devices
from .model import Model, ModelInfo, Output

if TYPE_CHECKING:
    from .tokenizer import StreamDecoder, Tokenizer

__version__ = _lib.VERSION

__all__ = [
    "AbortedError",
    "BadFileError",
    "BadGraphError",
    "BadMetadataError",
    "BadPositionError",
    "BadRangeError",
    "BadTensorError",
    "BadTokenError",
    "BusyError",
    "Cache",
    "CacheKind",
    "CacheStats",
    "CellkvError",
    "ClosedError",
    "ComputeError",
    "EmptyStepError",
    "Executor",
    "ExecutorStats",
    "FileError",
    "InvalidArgumentError",
    "Isa",
    "Layer",
    "MismatchError",
    "MissingTensorError",
    "Model",
    "ModelInfo",
    "NetworkError",
    "NoBuilderError",
    "NoSlotError",
    "NoStorageError",
    "NotDeclaredError",
    "NotWindowedError",
    "NothingToUndoError",
    "OutOfCellsError",
    "OutOfMemoryError",
    "Output",
    "Pooling",
    "SequenceCells",
    "Strategy",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerError",
    "TrimmedError",
    "UnknownArchitectureError",
    "UnknownDeviceError",
    "UnknownKeyError",
    "UnknownSequenceError",
    "UnsupportedError",
    "WorkerDiedError",
    "devices",
]


def __getattr__(name: str) -> Any:
    """Import the tokenizer, and with it its libraries, when it is first asked for."""
    if name in ("Tokenizer", "StreamDecoder"):
        from . import tokenizer

        return getattr(tokenizer, name)
    raise AttributeError(f"module 'cellkv' has no attribute {name!r}")
