"""How far from exact is attention? Relative L2 errors of dense and ragged, beside the float64
oracle of the tests. Nothing is timed.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import oracle
from attention import N_VOCAB, Case, Shape, executors, fill, table_cache
from figures import Figures

QUESTION = "accuracy: relative L2 error of the attention beside float64; K and V as stored"
SHAPES = [Shape(9, 3, 64, (0,)), Shape(8, 2, 128, (0,)), Shape(4, 1, 256, (0,))]
CASES = [Case(1, 1024), Case(8, 512, 448), Case(1, 512, n_new=128)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"width {shape.width}")
@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
def bench_accuracy(
    benchmark: BenchmarkFixture, figures: Figures, type_name: str, shape: Shape, case: Case
) -> None:
    errors = benchmark.pedantic(errors_of, (type_name, shape, case), rounds=1)
    figures.add_errors(QUESTION, f"{type_name}, width {shape.width}", str(case), errors)
    assert errors["ragged"] < errors["dense"]


def errors_of(type_name: str, shape: Shape, case: Case) -> dict[str, float]:
    """The errors of one step's results, all tokens of it together."""
    tokens = np.random.default_rng(3).integers(0, N_VOCAB, (case.n_seqs, case.n_new))
    with contextlib.ExitStack() as stack:
        program, cache = stack.enter_context(table_cache(shape, case.n_cells, type_name=type_name))
        made = executors(stack, program, cache, {"dense", "ragged"})
        filled = fill(made["ragged"], cache, case)
        owners = np.repeat(filled.seqs, case.n_new)
        results = {}
        for strategy, executor in made.items():
            results[strategy] = executor.run(tokens.ravel(), owners, outputs="all")
            cache.undo_step()
    rows = []
    tables = shape.tables()
    for before, new in zip(filled.tokens, tokens, strict=True):
        sequence = oracle.Sequence(dict(enumerate([*before, *new])))
        for pos in range(case.context, case.context + case.n_new):
            rows.append(sequence.result(tables, pos, type_name, type_name))
    exact = np.stack(rows)
    return {strategy: oracle.relative_error(got, exact) for strategy, got in results.items()}
