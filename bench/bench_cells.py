"""What do the cell table's verbs cost, and does that grow with the capacity?

Called from Python through the public package; the first group is what such a call costs by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from cellkv import Cache
from figures import Figures

QUESTION = "cells: one call from Python, against the capacity"
N_STEP = 64
LENGTH = 100_000

Measure = Callable[..., None]


@pytest.fixture
def measure(benchmark: BenchmarkFixture, figures: Figures) -> Measure:
    """Time calls of a verb, each after a call of `setup`, which is not timed."""

    def run(
        group: str,
        cache: Cache,
        verb: Callable[[], object],
        setup: Callable[[], object],
        rounds: int,
    ) -> None:
        benchmark.pedantic(verb, setup=lambda: setup() and None, rounds=rounds, warmup_rounds=3)
        case = f"{cache.stats.capacity:,} cells"
        figures.add(QUESTION, group, case, benchmark.stats.stats.data)

    return run


def half_full(capacity: int) -> tuple[Cache, np.ndarray]:
    """A cache with half of its cells in use and holes among them; 64 sequences to continue."""
    cache = Cache(backend="cells", capacity=capacity, max_seqs=4096)
    seqs = [cache.open() for _ in range(max(capacity // 1000, 2 * N_STEP))]
    n_each = capacity * 3 // 4 // len(seqs)
    for _ in range(n_each):  # their cells alternate
        cache.declare(seqs)
        cache.place()
    for seq in seqs[::3]:
        cache.close_seq(seq)
    return cache, np.array(seqs[1::3][:32] + seqs[2::3][:32])


@pytest.mark.parametrize("capacity", [10_000, 100_000, 1_000_000])
def bench_nothing(measure: Measure, capacity: int) -> None:
    cache, _ = half_full(capacity)
    measure("a call that does nothing", cache, lambda: cache.can_extend(1), lambda: None, 1000)


@pytest.mark.parametrize("capacity", [10_000, 100_000, 1_000_000])
def bench_declare(measure: Measure, capacity: int) -> None:
    cache, seqs = half_full(capacity)
    measure(f"declare {N_STEP} tokens", cache, lambda: cache.declare(seqs), lambda: None, 1000)


@pytest.mark.parametrize("capacity", [10_000, 100_000, 1_000_000])
def bench_place(measure: Measure, capacity: int) -> None:
    cache, seqs = half_full(capacity)
    positions = np.full(N_STEP, cache.next_pos(seqs[0]), np.int32)

    def setup() -> None:
        if cache.next_pos(seqs[0]) > positions[0]:
            cache.undo_step()
        cache.declare(seqs)

    measure(f"place {N_STEP} tokens", cache, lambda: cache.place(positions), setup, 1000)


@pytest.mark.parametrize("capacity", [10_000, 100_000, 1_000_000])
def bench_undo(measure: Measure, capacity: int) -> None:
    cache, seqs = half_full(capacity)

    def setup() -> None:
        cache.declare(seqs)
        cache.place()

    measure(f"undo a step of {N_STEP}", cache, cache.undo_step, setup, 1000)


# ---- sequences of 100,000 tokens ----


class Long:
    """A cache with one sequence of 100,000 tokens."""

    def __init__(self, capacity: int) -> None:
        self.cache = Cache(backend="cells", capacity=capacity)
        self.open()

    def open(self) -> None:
        self.seq = self.cache.open()
        self.extend(LENGTH)

    def extend(self, n: int) -> None:
        self.cache.declare(np.full(n, self.seq))
        self.cache.place()


@pytest.fixture(params=[100_000, 1_000_000])
def long(request: pytest.FixtureRequest) -> Long:
    return Long(request.param)


def bench_clone(measure: Measure, long: Long) -> None:
    clones: list[int] = []

    def setup() -> None:
        if clones:
            long.cache.close_seq(clones.pop())

    def clone() -> None:
        clones.append(long.cache.clone(long.seq))

    measure("clone 100,000 tokens", long.cache, clone, setup, 300)


def bench_close_clone(measure: Measure, long: Long) -> None:
    clones: list[int] = []

    def setup() -> None:
        clones.append(long.cache.clone(long.seq))

    def close() -> None:
        long.cache.close_seq(clones.pop())

    measure("close a clone of 100,000", long.cache, close, setup, 300)


def bench_rewind_little(measure: Measure, long: Long) -> None:
    long.cache.rewind(long.seq, LENGTH - N_STEP)

    def rewind() -> None:
        long.cache.rewind(long.seq, LENGTH - N_STEP)

    measure(f"rewind {N_STEP} of 100,000", long.cache, rewind, lambda: long.extend(N_STEP), 1000)


def bench_rewind_all(measure: Measure, long: Long) -> None:
    long.cache.rewind(long.seq, 0)

    def rewind() -> None:
        long.cache.rewind(long.seq, 0)

    measure("rewind all of 100,000", long.cache, rewind, lambda: long.extend(LENGTH), 300)


def bench_close(measure: Measure, long: Long) -> None:
    long.cache.close_seq(long.seq)

    def close() -> None:
        long.cache.close_seq(long.seq)

    measure("close 100,000 tokens", long.cache, close, long.open, 300)
