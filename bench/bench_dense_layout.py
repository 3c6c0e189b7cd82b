"""What does dense attention gain by reading each sequence's own blocks of rows instead of all rows?

Of the graph's compute by `compute_us`, two threads, K and V in f16, on the CPU or on `--device`.
The ragged op's time is beside them where the device is the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import cellkv
from attention import N_THREADS, N_VOCAB, SMOLLM2, Case, contender, table_cache
from figures import Figures
from layouts import Limit, last_layout, limit_layouts
from turns import take_turns

BLOCK = 256
N_SEQS = (1, 4, 16, 32)
QUESTION = f"dense attention: {SMOLLM2}; sequences x context"


def in_one_run(case: Case) -> np.ndarray:
    """Prompt after prompt: each sequence's cells lie together."""
    return np.repeat(np.arange(case.n_seqs), case.context)


def by_turns(case: Case) -> np.ndarray:
    """Decoded together: each sequence's blocks lie between those of the others."""
    return np.tile(np.arange(case.n_seqs), case.context)


# The next token goes into the sequence's last block, or into a new one behind all others.
CASES = {
    "one run": (in_one_run, 1024 - 8),
    "one run and a block": (in_one_run, 1024),
    "blocks by turns": (by_turns, 1024 - 8),
}


def fill(
    executor: cellkv.Executor, cache: cellkv.Cache, case: Case, order: Callable[[Case], np.ndarray]
) -> np.ndarray:
    seqs = np.array([cache.open() for _ in range(case.n_seqs)])
    owners = seqs[order(case)]
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, len(owners))
    executor.run(tokens, owners, outputs=[])
    return seqs


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
    order, context = CASES[words]
    device = request.config.option.device
    case = Case(n_seqs, context, n_new=n_new)
    n_cells = n_seqs * (context // BLOCK + 2) * BLOCK
    strategies = ("dense", "dense", "ragged") if device == "CPU" else ("dense", "dense")
    with contextlib.ExitStack() as stack:
        program, cache = stack.enter_context(table_cache(SMOLLM2, n_cells, device=device))
        made = [
            stack.enter_context(
                cellkv.Executor(program.address, cache, strategy=strategy, n_threads=N_THREADS)
            )
            for strategy in strategies
        ]
        limit_layouts(made[0], Limit.ONE_CALL)
        seqs = fill(made[-1], cache, case, order)
        made[1].run(np.zeros(n_seqs * n_new, int), np.repeat(seqs, n_new), outputs=[])
        layout = last_layout(made[1])
        cache.undo_step()
        names = ["one call", f"{layout.n_pieces} pieces, {layout.n_runs} runs", "ragged"]
        contenders = {
            name: contender(executor, cache, seqs, n_new)
            for name, executor in zip(names, made, strict=False)
        }
        seconds, _ = benchmark.pedantic(take_turns, (contenders, "compute_us"), rounds=1)
    for name, times in seconds.items():
        figures.add(QUESTION, f"{case}, {words}", name, times, n_seqs * n_new)
