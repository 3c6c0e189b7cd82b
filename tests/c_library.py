"""The library of C helpers for these tests: table programs, and what ggml stores."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from cellkv._arguments import TYPES


def _load() -> ctypes.CDLL:
    """It is built beside the library under test, or is one with it."""
    path = Path(os.environ["CELLKV_LIBRARY"]).absolute()
    if "table_program" not in path.name:
        path = path.parent.parent / "tests" / "c" / f"libtable_program{path.suffix}"
    library = ctypes.CDLL(str(path))
    library.test_as_stored.restype = ctypes.c_bool
    library.test_as_stored.argtypes = (
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    )
    return library


library = _load()


def as_stored(values: npt.NDArray[np.float32], type_name: str) -> npt.NDArray[np.float64]:
    """What rows of blocks hold once ggml has written these values, by gguf's own reading."""
    kind = gguf.GGMLQuantizationType[type_name.upper()]
    width = values.shape[-1]
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, width)
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = np.empty((len(rows), width // n_values * n_bytes), np.uint8)
    number, n_rows = TYPES[type_name], len(rows)
    assert library.test_as_stored(number, rows.ctypes.data, width, n_rows, stored.ctypes.data)
    with np.errstate(invalid="ignore"):
        read = gguf.quants.dequantize(stored, kind)
    return read.reshape(values.shape).astype(np.float64)
