"""The executor: runs steps of a program over a cache."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, SupportsIndex, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from . import _lib
from ._arguments import Ints, as_int, as_ints, as_member
from ._lib import check, lib
from ._owned import Owned, Owner
from .cache import Cache
from .errors import (
    AbortedError,
    BusyError,
    CellkvError,
    ClosedError,
    EmptyStepError,
    InvalidArgumentError,
    OutOfCellsError,
)

Outputs: TypeAlias = 'Ints | Literal["last_of_each", "last", "all"]'
StrategyName: TypeAlias = Literal["auto", "dense", "ragged"]
PoolingName: TypeAlias = Literal["none", "mean"]
IsaName: TypeAlias = Literal["best", "c", "avx2", "avx512", "neon"]


class Strategy(enum.IntEnum):
    """How attention is computed."""

    AUTO = 0
    DENSE = 1
    RAGGED = 2


class Isa(enum.IntEnum):
    """The instructions that strategy ragged uses."""

    BEST = 0
    C = 1
    AVX2 = 2
    AVX512 = 3
    NEON = 4


class Pooling(enum.IntEnum):
    """What becomes of the results of a step's outputs."""

    NONE = 0
    MEAN = 1


class ExecutorStats(NamedTuple):
    """An executor's figures, counted since it was made.

    `n_steps` run to their end; `n_graphs_kept` and `graph_bytes` are as of now;
    `n_attention_strayed`: attention nodes that ran elsewhere than on the rows' device;
    `n_row_growths`: times the cache's rows grew in this executor's steps; `step_us`: microseconds
    spent in steps, and `compute_us` the part of them in which graphs were computed; `strategy`,
    `isa` (of strategy ragged; BEST with dense) and `n_threads` are those in use.
    """

    n_steps: int
    n_tokens: int
    n_graphs_built: int
    n_graphs_reused: int
    n_graphs_kept: int
    graph_bytes: int
    n_attention_strayed: int
    n_row_growths: int
    step_us: int
    compute_us: int
    strategy: Strategy
    isa: Isa
    n_threads: int


@runtime_checkable
class ProgramSource(Protocol):
    """What has a program to run: a Model."""

    _owned: Owned

    def program(self) -> _lib.cellkv_program:
        """Return the program as the C struct."""


class Executor(Owner):
    """One program over one cache; a context manager that closes it.

    One caller at a time: BusyError otherwise, also while the cache is in use elsewhere. The GIL is
    released while a step computes. ClosedError after `close`.
    """

    def __init__(
        self,
        program: ProgramSource | _lib.cellkv_program | int | ctypes.c_void_p,
        cache: Cache | None = None,
        *,
        cache_key: SupportsIndex | None = None,
        strategy: Strategy | StrategyName = Strategy.AUTO,
        isa: Isa | IsaName = Isa.BEST,
        n_threads: int = 0,
        max_batch: int = 512,
        max_graphs: int = 32,
        reuse_graphs: bool = True,
        should_abort: Callable[[], bool] | None = None,
    ) -> None:
        """Make an executor.

        `program`: a Model, or the address of a `cellkv_program` made in C; model and cache are kept
        alive. `cache`, or the `cache_key` of a published one. `strategy`: "ragged" (a query reads
        the cells it sees and no others; on the CPU), "dense" (ggml's flash attention with a
        mask), or "auto": ragged where it can be. `isa`: the instructions of ragged.
        `n_threads` of the CPU, 1 .. 512; 0: one per core, at most 16. `max_batch`: most tokens
        computed at once, a wider step goes in slices; over a cache of kind SEQUENCE with windows
        more than its `max_step` is as good as that. `max_graphs`: most graphs kept;
        `reuse_graphs=False` builds one for each run.
        `should_abort` is asked between a running graph's nodes, by any thread: true stops the step,
        and so does an exception, which becomes the AbortedError's cause. It costs two switches of
        the GIL for each node.

        InvalidArgumentError. UnknownKeyError. NoStorageError: the cache has cells alone.
        MismatchError: the cache's layers are not the program's. UnsupportedError: the strategy
        cannot attend on this device over a layer of these types and widths, or there is no such
        isa. OutOfMemoryError.
        """
        self._should_abort = should_abort
        self._abort_cause: BaseException | None = None
        self._cache = cache
        config = lib.cellkv_executor_config_default()
        config.cache_key = 0 if cache_key is None else as_int(cache_key, "cache_key", np.int64)
        if (cache is None) == (cache_key is None):
            raise InvalidArgumentError("give either cache or cache_key")
        if cache is not None and not isinstance(cache, Cache):
            raise TypeError(f"cache is {type(cache).__name__}, a Cache is expected")
        config.strategy = as_member(strategy, Strategy, "strategy")
        config.isa = as_member(isa, Isa, "isa")
        config.n_threads = as_int(n_threads, "n_threads")
        config.max_batch = as_int(max_batch, "max_batch")
        config.max_graphs = as_int(max_graphs, "max_graphs")
        config.reuse_graphs = bool(reuse_graphs)
        # C keeps a pointer to the thunk: it must live until the C executor is freed.
        thunk = _abort_thunk(weakref.ref(self)) if should_abort else _lib.ABORT_CALLBACK()
        config.should_abort = thunk
        address = ctypes.c_void_p()
        with contextlib.ExitStack() as held:
            c_program = _as_program(program, held)
            config.program = ctypes.pointer(c_program)
            config.cache = None if cache is None else held.enter_context(cache._owned)
            check(lib.cellkv_executor_new(ctypes.byref(config), ctypes.byref(address)))
            self._n_result = int(c_program.n_result)
        assert address.value is not None

        def free(executor: int, _kept: object = thunk) -> None:
            lib.cellkv_executor_free(executor)

        self._owned = Owned(address.value, free, "executor")
        self._finalizer = weakref.finalize(self, _finish, self._owned)

    def close(self) -> None:
        """Free the executor and its references; closing twice is fine.

        Safe during a step of another thread: that goes on, and the memory goes when it ends.
        """
        self._owned.close()

    @property
    def cache(self) -> Cache | None:
        """The cache it was made with; None if that was given by key."""
        return self._cache

    @property
    def n_result(self) -> int:
        """Floats per result row: a model's vocabulary, or the width of its hidden state."""
        return self._n_result

    def run(
        self,
        tokens: Ints,
        seqs: Ints | SupportsIndex | None = None,
        positions: Ints | None = None,
        outputs: Outputs = "last_of_each",
        pooling: Pooling | PoolingName = Pooling.NONE,
    ) -> npt.NDArray[np.float32]:
        """Run one step: place its tokens, grow the rows if needed, compute.

        `tokens` [n_tokens]. `seqs`: one handle for all, or [n_tokens]; declares the step; None: the
        control plane has declared it with `Cache.declare`. `positions` [n_tokens]; None: each token
        continues its sequence. `outputs`: whose result rows are wanted: "last_of_each" sequence (in
        the order in which the sequences first appear in `seqs`, which must be given), the step's
        "last" token, "all", or indices [n_outputs] in any order.

        `pooling`: "mean" averages the results of each sequence's outputs, and needs `seqs`.

        Returns float32 [n_outputs, n_result], the caller's own; with pooling [n sequences among the
        outputs, n_result], in the order in which the outputs first name them.

        Before anything is computed, with cells, sequences and declaration left as they were:
        InvalidArgumentError, BadTokenError, EmptyStepError, UnknownSequenceError, OutOfCellsError
        (its `shortfall` says how many), NotDeclaredError, BadPositionError, BusyError,
        OutOfMemoryError, BadGraphError or the program's own status. During compute, with the step's
        cells left claimed until `Cache.undo_step`: AbortedError, ComputeError. The exception's
        `n_done` is how many tokens had been computed.
        """
        ids = as_ints(tokens, "tokens", np.int32)
        handles = None if seqs is None else _as_handles(seqs, len(ids))
        where = None if positions is None else as_ints(positions, "positions", np.int32, len(ids))
        wanted = _as_outputs(outputs, len(ids), handles)
        pooled = as_member(pooling, Pooling, "pooling")
        if pooled != Pooling.NONE and handles is None:
            raise InvalidArgumentError("pooling needs seqs")
        n_rows = len(wanted)
        if pooled != Pooling.NONE and handles is not None:
            inside = wanted[(wanted >= 0) & (wanted < len(handles))]  # C refuses the others
            n_rows = len(np.unique(handles[inside]))
        results = np.empty((n_rows, self._n_result), np.float32)
        step = _lib.cellkv_step(
            n_tokens=len(ids),
            n_outputs=len(wanted),
            tokens=ids.ctypes.data,
            seqs=None if handles is None else handles.ctypes.data,
            positions=None if where is None else where.ctypes.data,
            outputs=wanted.ctypes.data,
            pooling=pooled,
        )
        n_done = ctypes.c_int32()
        with self._owned as executor:
            status = lib.cellkv_executor_run(
                executor, ctypes.byref(step), results.ctypes.data, ctypes.byref(n_done)
            )
            try:
                check(status)
            except CellkvError as error:
                error.n_done = n_done.value
                self._explain(error, len(ids))
                raise
        return results

    def embed(
        self, texts: Sequence[Ints], pooling: Literal["mean", "last"] = "mean"
    ) -> npt.NDArray[np.float32]:
        """Run texts of which only one row each is wanted, all in one forward.

        `texts`: the tokens of each, at least one. `pooling`: the "mean" of a text's result rows, or
        the "last". With an executor of a model's hidden states these are the texts' embeddings. The
        sequences are opened for it and closed after it.

        Returns float32 [n texts, n_result], the caller's own. Errors as `Cache.open` and `run`;
        nothing stays in the cache either way. Waits for a thread that is inside the cache when the
        sequences are to be closed.
        """
        if self._cache is None:
            raise InvalidArgumentError("embed needs an executor that was given its cache itself")
        if pooling not in ("mean", "last"):
            raise InvalidArgumentError(f"pooling is {pooling!r}, not one of mean, last")
        ids = [as_ints(text, f"texts[{i}]", np.int32) for i, text in enumerate(texts)]
        if not all(len(one) for one in ids):
            raise EmptyStepError("a text has no tokens")
        if not ids:
            return np.empty((0, self._n_result), np.float32)
        seqs: list[int] = []
        try:
            for _ in ids:
                seqs.append(self._cache.open())
            owners = np.repeat(np.array(seqs, np.int64), [len(one) for one in ids])
            tokens = np.concatenate(ids)
            if pooling == "last":
                return self.run(tokens, owners)
            return self.run(tokens, owners, outputs="all", pooling="mean")
        finally:
            _close_all(self._cache, seqs)

    def _explain(self, error: CellkvError, n_tokens: int) -> None:
        """Add what C had no place for: the shortfall, and why `should_abort` stopped the step."""
        if isinstance(error, OutOfCellsError) and self._cache is not None:
            with contextlib.suppress(CellkvError):
                error.shortfall = n_tokens - self._cache.stats.free_cells
        cause, self._abort_cause = self._abort_cause, None
        if isinstance(error, AbortedError) and cause is not None:
            if not isinstance(cause, Exception):
                raise cause  # KeyboardInterrupt and its like are not ours to wrap
            error.__cause__ = cause

    def _ask_abort(self) -> bool:
        try:
            return self._should_abort is not None and bool(self._should_abort())
        except BaseException as error:
            self._abort_cause = error
            return True

    def abort(self) -> None:
        """Ask the step that runs now, in another thread, to stop; without one, do nothing.

        The run then raises AbortedError, unless it was past its last node. Any thread may call it.
        """
        with self._owned as executor:
            check(lib.cellkv_executor_abort(executor))

    @property
    def stats(self) -> ExecutorStats:
        """The executor's figures now."""
        stats = _lib.sized(_lib.cellkv_executor_stats)
        with self._owned as executor:
            check(lib.cellkv_executor_get_stats(executor, ctypes.byref(stats)))
        values = {field: getattr(stats, field) for field in ExecutorStats._fields}
        values["strategy"] = Strategy(values["strategy"])
        values["isa"] = Isa(values["isa"])
        return ExecutorStats(**values)


def devices() -> tuple[str, ...]:
    """Name ggml's devices in this process, as `device` arguments take them."""
    names = (lib.cellkv_device_name(i) for i in range(lib.cellkv_device_count()))
    return tuple(name.decode() for name in names if name is not None)


def _finish(owned: Owned) -> None:
    """Free an executor that nobody refers to, or at interpreter exit.

    Only at exit can another thread be inside, and its compute must not outlive the process's own
    clean-up.
    """
    owned.finish(lib.cellkv_executor_abort, seconds=10.0)


def _abort_thunk(executor: weakref.ref[Executor]) -> Any:
    """Make the C callback. It refers weakly: C's executor must not keep Python's alive."""

    def ask(_context: int | None) -> bool:
        caller = executor()
        return caller is not None and caller._ask_abort()

    return _lib.ABORT_CALLBACK(ask)


def _as_program(program: Any, held: contextlib.ExitStack) -> _lib.cellkv_program:
    if isinstance(program, _lib.cellkv_program):
        return program
    if isinstance(program, ProgramSource):
        held.enter_context(program._owned)
        return program.program()
    if isinstance(program, (ctypes.c_void_p, ctypes._Pointer)):
        address = ctypes.cast(program, ctypes.c_void_p).value
    else:
        try:
            address = as_int(program, "program", np.uintp)
        except TypeError:
            raise TypeError(
                f"program is {type(program).__name__}, a Model or a cellkv_program's address is "
                "expected"
            ) from None
    if not address:
        raise InvalidArgumentError("program is NULL")
    return _lib.cellkv_program.from_address(address)


def _close_all(cache: Cache, seqs: list[int]) -> None:
    for seq in seqs:
        while True:
            try:
                cache.close_seq(seq)
            except BusyError:
                time.sleep(0.001)
            except ClosedError:  # and the sequences with it
                return
            else:
                break


def _as_handles(seqs: Any, n_tokens: int) -> npt.NDArray[np.int64]:
    if hasattr(seqs, "__index__") and getattr(seqs, "ndim", 0) == 0:
        return np.full(n_tokens, as_int(seqs, "seqs", np.int64), np.int64)
    return as_ints(seqs, "seqs", np.int64, n_tokens)


def _as_outputs(
    outputs: Any, n_tokens: int, handles: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.int32]:
    if not isinstance(outputs, str):
        return as_ints(outputs, "outputs", np.int32)
    if outputs == "all":
        return np.arange(n_tokens, dtype=np.int32)
    if outputs == "last":
        return np.arange(max(n_tokens - 1, 0), n_tokens, dtype=np.int32)
    if outputs != "last_of_each":
        raise InvalidArgumentError(f"outputs is {outputs!r}, not one of last_of_each, last, all")
    if handles is None:
        raise InvalidArgumentError('outputs is "last_of_each", which needs seqs')
    _, first = np.unique(handles, return_index=True)
    _, from_end = np.unique(handles[::-1], return_index=True)
    return (n_tokens - 1 - from_end)[np.argsort(first)].astype(np.int32)
