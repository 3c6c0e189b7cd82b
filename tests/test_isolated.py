"""Isolated models: as the local ones while their worker process lives, one exception when not."""

from __future__ import annotations

import contextlib
import enum
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
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
    CellkvError,
    ClosedError,
    Executor,
    InvalidArgumentError,
    Model,
    Output,
    TokenizerError,
    UnsupportedError,
    WorkerDiedError,
    isolated,
)
from cellkv._owned import Owner
from cellkv._worker_process import WorkerProcess
from cellkv.isolated import IsolatedCache, IsolatedExecutor, IsolatedModel

TINY = tiny_gguf.VARIANTS["grouped"]  # without windows: a long step costs its tokens squared
PROXIES = {Model: IsolatedModel, Cache: IsolatedCache, Executor: IsolatedExecutor}
LONG = 40_000  # tokens of a step of many seconds
ALLOWED = 5.0  # seconds until a worker's end has been noticed


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write_tiny(tmp_path_factory.mktemp("isolated") / "tiny.gguf", TINY)


@pytest.fixture(scope="module")
def local(path: Path) -> Iterator[Model]:
    with Model.load(path) as model:
        yield model


@pytest.fixture(scope="module")
def shared(path: Path) -> Iterator[Model]:
    """An isolated model for tests that leave it alive."""
    with Model.load(path, isolated=True) as model:
        yield model


@pytest.fixture
def mortal(path: Path) -> Iterator[Model]:
    """An isolated model of the test's own."""
    with Model.load(path, isolated=True) as model:
        yield model


def worker_of(owner: Any) -> int:
    return int(owner._worker.pid)


def is_gone(pid: int) -> bool:
    """Whether the process ends within the allowed time, and is reaped: no zombie is left."""
    deadline = time.monotonic() + ALLOWED
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


# ---- as the local ones ----


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


def outcome(call: Callable[[], object]) -> object:
    """What a call gives or raises, all that tells exceptions apart; no numbers of handles."""
    try:
        return call()
    except Exception as error:
        words = re.sub(r"\d{6,}", "HANDLE", str(error))
        details = [getattr(error, name, None) for name in ("status", "n_done", "shortfall")]
        return type(error), words, *details


def test_everything_gives_what_it_gives_locally_bit_for_bit(local: Model, path: Path) -> None:
    with Model.load(path, isolated=True) as model:
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
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[tuple[type, str]] = set()
    ask = isolated._ask

    def record(proxy: Any, name: str, *rest: Any) -> Any:
        asked.add((type(proxy).__base__, name))
        return ask(proxy, name, *rest)

    monkeypatch.setattr(isolated, "_ask", record)
    with Model.load(path, isolated=True) as model:
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
    local: Model, shared: Model, path: Path
) -> None:
    here, there = local.new_cache(), shared.new_cache()
    before = here.stats, there.stats
    with Model.load(path, isolated=True) as other:
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
        type(shared).load(path)
    assert (here.stats, there.stats) == before


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "1"])
def test_a_timeout_is_a_number_of_seconds(timeout: Any, path: Path) -> None:
    with pytest.raises((InvalidArgumentError, TypeError), match="timeout"):
        Model.load(path, isolated=True, timeout=timeout)
    with pytest.raises(InvalidArgumentError, match="timeout is for isolated"):
        Model.load(path, timeout=1.0)


# ---- threads ----


class LongStep:
    """A step of many seconds in a thread of its own, under way once this is made."""

    def __init__(self, model: Model, capacity: int = LONG) -> None:
        self.cache = model.new_cache(capacity=capacity, max_seqs=2, kind="batched_cell")
        self.executor = model.executor(self.cache, n_threads=1, isa="c")
        self.seq = self.cache.open()
        self.result: Any = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        deadline = time.monotonic() + 60
        while not self._is_busy():
            assert self.thread.is_alive()
            assert time.monotonic() < deadline

    def _run(self) -> None:
        self.result = outcome(lambda: self.executor.run(np.ones(LONG, np.int32), self.seq))

    def _is_busy(self) -> bool:
        with contextlib.suppress(BusyError):
            _ = self.cache.stats
            return False
        return True

    def end(self) -> Any:
        """What the step raised; it must have ended within the allowed time."""
        self.thread.join(ALLOWED)
        assert not self.thread.is_alive()
        return self.result


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


# ---- a worker's end ----


def answers(model: Model) -> np.ndarray:
    cache = model.new_cache(capacity=64)
    executor = model.executor(cache)
    seq = cache.open()
    return np.concatenate([executor.run([1, 2, 3], seq), executor.run([4], seq)])


def test_a_worker_killed_in_mid_step_raises_and_a_new_one_serves_on(path: Path) -> None:
    model = Model.load(path, isolated=True)
    before = answers(model)
    step = LongStep(model)
    os.kill(worker_of(model), signal.SIGKILL)
    kind, words, status, _, _ = step.end()
    assert (kind, status) == (WorkerDiedError, None)
    assert "SIGKILL" in words
    with Model.load(path, isolated=True) as again:
        np.testing.assert_array_equal(answers(again), before)


def test_every_object_of_a_dead_worker_says_so_at_once_and_closes_quietly(mortal: Model) -> None:
    cache = mortal.new_cache()
    executor = mortal.executor(cache)
    seq, info, pid = cache.open(), mortal.info, worker_of(mortal)
    os.kill(pid, signal.SIGABRT)
    assert is_gone(pid)
    calls: list[Callable[[], object]] = [
        cache.open,
        lambda: cache.stats,
        lambda: executor.run([1], seq),
        executor.abort,
        lambda: executor.stats,
        lambda: mortal.executor(cache),
        mortal.new_cache,
    ]
    for call in calls:
        started = time.monotonic()
        with pytest.raises(WorkerDiedError, match="SIGABRT"):
            call()
        assert time.monotonic() - started < 1.0
    assert (mortal.info, executor.n_result) == (info, TINY.n_vocab)
    for owner in (mortal, cache, executor):
        owner.close()
        owner.close()
        assert owner.closed
    with pytest.raises(ClosedError):
        cache.open()


def test_a_worker_that_hangs_is_ended_after_the_timeout(path: Path) -> None:
    model = Model.load(path, isolated=True, timeout=20.0)
    cache, pid = model.new_cache(), worker_of(model)
    model._worker._timeout = 0.5  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    large = np.ones(1_000_000, np.int64)  # more than the pipe takes
    with pytest.raises(WorkerDiedError, match=r"no answer to declare within 0\.5 s"):
        cache.declare(large)
    assert time.monotonic() - started < ALLOWED
    assert is_gone(pid)
    with pytest.raises(WorkerDiedError, match="no answer"):
        cache.open()


def test_a_step_beyond_the_timeout_ends_its_worker(path: Path) -> None:
    model = Model.load(path, isolated=True, timeout=20.0)
    cache = model.new_cache(capacity=LONG)
    executor = model.executor(cache, n_threads=1, isa="c")
    model._worker._timeout = 1.0  # type: ignore[attr-defined]
    with pytest.raises(WorkerDiedError, match="no answer to run within 1 s"):
        executor.run(np.ones(LONG, np.int32), cache.open())
    assert is_gone(worker_of(model))


def test_the_exception_ends_with_the_last_that_the_worker_wrote(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CELLKV_LIBRARY", "/nowhere/no-library.so")
    with pytest.raises(WorkerDiedError) as caught:
        Model.load(path, isolated=True)
    assert "exit status 1; the last it wrote:\n" in str(caught.value)
    assert "ImportError: cellkv's C library cannot be loaded" in str(caught.value)
    assert "no-library.so" in capfd.readouterr().err


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the environment from /proc")
def test_a_worker_that_ggml_ends_does_not_wait_for_a_debugger(shared: Model) -> None:
    environment = Path(f"/proc/{worker_of(shared)}/environ").read_bytes().split(b"\0")
    assert b"GGML_NO_BACKTRACE=1" in environment


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("drop", [False, True])
def test_the_worker_ends_with_the_last_of_its_objects(
    order: tuple[int, ...], drop: bool, path: Path
) -> None:
    model = Model.load(path, isolated=True)
    pid, cache = worker_of(model), model.new_cache()
    objects: dict[int, Owner] = {0: model, 1: cache, 2: model.executor(cache)}
    seq = cache.open()
    del model, cache
    for i in order:
        if 2 in objects and not (drop and 1 not in objects):
            objects[2].run([1], seq)  # type: ignore[attr-defined]
        assert not os.kill(pid, 0)
        owner = objects.pop(i)
        if not drop:
            owner.close()
        del owner
        gc.collect()
    assert is_gone(pid)


def test_closing_during_a_step_lets_it_go_on(mortal: Model) -> None:
    step = LongStep(mortal)
    step.cache.close()
    mortal.close()
    executor = step.executor
    assert step.thread.is_alive()
    executor.abort()
    assert step.end()[0] is AbortedError


def test_a_refused_load_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    init = WorkerProcess.__init__

    def record(self: WorkerProcess, timeout: float | None) -> None:
        init(self, timeout)
        pids.append(self.pid)

    monkeypatch.setattr(WorkerProcess, "__init__", record)
    with pytest.raises(CellkvError):
        Model.load(tmp_path / "none.gguf", isolated=True)
    assert len(pids) == 1
    assert is_gone(pids[0])


# ---- the parent's end, in processes of its own ----

SETTING = """
import os, signal, sys, threading, time
sys.path[:0] = {paths!r}
import numpy as np
from cellkv import CellkvError, Model
model = Model.load({model!r}, isolated=True)
cache = model.new_cache(capacity=40000)
executor = model.executor(cache, n_threads=1, isa="c")
seq = cache.open()
print(model._worker.pid, flush=True)
"""
LONG_RUN = "executor.run(np.ones(40000, np.int32), seq)"


@pytest.fixture
def start(path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], int]]]:
    """Start Python on a script after SETTING, by default with no `__main__` to import again."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, by: str = "-c") -> tuple[subprocess.Popen[str], int]:
        paths = [entry for entry in sys.path if entry]
        code = SETTING.format(paths=paths, model=str(path)) + textwrap.dedent(script)
        process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "error", *(["-c", code] if by == "-c" else ["-i"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        if by != "-c":
            process.stdin.write(code + "\n")
            process.stdin.flush()
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_objects_may_be_alive_at_exit(start: Any) -> None:
    process, worker = start("held = [model, cache, executor]; held.append(held)")
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
    assert is_gone(worker)


def test_an_interactive_interpreter_may_isolate(start: Any) -> None:
    process, worker = start("print(executor.run([1, 2], seq).shape)\n", by="-i")
    printed, _ = process.communicate(timeout=60)
    assert "(1, 97)" in printed
    assert is_gone(worker)


def test_a_step_in_a_daemon_thread_at_exit_is_ended(start: Any) -> None:
    process, worker = start(
        f"""
        def work():
            try:
                {LONG_RUN}
            except CellkvError:
                pass
        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)
        """
    )
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
    assert is_gone(worker)


def test_ctrl_c_stops_a_step_and_the_worker_serves_on(start: Any) -> None:
    process, worker = start(
        f"""
        try:
            print("running", flush=True)
            {LONG_RUN}
        except KeyboardInterrupt:
            cache.undo_step()
            print(cache.stats.free_cells, executor.run([1], seq).shape)
        """
    )
    assert process.stdout.readline() == "running\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=ALLOWED) == ("40000 (1, 97)\n", "")
    assert is_gone(worker)


def test_ctrl_c_reaches_a_caller_whose_worker_hangs(start: Any) -> None:
    process, worker = start(
        """
        os.kill(model._worker.pid, signal.SIGSTOP)
        print("running", flush=True)
        executor.run([1], seq)
        """
    )
    assert process.stdout.readline() == "running\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=ALLOWED)
    assert "KeyboardInterrupt" in errors
    assert is_gone(worker)


@pytest.mark.parametrize("script", ["time.sleep(60)", LONG_RUN])
def test_a_worker_ends_with_its_parent(script: str, start: Any) -> None:
    process, worker = start(f"print('running', flush=True)\n{script}")
    assert process.stdout.readline() == "running\n"
    time.sleep(0.5)
    process.kill()
    process.wait()
    assert is_gone(worker)


FORK = """
import warnings
warnings.simplefilter("ignore")  # of a fork while there are threads
child = os.fork()
"""


def test_a_worker_ends_with_its_parent_though_a_fork_holds_its_socket(start: Any) -> None:
    process, worker = start(
        FORK
        + textwrap.dedent(
            """
            if child == 0:
                time.sleep(60)
            print(child, flush=True)
            time.sleep(60)
            """
        )
    )
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    assert is_gone(worker)
    os.kill(child, signal.SIGKILL)


def test_a_fork_of_the_parent_is_refused_and_leaves_the_worker_alone(start: Any) -> None:
    process, worker = start(
        FORK
        + textwrap.dedent(
            """
        if child == 0:
            try:
                cache.open()
            except CellkvError as error:
                print(error, flush=True)
            for owner in (executor, cache, model):
                owner.close()
            sys.exit(0)
        os.waitpid(child, 0)
        print(executor.run([1], seq).shape)
        """
        )
    )
    printed, errors = process.communicate(timeout=60)
    assert "cannot be used in a fork" in printed
    assert "(1, 97)" in printed, errors
    assert is_gone(worker)
