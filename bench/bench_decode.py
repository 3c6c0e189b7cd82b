"""How long does one decode step of SmolLM2 take, at 1, 4 and 16 sequences of 256 tokens each?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import cellkv
from figures import Figures, n_rounds

QUESTION = "decode: one step of SmolLM2-135M, 256 tokens in each sequence"
LENGTH = 256


@pytest.fixture(params=[1, 4, 16])
def n_seqs(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=["f32", "f16"])
def type_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=cellkv.devices())
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cache(model: cellkv.Model, device: str, type_name: str, n_seqs: int) -> Iterator[cellkv.Cache]:
    capacity = n_seqs * (LENGTH + 1)
    with model.new_cache(
        capacity=capacity, type_k=type_name, type_v=type_name, device=device
    ) as cache:
        yield cache


def bench_decode_step(
    benchmark: BenchmarkFixture,
    figures: Figures,
    model: cellkv.Model,
    cache: cellkv.Cache,
    device: str,
    type_name: str,
    n_seqs: int,
) -> None:
    tokens = np.random.default_rng(n_seqs).integers(0, model.info.n_vocab, (n_seqs, LENGTH + 1))
    seqs = [cache.open() for _ in range(n_seqs)]
    with model.executor(cache) as executor:
        for row, seq in zip(tokens, seqs, strict=True):
            executor.run(row[:-1].copy(), seq, outputs=[])
        last = tokens[:, -1].copy()
        executor.run(last, seqs)

        def step() -> None:
            executor.run(last, seqs)

        def back_and_step() -> None:
            cache.undo_step()
            step()

        rounds = n_rounds(back_and_step)
        benchmark.pedantic(step, setup=cache.undo_step, rounds=rounds)
        assert executor.stats.n_attention_strayed == 0
    case = f"{n_seqs} sequence{'s' * (n_seqs > 1)}"
    seconds = benchmark.stats.stats.data
    figures.add(QUESTION, f"{device}, K and V in {type_name}", case, seconds, n_seqs)
