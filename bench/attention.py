"""Attention without a model around it: its shapes, and caches full of sequences to attend."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

import cellkv
from oracle import LayerTables
from table_program import TableProgram, cache_layers, random_tables
from turns import Contender

N_THREADS = 2
N_VOCAB = 1024
OPTIONS = {
    "ragged": {"strategy": "ragged"},
    "ragged, AVX2": {"strategy": "ragged", "isa": "avx2"},
    "dense": {"strategy": "dense"},
}


class Shape(NamedTuple):
    """The attention of a model's layers, all alike but for their windows."""

    n_heads: int
    n_kv_heads: int
    width: int
    windows: tuple[int, ...]  # one for each layer, 0: none

    def __str__(self) -> str:
        words = (
            f"{len(self.windows)} layers of {self.n_heads} query heads on {self.n_kv_heads} KV "
            f"head{'s' * (self.n_kv_heads > 1)}, width {self.width}"
        )
        if any(self.windows):
            words += f", window {max(self.windows)} in {np.count_nonzero(self.windows)} of them"
        return words

    def tables(self) -> list[LayerTables]:
        return random_tables(
            np.random.default_rng(1),
            self.windows,
            n_vocab=N_VOCAB,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim_k=self.width,
            head_dim_v=self.width,
        )


SMOLLM2 = Shape(9, 3, 64, (0,) * 4)
WIDE = Shape(4, 1, 256, (512,) * 5 + (0,))


class Case(NamedTuple):
    """Sequences of `context` tokens, the first `shared` of which are the same cells in all; a step
    gives `n_new` more to each."""

    n_seqs: int
    context: int
    shared: int = 0
    n_new: int = 1

    def __str__(self) -> str:
        words = f"{self.n_seqs} x {self.context}"
        if self.shared:
            words += f" ({self.shared} shared)"
        if self.n_new > 1:
            words = f"{self.n_new} tokens at {words}"
        return words

    @property
    def n_cells(self) -> int:
        """Cells in use after the step."""
        return self.shared + self.n_seqs * (self.context - self.shared + self.n_new)

    def n_bytes(self, shape: Shape, n_bytes_each: float = 2) -> int:
        """K and V that the step's queries see, each row once."""
        n_rows = 0
        for window in shape.windows:
            first = max(0, self.context - window + 1) if window else 0
            n_rows += max(0, self.shared - first)
            n_rows += self.n_seqs * (self.context + self.n_new - max(self.shared, first))
        return int(n_rows * shape.n_kv_heads * 2 * shape.width * n_bytes_each)

    def n_flops(self, shape: Shape) -> int:
        """The step's multiplications and additions: K with a query, V with a weight."""
        n_seen = 0
        for window in shape.windows:
            for pos in range(self.context, self.context + self.n_new):
                n_seen += min(pos + 1, window or pos + 1)
        return self.n_seqs * n_seen * shape.n_heads * 2 * 2 * shape.width


@contextlib.contextmanager
def table_cache(
    shape: Shape,
    n_cells: int,
    max_seqs: int = 64,
    type_name: str = "f16",
    device: str | None = None,
) -> Iterator[tuple[TableProgram, cellkv.Cache]]:
    """A program of this shape and an empty cache for it, which won't have to grow."""
    tables = shape.tables()
    program = TableProgram(tables, device)
    layers = cache_layers(tables, type_name, type_name)
    try:
        with cellkv.Cache(
            layers, capacity=n_cells, initial_rows=n_cells, max_seqs=max_seqs, device=device
        ) as cache:
            yield program, cache
    finally:
        program.close()


def executors(
    stack: contextlib.ExitStack,
    program: TableProgram,
    cache: cellkv.Cache,
    names: Collection[str] = tuple(OPTIONS),
) -> dict[str, cellkv.Executor]:
    """Executors over one cache, in the order of OPTIONS; none held to what the CPU lacks."""
    made = {}
    for name, options in OPTIONS.items():
        if name not in names:
            continue
        try:
            executor = cellkv.Executor(program.address, cache, n_threads=N_THREADS, **options)
        except cellkv.UnsupportedError:
            assert "isa" in options
            continue
        made[name] = stack.enter_context(executor)
    return made


class Filled(NamedTuple):
    """Sequences in a cache, and what they hold."""

    seqs: np.ndarray  # [n_seqs]
    tokens: np.ndarray  # [n_seqs, context]


def fill(
    executor: cellkv.Executor, cache: cellkv.Cache, case: Case, n_vocab: int = N_VOCAB
) -> Filled:
    """Open the case's sequences and compute their tokens: the shared ones first, then one of each
    sequence by turns, as decoding lays them."""
    rng = np.random.default_rng(case.n_seqs)
    shared = rng.integers(0, n_vocab, case.shared)
    own = rng.integers(0, n_vocab, (case.n_seqs, case.context - case.shared))
    first = cache.open()
    if shared.size:
        executor.run(shared, first, outputs=[])
    seqs = np.array([first] + [cache.clone(first) for _ in range(case.n_seqs - 1)])
    if own.size:
        executor.run(own.T.ravel(), np.tile(seqs, own.shape[1]), outputs=[])
    return Filled(seqs, np.hstack([np.tile(shared, (case.n_seqs, 1)), own]))


def contender(
    executor: cellkv.Executor, cache: cellkv.Cache, seqs: np.ndarray, n_new: int = 1
) -> Contender:
    """A step of `n_new` tokens for each of the sequences."""
    owners = np.repeat(seqs, n_new)
    tokens = np.random.default_rng(0).integers(0, N_VOCAB, len(owners))
    return Contender(executor, cache, tokens, owners)
