"""Isolated models: as the local ones while their worker process lives."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_gguf
from cellkv import (
    AbortedError,
    BusyError,
    Cache,
    Executor,
    InvalidArgumentError,
    Model,
    Output,
    TokenizerError,
    UnsupportedError,
    isolated,
)
from cellkv._owned import Owner
from cellkv.isolated import IsolatedCache, IsolatedExecutor, IsolatedModel
from workers import LONG, TINY, LongStep, outcome

PROXIES = {Model: IsolatedModel, Cache: IsolatedCache, Executor: IsolatedExecutor}


@pytest.fixture(scope="module")
def local(tiny_path: Path) -> Iterator[Model]:
    with Model.load(tiny_path) as model:
        yield model


@pytest.fixture(scope="module")
def shared(tiny_path: Path) -> Iterator[Model]:
    """An isolated model for tests that leave it alive."""
    with Model.load(tiny_path, isolated=True) as model:
        yield model


# ---- the same answers ----


def use_everything(model: Model) -> dict[str, Any]:
    """Use every public method and property that can be forwarded; what each gave."""
    seen: dict[str, Any] = {"info": model.info, "info again": model.info is model.info}
    with pytest.raises(TokenizerError) as caught:
        _ = model.tokenizer
    seen["tokenizer"] = str(caught.value)
    cache = model.new_cache(capacity=96, max_seqs=4, initial_rows=1, type_k="f32")
    executor = model.executor(cache, n_threads=2, max_batch=16)
    seen["of"] = [isinstance(cache, Cache), isinstance(executor, Executor)]
    seen["cache"], seen["n_result"] = executor.cache is cache, executor.n_result
    seq = cache.open()
    seen["prefill"] = executor.run(np.arange(40, dtype=np.int32), seq, outputs="all")
    twin = cache.clone(seq, 30)
    seen["decode"] = executor.run([5, 6], [seq, twin], outputs=[1, 0])
    seen["mean"] = executor.run([5, 6, 7], [twin] * 3, pooling="mean", outputs="all")
    cache.undo_step(1)
    cache.rewind(seq, 20)
    cache.remove(twin, 3, 5)
    seen["lengths"] = [cache.length(seq), cache.next_pos(twin), cache.can_extend(96)]
    seen["cells"] = cache.cells(twin)
    cache.declare([seq, twin, seq])
    seen["declared"] = executor.run([1, 2, 3], outputs="last")
    cache.extend(seq, 2)
    seen["placed"] = cache.place()
    cache.close_seq(twin)
    seen["embedded"] = executor.embed([[1, 2], [3]], pooling="last")
    seen["trim"] = outcome(cache.trim_windows)
    executor.abort()
    seen["stats"] = [cache.stats, executor.stats._replace(step_us=0, compute_us=0)]
    cache.clear()
    hidden = model.executor(cache, output=Output.HIDDEN)
    seen["hidden"] = hidden.run([1], cache.open())
    seen["closed"] = []
    for owner in (hidden, executor, cache):
        seen["closed"] += [owner.closed, owner.close(), owner.close(), owner.closed]
    seen["after"] = [outcome(lambda: cache.stats), outcome(lambda: executor.run([1], 1))]
    return seen


def test_everything_gives_what_it_gives_locally_bit_for_bit(local: Model, tiny_path: Path) -> None:
    with Model.load(tiny_path, isolated=True) as model:
        mine, theirs = use_everything(local), use_everything(model)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert type(mine[name]) is type(theirs[name]), name
        np.testing.assert_equal(theirs[name], mine[name], err_msg=name)
    assert theirs["prefill"].dtype == np.float32
    assert theirs["prefill"].flags.writeable


def public(kind: type[Owner]) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


# Public names that need no worker, or are refused: all others must have been forwarded.
OF_THE_PARENT = {
    Model: {"close", "closed", "tokenizer", "executor"},
    Cache: {"close", "closed"},
    Executor: {"close", "closed", "cache", "n_result"},
}
REFUSED = {
    Model: {"load", "from_arrays", "program"},
    Cache: {"publish", "unpublish", "find"},
    Executor: set(),
}


def test_every_public_name_is_forwarded_and_used_or_refused(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[tuple[type, str]] = set()
    ask = isolated._ask

    def record(proxy: Any, name: str, *rest: Any) -> Any:
        asked.add((type(proxy).__base__, name))
        return ask(proxy, name, *rest)

    monkeypatch.setattr(isolated, "_ask", record)
    with Model.load(tiny_path, isolated=True) as model:
        use_everything(model)
        cache = model.new_cache()
        objects: dict[type, Any] = {Model: model, Cache: cache, Executor: model.executor(cache)}
        for kind, names in REFUSED.items():
            for name in names:
                with pytest.raises(UnsupportedError):
                    getattr(objects[kind], name)()
    for kind, proxy in PROXIES.items():
        forwarded = {name for owner, name in asked if owner is kind}
        assert public(kind) - OF_THE_PARENT[kind] - REFUSED[kind] <= forwarded
        assert public(proxy) == public(kind)


def test_what_can_be_neither_forwarded_nor_refused_stops_the_import() -> None:
    class Grown(Cache):
        limit = 3

    with pytest.raises(TypeError, match="limit"):

        @isolated.forwards({})
        class _Proxy(Grown):
            pass


class Number(enum.IntEnum):
    ONE = 1


class Index:
    def __index__(self) -> int:
        return 2


class Text(str):
    __slots__ = ()


# What callers may hand over. The worker knows none of these classes, nor a generator's state.
CALLS: dict[str, Callable[[Model, Cache, Executor, int], object]] = {
    "generator": lambda m, c, e, s: e.run((t for t in (1, 2)), s),
    "range": lambda m, c, e, s: e.run(range(3), s),
    "keys": lambda m, c, e, s: e.run({1: 0, 2: 0}.keys(), s),
    "index": lambda m, c, e, s: e.run([Index(), Number.ONE], s),
    "small integers": lambda m, c, e, s: e.run(np.array([1, 2], np.uint8), np.int64(s)),
    "nested": lambda m, c, e, s: e.embed(iter([1, t]) for t in (1, 2)),
    "text": lambda m, c, e, s: e.run([1, 2], s, outputs=Text("all")),
    "new cache": lambda m, c, e, s: m.new_cache(capacity=Index()).stats,
    "strided": lambda m, c, e, s: e.run(np.arange(6, dtype=np.int32)[::-2], s),
    "repeated": lambda m, c, e, s: e.run(np.broadcast_to(np.int32(1), (4,)), s),
    "two dimensions": lambda m, c, e, s: e.run(np.zeros((2, 2), np.int32), s),
    "floats": lambda m, c, e, s: e.run(np.zeros(2, np.float32), s),
    "objects": lambda m, c, e, s: e.run(np.array([object()]), s),
    "a float": lambda m, c, e, s: e.run([1.5], s),
    "a bool": lambda m, c, e, s: c.length(True),
    "a string": lambda m, c, e, s: e.run("12", s),
    "an object": lambda m, c, e, s: e.run(Model, s),
    "no cache": lambda m, c, e, s: m.executor(),
    "another's class": lambda m, c, e, s: m.executor(object()),
    "too many arguments": lambda m, c, e, s: c.open(1),
    "unknown option": lambda m, c, e, s: m.executor(c, colour="red"),
    "unknown word": lambda m, c, e, s: m.executor(c, strategy="best"),
    "too wide": lambda m, c, e, s: c.length(2**70),
    "bad token": lambda m, c, e, s: e.run([1, 97], s),
    "unknown sequence": lambda m, c, e, s: c.rewind(7, 0),
    "bad range": lambda m, c, e, s: c.rewind(s, 99),
    "no tokens": lambda m, c, e, s: e.run([], s),
    "no cells": lambda m, c, e, s: c.extend(s, 100),
    "no cells in a step": lambda m, c, e, s: e.run([1] * 70, s),
    "bad position": lambda m, c, e, s: e.run([1], s, positions=[9]),
    "not declared": lambda m, c, e, s: e.run([1], outputs="all"),
    "no slot": lambda m, c, e, s: [c.open() for _ in range(9)],
    "devices": lambda m, c, e, s: m.new_cache(device=["CPU"]).stats,
    "layers by device": lambda m, c, e, s: m.new_cache(device={"CPU": 2}).stats,
    "too many layers": lambda m, c, e, s: m.new_cache(device={"CPU": 3}),
    "no device": lambda m, c, e, s: m.new_cache(device="Nowhere"),
    "no type": lambda m, c, e, s: m.new_cache(type_k="f8"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_taken_or_refused_as_by_the_local_ones(
    name: str, local: Model, shared: Model
) -> None:
    def call(model: Model) -> object:
        with model.new_cache(capacity=64, max_seqs=3) as cache, model.executor(cache) as executor:
            seq = cache.open()
            executor.run([3, 4], seq)
            return outcome(lambda: CALLS[name](model, cache, executor, seq)), cache.stats

    np.testing.assert_equal(call(shared), call(local))


def test_a_model_from_arrays_is_as_the_local_one() -> None:
    metadata, tensors = tiny_gguf.metadata_of(TINY), tiny_gguf.tensors_of(TINY)
    with (
        Model.from_arrays(metadata, tensors, repack=False) as mine,
        Model.from_arrays(metadata, tensors, repack=False, isolated=True) as theirs,
    ):
        assert theirs.info == mine.info
        np.testing.assert_equal(use_everything(theirs), use_everything(mine))
    turned = tensors | {"token_embd.weight": tensors["token_embd.weight"].T}
    lists = tensors | {"token_embd.weight": [1.0]}
    for arrays in (turned, lists, tensors | {"output_norm.weight": np.zeros(3, np.float32)}, {}):
        theirs_too = outcome(lambda a=arrays: Model.from_arrays(metadata, a, isolated=True))
        assert theirs_too == outcome(lambda a=arrays: Model.from_arrays(metadata, a))


def test_a_file_that_cannot_be_loaded_is_refused_as_locally(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + b"\xff" * 40)
    for file in (damaged, tmp_path / "none.gguf", b"\0", 3):
        mine = outcome(lambda f=file: Model.load(f))
        assert outcome(lambda f=file: Model.load(f, isolated=True)) == mine
    mine = outcome(lambda: Model.load(damaged, device="Nowhere"))
    assert outcome(lambda: Model.load(damaged, device="Nowhere", isolated=True)) == mine


def test_what_cannot_cross_is_refused_and_changes_nothing(
    local: Model, shared: Model, tiny_path: Path
) -> None:
    here, there = local.new_cache(), shared.new_cache()
    before = here.stats, there.stats
    with Model.load(tiny_path, isolated=True) as other:
        for model, cache in ((shared, here), (local, there), (other, there)):
            with pytest.raises(InvalidArgumentError, match="worker process"):
                model.executor(cache)
    for refused in (shared, shared._owned):
        with pytest.raises((InvalidArgumentError, TypeError)):
            Executor(refused, there)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="should_abort"):
        shared.executor(there, should_abort=lambda: False)
    with pytest.raises(UnsupportedError, match="key"):
        shared.executor(cache_key=here.publish())
    with pytest.raises(UnsupportedError, match="address"):
        shared.program()
    with pytest.raises(UnsupportedError, match="isolated=True"):
        type(shared).load(tiny_path)
    assert (here.stats, there.stats) == before


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "1"])
def test_a_timeout_is_a_number_of_seconds(timeout: Any, tiny_path: Path) -> None:
    with pytest.raises((InvalidArgumentError, TypeError), match="timeout"):
        Model.load(tiny_path, isolated=True, timeout=timeout)
    with pytest.raises(InvalidArgumentError, match="timeout is for isolated"):
        Model.load(tiny_path, timeout=1.0)


# ---- threads ----


def test_a_running_step_makes_its_own_objects_busy_and_no_others(mortal: Model) -> None:
    step = LongStep(mortal)
    with pytest.raises(BusyError):
        step.executor.run([1], step.seq)
    with pytest.raises(BusyError):
        step.cache.open()
    other = mortal.new_cache()
    assert mortal.executor(other).run([1], other.open()).shape == (1, TINY.n_vocab)
    assert step.thread.is_alive()
    step.executor.abort()
    assert step.end()[0] is AbortedError


def test_abort_reaches_a_running_step_and_its_cells_can_be_given_back(mortal: Model) -> None:
    step = LongStep(mortal)
    step.executor.abort()
    kind, _, status, n_done, _ = step.end()
    assert (kind, status) == (AbortedError, AbortedError.status)
    assert 0 <= n_done < LONG
    step.cache.undo_step()
    assert step.cache.stats.free_cells == LONG


def test_threads_share_a_worker_without_mixing_answers(shared: Model) -> None:
    errors: list[BaseException] = []

    def work(n_seqs: int) -> None:
        try:
            with shared.new_cache(capacity=8, max_seqs=n_seqs) as cache:
                for _ in range(n_seqs):
                    cache.open()
                for _ in range(50):
                    stats = cache.stats
                    assert (stats.n_seqs, stats.max_seqs) == (n_seqs, n_seqs)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
