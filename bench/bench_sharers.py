"""What does one more sharer of a prefix cost: arithmetic, or another read of it?

1 to 32 sequences that share 2,048 tokens, and 16 that have as many each for themselves. Attention
alone, by `compute_us`, beside a streaming read of the prefix and f32 multiply-adds.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from attention import N_THREADS, SMOLLM2, Case, contender, executors, fill, table_cache
from figures import Figures
from limits import Machine, rates
from turns import take_turns

PREFIX = 2048
N_SHARERS = (1, 2, 4, 8, 16, 32)
APART = Case(16, PREFIX)
QUESTION = f"sharers: attention of sequences that share {PREFIX:,} tokens; {SMOLLM2}"


@pytest.mark.parametrize("strategy", ["ragged", "dense"])
def bench_sharers(benchmark: BenchmarkFixture, figures: Figures, strategy: str) -> None:
    cases = {f"{n} sharing": Case(n, PREFIX, PREFIX) for n in N_SHARERS}
    n_cells = cases[f"{N_SHARERS[-1]} sharing"].n_cells
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(contextlib.closing(Machine(N_THREADS)))
        program, cache = stack.enter_context(table_cache(SMOLLM2, n_cells + APART.n_cells))
        made = executors(stack, program, cache, {strategy, "ragged"})
        seqs = fill(made["ragged"], cache, Case(N_SHARERS[-1], PREFIX, PREFIX)).seqs
        contenders = {
            name: contender(made[strategy], cache, seqs[: case.n_seqs])
            for name, case in cases.items()
        }
        if strategy == "ragged":  # dense would pay for these in every step
            cases["16 apart"] = APART
            apart = fill(made["ragged"], cache, APART).seqs
            contenders["16 apart"] = contender(made[strategy], cache, apart)
        n_bytes = cases["1 sharing"].n_bytes(SMOLLM2)
        also = functools.partial(machine.limits, n_bytes)
        seconds, limits = benchmark.pedantic(
            take_turns, (contenders, "compute_us"), {"also": also, "budget": 6.0}, rounds=1
        )
    for name, times in seconds.items():
        case = cases[name]
        rates_of_it = rates(times, case.n_bytes(SMOLLM2), case.n_flops(SMOLLM2), limits)
        figures.add(QUESTION, strategy, name, times, case.n_seqs, rates_of_it)
