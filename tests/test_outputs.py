"""Which results a step gives: of chosen tokens, or their mean for each sequence."""

from __future__ import annotations

import numpy as np
import pytest

import cellkv
from table_program import random_tables
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
