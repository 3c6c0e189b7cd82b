"""What does a step pay for sequences that are in the cache and not in the step?

16 sequences decode, with and without 64 others of 1,000 tokens each. Of whole steps, by `step_us`.
"""

from __future__ import annotations

import contextlib

import numpy as np
from pytest_benchmark.fixture import BenchmarkFixture

import cellkv
from attention import N_THREADS, N_VOCAB, SMOLLM2, Case, executors, fill, table_cache
from figures import Figures
from turns import Contender, take_turns

N_IDLE = 64
IDLE_LENGTH = 1000
QUESTION = (
    f"idle: a step of 16 sequences, {N_IDLE} idle ones of {IDLE_LENGTH:,} tokens in the cache"
)
ATTENTION_CASE = Case(16, 1024)
MODEL_CASE = Case(16, 64)


class Idle:
    """The idle sequences, there or not. Nobody reads their K and V, so nobody computes them."""

    def __init__(self, cache: cellkv.Cache) -> None:
        self._cache = cache
        self._seqs: list[int] = []

    def come(self) -> None:
        if not self._seqs:
            self._seqs = [self._cache.open() for _ in range(N_IDLE)]
            self._cache.declare(np.tile(self._seqs, IDLE_LENGTH))
            self._cache.place()

    def go(self) -> None:
        while self._seqs:
            self._cache.close_seq(self._seqs.pop())


def compare(
    benchmark: BenchmarkFixture,
    figures: Figures,
    name: str,
    made: dict[str, cellkv.Executor],
    cache: cellkv.Cache,
    seqs: np.ndarray,
    n_vocab: int,
) -> None:
    idle = Idle(cache)
    tokens = np.random.default_rng(0).integers(0, n_vocab, len(seqs))
    contenders = {
        (strategy, case): Contender(executor, cache, tokens, seqs, before_turn=before_turn)
        for strategy, executor in made.items()
        for case, before_turn in (("without", idle.go), (f"with {N_IDLE} idle", idle.come))
    }
    seconds, _ = benchmark.pedantic(take_turns, (contenders, "step_us"), {"budget": 8.0}, rounds=1)
    for (strategy, case), times in seconds.items():
        figures.add(QUESTION, f"{name}, {strategy}", case, times, len(seqs))


def bench_idle_attention(benchmark: BenchmarkFixture, figures: Figures) -> None:
    n_cells = ATTENTION_CASE.n_cells + N_IDLE * IDLE_LENGTH
    with contextlib.ExitStack() as stack:
        program, cache = stack.enter_context(table_cache(SMOLLM2, n_cells, max_seqs=128))
        made = executors(stack, program, cache, {"ragged", "dense"})
        seqs = fill(made["ragged"], cache, ATTENTION_CASE).seqs
        compare(benchmark, figures, "attention alone", made, cache, seqs, N_VOCAB)


def bench_idle_model(benchmark: BenchmarkFixture, figures: Figures, model: cellkv.Model) -> None:
    """The same in SmolLM2-135M, whose cache takes 1.5 GB here."""
    n_cells = MODEL_CASE.n_cells + N_IDLE * IDLE_LENGTH
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(
            model.new_cache(capacity=n_cells, initial_rows=n_cells, max_seqs=128)
        )
        made = {
            strategy: stack.enter_context(
                model.executor(cache, strategy=strategy, n_threads=N_THREADS)
            )
            for strategy in ("ragged", "dense")
        }
        seqs = fill(made["ragged"], cache, MODEL_CASE, model.info.n_vocab).seqs
        compare(benchmark, figures, "SmolLM2-135M", made, cache, seqs, model.info.n_vocab)
