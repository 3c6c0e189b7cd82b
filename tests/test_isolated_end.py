"""What happens when the worker process of an isolated model ends, or the process that uses it."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellkv import AbortedError, CellkvError, ClosedError, Model, WorkerDiedError
from cellkv._owned import Owner
from cellkv._worker_process import WorkerProcess
from workers import ALLOWED, LONG, TINY, LongStep, is_gone, worker_of

# ---- a worker's end ----


def answers(model: Model) -> np.ndarray:
    cache = model.new_cache(capacity=64)
    executor = model.executor(cache)
    seq = cache.open()
    return np.concatenate([executor.run([1, 2, 3], seq), executor.run([4], seq)])


def test_a_worker_killed_in_mid_step_raises_and_a_new_one_serves_on(tiny_path: Path) -> None:
    model = Model.load(tiny_path, isolated=True)
    before = answers(model)
    step = LongStep(model)
    os.kill(worker_of(model), signal.SIGKILL)
    kind, words, status, _, _ = step.end()
    assert (kind, status) == (WorkerDiedError, None)
    assert "SIGKILL" in words
    with Model.load(tiny_path, isolated=True) as again:
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


def test_a_worker_that_hangs_is_ended_after_the_timeout(tiny_path: Path) -> None:
    model = Model.load(tiny_path, isolated=True, timeout=20.0)
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


def test_a_step_beyond_the_timeout_ends_its_worker(tiny_path: Path) -> None:
    model = Model.load(tiny_path, isolated=True, timeout=20.0)
    cache = model.new_cache(capacity=LONG)
    executor = model.executor(cache, n_threads=1, isa="c")
    model._worker._timeout = 1.0  # type: ignore[attr-defined]
    with pytest.raises(WorkerDiedError, match="no answer to run within 1 s"):
        executor.run(np.ones(LONG, np.int32), cache.open())
    assert is_gone(worker_of(model))


def test_the_exception_ends_with_the_last_that_the_worker_wrote(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CELLKV_LIBRARY", "/nowhere/no-library.so")
    with pytest.raises(WorkerDiedError) as caught:
        Model.load(tiny_path, isolated=True)
    assert "exit status 1; the last it wrote:\n" in str(caught.value)
    assert "ImportError: cellkv's C library cannot be loaded" in str(caught.value)
    assert "no-library.so" in capfd.readouterr().err


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the environment from /proc")
def test_a_worker_that_ggml_ends_does_not_wait_for_a_debugger(mortal: Model) -> None:
    environment = Path(f"/proc/{worker_of(mortal)}/environ").read_bytes().split(b"\0")
    assert b"GGML_NO_BACKTRACE=1" in environment


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("drop", [False, True])
def test_the_worker_ends_with_the_last_of_its_objects(
    order: tuple[int, ...], drop: bool, tiny_path: Path
) -> None:
    model = Model.load(tiny_path, isolated=True)
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
def start(tiny_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], int]]]:
    """Start Python on a script after SETTING, by default with no `__main__` to import again."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, by: str = "-c") -> tuple[subprocess.Popen[str], int]:
        paths = [entry for entry in sys.path if entry]
        code = SETTING.format(paths=paths, model=str(tiny_path)) + textwrap.dedent(script)
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
