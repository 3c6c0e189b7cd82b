"""The cache: cells, the sequences that own them, and the verbs on both."""

from __future__ import annotations

import ctypes
import enum
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _lib
from ._arguments import (
    TYPES,
    Devices,
    Ints,
    as_devices,
    as_int,
    as_ints,
    as_position,
    as_text,
    by_name,
)
from ._lib import UNSET, check, lib
from ._owned import Owned, Owner
from .errors import InvalidArgumentError, OutOfCellsError

TypeName: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
KindName: TypeAlias = Literal["sequence", "batched", "batched_cell"]


class CacheKind(enum.IntEnum):
    """How a cache lays out its sequences.

    BATCHED is the library's best layout for many sequences, BATCHED_CELL one pool of cells. All
    that `Cache` says holds for both.

    SEQUENCE is one sequence: position p is cell p, `capacity` the most positions. `max_seqs` is 1
    whatever is asked for; clone, removing anything but the end, and trim_windows raise
    UnsupportedError. A layer of window W keeps W + `max_step` - 1 rows, if that is less than the
    capacity: position p lies in row p modulo that. A step of any width runs, at most `max_step`
    tokens at once. What is written over there does not come back, so a rewind, a removal or an undo
    must not go back by more than `max_step` from the farthest position that was reached, but to
    nothing at all it may: TrimmedError otherwise.
    """

    SEQUENCE = 0
    BATCHED = 1
    BATCHED_CELL = 2


class Layer(NamedTuple):
    """One layer's shape: what a cell stores there, and how far back a query sees.

    `head_dim_k`, `head_dim_v` are values per head; a query at position p sees positions
    > p - `window`, all earlier ones when `window` is 0; the types are "f32", "f16", "bf16", or
    "q8_0" and "q4_0", which need widths that are multiples of 32.
    """

    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int = 0
    type_k: TypeName = "f16"
    type_v: TypeName = "f16"


class SequenceCells(NamedTuple):
    """A sequence's cells in order of position: two int32 arrays [length], the caller's own."""

    cells: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]


class CacheStats(NamedTuple):
    """A cache's figures.

    `rows` are those of the longest K/V tensors now, `storage_bytes` the bytes of all, 0 without
    storage; `extent` is one past the highest occupied cell; `owned_cells` counts a cell once for
    each of its sequences; `table_bytes` is the memory of cells and sequences.
    """

    capacity: int
    free_cells: int
    used_cells: int
    extent: int
    rows: int
    n_seqs: int
    max_seqs: int
    declared_tokens: int
    owned_cells: int
    table_bytes: int
    storage_bytes: int
    n_growths: int


class Cache(Owner):
    """A pool of cells and the sequences that own them; a context manager that closes it.

    Every call but `publish`, `unpublish`, `find` and `close` raises BusyError while a step runs or
    another thread is inside this cache, and ClosedError after `close`. Handles of sequences are
    plain ints, never given twice in one process.
    """

    def __init__(
        self,
        layers: Sequence[Layer] = (),
        *,
        backend: Literal["ggml", "cells"] = "ggml",
        kind: CacheKind | KindName = CacheKind.BATCHED,
        capacity: int = 4096,
        max_seqs: int = 64,
        initial_rows: int | None = None,
        max_step: int | None = None,
        device: Devices = None,
    ) -> None:
        """Make a cache.

        `layers`: what a cell stores; at least one, but for "cells" (`Model.new_cache` fills them
        in). `backend`: "ggml" holds cells and K/V rows, "cells" the cell table alone. `capacity`:
        most cells it may hold. `max_seqs`: most open sequences. `initial_rows`: rows allocated at
        once, 0 for on first use; default 256, or the capacity if that is smaller. `max_step`: kind
        SEQUENCE, the most tokens computed at once where a layer has a window; default 512.
        `device`: which ggml device holds the rows; default the best one. Several share the layers:
        evenly, given as a sequence of names; by numbers of layers, given as a mapping.

        InvalidArgumentError: a field outside its range, or a width that is no multiple of its
        type's blocks. NoBuilderError: nothing builds this kind for this backend.
        UnknownDeviceError: `device`. OutOfMemoryError.
        """
        config, _kept = _config(
            backend, kind, capacity, max_seqs, initial_rows, max_step, layers, device
        )
        address = ctypes.c_void_p()
        check(lib.cellkv_cache_new(ctypes.byref(config), ctypes.byref(address)))
        self._own(address)

    def _own(self, address: ctypes.c_void_p) -> None:
        assert address.value is not None
        self._owned = Owned(address.value, lib.cellkv_cache_free, "cache")
        self._finalizer = weakref.finalize(self, self._owned.close)

    @classmethod
    def _adopt(cls, address: ctypes.c_void_p) -> Cache:
        """Make a Cache of a reference that C has handed over."""
        cache = cls.__new__(cls)
        cache._own(address)
        return cache

    def close(self) -> None:
        """Drop this reference; closing twice is fine. Its published key is erased.

        Safe during a call or a step of another thread: the memory goes when that ends. An executor
        over the cache keeps it alive and goes on working.
        """
        self._finalizer()

    # ---- sequences: these change the cache, cancel a declaration and the last step's undo ----

    def open(self) -> int:
        """Open a new, empty sequence and return its handle.

        NoSlotError: `max_seqs` are open. OutOfMemoryError.
        """
        seq = ctypes.c_int64()
        with self._owned as cache:
            check(lib.cellkv_cache_open(cache, ctypes.byref(seq)))
        return seq.value

    def clone(self, src: SupportsIndex, upto: SupportsIndex | None = None) -> int:
        """Open a sequence that shares the cells of `src` at positions < `upto`; return its handle.

        Nothing is copied or recomputed, no cell is used. `upto` is in [0, next_pos(src)], which
        None stands for.

        UnknownSequenceError: `src`. BadRangeError: `upto`. NoSlotError. OutOfMemoryError.
        TrimmedError: the clone's next token would see trimmed positions. UnsupportedError: kind
        SEQUENCE.
        """
        source = as_int(src, "src", np.int64)
        end = UNSET if upto is None else as_position(upto, "upto")
        seq = ctypes.c_int64()
        with self._owned as cache:
            check(lib.cellkv_cache_clone(cache, source, end, ctypes.byref(seq)))
        return seq.value

    def rewind(self, seq: SupportsIndex, pos: SupportsIndex) -> None:
        """Drop the sequence's claim on positions >= `pos`, which is in [0, next_pos(seq)].

        UnknownSequenceError. BadRangeError: `pos`. TrimmedError: the next token would see positions
        that were trimmed, or in kind SEQUENCE written over.
        """
        handle, position = as_int(seq, "seq", np.int64), as_int(pos, "pos")
        with self._owned as cache:
            check(lib.cellkv_cache_rewind(cache, handle, position))

    def remove(
        self, seq: SupportsIndex, p0: SupportsIndex, p1: SupportsIndex | None = None
    ) -> None:
        """Drop the sequence's claim on positions [p0, p1); the rest keeps its positions.

        `p1` is at most next_pos(seq), which None stands for. Removing nothing is fine.

        UnknownSequenceError. BadRangeError: `p0`, `p1`. TrimmedError: what is left would end where
        its next token sees positions that are gone. UnsupportedError: kind SEQUENCE, and it is not
        the end that would be removed.
        """
        handle, start = as_int(seq, "seq", np.int64), as_int(p0, "p0")
        end = UNSET if p1 is None else as_position(p1, "p1")
        with self._owned as cache:
            check(lib.cellkv_cache_remove(cache, handle, start, end))

    def close_seq(self, seq: SupportsIndex) -> None:
        """Close the sequence: its claims are dropped, its handle is dead. UnknownSequenceError."""
        handle = as_int(seq, "seq", np.int64)
        with self._owned as cache:
            check(lib.cellkv_cache_close(cache, handle))

    def clear(self) -> None:
        """Close every sequence and free every cell. Rows stay allocated."""
        with self._owned as cache:
            check(lib.cellkv_cache_clear(cache))

    def trim_windows(self) -> int:
        """Drop the cells that no layer can see again; return how many became free.

        NotWindowedError: a layer has no window, or there are no layers. UnsupportedError: kind
        SEQUENCE.
        """
        n_freed = ctypes.c_int32()
        with self._owned as cache:
            check(lib.cellkv_cache_trim_windows(cache, ctypes.byref(n_freed)))
        return n_freed.value

    # ---- the step ----

    def declare(self, seqs: Ints) -> None:
        """Say which sequence each token of the next step belongs to; admit the whole step, or none.

        `seqs`: handles [n_tokens]. Replaces an earlier declaration, cancels the last step's undo.

        UnknownSequenceError. EmptyStepError: no token. OutOfCellsError: its `shortfall` is how many
        cells are missing. OutOfMemoryError. On failure nothing changed, the earlier declaration
        included.
        """
        handles = as_ints(seqs, "seqs", np.int64)
        shortfall = ctypes.c_int32()
        with self._owned as cache:
            try:
                check(
                    lib.cellkv_cache_declare(
                        cache, handles.ctypes.data, len(handles), ctypes.byref(shortfall)
                    )
                )
            except OutOfCellsError as error:
                error.shortfall = shortfall.value
                raise

    def extend(self, seq: SupportsIndex, n: SupportsIndex) -> None:
        """Declare a step of `n` tokens of one sequence. Errors as `declare`."""
        handle, n_tokens = as_int(seq, "seq", np.int64), as_int(n, "n")
        shortfall = ctypes.c_int32()
        with self._owned as cache:
            try:
                check(lib.cellkv_cache_extend(cache, handle, n_tokens, ctypes.byref(shortfall)))
            except OutOfCellsError as error:
                error.shortfall = shortfall.value
                raise

    def place(
        self, positions: Ints | None = None, n: SupportsIndex | None = None
    ) -> npt.NDArray[np.int32]:
        """Give each declared token a cell and return the cells, int32 [n_tokens], the caller's own.

        For callers who bring their own storage and compute: `Executor.run` does it by itself.
        `positions` [n_tokens]: each must be its sequence's next position; None: just that. `n`:
        how many tokens are expected; default as many as there are positions, or were declared.

        NotDeclaredError: no declaration, or of another length. BadPositionError. OutOfMemoryError.
        On failure nothing changed, the declaration included.
        """
        wanted = None if positions is None else as_ints(positions, "positions", np.int32)
        if n is not None:
            n_tokens = as_int(n, "n")
            if wanted is not None and len(wanted) != n_tokens:
                raise InvalidArgumentError(f"positions has {len(wanted)} entries, n is {n_tokens}")
        else:
            n_tokens = self.stats.declared_tokens if wanted is None else len(wanted)
        cells = np.empty(max(n_tokens, 0), np.int32)
        address = None if wanted is None else wanted.ctypes.data
        with self._owned as cache:
            check(lib.cellkv_cache_place(cache, address, n_tokens, cells.ctypes.data))
        return cells

    def undo_step(self, n_keep: SupportsIndex = 0) -> None:
        """Give back the last placed step's cells from its `n_keep`-th token on.

        NothingToUndoError: no step, already undone, or another changing call came between.
        BadRangeError: `n_keep` outside [0, tokens of the step]. TrimmedError: kind SEQUENCE, and
        the next token would see positions that were written over.
        """
        kept = as_int(n_keep, "n_keep")
        with self._owned as cache:
            check(lib.cellkv_cache_undo_step(cache, kept))

    # ---- read-outs: they change nothing ----

    def can_extend(self, n: SupportsIndex) -> bool:
        """Tell whether `n` more cells can be given now. InvalidArgumentError: n < 0."""
        wanted = as_int(n, "n")
        fits = ctypes.c_bool()
        with self._owned as cache:
            check(lib.cellkv_cache_can_extend(cache, wanted, ctypes.byref(fits)))
        return fits.value

    def length(self, seq: SupportsIndex) -> int:
        """Count the cells that the sequence owns, shared ones in full. UnknownSequenceError."""
        return self._ask(lib.cellkv_cache_length, seq)

    def next_pos(self, seq: SupportsIndex) -> int:
        """Tell the position that the sequence's next token must have. UnknownSequenceError."""
        return self._ask(lib.cellkv_cache_next_pos, seq)

    def _ask(self, function: Any, seq: SupportsIndex) -> int:
        handle = as_int(seq, "seq", np.int64)
        answer = ctypes.c_int32()
        with self._owned as cache:
            check(function(cache, handle, ctypes.byref(answer)))
        return answer.value

    def cells(self, seq: SupportsIndex) -> SequenceCells:
        """List the sequence's cells in order of position. UnknownSequenceError."""
        handle = as_int(seq, "seq", np.int64)
        n_max = self.length(handle)
        cells, positions = np.empty(n_max, np.int32), np.empty(n_max, np.int32)
        length = ctypes.c_int32()
        with self._owned as cache:
            check(
                lib.cellkv_cache_read_cells(
                    cache,
                    handle,
                    cells.ctypes.data,
                    positions.ctypes.data,
                    n_max,
                    ctypes.byref(length),
                )
            )
        n = min(n_max, length.value)
        return SequenceCells(cells[:n], positions[:n])

    @property
    def stats(self) -> CacheStats:
        """The cache's figures now."""
        stats = _lib.sized(_lib.cellkv_cache_stats)
        with self._owned as cache:
            check(lib.cellkv_cache_get_stats(cache, ctypes.byref(stats)))
        return CacheStats(*(getattr(stats, field) for field in CacheStats._fields))

    # ---- the registry ----

    def publish(self) -> int:
        """Publish the cache under a generated key, always the same, and return it."""
        key = ctypes.c_int64()
        with self._owned as cache:
            check(lib.cellkv_cache_publish(cache, ctypes.byref(key)))
        return key.value

    @staticmethod
    def unpublish(key: SupportsIndex) -> None:
        """Erase a key; its cache lives on. UnknownKeyError."""
        check(lib.cellkv_cache_unpublish(as_int(key, "key", np.int64)))

    @classmethod
    def find(cls, key: SupportsIndex) -> Cache:
        """Find a published cache: a reference of its own, to be closed. UnknownKeyError."""
        address = ctypes.c_void_p()
        check(lib.cellkv_cache_find(as_int(key, "key", np.int64), ctypes.byref(address)))
        return cls._adopt(address)


_KINDS = {kind.name.lower(): kind.value for kind in CacheKind}


def _config(
    backend: str,
    kind: CacheKind | str,
    capacity: int,
    max_seqs: int,
    initial_rows: int | None,
    max_step: int | None,
    layers: Sequence[Layer],
    device: Devices,
) -> tuple[_lib.cellkv_cache_config, object]:
    """Make the C configuration, and what must stay alive as long as it is used."""
    config = lib.cellkv_cache_config_default()
    config.backend = as_text(backend, "backend")
    if isinstance(kind, str):
        config.kind = by_name(kind, _KINDS, "kind")
    else:
        config.kind = as_int(kind, "kind")
    config.capacity = as_int(capacity, "capacity")
    config.max_seqs = as_int(max_seqs, "max_seqs")
    if initial_rows is not None:
        config.initial_rows = as_int(initial_rows, "initial_rows")
    else:
        config.initial_rows = min(config.initial_rows, max(config.capacity, 0))
    if max_step is not None:
        config.max_step = as_int(max_step, "max_step")
    c_layers = _c_layers(layers)
    config.n_layers = len(c_layers)
    config.layers = c_layers
    config.device = as_devices(device, "device")
    return config, c_layers


def _c_layers(layers: Sequence[Layer]) -> ctypes.Array[_lib.cellkv_layer]:
    c_layers = (_lib.cellkv_layer * len(layers))()
    for i, layer in enumerate(layers):
        row = Layer(*layer)
        for field in ("n_kv_heads", "head_dim_k", "head_dim_v", "window"):
            setattr(c_layers[i], field, as_int(getattr(row, field), f"layers[{i}].{field}"))
        for field in ("type_k", "type_v"):
            setattr(c_layers[i], field, by_name(getattr(row, field), TYPES, f"layers[{i}].{field}"))
    return c_layers
