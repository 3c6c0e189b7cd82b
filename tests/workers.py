"""Isolated models: their worker processes, and steps that are under way in them."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tiny_gguf
from cellkv import BusyError, Model

TINY = tiny_gguf.VARIANTS["grouped"]  # without windows: a long step costs its tokens squared
LONG = 40_000  # tokens of a step of many seconds
ALLOWED = 5.0  # seconds until a worker's end has been noticed


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


def outcome(call: Callable[[], object]) -> object:
    """What a call gives or raises, all that tells exceptions apart; no numbers of handles."""
    try:
        return call()
    except Exception as error:
        words = re.sub(r"\d{6,}", "HANDLE", str(error))
        details = [getattr(error, name, None) for name in ("status", "n_done", "shortfall")]
        return type(error), words, *details


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
        while self.result is None or self.result[0] is BusyError:  # by a look of _is_busy
            self.result = outcome(self._step)

    def _step(self) -> Any:
        return self.executor.run(np.ones(LONG, np.int32), self.seq)

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
