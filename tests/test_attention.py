"""Attention's parameters, shapes and types against the oracle."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import cellkv
from table_program import random_tables
from world import NewWorld, World

SHAPES = {
    "one head": {"n_heads": 1, "n_kv_heads": 1, "head_dim_k": 64, "head_dim_v": 64},
    "nine on three": {"n_heads": 9, "n_kv_heads": 3, "head_dim_k": 64, "head_dim_v": 64},
    "sixteen on one": {"n_heads": 16, "n_kv_heads": 1, "head_dim_k": 80, "head_dim_v": 80},
    "wide K": {"n_heads": 4, "n_kv_heads": 2, "head_dim_k": 96, "head_dim_v": 32},
    "wide V": {"n_heads": 4, "n_kv_heads": 2, "head_dim_k": 40, "head_dim_v": 128},
    "width 256": {"n_heads": 4, "n_kv_heads": 1, "head_dim_k": 256, "head_dim_v": 256},
    "width 8": {"n_heads": 3, "n_kv_heads": 3, "head_dim_k": 8, "head_dim_v": 8},
}
ODD_WIDTHS = {"n_heads": 2, "n_kv_heads": 2, "head_dim_k": 17, "head_dim_v": 9}
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
def test_head_shapes(new_world: NewWorld, shape: dict[str, int], type_name: str) -> None:
    tables = random_tables(np.random.default_rng(2), (0, 5), **shape)
    with new_world(tables, type_k=type_name, type_v=type_name) as world:
        run_a_while(world)


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
def test_widths_that_are_no_multiple_of_8_are_left_to_dense(type_name: str) -> None:
    tables = random_tables(np.random.default_rng(2), (0, 5), **ODD_WIDTHS)
    with World(tables, type_k=type_name, type_v=type_name) as world:
        assert world.executor.stats.strategy is cellkv.Strategy.DENSE
        run_a_while(world)
        with pytest.raises(cellkv.UnsupportedError, match=r"layer 0: .*CPU.* 17,.* 9"):
            cellkv.Executor(world.program.address, world.cache, strategy="ragged")


def available_isas() -> list[str]:
    tables = random_tables(np.random.default_rng(2))
    names = [isa.name.lower() for isa in cellkv.Isa if isa is not cellkv.Isa.BEST]
    found = []
    for name in names:
        with contextlib.suppress(cellkv.UnsupportedError), World(tables, isa=name) as world:
            assert world.executor.stats.isa.name.lower() == name
            found.append(name)
    return found


def test_portable_c_is_always_there_and_best_is_the_last_there_is() -> None:
    found = available_isas()
    assert found[0] == "c"
    with World(random_tables(np.random.default_rng(2))) as world:
        assert world.executor.stats.strategy is cellkv.Strategy.RAGGED
        assert world.executor.stats.isa.name.lower() == found[-1]


def test_an_isa_of_another_cpu_is_refused_by_name() -> None:
    missing = {"avx2", "avx512", "neon"} - set(available_isas())
    assert missing  # no CPU has both AVX and NEON
    for name in missing:
        with pytest.raises(cellkv.UnsupportedError, match=f"isa {name}"):
            World(random_tables(np.random.default_rng(2)), isa=name)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_isa_gives_the_same_attention(
    shape: dict[str, int], type_name: str, isa: str
) -> None:
    tables = random_tables(np.random.default_rng(2), (0, 5), soft_cap=3.0, sinks=True, **shape)
    with World(tables, type_k=type_name, type_v=type_name, isa=isa) as world:
        run_a_while(world)


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_soft_cap_and_sinks(
    new_world: NewWorld, parameters: dict[str, float], type_name: str
) -> None:
    tables = random_tables(np.random.default_rng(3), (0, 7), **parameters)
    with new_world(tables, type_k=type_name, type_v=type_name) as world:
        run_a_while(world)


@pytest.mark.parametrize("type_v", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("type_k", ["f32", "f16", "bf16"])
def test_k_and_v_of_different_types(new_world: NewWorld, type_k: str, type_v: str) -> None:
    with new_world(random_tables(np.random.default_rng(4)), type_k=type_k, type_v=type_v) as world:
        run_a_while(world)


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
def test_a_single_query_over_more_than_512_rows(new_world: NewWorld, type_name: str) -> None:
    """Where ggml changes its order of summation."""
    with new_world(
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
def test_poison_in_freed_rows_does_no_harm(
    new_world: NewWorld, free: str, type_name: str, n_tokens: int
) -> None:
    """ggml computes 0 * NaN inside a tile: masking alone does not hide what a freed row held."""
    tables = random_tables(np.random.default_rng(6))
    poison = 0
    for table in tables:
        table.k[poison] = np.nan
        table.v[poison] = np.inf
    with new_world(tables, type_k=type_name, type_v=type_name) as world:
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
