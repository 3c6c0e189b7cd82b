"""What does it save to keep a step's graph? Kept and rebuilt by turns, in one process.

On one thread: building uses no more, and the threads of one executor don't disturb the other's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import cellkv
from figures import Figures, n_rounds

QUESTION = "graphs: one decode step on one thread, 64 tokens in each sequence"
LENGTH = 64


def narrow_model(n_layers: int, n_embd: int = 64, n_vocab: int = 256) -> cellkv.Model:
    """A random model whose layers compute next to nothing."""
    rng = np.random.default_rng(1)

    def matrix(n_out: int) -> np.ndarray:
        return rng.standard_normal((n_out, n_embd), np.float32) / n_embd**0.5

    ones = np.ones(n_embd, np.float32)
    arrays = {"token_embd.weight": matrix(n_vocab), "output_norm.weight": ones}
    for layer in range(n_layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            arrays[f"blk.{layer}.{name}.weight"] = matrix(n_embd)
        for name in ("attn_norm", "ffn_norm"):
            arrays[f"blk.{layer}.{name}.weight"] = ones
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": n_layers,
        "llama.context_length": 1024,
        "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_embd,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    return cellkv.Model.from_arrays(metadata, arrays)


@pytest.fixture(params=["SmolLM2-135M", "64 wide"])
def any_model(request: pytest.FixtureRequest, model: cellkv.Model) -> Iterator[cellkv.Model]:
    """SmolLM2, and a model of as many layers where little but the graph's own cost is left."""
    if request.param == "SmolLM2-135M":
        yield model
        return
    with narrow_model(model.info.n_layers) as narrow:
        yield narrow


@pytest.mark.parametrize("n_seqs", [1, 8])
def bench_kept_graphs(
    benchmark: BenchmarkFixture,
    figures: Figures,
    any_model: cellkv.Model,
    n_seqs: int,
    request: pytest.FixtureRequest,
) -> None:
    tokens = np.random.default_rng(n_seqs).integers(0, any_model.info.n_vocab, n_seqs)
    with (
        any_model.new_cache(capacity=1024) as cache,
        any_model.executor(cache, n_threads=1) as keeping,
        any_model.executor(cache, n_threads=1, reuse_graphs=False) as rebuilding,
    ):
        seqs = [cache.open() for _ in range(n_seqs)]
        keeping.run(np.tile(tokens, LENGTH), seqs * LENGTH, outputs=[])
        seconds: dict[cellkv.Executor, list[float]] = {keeping: [], rebuilding: []}

        def both() -> None:
            for executor, times in seconds.items():
                start = time.perf_counter()
                executor.run(tokens, seqs)
                times.append(time.perf_counter() - start)
                cache.undo_step()

        benchmark.pedantic(both, rounds=n_rounds(both), warmup_rounds=0)
        assert keeping.stats.n_graphs_built <= 2  # the prefill's and the step's
        assert rebuilding.stats.n_graphs_reused == 0
    name = request.node.callspec.params["any_model"]
    group = f"{name}, {n_seqs} sequence{'s' * (n_seqs > 1)}"
    for case, times in zip(("kept", "built each time"), seconds.values(), strict=True):
        figures.add(QUESTION, group, case, times[2:], n_seqs)
