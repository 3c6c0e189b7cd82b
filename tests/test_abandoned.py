"""Requests to a worker that nobody waits for any more: their steps stop, what they make goes."""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellkv import AbortedError, Executor, Model
from cellkv._messages import Abandon, Reply, Request
from cellkv._worker import _Worker
from cellkv._worker_process import WorkerProcess
from workers import ALLOWED, LONG, LongStep, is_gone

# ---- in the worker, whose inside runs in this process here ----

TARGET, FIRST, SECOND = 1, 2, 3


class Inside:
    """A worker's inside whose only object is an executor; requests wait until they are let go."""

    def __init__(self, executor: Executor) -> None:
        self._parent, theirs = Pipe()
        self._worker = _Worker(theirs, os.getpid())
        self._worker._objects[TARGET] = executor
        self._pool = self._worker._threads
        self._waiting: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._worker._threads = types.SimpleNamespace(submit=self._hold)  # type: ignore[assignment]

    def _hold(self, call: Callable[..., object], *arguments: object) -> None:
        self._waiting.append((call, arguments))

    def request(self, number: int, name: str, *arguments: object) -> None:
        of_call = None if name == "stats" else arguments
        self._worker._take(Request(number, TARGET, name, of_call))

    def abandon(self, number: int) -> None:
        self._worker._take(Abandon(number))

    def let_go(self) -> None:
        """Has what waits answered, and whatever comes from now on, in threads."""
        self._worker._threads = self._pool
        for call, arguments in self._waiting:
            self._pool.submit(call, *arguments)

    def replies(self, n: int) -> dict[int, Reply]:
        replies = {}
        while len(replies) < n:
            assert self._parent.poll(ALLOWED), "no reply"
            reply = self._parent.recv()
            replies[reply.number] = reply
        return replies


@pytest.fixture
def local(tiny_path: Path) -> Iterator[Model]:
    with Model.load(tiny_path) as model:
        yield model


@pytest.mark.parametrize("name", ["stats", "run"])
def test_another_threads_step_goes_on(local: Model, name: str) -> None:
    step = LongStep(local)
    inside = Inside(step.executor)
    inside.request(FIRST, name, [1], step.seq)
    inside.abandon(FIRST)
    inside.let_go()
    inside.replies(1)
    step.thread.join(0.2)
    assert step.thread.is_alive()
    step.executor.abort()
    assert step.end()[0] is AbortedError


def test_of_two_runs_the_one_that_was_abandoned_is_not_the_one_that_stops(local: Model) -> None:
    with local.new_cache(capacity=LONG) as cache, local.executor(cache) as executor:
        seq = cache.open()
        inside = Inside(executor)
        inside.request(FIRST, "run", np.ones(1000, np.int32), seq)
        inside.request(SECOND, "run", [1], seq)
        inside.abandon(SECOND)
        inside.let_go()
        replies = inside.replies(2)
        assert replies[FIRST].error is None
        assert replies[SECOND] == Reply(SECOND)
        assert cache.length(seq) == 1000


def test_a_run_that_has_not_begun_places_nothing(local: Model) -> None:
    with local.new_cache() as cache, local.executor(cache) as executor:
        seq = cache.open()
        inside = Inside(executor)
        inside.request(FIRST, "run", [1, 2, 3], seq)
        inside.abandon(FIRST)
        inside.let_go()
        assert inside.replies(1) == {FIRST: Reply(FIRST)}
        assert cache.length(seq) == 0


class Late(Executor):
    """Its run is on its way into C for a while."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.is_entered, self.may_go_on = threading.Event(), threading.Event()

    def run(self, *arguments: Any, **options: Any) -> Any:
        self.is_entered.set()
        assert self.may_go_on.wait(60)
        return super().run(*arguments, **options)


def test_a_run_that_is_on_its_way_in_is_stopped_once_it_is_there(local: Model) -> None:
    with local.new_cache(capacity=LONG) as cache, Late(local, cache, n_threads=1) as executor:
        inside = Inside(executor)
        inside.let_go()
        inside.request(FIRST, "run", np.ones(LONG, np.int32), cache.open())
        assert executor.is_entered.wait(60)
        inside.abandon(FIRST)
        executor.may_go_on.wait(0.1)
        executor.may_go_on.set()
        assert isinstance(inside.replies(1)[FIRST].error, AbortedError)


# ---- in its parent ----


def interrupt_at(n: int) -> Callable[..., Any]:
    """Make a tracer that interrupts at the n-th line of a request's way out and back."""
    ways = {WorkerProcess.ask.__code__, WorkerProcess.keep.__code__}
    lines = iter(range(n))

    def trace_lines(frame: types.FrameType, event: str, _argument: object) -> Any:
        if event == "line" and next(lines, None) is None:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace_lines

    def trace(frame: types.FrameType, _event: str, _argument: object) -> Any:
        is_of_it = frame.f_code in ways or frame.f_code.co_name == "_received"
        return trace_lines if is_of_it else None

    return trace


def test_wherever_an_interrupt_comes_no_object_is_left_that_nobody_has(mortal: Model) -> None:
    worker, n_interrupted = mortal._worker, 0  # type: ignore[attr-defined]
    while True:
        tracer = sys.gettrace()
        sys.settrace(interrupt_at(n_interrupted))
        try:
            cache = mortal.new_cache()
        except KeyboardInterrupt:
            n_interrupted += 1
        else:
            break
        finally:
            sys.settrace(tracer)
        gc.collect()
        assert len(worker._objects) == 1
    assert n_interrupted > 10
    assert cache.stats.n_seqs == 0  # it serves on
    cache.close()
    mortal.close()
    assert is_gone(worker.pid)
