"""Attention's parameters, shapes and types against the oracle."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import cellkv
import oracle
from table_program import random_tables
from world import NewWorld, World, dense_tolerance

TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0"]
IN_BLOCKS = ["q8_0", "q4_0"]
SHAPES = {
    "one head": {"n_heads": 1, "n_kv_heads": 1, "head_dim_k": 64, "head_dim_v": 64},
    "nine on three": {"n_heads": 9, "n_kv_heads": 3, "head_dim_k": 64, "head_dim_v": 64},
    "sixteen on one": {"n_heads": 16, "n_kv_heads": 1, "head_dim_k": 80, "head_dim_v": 80},
    "twenty on one": {"n_heads": 20, "n_kv_heads": 1, "head_dim_k": 16, "head_dim_v": 24},
    "wide K": {"n_heads": 4, "n_kv_heads": 2, "head_dim_k": 96, "head_dim_v": 32},
    "wide V": {"n_heads": 4, "n_kv_heads": 2, "head_dim_k": 40, "head_dim_v": 128},
    "width 256": {"n_heads": 4, "n_kv_heads": 1, "head_dim_k": 256, "head_dim_v": 256},
    "width 8": {"n_heads": 3, "n_kv_heads": 3, "head_dim_k": 8, "head_dim_v": 8},
}
SHAPES_OF_TYPES = [
    pytest.param(shape, type_name, id=f"{name}-{type_name}")
    for name, shape in SHAPES.items()
    for type_name in TYPES
    if type_name not in IN_BLOCKS or shape["head_dim_k"] % 32 == shape["head_dim_v"] % 32 == 0
]
ODD_WIDTHS = {"n_heads": 2, "n_kv_heads": 2, "head_dim_k": 17, "head_dim_v": 9}
PARAMETERS = {
    "plain": {},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "both": {"soft_cap": 3.0, "sinks": True},
}


def poison(tables: list[oracle.LayerTables], type_name: str) -> None:
    """Makes token 0 one whose K and V are not finite. Blocks of q4_0 cannot hold NaN alone."""
    for table in tables:
        table.k[0] = np.inf if type_name in IN_BLOCKS else np.nan
        table.v[0] = np.inf


def run_a_while(world: World) -> None:
    """Prefill, decode of several, a clone: one query and many, below and above 512 rows."""
    world.open("a", "b")
    world.prefill("a", 70)
    world.prefill("b", 1)
    world.step(["a", "b"])
    world.clone("a", "c", upto=30)
    world.step(["c", "a", "b"] * 3)
    world.step(["b"])


@pytest.mark.parametrize(("shape", "type_name"), SHAPES_OF_TYPES)
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
@pytest.mark.parametrize(("shape", "type_name"), SHAPES_OF_TYPES)
def test_every_isa_gives_the_same_attention(
    shape: dict[str, int], type_name: str, isa: str
) -> None:
    tables = random_tables(np.random.default_rng(2), (0, 5), soft_cap=3.0, sinks=True, **shape)
    with World(tables, type_k=type_name, type_v=type_name, isa=isa) as world:
        run_a_while(world)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_soft_cap_and_sinks(
    new_world: NewWorld, parameters: dict[str, float], type_name: str
) -> None:
    tables = random_tables(np.random.default_rng(3), (0, 7), **parameters)
    with new_world(tables, type_k=type_name, type_v=type_name) as world:
        run_a_while(world)


@pytest.mark.parametrize("type_v", TYPES)
@pytest.mark.parametrize("type_k", TYPES)
def test_k_and_v_of_different_types(new_world: NewWorld, type_k: str, type_v: str) -> None:
    with new_world(random_tables(np.random.default_rng(4)), type_k=type_k, type_v=type_v) as world:
        run_a_while(world)


@pytest.mark.parametrize("type_name", TYPES)
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
@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("free", ["close", "rewind", "remove", "clear", "undo"])
def test_poison_in_freed_rows_does_no_harm(
    new_world: NewWorld, free: str, type_name: str, n_tokens: int
) -> None:
    """ggml computes 0 * NaN inside a tile: masking alone does not hide what a freed row held."""
    tables = random_tables(np.random.default_rng(6))
    poison(tables, type_name)
    with new_world(tables, type_k=type_name, type_v=type_name) as world:
        world.random_tokens = lambda n: [1 + i % 63 for i in range(n)]  # type: ignore[method-assign]
        world.open("poisoned")
        if free != "clear":
            world.open("a")
            world.prefill("a", 20)
        poisoned = world.handles["poisoned"]
        world.executor.run([1], poisoned)
        world.executor.run([0] * 90, poisoned)
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


@pytest.mark.parametrize("type_name", ["f32", "f16", "q8_0", "q4_0"])
def test_dense_after_ragged_keeps_what_was_written_into_freed_rows(type_name: str) -> None:
    tables = random_tables(np.random.default_rng(6))
    poison(tables, type_name)
    with World(tables, type_k=type_name, type_v=type_name, strategy="ragged") as world:
        world.random_tokens = lambda n: [1 + i % 63 for i in range(n)]  # type: ignore[method-assign]
        world.open("poisoned", "a")
        world.executor.run([0] * 30, world.handles["poisoned"])
        world.close("poisoned")
        world.prefill("a", 10)  # into rows that were freed
        with cellkv.Executor(world.program.address, world.cache, strategy="dense") as dense:
            for n in (1, 70):
                tokens = world.random_tokens(n)
                results = dense.run(tokens, world.handles["a"], outputs="all")
                world.tolerance = dense_tolerance(*world.types)
                world.check(["a"] * n, tokens, results)


# ---- what ragged promises beyond dense ----


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("n_heads", [4, 40])
@pytest.mark.parametrize("n_tokens", [1, 3, 63, 64, 65, 200])
def test_ragged_never_reads_what_a_query_does_not_see(
    n_tokens: int, n_heads: int, type_name: str
) -> None:
    """NaN in cells of other sequences, in a query's own future and before its window."""
    tables = random_tables(np.random.default_rng(8), (0, 16), n_heads=n_heads, n_kv_heads=2)
    poison(tables, type_name)
    with World(tables, type_k=type_name, type_v=type_name) as world:
        world.random_tokens = lambda n: [1 + i % 63 for i in range(n)]  # type: ignore[method-assign]
        world.open("poisoned", "a", "windowed")
        world.executor.run([0] * 100, world.handles["poisoned"])
        world.prefill("a", n_tokens)
        clean = [1 + i % 63 for i in range(n_tokens)]
        tokens = [*clean, *[0] * 3]
        results = world.executor.run(tokens, world.handles["a"], outputs=range(n_tokens))
        world.check(["a"] * n_tokens, clean, results)
        world.rewind("a", world.truth["a"].next_pos)
        world.executor.run([0] * 2, world.handles["windowed"])
        world.executor.run([1] * 16, world.handles["windowed"])
        result = world.executor.run([2], world.handles["windowed"])[0]
        unlimited, windowed = np.split(result, 2)
        assert np.isnan(unlimited).all()
        assert np.isfinite(windowed).all()
        world.step(["a"])


@pytest.mark.parametrize("type_name", TYPES)
def test_a_sequences_outputs_do_not_depend_on_who_else_is_in_the_step(type_name: str) -> None:
    tables = random_tables(np.random.default_rng(9), (0, 40))
    options = {"type_k": type_name, "type_v": type_name, "strategy": "ragged", "n_threads": 2}
    with World(tables, **options) as world:
        world.open("a")
        world.prefill("a", 300)
        for name in "bcdefgh":
            world.clone("a", name, upto=250)
        world.open("i")
        world.prefill("i", 700)
        for names in (["a", "b"], [*"abcdefghi"], [*"aaiihb"] * 20):
            tokens = world.random_tokens(len(names))
            owned = [i for i, name in enumerate(names) if name == "a"]
            handle = world.handles["a"]
            alone = world.executor.run([tokens[i] for i in owned], handle, outputs="all")
            world.cache.undo_step()
            together = world.step(names, tokens)[owned]
            for one, other in zip(alone, together, strict=True):
                assert oracle.relative_error(one, other) < 1e-6


@pytest.mark.parametrize("type_name", ["f16", "q8_0", "q4_0"])
def test_the_same_step_gives_the_same_bits(new_world: NewWorld, type_name: str) -> None:
    tables = random_tables(np.random.default_rng(10), (0, 40))
    with new_world(tables, type_k=type_name, type_v=type_name, n_threads=2) as world:
        world.open("a", "b")
        world.prefill("a", 900)
        world.clone("a", "c", upto=800)
        names = ["a", "b", "c", "a"] * 9
        tokens = world.random_tokens(len(names))
        first = world.step(names, tokens)
        seqs = [world.handles[name] for name in names]
        for _ in range(20):
            world.cache.undo_step()
            again = world.executor.run(tokens, seqs, outputs="all")
            np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("n_threads", [1, 2, 3, 7])
def test_any_number_of_threads(new_world: NewWorld, n_threads: int) -> None:
    tables = random_tables(np.random.default_rng(11), (0, 40))
    with new_world(tables, n_threads=n_threads) as world:
        run_a_while(world)
        world.step(["b"] * 700)
        world.step(["a", "b", "c"])


def test_ragged_is_more_exact_than_dense() -> None:
    for type_name in ("f16", "bf16", "q8_0", "q4_0"):
        worst = {}
        for strategy in ("dense", "ragged"):
            tables = random_tables(np.random.default_rng(12))
            options = {"type_k": type_name, "type_v": type_name, "strategy": strategy}
            with World(tables, **options) as world:
                run_a_while(world)
                worst[strategy] = world.worst
        assert worst["ragged"] < worst["dense"] / 100


# ---- what is stored in blocks ----


@pytest.mark.parametrize("type_name", IN_BLOCKS)
def test_a_value_is_stored_to_half_a_step_of_its_block(type_name: str) -> None:
    """So the oracle, which takes K and V as stored, is not as wrong as what it judges."""
    values = np.random.default_rng(13).standard_normal((64, 96), np.float32)
    values[3, 32:64] = 0
    values[4, :32] *= 1e-6  # where the scale is no normal number of 16 bits
    stored = oracle.round_to(values, type_name)
    largest = np.abs(values.reshape(64, 3, 32)).max(axis=2)
    # The scale is rounded as well, to 11 bits. Numbers of 4 bits end at 7, one step before -8.
    step = largest / 127 * 0.51 if type_name == "q8_0" else largest / 8 * 1.01
    off = np.abs(stored - values).reshape(64, 3, 32).max(axis=2)
    assert (off <= step + largest * 2.0**-11 + 127 * 2.0**-25).all()
    assert (stored[3, 32:64] == 0).all()


@pytest.mark.parametrize("type_name", IN_BLOCKS)
def test_widths_that_are_no_whole_blocks_are_refused_with_the_layer(type_name: str) -> None:
    good = cellkv.Layer(2, 64, 96, 0, type_name, type_name)
    for backend in ("ggml", "cells"):
        for change, words in (
            ({"head_dim_k": 48}, "layer 1: head_dim_k is 48, .* blocks of 32"),
            ({"head_dim_v": 8}, "layer 1: head_dim_v is 8, .* blocks of 32"),
        ):
            with pytest.raises(cellkv.InvalidArgumentError, match=words):
                cellkv.Cache([good, good._replace(**change)], backend=backend)
        cellkv.Cache([good, good._replace(head_dim_k=17, type_k="f16")], backend=backend).close()


@pytest.mark.parametrize("type_name", IN_BLOCKS)
def test_a_cell_takes_the_bytes_of_its_blocks(type_name: str) -> None:
    layers = [cellkv.Layer(3, 64, 32, 0, type_name, "f16")] * 2
    with cellkv.Cache(layers, capacity=1024, initial_rows=1024) as cache:
        block = {"q8_0": 34, "q4_0": 18}[type_name]
        per_cell = 2 * 3 * (64 // 32 * block + 32 * 2)
        assert 0 <= cache.stats.storage_bytes - 1024 * per_cell < 1024
