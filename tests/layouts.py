"""Hooks into the layouts of dense attention (src/executor/layout_hooks.c)."""

from __future__ import annotations

import ctypes
import enum
import os
from typing import NamedTuple

import cellkv

_library = ctypes.CDLL(os.environ["CELLKV_LIBRARY"])


class Limit(enum.IntEnum):
    """enum ck_layout_limit."""

    ONE_CALL = 0
    IN_PLACE = 1
    COPIES = 2


class Layout(NamedTuple):
    """How many flash attentions a layer has, and how many runs of rows they read."""

    n_pieces: int
    n_runs: int
    n_looked_at: int  # rows, seen or not, once for each query


def limit_layouts(executor: cellkv.Executor, limit: Limit) -> None:
    """Has the executor lay out its steps as on devices that can do no more."""
    with executor._owned as address:
        _library.cellkv_test_limit_layouts(ctypes.c_void_p(address), limit)


def last_layout(executor: cellkv.Executor, window: int = 0) -> Layout:
    """Return the last step's layout for the cache's `window`-th distinct window."""
    counts = (ctypes.c_int32(), ctypes.c_int32(), ctypes.c_int64())
    with executor._owned as address:
        _library.cellkv_test_count_layout(
            ctypes.c_void_p(address), window, *map(ctypes.byref, counts)
        )
    return Layout(*(count.value for count in counts))
