"""What does dense attention gain where sequences have blocks of rows of their own?

One call over all rows, cells of the sequences mixed as they were computed by turns; one call over
cells in blocks; and a piece for each sequence or group. Of the whole step by `step_us`, two
threads, K and V in f16, on the CPU or on `--device`. The steps of a turn follow each other, and are
taken back before the next turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import cellkv
from attention import N_THREADS, SMOLLM2, Case, contender, table_cache
from figures import Figures
from layouts import Layout, Limit, last_layout, limit_layouts
from turns import Clock, Contender, take_turns

BLOCK = 256
ROOM = 40  # tokens of a sequence that a turn may take: 6 steps of 4, and some
N_SEQS = (1, 4, 16, 32)
QUESTION = f"dense attention: {SMOLLM2}; sequences x context"


# The first is what a step of mixed cells costs without either.
WAYS = (
    ("one call, mixed", Limit.ONE_CALL, True),
    ("one call", Limit.ONE_CALL, False),
    ("", Limit.COPIES, False),
)


def in_one_run(case: Case) -> np.ndarray:
    """Prompt after prompt: each sequence's cells lie together."""
    return np.repeat(np.arange(case.n_seqs), case.context)


def by_turns(case: Case) -> np.ndarray:
    """Decoded together: each sequence's blocks lie between those of the others."""
    return np.tile(np.arange(case.n_seqs), case.context)


# The next token goes into the sequence's last block, or into a new one behind all others.
CASES = {
    "one run": (in_one_run, 1024 - ROOM),
    "one run and a block": (in_one_run, 1024),
    "blocks by turns": (by_turns, 1024 - ROOM),
}


class Going(Contender):
    """Steps that go on from each other: undoing one has the next zero its rows first, which over
    RPC takes longer than the step."""

    def seconds(self, clock: Clock) -> float:
        before = getattr(self.executor.stats, clock)
        self.executor.run(self.tokens, self.seqs, outputs=self.outputs)
        return (getattr(self.executor.stats, clock) - before) / 1e6


def prevent_blocks(cache: cellkv.Cache) -> None:
    """Leaves no block of cells wholly free: a sequence has one cell of each."""
    seq, capacity = cache.open(), cache.stats.capacity
    cache.extend(seq, capacity)
    cache.place()
    for first in range(0, capacity, BLOCK):
        cache.remove(seq, first, first + BLOCK - 1)


def fill(cache: cellkv.Cache, case: Case, order: Callable[[Case], np.ndarray]) -> np.ndarray:
    """Place the sequences' tokens. Their K and V remain zero, which takes as long to attend to."""
    seqs = np.array([cache.open() for _ in range(case.n_seqs)])
    owners = seqs[order(case)]
    cache.declare(owners)
    cache.place()
    return seqs


def filled_contender(
    stack: contextlib.ExitStack, case: Case, words: str, device: str, limit: Limit, mixed: bool
) -> tuple[Contender, Layout]:
    n_cells = case.n_seqs * (case.context // BLOCK + 2) * BLOCK
    program, cache = stack.enter_context(table_cache(SMOLLM2, n_cells, device=device))
    executor = stack.enter_context(
        cellkv.Executor(program.address, cache, strategy="dense", n_threads=N_THREADS)
    )
    limit_layouts(executor, limit)
    if mixed:
        prevent_blocks(cache)
    seqs = fill(cache, case, by_turns if mixed else CASES[words][0])

    def rewind() -> None:
        for seq in seqs:
            cache.rewind(seq, case.context)

    made = Going(*contender(executor, cache, seqs, case.n_new))._replace(before_turn=rewind)
    made.seconds("step_us")
    return made, last_layout(executor)


@pytest.mark.parametrize("n_new", [1, 4])
@pytest.mark.parametrize("n_seqs", N_SEQS)
@pytest.mark.parametrize("words", CASES)
def bench_dense_layout(
    benchmark: BenchmarkFixture,
    figures: Figures,
    request: pytest.FixtureRequest,
    words: str,
    n_seqs: int,
    n_new: int,
) -> None:
    device = request.config.option.device
    case = Case(n_seqs, CASES[words][1], n_new=n_new)
    with contextlib.ExitStack() as stack:
        contenders = {}
        for name, limit, mixed in WAYS:
            made, layout = filled_contender(stack, case, words, device, limit, mixed)
            shown = f"{layout.n_pieces} pieces, {layout.n_runs} runs"
            contenders[name or shown] = made
        seconds, _ = benchmark.pedantic(take_turns, (contenders, "step_us"), rounds=1)
    for name, times in seconds.items():
        figures.add(QUESTION, f"{case}, {words}", name, times, n_seqs * n_new)
