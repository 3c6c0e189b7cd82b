"""The executor: graphs, slices, outputs, failures before and during compute."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest

import cellkv
from cellkv import Cache, Executor, Layer
from table_program import Fault, TableProgram, cache_layers, n_alive, random_tables
from world import NewWorld, World


@pytest.fixture
def tables() -> list:
    return random_tables(np.random.default_rng(11))


@pytest.fixture
def world(new_world: NewWorld, tables: list) -> Iterator[World]:
    with new_world(tables) as world:
        yield world


def state(cache: Cache, seqs: list[int]) -> list:
    """All that can be seen of the cells."""
    stats = cache.stats._replace(rows=0, storage_bytes=0, n_growths=0, table_bytes=0)
    return [stats, *([array.tolist() for array in cache.cells(seq)] for seq in seqs)]


# ---- graphs ----


def test_a_decode_loop_builds_one_graph_per_extent(world: World) -> None:
    names = ["a", "b", "c", "d"]
    world.open(*names)
    for name in names:
        world.prefill(name, 40)
    before = world.executor.stats
    for _ in range(64):  # cells 160 .. 416: extents 256 and 512
        world.step(names)
    after = world.executor.stats
    assert after.n_graphs_built - before.n_graphs_built == 2
    assert after.n_graphs_reused - before.n_graphs_reused == 62


def test_kept_and_rebuilt_graphs_give_the_same_bits(new_world: NewWorld, tables: list) -> None:
    def run(reuse_graphs: bool, type_name: str) -> list[np.ndarray]:
        options = {"type_k": type_name, "type_v": type_name, "reuse_graphs": reuse_graphs}
        with new_world(tables, **options) as world:
            world.open("a", "b")
            world.prefill("a", 200)
            world.prefill("b", 70)
            steps = [world.step(["a", "b"]) for _ in range(30)]
            steps += [world.step(["b"]) for _ in range(3)]
            return steps

    for type_name in ("f32", "f16", "q8_0", "q4_0"):
        for kept, rebuilt in zip(run(True, type_name), run(False, type_name), strict=True):
            np.testing.assert_array_equal(kept, rebuilt)


def test_without_reuse_no_graph_is_kept(new_world: NewWorld, tables: list) -> None:
    with new_world(tables, reuse_graphs=False) as world:
        world.open("a")
        world.prefill("a", 3)
        world.step(["a"])
        world.step(["a"])
        stats = world.executor.stats
        assert (stats.n_graphs_built, stats.n_graphs_reused) == (3, 0)
        assert (stats.n_graphs_kept, stats.graph_bytes) == (0, 0)


def test_the_least_recently_used_graph_goes_first(new_world: NewWorld, tables: list) -> None:
    with new_world(tables, max_graphs=2) as world:
        world.open("a")
        for n in (1, 2, 1, 3):  # 3 displaces 2
            world.step(["a"] * n)
        built = world.executor.stats.n_graphs_built
        assert built == 3
        world.step(["a"])
        assert world.executor.stats.n_graphs_built == built
        world.step(["a"] * 2)
        stats = world.executor.stats
        assert stats.n_graphs_built == built + 1
        assert stats.n_graphs_kept == 2
        assert stats.graph_bytes > 0


def test_growing_rows_drops_the_graphs(world: World) -> None:
    world.open("a")
    world.prefill("a", 250)
    world.step(["a"] * 2)
    kept = world.executor.stats.n_graphs_kept
    assert kept == 2
    world.step(["a"] * 10)
    assert world.executor.stats.n_graphs_kept == 1
    assert world.executor.stats.n_row_growths >= 1
    assert world.cache.stats.rows == 512


@pytest.mark.parametrize(("type_k", "type_v"), [("f32", "f32"), ("q8_0", "q4_0")])
@pytest.mark.parametrize("initial_rows", [0, 1, 3, 1000])
def test_any_number_of_initial_rows(
    new_world: NewWorld, tables: list, initial_rows: int, type_k: str, type_v: str
) -> None:
    options = {"initial_rows": initial_rows, "type_k": type_k, "type_v": type_v}
    with new_world(tables, capacity=1000, **options) as world:
        assert world.cache.stats.rows == initial_rows
        assert (world.cache.stats.storage_bytes == 0) == (initial_rows == 0)
        world.open("a", "b")
        world.prefill("a", 600)
        world.prefill("b", 400)
        assert world.cache.stats.rows == 1000
        world.rewind("a", 300)
        world.step(["b", "a"])


def test_rows_do_not_grow_while_cells_below_are_free(world: World) -> None:
    world.open("a", "b")
    world.prefill("a", 100)
    world.prefill("b", 28)
    assert world.cache.stats.rows == 128
    for _ in range(5):
        world.rewind("a", 10)
        world.step(["a"] * 60 + ["b"])
    assert world.cache.stats.rows == 128


def test_sequences_of_one_step_have_blocks_of_their_own_as_far_as_the_rows_go(
    new_world: NewWorld, tables: list
) -> None:
    with new_world(tables, initial_rows=512) as world:
        world.open("a", "b", "c")
        for _ in range(20):
            world.step(["a", "b", "c"])
        first = {name: int(world.cache.cells(seq).cells[0]) for name, seq in world.handles.items()}
        assert first == {"a": 0, "b": 256, "c": 1}
        assert np.all(np.diff(world.cache.cells(world.handles["b"]).cells) == 1)
        world.prefill("b", 452)
        assert world.cache.stats.free_cells == 4096 - 512
        assert world.cache.stats.rows == 512
        world.step(["c"])
        assert world.cache.stats.rows == 1024


def test_cells_placed_by_hand_keep_to_the_rows_there_are(tables: list) -> None:
    layers = cache_layers(tables, "f32", "f32")
    with Cache(layers, capacity=4096, initial_rows=1024) as cache:
        seqs = [cache.open() for _ in range(5)]
        cache.declare(seqs)
        assert cache.place().tolist() == [0, 256, 512, 768, 1]


@pytest.mark.parametrize("other_strategy", ["dense", "ragged"])
def test_two_executors_share_one_cache(
    tables: list, world: World, other_strategy: Literal["dense", "ragged"]
) -> None:
    world.open("a")
    world.prefill("a", 200)
    with Executor(
        world.program.address, world.cache, max_batch=16, strategy=other_strategy
    ) as other:
        tokens = world.random_tokens(200)  # the rows move under the first one's kept graphs
        results = other.run(tokens, world.handles["a"], outputs="all")
        world.check(["a"] * 200, tokens, results)
    world.step(["a"])


# ---- slices and outputs ----


@pytest.mark.parametrize("max_batch", [1, 7, 64, 200])
def test_a_wide_step_is_computed_in_slices(
    new_world: NewWorld, tables: list, max_batch: int
) -> None:
    with new_world(tables, max_batch=max_batch) as world:
        world.open("a", "b")
        world.step(["a", "a", "b"] * 50)
        assert world.executor.stats.n_tokens == 150
        assert world.executor.stats.n_steps == 1


@pytest.mark.parametrize("max_batch", [4, 512])
def test_only_the_chosen_rows_are_read_in_the_order_asked(
    new_world: NewWorld, tables: list, max_batch: int
) -> None:
    with new_world(tables, max_batch=max_batch) as world:
        world.open("a")
        tokens = world.random_tokens(11)
        everything = world.executor.run(tokens, world.handles["a"], outputs="all")
        world.cache.undo_step()
        chosen = [10, 0, 3, 3, 7, 4]
        some = world.executor.run(tokens, world.handles["a"], outputs=chosen)
        np.testing.assert_allclose(some, everything[chosen], rtol=1e-6, atol=1e-6)
        assert some.base is None or some.base is not everything


def test_a_step_without_outputs_still_fills_the_cells(world: World) -> None:
    world.open("a")
    tokens = world.random_tokens(20)
    assert world.executor.run(tokens, world.handles["a"], outputs=[]).shape == (
        0,
        world.executor.n_result,
    )
    world.truth["a"].append(tokens)
    world.step(["a"])


@pytest.mark.parametrize("outputs", [[3], [-1], [0, 1, 2, 3, 4]])
def test_outputs_outside_the_step_are_refused(world: World, outputs: list[int]) -> None:
    world.open("a")
    with pytest.raises(cellkv.InvalidArgumentError, match="output"):
        world.executor.run([1, 2, 3], world.handles["a"], outputs=outputs)
    assert world.cache.stats.used_cells == 0


@pytest.mark.parametrize("token", [-1, 64, 2**31 - 1])
def test_tokens_outside_the_vocabulary_are_refused(world: World, token: int) -> None:
    world.open("a")
    with pytest.raises(cellkv.BadTokenError, match=f"token 1 .*{token}"):
        world.executor.run([1, token], world.handles["a"])
    assert world.cache.stats.used_cells == 0


def test_a_declared_step_runs_with_and_without_positions(world: World) -> None:
    world.open("a", "b")
    names = ["a", "b", "a"]
    seqs = [world.handles[name] for name in names]
    world.cache.declare(seqs)
    world.check(names, [5, 6, 7], world.executor.run([5, 6, 7], outputs="all"))
    world.cache.declare(seqs)
    results = world.executor.run([5, 6, 7], positions=[2, 1, 3], outputs="all")
    world.check(names, [5, 6, 7], results)
    with pytest.raises(cellkv.NotDeclaredError):
        world.executor.run([5, 6, 7], outputs="all")


def test_a_step_over_capacity_reports_the_shortfall(new_world: NewWorld, tables: list) -> None:
    with new_world(tables, capacity=10) as world:
        world.open("a")
        world.prefill("a", 8)
        before = state(world.cache, [world.handles["a"]])
        with pytest.raises(cellkv.OutOfCellsError, match="3") as refusal:
            world.executor.run([1] * 5, world.handles["a"])
        assert refusal.value.shortfall == 3
        assert state(world.cache, [world.handles["a"]]) == before
        world.step(["a"] * 2)


# ---- failures ----


def fail_allocation_after(n: int) -> bool:
    function = ctypes.CDLL(os.environ["CELLKV_LIBRARY"]).cellkv_test_fail_allocation_after
    function.restype, function.argtypes = ctypes.c_bool, (ctypes.c_int,)
    return bool(function(n))


def test_an_aborted_forward_leaves_its_cells_claimed_and_undo_gives_them_back(
    new_world: NewWorld, tables: list
) -> None:
    countdown = [10**9]

    def should_abort() -> bool:
        countdown[0] -= 1
        return countdown[0] < 0

    with new_world(tables, should_abort=should_abort, max_batch=8) as world:
        world.open("a", "b")
        world.prefill("a", 30)
        seqs = [world.handles["a"], world.handles["b"]]
        before = state(world.cache, seqs)
        names = ["a", "b", "a"] * 7
        tokens = world.random_tokens(21)
        for patience in (0, 3, 20):
            countdown[0] = patience
            with pytest.raises(cellkv.AbortedError) as refusal:
                world.executor.run(tokens, [world.handles[n] for n in names], outputs="all")
            assert refusal.value.n_done in (0, 8, 16)
            assert world.cache.length(seqs[0]) == 44
            assert world.cache.length(seqs[1]) == 7
            with pytest.raises(cellkv.NotDeclaredError):
                world.executor.run(tokens, outputs="all")
            world.cache.undo_step()
            assert state(world.cache, seqs) == before
        countdown[0] = 10**9
        world.step(names, tokens)
        world.step(["a", "b"])


@pytest.mark.parametrize("type_name", ["f32", "f16", "q8_0", "q4_0"])
def test_a_kept_token_survives_an_undo(new_world: NewWorld, tables: list, type_name: str) -> None:
    with new_world(tables, type_k=type_name, type_v=type_name) as world:
        world.open("a")
        world.prefill("a", 3)
        tokens = world.random_tokens(5)
        world.executor.run(tokens, world.handles["a"])
        world.cache.undo_step(n_keep=2)
        world.truth["a"].append(tokens[:2])
        assert world.cache.next_pos(world.handles["a"]) == 5
        world.step(["a"])


@pytest.mark.parametrize("declared", [True, False])
def test_a_failure_before_compute_changes_nothing(new_world: NewWorld, declared: bool) -> None:
    """Every allocation is made to fail in turn, until the step gets through."""
    two_windows = random_tables(np.random.default_rng(11), (0, 9))
    outcomes = []
    for n in range(1000):
        with new_world(two_windows, initial_rows=200, reuse_graphs=False) as world:
            world.open("a", "b")
            world.prefill("a", 190)
            seqs = [world.handles[name] for name in "ab"]
            step = [seqs[i % 2] for i in range(80)]  # grows the rows to 400
            world.cache.declare(step if declared else seqs)
            before = state(world.cache, seqs)
            tokens = world.random_tokens(80)
            fail_allocation_after(n)
            try:
                results = world.executor.run(tokens, None if declared else step, outputs="all")
            except cellkv.OutOfMemoryError:
                outcomes.append("memory")
                assert fail_allocation_after(-1)
                assert state(world.cache, seqs) == before
                results = world.executor.run(tokens, None if declared else step, outputs="all")
            except cellkv.ComputeError:
                outcomes.append("compute")
                assert fail_allocation_after(-1)
                world.cache.undo_step()
                assert state(world.cache, seqs)[1:] == before[1:]
                results = world.executor.run(tokens, step, outputs="all")
            else:
                assert not fail_allocation_after(-1)
                outcomes.append("done")
            world.check(["a", "b"] * 40, tokens, results)
            if outcomes[-1] == "done":
                break
    assert outcomes[-2:] == ["compute", "done"]
    assert outcomes.count("memory") >= 8


def test_an_executor_is_made_whole_or_not_at_all(tables: list) -> None:
    program = TableProgram(tables)
    with Cache(cache_layers(tables, "f32", "f32")) as cache:
        for n in range(1000):
            fail_allocation_after(n)
            try:
                Executor(program.address, cache).close()
            except cellkv.OutOfMemoryError:
                assert fail_allocation_after(-1)
                continue
            break
        assert n > 3
    program.close()
    assert n_alive() == 0


def test_rows_too_large_for_memory_are_refused(tables: list) -> None:
    layers = [Layer(1024, 4096, 4096, 0, "f32", "f32")] * 8
    with pytest.raises(cellkv.OutOfMemoryError):
        Cache(layers, capacity=2**30, initial_rows=2**30)


FAULTS = {
    Fault.SKIP_LAYER: "never attends layer 1",
    Fault.TWICE: "layer 0 is attended twice",
    Fault.LAYER_OUTSIDE: "layer 2 is outside",
    Fault.NO_RESULT: "result is missing",
    Fault.RESULT_SHAPE: "result is of another shape",
    Fault.Q_SHAPE: "layer 0: q is",
    Fault.NO_HEADS: "layer 0: q is",
    Fault.NULL_K: "layer 0: k is NULL",
    Fault.V_TYPE: "layer 0: v is f16",
    Fault.PARAMS: "finite scale",
    Fault.SINKS: "sinks must be",
    Fault.NO_DATA: "has no data",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_program_that_misuses_the_graph_is_refused(world: World, fault: Fault) -> None:
    world.open("a")
    world.prefill("a", 3)
    before = state(world.cache, [world.handles["a"]])
    world.program.set_fault(fault)
    with pytest.raises(cellkv.BadGraphError, match=FAULTS[fault]):
        world.executor.run([1, 2], world.handles["a"])
    assert state(world.cache, [world.handles["a"]]) == before
    world.program.set_fault(Fault.NONE)
    world.step(["a", "a"])


def test_the_programs_own_status_comes_through(world: World) -> None:
    world.open("a")
    world.program.set_fault(Fault.GIVES_UP)
    with pytest.raises(cellkv.UnsupportedError, match="told to give up"):
        world.executor.run([1], world.handles["a"])
    world.program.set_fault(Fault.NONE)


# ---- making an executor ----


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 4}, "layer 1.*window"),
        ({"n_kv_heads": 1}, "layer 1"),
        ({"head_dim_k": 64}, "layer 1"),
        ({"head_dim_v": 64}, "layer 1"),
        (None, "2 layers, the cache 1"),
    ],
)
def test_a_cache_of_other_layers_is_refused(
    tables: list, change: dict[str, int] | None, words: str
) -> None:
    program = TableProgram(tables)
    layers = cache_layers(tables, "f16", "f16")
    layers = layers[:1] if change is None else [layers[0], layers[1]._replace(**change)]
    with Cache(layers) as cache, pytest.raises(cellkv.MismatchError, match=words):
        Executor(program.address, cache)
    program.close()


def test_a_cache_without_rows_is_refused(tables: list) -> None:
    program = TableProgram(tables)
    layers = cache_layers(tables, "f16", "f16")
    with Cache(layers, backend="cells") as cache, pytest.raises(cellkv.NoStorageError):
        Executor(program.address, cache)
    program.close()


def test_an_executor_takes_a_published_cache_by_key(world: World) -> None:
    key = world.cache.publish()
    with Executor(world.program.address, cache_key=key) as executor:
        seq = world.cache.open()
        executor.run([1, 2, 3], seq)
        assert world.cache.length(seq) == 3
    world.cache.unpublish(key)
    with pytest.raises(cellkv.UnknownKeyError):
        Executor(world.program.address, cache_key=key)


def test_an_executor_keeps_cache_and_program_alive(tables: list) -> None:
    program = TableProgram(tables)
    cache = Cache(cache_layers(tables, "f16", "f16"))
    executor = Executor(program.address, cache)
    seq = cache.open()
    program.close()
    executor.run([1, 2], seq)
    cache.declare([seq])
    cache.close()
    assert np.isfinite(executor.run([3], outputs="all")).all()
    assert n_alive() == 1
    executor.close()
    gc.collect()
    assert n_alive() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"n_threads": -1},
        {"n_threads": 513},
        {"max_batch": 0},
        {"max_graphs": 0},
        {"strategy": 7},
        {"strategy": -1},
        {"isa": 5},
        {"isa": -1},
    ],
)
def test_options_outside_their_range_are_refused(world: World, options: dict[str, int]) -> None:
    with pytest.raises(cellkv.InvalidArgumentError, match=next(iter(options))):
        Executor(world.program.address, world.cache, **options)


def test_an_unknown_device_is_refused_with_the_names_there_are(tables: list) -> None:
    with pytest.raises(cellkv.UnknownDeviceError, match="CPU"):
        Cache(cache_layers(tables, "f16", "f16"), device="Abacus")
