"""What does a K/V type cost, and what does it save? Bytes, time and exactness of attention over it.

Errors are relative L2 beside float64: of attention alone, whose K and V are taken as they are
stored, and of all of it, rounding of K and V included. Times are of the graph's compute.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import oracle
from attention import (
    N_THREADS,
    N_VOCAB,
    SMOLLM2,
    Case,
    Shape,
    contender,
    executors,
    fill,
    table_cache,
)
from figures import Figures
from limits import Machine, rates
from turns import Contender, take_turns

TYPES = ["f16", "f32", "bf16", "q8_0", "q4_0"]  # the first is what the others are compared with
BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # of a value
STRATEGIES = ["ragged", "dense"]
DECODE = Case(16, 1024)
EXACTNESS = Case(4, 256)
ONE_LAYER = Shape(9, 3, 64, (0,))


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with contextlib.closing(Machine(N_THREADS)) as machine:
        yield machine


def bench_decode_step_by_type(
    benchmark: BenchmarkFixture, figures: Figures, machine: Machine
) -> None:
    with contextlib.ExitStack() as stack:
        contenders = dict(decode_steps(stack))
        also = functools.partial(machine.limits, DECODE.n_bytes(SMOLLM2))
        seconds, limits = benchmark.pedantic(
            take_turns, (contenders, "compute_us"), {"also": also}, rounds=1
        )
    question = f"K/V types: attention of {DECODE}; {SMOLLM2}"
    for strategy, type_name in itertools.product(STRATEGIES, TYPES):
        times = seconds[strategy, type_name]
        n_bytes = DECODE.n_bytes(SMOLLM2, BYTES[type_name])
        rates_of_it = rates(times, n_bytes, DECODE.n_flops(SMOLLM2), limits)
        words = f"{type_name}, {bytes_per_token(SMOLLM2, type_name):,} B/token"
        figures.add(question, strategy, words, times, DECODE.n_seqs, rates_of_it)


@pytest.mark.parametrize("type_name", TYPES)
def bench_exactness_by_type(benchmark: BenchmarkFixture, figures: Figures, type_name: str) -> None:
    as_stored, in_all = benchmark.pedantic(errors_of, (type_name,), rounds=1)
    for words, errors in (("attention's own", as_stored), ("with K and V's rounding", in_all)):
        figures.add_errors(
            f"K/V types: relative L2 error; {EXACTNESS}, width {ONE_LAYER.width}",
            type_name,
            words,
            errors,
        )
    assert as_stored["ragged"] < 1e-6
    assert as_stored["dense"] < in_all["dense"] * 1.5 + 1e-6


def bytes_per_token(shape: Shape, type_name: str) -> int:
    """Of a token's K and V in all layers."""
    n_values = len(shape.windows) * shape.n_kv_heads * 2 * shape.width
    return int(n_values * BYTES[type_name])


def decode_steps(stack: contextlib.ExitStack) -> Iterator[tuple[tuple[str, str], Contender]]:
    """A token for each of the sequences, by strategy and type, each type in a full cache."""
    for type_name in TYPES:
        program, cache = stack.enter_context(
            table_cache(SMOLLM2, DECODE.n_cells, type_name=type_name)
        )
        stored = cache.stats.storage_bytes / cache.stats.rows
        assert abs(stored / bytes_per_token(SMOLLM2, type_name) - 1) < 0.02  # rows are padded
        made = executors(stack, program, cache, STRATEGIES)
        seqs = fill(made["ragged"], cache, DECODE).seqs
        for strategy in STRATEGIES:
            yield (strategy, type_name), contender(made[strategy], cache, seqs)


def errors_of(type_name: str) -> tuple[dict[str, float], dict[str, float]]:
    """Of a decode step, by strategy: beside K and V as stored, and as they were given."""
    tokens = np.random.default_rng(3).integers(0, N_VOCAB, EXACTNESS.n_seqs)
    results = {}
    with contextlib.ExitStack() as stack:
        program, cache = stack.enter_context(
            table_cache(ONE_LAYER, EXACTNESS.n_cells, type_name=type_name)
        )
        made = executors(stack, program, cache, STRATEGIES)
        filled = fill(made["ragged"], cache, EXACTNESS)
        for strategy, executor in made.items():
            results[strategy] = executor.run(tokens, filled.seqs, outputs="all")
            cache.undo_step()
    tables = ONE_LAYER.tables()
    sequences = [
        oracle.Sequence(dict(enumerate([*before, token])))
        for before, token in zip(filled.tokens, tokens, strict=True)
    ]
    errors = []
    for stored_as in (type_name, "f32"):
        exact = np.stack(
            [s.result(tables, EXACTNESS.context, stored_as, stored_as) for s in sequences]
        )
        errors.append({name: oracle.relative_error(got, exact) for name, got in results.items()})
    return errors[0], errors[1]
