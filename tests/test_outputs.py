"""Which results a step gives: logits or hidden states, of chosen tokens or pooled by sequence."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import cellkv
from oracle_decoder import Decoder
from table_program import random_tables
from tiny_gguf import VARIANTS, metadata_of, tensors_of
from world import NewWorld, World

NAMES = ["b", "a", "b", "c", "a", "b", "c", "b"]


@pytest.fixture
def world(new_world: NewWorld) -> World:
    with new_world(random_tables(np.random.default_rng(21))) as world:
        world.open("a", "b", "c")
        world.prefill("a", 5)
        yield world


def owners(world: World) -> list[int]:
    return [world.handles[name] for name in NAMES]


@pytest.mark.parametrize("max_batch", [1, 3, 512])
@pytest.mark.parametrize("outputs", [range(8), [7, 1, 2], [4], [3, 3, 6]])
def test_mean_pooling_averages_each_sequences_outputs(
    new_world: NewWorld, outputs: list[int], max_batch: int
) -> None:
    with new_world(random_tables(np.random.default_rng(21)), max_batch=max_batch) as world:
        world.open("a", "b", "c")
        tokens = world.random_tokens(8)
        rows = world.executor.run(tokens, owners(world), outputs=outputs)
        world.cache.undo_step()
        pooled = world.executor.run(tokens, owners(world), outputs=outputs, pooling="mean")
    names = [NAMES[i] for i in outputs]
    means = [
        rows[[i for i, name in enumerate(names) if name == one]].mean(axis=0)
        for one in dict.fromkeys(names)
    ]
    assert pooled.base is None
    np.testing.assert_allclose(pooled, means, rtol=1e-5, atol=1e-6)


def test_pooled_steps_fill_the_cells_as_any_other(world: World) -> None:
    tokens = world.random_tokens(8)
    world.executor.run(tokens, owners(world), outputs="all", pooling="mean")
    for name, token in zip(NAMES, tokens, strict=True):
        world.truth[name].append([token])
    world.step(NAMES)


def test_pooling_without_outputs_gives_no_rows(world: World) -> None:
    pooled = world.executor.run([1, 2], owners(world)[:2], outputs=[], pooling="mean")
    assert pooled.shape == (0, world.executor.n_result)


def test_pooling_needs_the_sequences(world: World) -> None:
    world.cache.declare(owners(world))
    with pytest.raises(cellkv.InvalidArgumentError, match="pooling needs seqs"):
        world.executor.run([1] * 8, outputs="all", pooling="mean")
    world.step(NAMES)


@pytest.mark.parametrize("pooling", [-1, 2, "max"])
def test_an_unknown_pooling_is_refused(world: World, pooling: int | str) -> None:
    used = world.cache.stats.used_cells
    with pytest.raises(cellkv.InvalidArgumentError, match="pooling"):
        world.executor.run([1] * 8, owners(world), pooling=pooling)
    assert world.cache.stats.used_cells == used


# ---- hidden states of a model ----

TEXTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7], [9, 3]]
ARCHITECTURES = ["plain", "gemma2", "qwen3moe"]


def tiny_model(name: str) -> tuple[cellkv.Model, Decoder]:
    metadata, tensors = metadata_of(VARIANTS[name]), tensors_of(VARIANTS[name])
    return cellkv.Model.from_arrays(metadata, tensors, device="CPU"), Decoder(metadata, tensors)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hidden_states_are_those_that_logits_are_made_of(name: str, strategy: str) -> None:
    model, truth = tiny_model(name)
    with (
        model,
        model.new_cache(type_k="f32", type_v="f32") as cache,
        model.executor(cache, output="hidden", strategy=strategy, n_threads=1) as executor,
    ):
        assert executor.n_result == model.info.n_embd
        hidden = executor.run(TEXTS[2], cache.open(), outputs="all")
        np.testing.assert_allclose(hidden, truth.hidden(TEXTS[2]), rtol=0, atol=1e-4)


def test_logits_and_hidden_states_of_one_cache() -> None:
    model, truth = tiny_model("plain")
    with (
        model,
        model.new_cache(type_k="f32", type_v="f32") as cache,
        model.executor(cache, n_threads=1) as logits,
        model.executor(cache, output=cellkv.Output.HIDDEN, n_threads=1) as hidden,
    ):
        seq = cache.open()
        hidden.run(TEXTS[0], seq)
        row = logits.run(TEXTS[1], seq)[0]
        expected = truth.logits([*TEXTS[0], *TEXTS[1]])[-1]
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("max_batch", [4, 512])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_texts_are_embedded_in_one_forward(pooling: str, max_batch: int) -> None:
    model, truth = tiny_model("plain")
    with (
        model,
        model.new_cache(type_k="f32", type_v="f32") as cache,
        model.executor(cache, output="hidden", n_threads=1, max_batch=max_batch) as executor,
    ):
        embeddings = executor.embed(TEXTS, pooling=pooling)
        assert executor.stats.n_steps == 1
        assert (cache.stats.used_cells, cache.stats.n_seqs) == (0, 0)
    states = [truth.hidden(text) for text in TEXTS]
    expected = [state.mean(axis=0) if pooling == "mean" else state[-1] for state in states]
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=1e-4)


def test_texts_that_cannot_be_embedded_leave_nothing_behind() -> None:
    model, _ = tiny_model("plain")
    with (
        model,
        model.new_cache(capacity=10, max_seqs=3) as cache,
        model.executor(cache, output="hidden", n_threads=1) as executor,
    ):
        for texts, error in (
            ([[1], []], cellkv.EmptyStepError),
            ([[1], [97]], cellkv.BadTokenError),
            ([[1] * 6, [2] * 5], cellkv.OutOfCellsError),
            ([[1], [2], [3], [4]], cellkv.NoSlotError),
        ):
            with pytest.raises(error):
                executor.embed(texts)
            assert (cache.stats.used_cells, cache.stats.n_seqs) == (0, 0)
        with pytest.raises(cellkv.InvalidArgumentError, match="pooling"):
            executor.embed([[1]], pooling="max")
        assert executor.embed([]).shape == (0, model.info.n_embd)


def test_embed_waits_for_threads_inside_the_cache() -> None:
    model, _ = tiny_model("plain")
    with (
        model,
        model.new_cache() as cache,
        model.executor(cache, output="hidden", n_threads=1) as executor,
    ):
        ended = threading.Event()

        def look() -> None:
            while not ended.is_set():
                with contextlib.suppress(cellkv.BusyError):
                    cache.stats  # noqa: B018

        thread = threading.Thread(target=look)
        thread.start()
        try:
            for _ in range(50):
                with contextlib.suppress(cellkv.BusyError):
                    executor.embed(TEXTS)
        finally:
            ended.set()
            thread.join()
        assert (cache.stats.used_cells, cache.stats.n_seqs) == (0, 0)


@pytest.mark.parametrize("output", [2, -1, "tokens"])
def test_an_unknown_output_is_refused(output: int | str) -> None:
    model, _ = tiny_model("plain")
    with (
        model,
        model.new_cache() as cache,
        pytest.raises(cellkv.InvalidArgumentError, match="output"),
    ):
        model.executor(cache, output=output)
