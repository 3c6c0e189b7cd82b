"""Random verbs and steps on a cache of kind sequence, against rings that are really written.

The model knows nothing of how far back a sequence may go: it keeps each windowed layer's rows as a
storage would, and asks them whether they still hold what the next token would see.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cellkv import Cache, CellkvError, Layer
from cellkv.errors import (
    BadRangeError,
    EmptyStepError,
    NoSlotError,
    NotDeclaredError,
    NothingToUndoError,
    OutOfCellsError,
    TrimmedError,
    UnknownSequenceError,
    UnsupportedError,
)


class Model:
    """One sequence: what was written at each position, and each windowed layer's rows.

    A refusal is an exception whose arguments are what its message must have in it.
    """

    def __init__(self, capacity: int, windows: tuple[int, ...], max_step: int) -> None:
        self.capacity = capacity
        self.windows = [window for window in windows if window > 0]
        self.rings: list[list[int | None]] = [
            [None] * min(capacity, window + max_step - 1) for window in self.windows
        ]
        self.seq: int | None = None
        self.contents: list[int] = []
        self.n_declared = 0
        self.step: int | None = None  # tokens of the last placed one, while undoable
        self.n_written = 0

    def cancel(self) -> None:
        self.n_declared, self.step = 0, None

    def find(self, seq: int) -> None:
        if seq != self.seq:
            raise UnknownSequenceError(str(seq))

    def holds_what_is_seen_at(self, pos: int) -> bool:
        """Do the rows hold all earlier positions that a token at `pos` sees?"""
        return all(
            ring[p % len(ring)] == self.contents[p]
            for window, ring in zip(self.windows, self.rings, strict=True)
            for p in range(max(0, pos - window + 1), pos)
        )

    def check_end(self, pos: int) -> None:
        if not self.holds_what_is_seen_at(pos):
            ends = range(1, len(self.contents) + 1)
            oldest = next(end for end in ends if self.holds_what_is_seen_at(end))
            raise TrimmedError(f"cannot end at position {pos}", f"can be reached is {oldest}")

    def end_at(self, pos: int) -> None:
        self.check_end(pos)
        del self.contents[pos:]
        self.cancel()

    def open(self) -> None:
        if self.seq is not None:
            raise NoSlotError("all 1 ")
        self.cancel()

    def close_seq(self, seq: int) -> None:
        self.find(seq)
        self.clear()

    def clear(self) -> None:
        self.seq, self.contents = None, []
        self.cancel()

    def clone(self, seq: int, upto: int | None) -> None:
        self.find(seq)
        end = len(self.contents)
        if upto is not None and not 0 <= upto <= end:
            raise BadRangeError(str(upto), f"[0, {end})")
        raise UnsupportedError("kind sequence")

    def rewind(self, seq: int, pos: int) -> None:
        self.find(seq)
        if not 0 <= pos <= len(self.contents):
            raise BadRangeError(str(pos), f"[0, {len(self.contents)})")
        self.end_at(pos)

    def remove(self, seq: int, p0: int, p1: int | None) -> None:
        self.find(seq)
        end = len(self.contents)
        p1 = end if p1 is None else p1
        if not 0 <= p0 <= p1 <= end:
            raise BadRangeError(f"[{p0}, {p1})", f"[0, {end})")
        if p0 < p1 < end:
            raise UnsupportedError("kind sequence", f"[{p0}, {p1})")
        if p0 < p1:
            self.end_at(p0)
        self.cancel()

    def extend(self, seq: int, n: int) -> None:
        if n == 0:
            raise EmptyStepError
        self.find(seq)
        missing = n - (self.capacity - len(self.contents))
        if missing > 0:
            raise OutOfCellsError(f"needs {missing} more")
        self.cancel()
        self.n_declared = n

    def declare(self, seqs: list[int]) -> None:
        for i, seq in enumerate(seqs):
            if seq != self.seq:
                raise UnknownSequenceError(f"token {i}:", str(seq))
        self.extend(self.seq if self.seq is not None else 0, len(seqs))

    def place(self) -> list[int]:
        n = self.n_declared
        if n == 0:
            raise NotDeclaredError
        self.cancel()
        cells = list(range(len(self.contents), len(self.contents) + n))
        for cell in cells:
            self.n_written += 1
            self.contents.append(self.n_written)
            for ring in self.rings:
                ring[cell % len(ring)] = self.n_written
        self.step = n
        return cells

    def undo_step(self, n_keep: int) -> None:
        if self.step is None:
            raise NothingToUndoError
        if not 0 <= n_keep <= self.step:
            raise BadRangeError(str(n_keep), str(self.step))
        self.end_at(len(self.contents) - (self.step - n_keep))


NEAR = st.integers(-1, 9)  # to the end of the sequence


class SequenceMachine(RuleBasedStateMachine):
    """Each rule asks the cache and the model; they must agree in answers, refusals and words."""

    cache: Cache

    @initialize(
        capacity=st.integers(1, 60),
        windows=st.lists(st.integers(0, 9), max_size=3),
        max_step=st.integers(1, 6),
    )
    def start(self, capacity: int, windows: list[int], max_step: int) -> None:
        layers = [Layer(1, 8, 8, window) for window in windows]
        self.cache = Cache(
            layers, backend="cells", kind="sequence", capacity=capacity, max_step=max_step
        )
        self.model = Model(capacity, tuple(windows), max_step)
        self.dead = 1

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()

    def agree(self, verb: str, *arguments: Any) -> tuple[Any, Any]:
        """Ask both; return what the cache and what the model says, None where they refuse."""
        answers: list[Any] = []
        refusals: list[CellkvError | None] = []
        for target in (self.cache, self.model):
            try:
                answers.append(getattr(target, verb)(*arguments))
                refusals.append(None)
            except CellkvError as error:
                answers.append(None)
                refusals.append(error)
        error, refusal = refusals
        assert type(error) is type(refusal), f"{error!r}, expected {refusal!r}"
        if error is not None and refusal is not None:
            assert all(words in str(error) for words in refusal.args), f"{error}: {refusal.args}"
        return answers[0], answers[1]

    def seq(self, alive: bool = True) -> int:
        return self.model.seq if alive and self.model.seq is not None else self.dead

    @rule()
    def open(self) -> None:
        seq, _ = self.agree("open")
        if seq is not None:
            self.model.seq = seq

    @rule(really=st.integers(0, 5))
    def close_seq(self, really: int) -> None:
        if really == 0:
            seq = self.seq()
            self.agree("close_seq", seq)
            self.dead = seq

    @rule(really=st.integers(0, 5))
    def clear(self, really: int) -> None:
        if really == 0:
            self.dead = self.seq()
            self.agree("clear")

    @rule(alive=st.booleans(), upto=st.none() | st.integers(-1, 9))
    def clone(self, alive: bool, upto: int | None) -> None:
        self.agree("clone", self.seq(alive), upto)

    @rule(back=NEAR)
    def rewind_near_end(self, back: int) -> None:
        self.agree("rewind", self.seq(), len(self.model.contents) - back)

    @rule(alive=st.booleans(), pos=st.integers(-1, 61))
    def rewind(self, alive: bool, pos: int) -> None:
        self.agree("rewind", self.seq(alive), pos)

    @rule(back=NEAR, width=st.none() | NEAR)
    def remove_near_end(self, back: int, width: int | None) -> None:
        start = len(self.model.contents) - back
        self.agree("remove", self.seq(), start, None if width is None else start + width)

    @rule(n=st.integers(0, 12), by_declare=st.booleans(), alive=st.integers(0, 9))
    def declare_and_place(self, n: int, by_declare: bool, alive: int) -> None:
        """Declare, and place: what is then written lies in the rings."""
        seq = self.seq(alive > 0)
        if by_declare:
            self.agree("declare", [seq] * n)
        else:
            self.agree("extend", seq, n)
        cells, expected = self.agree("place")
        assert (None if cells is None else cells.tolist()) == expected

    @rule(n=st.integers(1, 3))
    def decode(self, n: int) -> None:
        for _ in range(4 * n):
            self.declare_and_place(1, False, 1)

    @rule(n_keep=st.integers(-1, 12))
    def undo_step(self, n_keep: int) -> None:
        self.agree("undo_step", n_keep)

    @invariant()
    def its_cells_are_its_positions(self) -> None:
        if hasattr(self, "cache") and self.model.seq is not None:
            cells, positions = self.cache.cells(self.model.seq)
            assert cells.tolist() == positions.tolist() == list(range(len(self.model.contents)))

    @invariant()
    def the_next_token_finds_all_that_it_sees(self) -> None:
        if hasattr(self, "cache"):
            assert self.model.holds_what_is_seen_at(len(self.model.contents))

    @invariant()
    def stats_are_the_models(self) -> None:
        if hasattr(self, "cache"):
            stats, n = self.cache.stats, len(self.model.contents)
            assert (stats.used_cells, stats.extent, stats.owned_cells) == (n, n, n)
            assert (stats.n_seqs, stats.max_seqs) == (int(self.model.seq is not None), 1)
            assert stats.declared_tokens == self.model.n_declared


SequenceMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestSequence = SequenceMachine.TestCase
