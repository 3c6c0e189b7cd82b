"""A cache with an executor of a table program, and the oracle beside it.

Every step is run on both and compared, token by token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from types import TracebackType

import numpy as np

import oracle
from cellkv import Cache, Executor, Strategy
from table_program import TableProgram, cache_layers

# Relative L2 error of the dense strategy on the CPU, by the type of K and by that of V. ggml rounds
# the queries to K's type, beside q8_0 and q4_0 to q8_0; it accumulates f16 V in f16 when a step has
# fewer than 64 tokens (of a piece, see attention/layout.h), and makes f32 of all others.
DENSE_TOLERANCE_K = {"f32": 1e-5, "f16": 8e-3, "bf16": 2e-2, "q8_0": 3e-2, "q4_0": 3e-2}
DENSE_TOLERANCE_V = {"f32": 1e-5, "f16": 8e-3, "bf16": 1e-5, "q8_0": 1e-5, "q4_0": 1e-5}
RAGGED_TOLERANCE = 1e-5  # for every type: f32 throughout


def dense_tolerance(type_k: str, type_v: str) -> float:
    return max(DENSE_TOLERANCE_K[type_k], DENSE_TOLERANCE_V[type_v])


class World:
    """Sequences by name, in a cache and in the oracle."""

    def __init__(
        self,
        tables: list[oracle.LayerTables],
        *,
        type_k: str = "f32",
        type_v: str = "f32",
        kind: str = "batched",
        capacity: int = 4096,
        initial_rows: int = 1,
        max_step: int | None = None,
        device: str = "CPU",
        tolerance: float | None = None,
        n_threads: int = 1,
        **executor: object,
    ) -> None:
        self.tables = tables
        self.types = (type_k, type_v)
        self.worst = 0.0
        with contextlib.ExitStack() as made:
            self.program = made.enter_context(contextlib.closing(TableProgram(tables, device)))
            self.cache = made.enter_context(
                Cache(
                    cache_layers(tables, type_k, type_v),
                    kind=kind,
                    capacity=capacity,
                    initial_rows=initial_rows,
                    max_step=max_step,
                    device=device,
                )
            )
            self.executor = made.enter_context(
                Executor(self.program.address, self.cache, n_threads=n_threads, **executor)
            )
            self._made = made.pop_all()
        self.tolerance = tolerance or self.tolerance_of_strategy()
        self.handles: dict[str, int] = {}
        self.truth: dict[str, oracle.Sequence] = {}
        self._rng = np.random.default_rng(7)

    def tolerance_of_strategy(self) -> float:
        if self.executor.stats.strategy is Strategy.RAGGED:
            return RAGGED_TOLERANCE
        return dense_tolerance(*self.types)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            assert self.executor.stats.n_attention_strayed == 0
        self._made.close()

    def open(self, *names: str) -> None:
        for name in names:
            self.handles[name] = self.cache.open()
            self.truth[name] = oracle.Sequence()

    def clone(self, src: str, name: str, upto: int | None = None) -> None:
        self.handles[name] = self.cache.clone(self.handles[src], upto)
        self.truth[name] = self.truth[src].clone(upto)

    def rewind(self, name: str, pos: int) -> None:
        self.cache.rewind(self.handles[name], pos)
        self.truth[name].rewind(pos)

    def remove(self, name: str, p0: int, p1: int) -> None:
        self.cache.remove(self.handles[name], p0, p1)
        self.truth[name].remove(p0, p1)

    def close(self, name: str) -> None:
        self.cache.close_seq(self.handles.pop(name))
        del self.truth[name]

    def random_tokens(self, n: int) -> list[int]:
        return [int(t) for t in self._rng.integers(0, len(self.tables[0].q), n)]

    def prefill(self, name: str, n: int) -> None:
        """Gives one sequence n random tokens in one step."""
        self.step([name] * n)

    def step(self, names: SequenceOf[str], tokens: SequenceOf[int] | None = None) -> np.ndarray:
        """Runs a step of these sequences' tokens, compares every token's result, returns them."""
        tokens = self.random_tokens(len(names)) if tokens is None else tokens
        seqs = [self.handles[name] for name in names]
        results = self.executor.run(tokens, seqs, outputs="all")
        self.check(names, tokens, results)
        return results

    def check(self, names: SequenceOf[str], tokens: SequenceOf[int], results: np.ndarray) -> None:
        """Adds the tokens to the oracle's sequences and compares the results."""
        for name, token, result in zip(names, tokens, results, strict=True):
            sequence = self.truth[name]
            sequence.append([token])
            want = sequence.result(self.tables, sequence.next_pos - 1, *self.types)
            error = oracle.relative_error(result, want)
            self.worst = max(self.worst, error)
            assert error < self.tolerance, (
                f"{name} at position {sequence.next_pos - 1}: error {error:.2e}, "
                f"tolerance {self.tolerance:.0e}"
            )


NewWorld = Callable[..., World]
