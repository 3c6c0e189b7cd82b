"""Table programs (tests/c/table_program.h) from numpy arrays."""

from __future__ import annotations

import ctypes
import enum

import numpy as np

import c_library
from cellkv import Layer, _lib
from oracle import LayerTables


class Fault(enum.IntEnum):
    """enum table_fault."""

    NONE = 0
    SKIP_LAYER = 1
    TWICE = 2
    LAYER_OUTSIDE = 3
    NO_RESULT = 4
    RESULT_SHAPE = 5
    Q_SHAPE = 6
    NO_HEADS = 7
    NULL_K = 8
    V_TYPE = 9
    PARAMS = 10
    SINKS = 11
    NO_DATA = 12
    GIVES_UP = 13


class _CLayer(ctypes.Structure):
    _fields_ = (
        ("shape", _lib.cellkv_layer),
        ("n_heads", ctypes.c_int32),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


_library = c_library.library
_library.table_program_new.restype = ctypes.c_void_p
_library.table_program_new.argtypes = (
    ctypes.c_char_p,
    ctypes.c_int32,
    ctypes.POINTER(_CLayer),
    ctypes.c_int32,
)
_library.table_program_free.argtypes = (ctypes.c_void_p,)
_library.table_program_interface.restype = ctypes.c_void_p
_library.table_program_interface.argtypes = (ctypes.c_void_p,)
_library.table_program_set_fault.argtypes = (ctypes.c_void_p, ctypes.c_int)


def n_alive() -> int:
    """How many table programs this process holds in memory."""
    return int(_library.table_program_alive())


class TableProgram:
    """A program whose tokens' q, k and v are rows of tables; its address goes to `Executor`."""

    def __init__(self, tables: list[LayerTables], device: str | None = None) -> None:
        kept = []

        def address(array: np.ndarray | None) -> int | None:
            if array is None:
                return None
            kept.append(np.ascontiguousarray(array, np.float32))
            return kept[-1].ctypes.data

        layers = (_CLayer * len(tables))()
        for c_layer, table in zip(layers, tables, strict=True):
            c_layer.shape = _lib.cellkv_layer(
                n_kv_heads=table.k.shape[1],
                head_dim_k=table.k.shape[2],
                head_dim_v=table.v.shape[2],
                window=table.window,
            )
            c_layer.n_heads = table.q.shape[1]
            c_layer.q, c_layer.k, c_layer.v = map(address, (table.q, table.k, table.v))
            c_layer.sinks = address(table.sinks)
            c_layer.scale, c_layer.soft_cap = table.scale, table.soft_cap
        name = None if device is None else device.encode()
        n_vocab = len(tables[0].q)
        self._program = _library.table_program_new(name, n_vocab, layers, len(tables))
        assert self._program, f"no table program on {device}"

    @property
    def address(self) -> int:
        return int(_library.table_program_interface(self._program))

    def set_fault(self, fault: Fault) -> None:
        _library.table_program_set_fault(self._program, fault)

    def close(self) -> None:
        _library.table_program_free(self._program)
        self._program = None


def cache_layers(tables: list[LayerTables], type_k: str, type_v: str) -> list[Layer]:
    """The cache layers that a program of these tables needs."""
    return [
        Layer(t.k.shape[1], t.k.shape[2], t.v.shape[2], t.window, type_k, type_v) for t in tables
    ]


def random_tables(
    rng: np.random.Generator,
    windows: tuple[int, ...] = (0, 0),
    *,
    n_vocab: int = 64,
    n_heads: int = 6,
    n_kv_heads: int = 2,
    head_dim_k: int = 32,
    head_dim_v: int = 32,
    soft_cap: float = 0.0,
    sinks: bool = False,
) -> list[LayerTables]:
    """Tables of normal numbers, a layer per window; scores then have a deviation of about 1."""

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    return [
        LayerTables(
            q=normal(n_vocab, n_heads, head_dim_k),
            k=normal(n_vocab, n_kv_heads, head_dim_k),
            v=normal(n_vocab, n_kv_heads, head_dim_v),
            window=window,
            scale=head_dim_k**-0.5,
            soft_cap=soft_cap,
            sinks=normal(n_heads) if sinks else None,
        )
        for window in windows
    ]
