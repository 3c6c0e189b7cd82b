"""Steps of several executors timed by turns, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np

import cellkv

Name = TypeVar("Name")
Clock = Literal["compute_us", "step_us"]

# A thread of ggml's that has no work spins for some milliseconds before it sleeps; on few cores it
# takes them from whoever is timed next.
UNTIL_THREADS_SLEEP = 0.015
STEPS_PER_TURN = 5
SECONDS_PER_TURN = 0.3


class Contender(NamedTuple):
    """One step to time: each token continues a sequence; it is undone before the next."""

    executor: cellkv.Executor
    cache: cellkv.Cache
    tokens: np.ndarray
    seqs: np.ndarray
    outputs: Sequence[int] | Literal["last", "all"] = "last"
    before_turn: Callable[[], None] = lambda: None

    def seconds(self, clock: Clock) -> float:
        """Run the step and take it back; what the executor's own clock says of it."""
        before = getattr(self.executor.stats, clock)
        self.executor.run(self.tokens, self.seqs, outputs=self.outputs)
        after = getattr(self.executor.stats, clock)
        self.cache.undo_step()
        return (after - before) / 1e6


def take_turns(
    contenders: Mapping[Name, Contender],
    clock: Clock,
    *,
    budget: float = 3.0,
    also: Callable[[], np.ndarray] = lambda: np.zeros(0),
) -> tuple[dict[Name, list[float]], np.ndarray]:
    """Time each contender's steps, a few at a turn, for about `budget` seconds in at least three
    rounds. Returns the seconds of each, and the medians of `also()`, asked once a round."""
    seconds: dict[Name, list[float]] = {name: [] for name in contenders}
    others = []
    end = time.perf_counter() + budget
    while len(others) < 3 or time.perf_counter() < end:
        time.sleep(UNTIL_THREADS_SLEEP)
        others.append(also())
        for name, contender in contenders.items():
            contender.before_turn()
            time.sleep(UNTIL_THREADS_SLEEP)
            warm_up = contender.seconds("step_us")
            n_steps = int(np.clip(SECONDS_PER_TURN / max(warm_up, 1e-6), 1, STEPS_PER_TURN))
            seconds[name] += [contender.seconds(clock) for _ in range(n_steps)]
    for contender in contenders.values():
        assert contender.executor.stats.n_attention_strayed == 0
    return seconds, np.median(others, axis=0)
