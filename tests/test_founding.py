"""The founding suite: what cellkv exists for, against naive attention in float64.

On every device present (with --devices=rpc, on RPC servers), for storage in floats and in blocks,
graph caching on and off, every strategy, and starting from one row. What a device cannot do, it has
to refuse by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import cellkv
from table_program import random_tables
from world import World

MakeWorld = Callable[..., World]


def does_all(device: str) -> bool:
    """Whether it attends over K and V of all types: an RPC server lends a CPU here."""
    return device == "CPU" or device.startswith("rpc://")


def check_refusal(refusal: cellkv.UnsupportedError, device: str, type_name: str) -> None:
    """It names the layer, its device, and its types."""
    words = str(refusal)
    assert re.search(r"\blayer \d", words), words
    assert device.split(",")[0].removeprefix("rpc://") in words, words
    assert words.count(f"type {type_name}") == 2, words


@pytest.fixture(params=["f32", "f16", "q8_0", "q4_0"])
def type_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[True, False], ids=["kept", "rebuilt"])
def reuse_graphs(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def make_world(
    device: str, type_name: str, reuse_graphs: bool, strategy: str
) -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def make(windows: tuple[int, ...] = (0, 0), **options: object) -> World:
        tables = random_tables(np.random.default_rng(1), windows)
        try:
            world = World(
                tables,
                type_k=type_name,
                type_v=type_name,
                device=device,
                reuse_graphs=reuse_graphs,
                strategy=strategy,
                n_threads=2,
                **options,
            )
        except cellkv.UnsupportedError as refusal:
            assert not does_all(device)
            check_refusal(refusal, device, type_name)
            pytest.skip(f"refused by name: {refusal}")
        worlds.append(world)
        assert world.cache.stats.rows == 1
        return world

    yield make
    for world in worlds:
        world.__exit__(None, None, None)


def test_ragged_is_done_by_the_cpu_and_refused_by_name_elsewhere(
    device: str, type_name: str
) -> None:
    tables = random_tables(np.random.default_rng(1))
    types = {"type_k": type_name, "type_v": type_name}
    if device == "CPU":
        with World(tables, device=device, strategy="ragged", **types) as world:
            assert world.executor.stats.strategy is cellkv.Strategy.RAGGED
        return
    with pytest.raises(cellkv.UnsupportedError) as refusal:
        World(tables, device=device, strategy="ragged", **types)
    check_refusal(refusal.value, device, type_name)


def test_sequences_prefilled_apart_decode_in_one_forward(make_world: MakeWorld) -> None:
    world = make_world()
    world.open("a", "b")
    world.prefill("a", 150)
    world.prefill("b", 90)
    for _ in range(40):  # past row 256: the rows move
        world.step(["a", "b"])
    assert world.cache.stats.rows == 512
    assert world.executor.stats.n_steps == 42


def test_clone_shares_its_sources_prefix_while_both_go_on(make_world: MakeWorld) -> None:
    world = make_world()
    world.open("source")
    world.prefill("source", 70)
    used = world.cache.stats.used_cells
    world.clone("source", "clone")
    world.clone("source", "early", upto=33)
    assert world.cache.stats.used_cells == used
    for _ in range(5):
        world.step(["source", "clone", "early"])

    world.rewind("source", 40)  # below the clone's prefix: the clone keeps it
    for _ in range(5):
        world.step(["clone", "early", "source"])
    world.rewind("clone", 71)
    world.close("early")
    world.step(["clone", "source", "clone"])

    world.close("source")  # what the clone shares stays
    world.step(["clone"])
    world.close("clone")
    assert world.cache.stats.used_cells == 0


def test_windows_hide_what_lies_before_them(make_world: MakeWorld) -> None:
    world = make_world(windows=(8, 0, 3, 8))
    world.open("a", "b")
    world.prefill("a", 40)  # wider than the windows
    world.prefill("b", 5)
    for _ in range(12):
        world.step(["b", "a"])
    world.clone("a", "c", upto=20)  # a windowed layer has kept every cell
    world.rewind("a", 12)
    world.step(["a", "b", "c"])
    world.step(["c"] * 10 + ["a"] * 2)


@pytest.mark.parametrize("kind", ["sequence", "batched"])
def test_one_sequence_on_every_kind(make_world: MakeWorld, kind: str) -> None:
    world = make_world(windows=(8, 0, 3), kind=kind, max_step=16)
    world.open("a")
    world.prefill("a", 150)  # wider than the windows, and than what is computed at once
    for _ in range(40):
        world.step(["a"])
    world.rewind("a", 174)
    world.prefill("a", 100)  # past row 256: the rows move, where they are not bounded
    world.rewind("a", 0)
    world.prefill("a", 5)
    world.close("a")
    assert world.cache.stats.used_cells == 0


@pytest.mark.parametrize("kind", ["sequence", "batched"])
def test_undeclared_and_discontinuous_steps_are_refused_on_every_kind(
    make_world: MakeWorld, kind: str
) -> None:
    world = make_world(windows=(8, 0), kind=kind, max_step=16)
    world.open("a")
    world.prefill("a", 60)
    run, seq = world.executor.run, world.handles["a"]
    with pytest.raises(cellkv.NotDeclaredError):
        run([1, 2], outputs="all")
    with pytest.raises(cellkv.BadPositionError, match=r"token 1\b"):
        run([1, 2], seq, positions=[60, 60], outputs="all")
    assert world.cache.cells(seq).cells.tolist() == list(range(60))
    world.cache.extend(seq, 2)
    with pytest.raises(cellkv.BadPositionError):
        run([1, 2], positions=[59, 60], outputs="all")
    results = run([1, 2], positions=[60, 61], outputs="all")
    world.check("aa", [1, 2], results)


def test_steps_that_do_not_continue_their_sequences_are_refused(make_world: MakeWorld) -> None:
    world = make_world()
    world.open("a", "b", "c", "d")
    for name in "abcd":
        world.prefill(name, 3)
    run, seqs = world.executor.run, [world.handles[name] for name in "abcd"]
    before = world.cache.stats, [world.cache.cells(seq) for seq in seqs]

    with pytest.raises(cellkv.NotDeclaredError):
        run([1, 2], outputs="all")
    with pytest.raises(cellkv.BadPositionError, match=r"token 2\b") as refusal:
        run([1, 2, 3, 4], seqs, positions=[3, 3, 4, 3], outputs="all")
    assert str(seqs[2]) in str(refusal.value)
    with pytest.raises(cellkv.BadPositionError):
        run([1, 2], [seqs[0], seqs[0]], positions=[4, 3], outputs="all")
    after = world.cache.stats, [world.cache.cells(seq) for seq in seqs]
    assert after[0] == before[0]
    for now, then in zip(after[1], before[1], strict=True):
        np.testing.assert_array_equal(now.cells, then.cells)
        np.testing.assert_array_equal(now.positions, then.positions)

    world.cache.declare(seqs)  # a declared step with a gap: refused, and still declared
    with pytest.raises(cellkv.BadPositionError):
        run([1, 2, 3, 4], positions=[3, 3, 4, 3], outputs="all")
    results = run([1, 2, 3, 4], positions=[3, 3, 3, 3], outputs="all")
    world.check("abcd", [1, 2, 3, 4], results)
    world.step("abd")  # the other three run without the one
