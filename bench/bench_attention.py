"""How long does attention alone take: ragged, held to AVX2, dense? And how near is it to what the
machine can do?

Of the graph's compute by `compute_us`, two threads, K and V in f16. Two limits are measured between
the turns: a streaming read of the K and V that the step sees, each row once, and f32 multiply-adds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from attention import N_THREADS, SMOLLM2, WIDE, Case, Shape, contender, executors, fill, table_cache
from figures import Figures
from limits import Machine, rates
from turns import take_turns

CASES = [
    *((SMOLLM2, case) for case in (Case(1, 1024), Case(4, 1024), Case(16, 1024), Case(32, 1024))),
    *((SMOLLM2, case) for case in (Case(16, 1024, 896), Case(32, 2048, 1920))),
    (SMOLLM2, Case(1, 1024, n_new=512)),
    *((WIDE, case) for case in (Case(1, 1024), Case(16, 1024), Case(16, 2048, 1920))),
]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with contextlib.closing(Machine(N_THREADS)) as machine:
        yield machine


@pytest.mark.parametrize(
    ("shape", "case"), CASES, ids=[f"width {shape.width}, {case}" for shape, case in CASES]
)
def bench_attention(
    benchmark: BenchmarkFixture, figures: Figures, machine: Machine, shape: Shape, case: Case
) -> None:
    n_bytes, n_flops = case.n_bytes(shape), case.n_flops(shape)
    with contextlib.ExitStack() as stack:
        program, cache = stack.enter_context(table_cache(shape, case.n_cells))
        made = executors(stack, program, cache)
        filled = fill(made["ragged"], cache, case)
        contenders = {name: contender(made[name], cache, filled.seqs, case.n_new) for name in made}
        also = functools.partial(machine.limits, n_bytes)
        seconds, limits = benchmark.pedantic(
            take_turns, (contenders, "compute_us"), {"also": also}, rounds=1
        )
    question = f"attention: {shape}; sequences x context"
    for name, times in seconds.items():
        rates_of_it = rates(times, n_bytes, n_flops, limits)
        figures.add(question, str(case), name, times, case.n_seqs * case.n_new, rates_of_it)
