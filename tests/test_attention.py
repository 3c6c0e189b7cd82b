"""Attention's parameters, shapes and types against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from table_program import random_tables
from world import World

SHAPES = {
    "one head": {"n_heads": 1, "n_kv_heads": 1, "head_dim_k": 64, "head_dim_v": 64},
    "nine on three": {"n_heads": 9, "n_kv_heads": 3, "head_dim_k": 64, "head_dim_v": 64},
    "sixteen on one": {"n_heads": 16, "n_kv_heads": 1, "head_dim_k": 80, "head_dim_v": 80},
    "wide K": {"n_heads": 4, "n_kv_heads": 2, "head_dim_k": 96, "head_dim_v": 32},
    "wide V": {"n_heads": 4, "n_kv_heads": 2, "head_dim_k": 40, "head_dim_v": 128},
    "width 256": {"n_heads": 4, "n_kv_heads": 1, "head_dim_k": 256, "head_dim_v": 256},
    "odd widths": {"n_heads": 2, "n_kv_heads": 2, "head_dim_k": 17, "head_dim_v": 9},
}
PARAMETERS = {
    "plain": {},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "both": {"soft_cap": 3.0, "sinks": True},
}


def run_a_while(world: World) -> None:
    """Prefill, decode of several, a clone: one query and many, below and above 512 rows."""
    world.open("a", "b")
    world.prefill("a", 70)
    world.prefill("b", 1)
    world.step(["a", "b"])
    world.clone("a", "c", upto=30)
    world.step(["c", "a", "b"] * 3)
    world.step(["b"])


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_head_shapes(shape: dict[str, int], type_name: str) -> None:
    tables = random_tables(np.random.default_rng(2), (0, 5), **shape)
    with World(tables, type_k=type_name, type_v=type_name) as world:
        run_a_while(world)


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_soft_cap_and_sinks(parameters: dict[str, float], type_name: str) -> None:
    tables = random_tables(np.random.default_rng(3), (0, 7), **parameters)
    with World(tables, type_k=type_name, type_v=type_name) as world:
        run_a_while(world)


@pytest.mark.parametrize("type_v", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("type_k", ["f32", "f16", "bf16"])
def test_k_and_v_of_different_types(type_k: str, type_v: str) -> None:
    with World(random_tables(np.random.default_rng(4)), type_k=type_k, type_v=type_v) as world:
        run_a_while(world)


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
def test_a_single_query_over_more_than_512_rows(type_name: str) -> None:
    """Where ggml changes its order of summation."""
    with World(
        random_tables(np.random.default_rng(5)), type_k=type_name, type_v=type_name
    ) as world:
        world.open("a", "b")
        world.prefill("b", 300)
        world.prefill("a", 300)
        world.step(["a"])
        world.step(["b"])


@pytest.mark.parametrize("n_tokens", [1, 63, 64, 65])
@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("free", ["close", "rewind", "remove", "clear", "undo"])
def test_poison_in_freed_rows_does_no_harm(free: str, type_name: str, n_tokens: int) -> None:
    """ggml computes 0 * NaN inside a tile: masking alone does not hide what a freed row held."""
    tables = random_tables(np.random.default_rng(6))
    poison = 0
    for table in tables:
        table.k[poison] = np.nan
        table.v[poison] = np.inf
    with World(tables, type_k=type_name, type_v=type_name) as world:
        world.random_tokens = lambda n: [1 + i % 63 for i in range(n)]  # type: ignore[method-assign]
        world.open("poisoned")
        if free != "clear":
            world.open("a")
            world.prefill("a", 20)
        poisoned = world.handles["poisoned"]
        world.executor.run([1], poisoned)
        world.executor.run([poison] * 90, poisoned)
        if free == "close":
            world.cache.close_seq(poisoned)
        elif free == "rewind":
            world.cache.rewind(poisoned, 1)
        elif free == "remove":
            world.cache.remove(poisoned, 1, 91)
        elif free == "undo":
            world.cache.undo_step()
        else:
            world.cache.clear()
            world.open("a")
        world.prefill("a", n_tokens)  # over some freed rows, beside the others
        world.step(["a"])
