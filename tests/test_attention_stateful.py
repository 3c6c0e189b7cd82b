"""Random verbs and steps on a cache with rows, against naive attention in float64.

Executors of both strategies take the steps in turn, over one cache.
"""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cellkv import Executor, NoSlotError, OutOfCellsError
from table_program import random_tables
from world import RAGGED_TOLERANCE, World, dense_tolerance

CAPACITY = 300
MAX_SEQS = 7
SHAPE = {"n_heads": 4, "n_kv_heads": 2, "head_dim_k": 32, "head_dim_v": 32}
TABLES = random_tables(np.random.default_rng(31), (0, 6), **SHAPE)


class AttentionMachine(RuleBasedStateMachine):
    """Sequences are named by numbers; the oracle has them in `world.truth`."""

    @initialize(
        type_name=st.sampled_from(["f32", "f16", "q8_0"]), max_batch=st.sampled_from([5, 512])
    )
    def start(self, type_name: str, max_batch: int) -> None:
        self.held = contextlib.ExitStack()
        self.world = self.held.enter_context(
            World(TABLES, type_k=type_name, type_v=type_name, capacity=CAPACITY, strategy="dense")
        )
        self.ragged = self.held.enter_context(
            Executor(
                self.world.program.address,
                self.world.cache,
                strategy="ragged",
                n_threads=2,
                max_batch=max_batch,
            )
        )
        self.executors = {"dense": self.world.executor, "ragged": self.ragged}
        self.tolerances = {
            "dense": dense_tolerance(type_name, type_name),
            "ragged": RAGGED_TOLERANCE,
        }
        self.n_opened = 0
        self.rows = 1  # that must do for all cells that were ever used at once

    def teardown(self) -> None:
        if hasattr(self, "held"):
            self.world.executor = self.executors["dense"]
            self.held.close()

    def pick(self, which: int) -> str:
        names = sorted(self.world.truth)
        return names[which % len(names)]

    def new_name(self) -> str:
        self.n_opened += 1
        return str(self.n_opened)

    def is_any(self) -> bool:
        return hasattr(self, "world") and bool(self.world.truth)

    def has_room(self) -> bool:
        return self.is_any() and len(self.world.truth) < MAX_SEQS

    @rule()
    def open(self) -> None:
        if len(self.world.truth) < MAX_SEQS:
            self.world.open(self.new_name())

    @precondition(has_room)
    @rule(which=st.integers(0, 50), back=st.integers(0, 40))
    def clone(self, which: int, back: int) -> None:
        source = self.pick(which)
        upto = max(0, self.world.truth[source].next_pos - back)
        with contextlib.suppress(NoSlotError):
            self.world.clone(source, self.new_name(), upto)

    @precondition(is_any)
    @rule(which=st.integers(0, 50), back=st.integers(0, 40))
    def rewind(self, which: int, back: int) -> None:
        name = self.pick(which)
        self.world.rewind(name, max(0, self.world.truth[name].next_pos - back))

    @precondition(is_any)
    @rule(which=st.integers(0, 50), back=st.integers(0, 40), width=st.integers(0, 12))
    def remove(self, which: int, back: int, width: int) -> None:
        name = self.pick(which)
        end = self.world.truth[name].next_pos
        begin = max(0, end - back)
        self.world.remove(name, begin, min(begin + width, end))

    @precondition(is_any)
    @rule(which=st.integers(0, 50))
    def close(self, which: int) -> None:
        self.world.close(self.pick(which))

    @precondition(is_any)
    @rule(
        which=st.lists(st.integers(0, 50), min_size=1, max_size=12),
        times=st.sampled_from([1, 1, 1, 7]),
        strategy=st.sampled_from(["dense", "ragged"]),
        undone=st.booleans(),
    )
    def step(self, which: list[int], times: int, strategy: str, undone: bool) -> None:
        names = [self.pick(i) for i in which] * times
        world = self.world
        world.executor, world.tolerance = self.executors[strategy], self.tolerances[strategy]
        with contextlib.suppress(OutOfCellsError):
            if undone:
                seqs = [world.handles[name] for name in names]
                world.executor.run(world.random_tokens(len(names)), seqs)
                self.check_rows()
                world.cache.undo_step()
            world.step(names)
            self.check_rows()

    def check_rows(self) -> None:
        """Check that rows grew by doubling, and only where the cells below did not suffice."""
        stats = self.world.cache.stats
        while self.rows < stats.used_cells:
            self.rows *= 2
        assert stats.rows == min(self.rows, CAPACITY)


TestAttention = AttentionMachine.TestCase
TestAttention.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
