"""Kind sequence with its storage: rings bound what windows keep, and outputs do not tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cellkv
from cellkv import Cache, Executor, Layer, Model
from oracle_decoder import Decoder
from table_program import random_tables
from test_executor import fail_allocation_after
from tiny_gguf import VARIANTS, Tiny, metadata_of, tensors_of, write_tiny
from world import World

WINDOWS = (8, 0, 3, 60)
MAX_STEP = 16  # the rings have 23, 18 and 75 rows

MakeWorld = Callable[..., World]


@pytest.fixture(params=["f32", "f16"])
def type_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_world(strategy: str, type_name: str) -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def make(windows: tuple[int, ...] = WINDOWS, **options: Any) -> World:
        tables = random_tables(np.random.default_rng(21), windows)
        options = {"kind": "sequence", "max_step": MAX_STEP, "strategy": strategy, **options}
        world = World(tables, type_k=type_name, type_v=type_name, n_threads=2, **options)
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.__exit__(None, None, None)


def go_back(world: World, pos: int) -> None:
    """Rewind, and go on from there with other tokens."""
    world.rewind("a", pos)
    world.step(["a"])


# ---- outputs ----


def test_a_sequence_longer_than_its_rings(make_world: MakeWorld) -> None:
    world = make_world()
    world.open("a")
    world.prefill("a", 40)  # wider than two windows, and than max_step
    for _ in range(30):
        world.step(["a"])
    world.prefill("a", 100)  # past the widest window's ring
    for _ in range(20):
        world.step(["a"])
    world.prefill("a", 17)  # one more than max_step


@pytest.mark.parametrize("n", [1, 15, 16])
def test_rewinds_by_all_that_is_kept(make_world: MakeWorld, n: int) -> None:
    world = make_world(windows=(8, 0, 3))
    world.open("a")
    world.prefill("a", 20)
    for _ in range(60 // n):
        world.step(["a"] * n)
        go_back(world, world.truth["a"].next_pos - n)
        if n > 1:
            world.prefill("a", n - 1)
            go_back(world, world.truth["a"].next_pos - n)


def test_an_undone_step_leaves_what_the_next_one_sees(make_world: MakeWorld) -> None:
    world = make_world(windows=(8, 0, 3))
    world.open("a")
    world.prefill("a", 30)
    for n_keep in [0, 1, 7, 15, 16] * 5:
        world.step(["a"] * 16)
        world.cache.undo_step(n_keep)
        world.truth["a"].rewind(world.truth["a"].next_pos - 16 + n_keep)
        world.step(["a"])


def test_a_sequence_that_starts_anew(make_world: MakeWorld) -> None:
    world = make_world(windows=(8, 0, 3))
    world.open("a")
    world.prefill("a", 70)
    world.rewind("a", 0)
    world.prefill("a", 5)
    go_back(world, 2)
    world.prefill("a", 50)
    world.close("a")
    world.open("a")
    world.prefill("a", 30)
    world.cache.clear()
    world.open("a")
    world.prefill("a", 3)


def test_windows_alone_and_capacities_that_no_ring_is_shorter_than(make_world: MakeWorld) -> None:
    world = make_world(windows=(8, 1), capacity=200)
    world.open("a")
    world.prefill("a", 100)
    go_back(world, 84)
    world = make_world(windows=(8, 190), capacity=200)
    world.open("a")
    world.prefill("a", 100)
    go_back(world, 90)
    world = make_world(windows=(8, 0, 3), capacity=18)
    world.open("a")
    world.prefill("a", 18)
    go_back(world, 1)


@pytest.mark.parametrize("n_tokens", [1, 63, 64, 65])
def test_poison_in_rows_that_were_rewound_does_no_harm(
    strategy: str, type_name: str, n_tokens: int
) -> None:
    """From 64 queries on ggml computes 0 * NaN."""
    tables = random_tables(np.random.default_rng(21), (8, 0, 3))
    poison = [0] * 80
    for table in tables:
        table.k[0] = np.nan
        table.v[0] = np.inf
    options: dict[str, Any] = {"kind": "sequence", "max_step": 80, "strategy": strategy}
    with World(tables, type_k=type_name, type_v=type_name, **options) as world:
        world.random_tokens = lambda n: [1 + i % 63 for i in range(n)]  # type: ignore[method-assign]
        world.open("a")
        handle = world.handles["a"]
        for start in (5, 30, 40):
            world.prefill("a", start)
            world.executor.run(poison, handle)
            world.cache.rewind(handle, world.truth["a"].next_pos)
            world.prefill("a", n_tokens)
            world.step(["a"])
            world.executor.run(poison, handle)
            world.cache.undo_step()
            world.prefill("a", n_tokens)
        world.executor.run(poison * 3, handle)
        world.rewind("a", 0)
        world.prefill("a", n_tokens)


def test_dense_after_ragged_zeroes_no_row_that_lives(type_name: str) -> None:
    """Positions that were rewound share rows with earlier ones that were written later."""
    tables = random_tables(np.random.default_rng(22), (8, 0, 3))
    options = {"kind": "sequence", "max_step": MAX_STEP, "type_k": type_name, "type_v": type_name}
    with World(tables, strategy="ragged", **options) as world:
        world.open("a")
        world.prefill("a", 101)
        world.rewind("a", 0)
        world.prefill("a", 60)
        with Executor(world.program.address, world.cache, strategy="dense") as dense:
            world.tolerance = 8e-3
            for n in (1, 20, 1):
                tokens = world.random_tokens(n)
                world.check(["a"] * n, tokens, dense.run(tokens, world.handles["a"], outputs="all"))


# ---- one program, any kind ----


@pytest.mark.parametrize("kind", ["sequence", "batched", "batched_cell"])
@pytest.mark.parametrize("by_key", [False, True], ids=["handle", "key"])
def test_one_program_runs_on_every_kind(
    make_world: MakeWorld, kind: str, by_key: bool, strategy: str
) -> None:
    """Two executors over one program, caches of different kinds: the same outputs."""
    world = make_world(windows=(8, 0, 3))
    world.open("a")
    layers = [Layer(2, 32, 32, t.window, *world.types) for t in world.tables]
    with Cache(layers, kind=kind, max_step=MAX_STEP, initial_rows=0) as cache:
        given: dict[str, Any] = {"cache_key": cache.publish()} if by_key else {"cache": cache}
        with Executor(world.program.address, strategy=strategy, n_threads=2, **given) as executor:
            seq = cache.open()
            for n in (1, 30, 16, 1, 1, 40, 1):
                tokens = world.random_tokens(n)
                one = world.step(["a"] * n, tokens)
                cache.extend(seq, n)
                other = executor.run(tokens, outputs="all")
                np.testing.assert_allclose(other, one, rtol=0, atol=world.tolerance)
                back = world.truth["a"].next_pos - n // 3
                world.rewind("a", back)
                cache.rewind(seq, back)


TINY = Tiny(n_kv_heads=2, more={"attention.sliding_window": [0, 4]})


@pytest.mark.parametrize(
    "tiny", [TINY, VARIANTS["window"], VARIANTS["plain"]], ids=["mixed", "window", "plain"]
)
def test_a_models_outputs_are_those_of_a_batched_cache(
    tiny: Tiny, tmp_path: Path, strategy: str, type_name: str
) -> None:
    truth = Decoder(metadata_of(tiny), tensors_of(tiny))
    tolerance = {"f32": 1e-4, "f16": 5e-2}[type_name]  # f16 keeps 11 bits of K and V
    history: list[int] = []
    rng = np.random.default_rng(3)
    with Model.load(write_tiny(tmp_path / "tiny.gguf", tiny), device="CPU") as model:
        types: Any = {"type_k": type_name, "type_v": type_name, "device": "CPU"}
        single = model.new_cache(kind="sequence", max_step=6, capacity=400, **types)
        batched = model.new_cache(max_seqs=1, capacity=400, **types)
        seqs = [(cache, cache.open()) for cache in (single, batched)]
        executors = [model.executor(cache, strategy=strategy, n_threads=2) for cache, _ in seqs]
        for n in (5, 13, 1, 1, 6, 2, 30, 1, 6, 1):
            tokens = rng.integers(0, 97, n).tolist()
            history += tokens
            one, other = (
                executor.run(tokens, seq, outputs="all")
                for executor, (_, seq) in zip(executors, seqs, strict=True)
            )
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
            if n == 30:  # once: the decoder computes all of it anew
                want = truth.logits(history)[-n:]
                np.testing.assert_allclose(one, want, rtol=0, atol=tolerance)
            del history[len(history) - min(n, 6) // 2 :]
            for cache, seq in seqs:
                cache.rewind(seq, len(history))


# ---- memory ----


def test_a_long_sequence_takes_bounded_memory() -> None:
    tables = random_tables(np.random.default_rng(1), (8, 100))
    options: dict[str, Any] = {"max_step": 32, "capacity": 5000, "strategy": "ragged"}
    with World(tables, kind="sequence", **options) as world, World(tables, **options) as batched:
        world.open("a")
        batched.open("a")
        handle = world.handles["a"]
        sizes = set()
        for _ in range(8):
            world.executor.run([1] * 512, handle)
            batched.executor.run([1] * 512, batched.handles["a"])
            sizes.add(world.cache.stats.storage_bytes)
        row = 2 * 2 * 32 * 4  # K and V of 2 heads, in bytes
        assert sizes == {2 * 256 * row}
        assert world.cache.stats.rows == 131  # the longest ring
        assert world.executor.stats.n_row_growths == 1
        assert batched.cache.stats.storage_bytes == 2 * 4096 * row
        assert world.cache.stats.used_cells == 4096
        world.truth["a"].append([1] * 4096)
        world.step(["a"])


def test_growth_stops_at_the_ring(make_world: MakeWorld) -> None:
    world = make_world(windows=(8, 0, 3, 300))
    world.open("a")
    row = 2 * 2 * 32 * {"f32": 4, "f16": 2}[world.types[0]]
    world.step(["a"])
    assert world.cache.stats.storage_bytes == row * 4 * 256
    world.executor.run([1] * 299, world.handles["a"])
    assert world.cache.stats.storage_bytes == row * (256 + 512 + 256 + 512)
    world.executor.run([1] * 300, world.handles["a"])  # the ring of 315 rows has 512 already
    assert world.cache.stats.storage_bytes == row * (256 + 1024 + 256 + 512)
    assert world.cache.stats.rows == 1024


def test_a_decode_loop_over_windows_alone_builds_no_graph() -> None:
    tables = random_tables(np.random.default_rng(1), (8, 100))
    options: dict[str, Any] = {"kind": "sequence", "max_step": 8, "strategy": "dense"}
    with World(tables, **options) as world:
        world.open("a")
        world.prefill("a", 8)
        world.step(["a"])
        built = world.executor.stats.n_graphs_built
        for _ in range(600):
            world.executor.run([1], world.handles["a"])
        assert world.executor.stats.n_graphs_built == built


# ---- refusals ----


def test_what_a_single_sequence_cannot_do(make_world: MakeWorld) -> None:
    world = make_world()
    world.open("a")
    world.prefill("a", 40)
    cache, seq = world.cache, world.handles["a"]
    with pytest.raises(cellkv.NoSlotError):
        cache.open()
    with pytest.raises(cellkv.UnsupportedError, match="kind sequence"):
        cache.clone(seq)
    with pytest.raises(cellkv.UnsupportedError, match="kind sequence"):
        cache.remove(seq, 3, 10)
    with pytest.raises(cellkv.NotWindowedError):
        cache.trim_windows()
    with pytest.raises(cellkv.TrimmedError, match="can be reached is 24"):
        cache.rewind(seq, 23)
    with pytest.raises(cellkv.TrimmedError, match="can be reached is 24"):
        cache.undo_step(23)
    assert cache.length(seq) == 40
    cache.undo_step(24)
    world.truth["a"].rewind(24)
    world.step(["a"])
    for max_step in (0, -1):
        with pytest.raises(cellkv.InvalidArgumentError, match="max_step"):
            Cache([Layer(1, 32, 32, 4)], kind="sequence", max_step=max_step)


def test_a_wide_step_that_breaks_off_keeps_what_it_has_done(strategy: str) -> None:
    """The caller keeps the slices that were computed, and runs the rest again."""
    tables = random_tables(np.random.default_rng(1), (8, 0, 3))
    stop_at = [10**9]
    asked = [0]

    def should_abort() -> bool:
        asked[0] += 1
        return asked[0] > stop_at[0]

    options: dict[str, Any] = {"kind": "sequence", "max_step": 8, "strategy": strategy}
    with World(tables, should_abort=should_abort, **options) as world:
        world.open("a")
        world.prefill("a", 50)
        handle = world.handles["a"]
        a_slice = asked[0] // 7  # questions asked in each of the seven slices
        stop_at[0] = asked[0] + 2 * a_slice + 1  # in the third
        tokens = world.random_tokens(40)
        with pytest.raises(cellkv.AbortedError) as caught:
            world.executor.run(tokens, handle, outputs="all")
        n_done = caught.value.n_done
        assert n_done % 8 == 0
        assert n_done > 0
        stop_at[0] = 10**9
        with pytest.raises(cellkv.TrimmedError):
            world.cache.undo_step(0)
        world.cache.undo_step(n_done)
        world.truth["a"].append(tokens[:n_done])
        world.step(["a"] * (40 - n_done), tokens[n_done:])


def test_a_failure_before_compute_writes_nothing_over(strategy: str) -> None:
    """Every allocation is made to fail in turn, until the step gets through."""
    tables = random_tables(np.random.default_rng(23), (8, 0))
    options: dict[str, Any] = {"kind": "sequence", "max_step": 100, "reuse_graphs": False}
    outcomes = []
    for n in range(1000):
        with World(tables, strategy=strategy, **options) as world:
            world.open("a")
            world.executor.run([1] * 250, world.handles["a"])  # more than the ring's 107 rows
            world.truth["a"].append([1] * 250)
            tokens = world.random_tokens(80)
            fail_allocation_after(n)
            try:
                results = world.executor.run(tokens, world.handles["a"], outputs="all")
            except (cellkv.OutOfMemoryError, cellkv.ComputeError) as error:
                outcomes.append(type(error))
                assert fail_allocation_after(-1)
                if isinstance(error, cellkv.ComputeError):
                    world.cache.undo_step()
                else:
                    world.rewind("a", 150)  # as far back as before the step
                assert world.cache.next_pos(world.handles["a"]) == world.truth["a"].next_pos
                world.step(["a"])
                continue
            assert not fail_allocation_after(-1)
            world.check(["a"] * 80, tokens, results)
            break
    assert outcomes[-1] is cellkv.ComputeError
    assert outcomes.count(cellkv.OutOfMemoryError) >= 8


def test_extend_declares_and_tells_a_shortfall() -> None:
    with Cache(backend="cells", kind="sequence", capacity=5) as cache:
        seq = cache.open()
        cache.extend(seq, 3)
        assert cache.stats.declared_tokens == 3
        assert cache.place().tolist() == [0, 1, 2]
        with pytest.raises(cellkv.OutOfCellsError) as caught:
            cache.extend(seq, 4)
        assert caught.value.shortfall == 2
        with pytest.raises(cellkv.EmptyStepError):
            cache.extend(seq, 0)
        with pytest.raises(cellkv.UnknownSequenceError):
            cache.extend(seq + 1, 1)
        for bad in (1.5, "1"):
            with pytest.raises(TypeError):
                cache.extend(seq, bad)  # type: ignore[arg-type]
