"""Random verbs and steps on a cache of cells, against a plain dictionary model of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cellkv import Cache, CellkvError, Layer
from cellkv.errors import (
    BadPositionError,
    BadRangeError,
    EmptyStepError,
    NoSlotError,
    NotDeclaredError,
    NothingToUndoError,
    NotWindowedError,
    OutOfCellsError,
    TrimmedError,
    UnknownSequenceError,
)

BLOCK = 256  # cells that a sequence has for itself where there are any
NO_HANDLES = [-1, 0, 1, 2**31 - 1, 2**63 - 1, -(2**63)]

# ---- the model ----


@dataclass
class Owned:
    """What a sequence owns: the cell at each position, and what was put there."""

    cells: dict[int, int] = field(default_factory=dict)
    contents: dict[int, int] = field(default_factory=dict)
    trimmed: int = 0  # positions below it may be missing because of trims

    def next_pos(self) -> int:
        return max(self.cells, default=-1) + 1

    def last_cell(self) -> int | None:
        return self.cells[max(self.cells)] if self.cells else None

    def keep(self, positions: set[int]) -> None:
        self.cells = {p: c for p, c in self.cells.items() if p in positions}
        self.contents = {p: c for p, c in self.contents.items() if p in positions}
        if not self.cells:
            self.trimmed = 0


class Model:
    """The verbs of a cache, as slow and as plain as can be.

    A refusal is an exception whose arguments are what its message must have in it.
    """

    def __init__(self, capacity: int, max_seqs: int, windows: Sequence[int]) -> None:
        self.capacity = capacity
        self.max_seqs = max_seqs
        self.windows = windows
        self.owned: dict[int, Owned] = {}
        self.declared: list[int] = []
        self.step: list[tuple[int, int]] | None = None  # the last placed one, while undoable
        self.n_written = 0

    def cancel(self) -> None:
        self.declared, self.step = [], None

    def used(self) -> set[int]:
        return {cell for owned in self.owned.values() for cell in owned.cells.values()}

    def free(self) -> list[int]:
        return sorted(set(range(self.capacity)) - self.used())

    def limit(self, n: int) -> int:
        """Below which cells n more tokens must find theirs: one row, doubled as often as needed."""
        used, rows = self.used(), 1
        while rows < len(used) + n or rows <= max(used, default=-1):
            rows *= 2
        return min(rows, self.capacity)

    def choose(self, owned: Owned, free: set[int]) -> int:
        """Choose the sequence's next cell of those that are free."""
        last = owned.last_cell()
        blocks = [range(b, min(b + BLOCK, self.capacity)) for b in range(0, self.capacity, BLOCK)]
        firsts = [block[0] for block in blocks if free.issuperset(block)]
        if last is not None:
            if (last + 1) % BLOCK and last + 1 in free:
                return last + 1
            after = (last // BLOCK + 1) * BLOCK
            if after in firsts:
                return after
        return min(firsts or free)

    def find(self, seq: int) -> Owned:
        if seq not in self.owned:
            raise UnknownSequenceError(str(seq))
        return self.owned[seq]

    def check_slot(self) -> None:
        if len(self.owned) == self.max_seqs:
            raise NoSlotError(str(self.max_seqs))

    def check_trimmed(self, owned: Owned, kept: set[int], pos: int) -> None:
        """May the sequence end with these positions, asked to keep what is before pos?"""
        if owned.trimmed == 0 or pos == 0:
            return
        reach = max(self.windows) - 1  # how far its next token looks back
        ends = [end for end in (p + 1 for p in owned.cells) if end - reach >= owned.trimmed]
        if not kept or max(kept) + 1 not in ends:
            raise TrimmedError(f"reached is {min(ends)}")

    def open(self) -> Owned:
        self.check_slot()
        self.cancel()
        return Owned()

    def clone(self, src: int, upto: int | None) -> Owned:
        source = self.find(src)
        end = source.next_pos()
        upto = end if upto is None else upto
        if not 0 <= upto <= end:
            raise BadRangeError(str(upto), f"[0, {end})")
        kept = {p for p in source.cells if p < upto}
        self.check_trimmed(source, kept, upto)
        self.check_slot()
        self.cancel()
        clone = Owned(dict(source.cells), dict(source.contents), source.trimmed)
        clone.keep(kept)
        return clone

    def rewind(self, seq: int, pos: int) -> None:
        owned = self.find(seq)
        if not 0 <= pos <= owned.next_pos():
            raise BadRangeError(str(pos), f"[0, {owned.next_pos()})")
        kept = {p for p in owned.cells if p < pos}
        self.check_trimmed(owned, kept, pos)
        owned.keep(kept)
        self.cancel()

    def remove(self, seq: int, p0: int, p1: int | None) -> None:
        owned = self.find(seq)
        end = owned.next_pos()
        p1 = end if p1 is None else p1
        if not 0 <= p0 <= p1 <= end:
            raise BadRangeError(f"[{p0}, {p1})", f"[0, {end})")
        kept = {p for p in owned.cells if not p0 <= p < p1}
        if len(kept) < len(owned.cells) and end - 1 not in kept:
            self.check_trimmed(owned, kept, p0)
        owned.keep(kept)
        self.cancel()

    def close_seq(self, seq: int) -> None:
        self.find(seq)
        del self.owned[seq]
        self.cancel()

    def clear(self) -> None:
        self.owned.clear()
        self.cancel()

    def trim_windows(self) -> int:
        if not self.windows:
            raise NotWindowedError("no layers")
        if 0 in self.windows:
            raise NotWindowedError(f"layer {self.windows.index(0)}")
        n_used = len(self.used())
        for owned in self.owned.values():
            last = owned.next_pos() - 1
            dropped = {p for p in owned.cells if p <= last - max(self.windows) + 1 and p < last}
            if dropped:
                owned.keep(set(owned.cells) - dropped)
                owned.trimmed = max(dropped) + 1
        self.cancel()
        return n_used - len(self.used())

    def declare(self, seqs: list[int]) -> None:
        if not seqs:
            raise EmptyStepError
        for i, seq in enumerate(seqs):
            if seq not in self.owned:
                raise UnknownSequenceError(f"token {i}:", str(seq))
        missing = len(seqs) - len(self.free())
        if missing > 0:
            raise OutOfCellsError(f"needs {missing} more")
        self.cancel()
        self.declared = list(seqs)

    def expected_positions(self) -> list[int]:
        ends = {seq: self.owned[seq].next_pos() for seq in self.declared}
        positions = []
        for seq in self.declared:
            positions.append(ends[seq])
            ends[seq] += 1
        return positions

    def place(self, positions: list[int] | None, n: int | None) -> list[int]:
        n_given = len(positions) if positions is not None else n
        if not self.declared or (n_given is not None and n_given != len(self.declared)):
            raise NotDeclaredError
        expected = self.expected_positions()
        for i, (want, given) in enumerate(zip(expected, positions or expected, strict=True)):
            if want != given:
                raise BadPositionError(
                    f"token {i} ", str(self.declared[i]), f"{want} expected, {given} given"
                )
        step = list(zip(self.declared, expected, strict=True))
        free = {cell for cell in self.free() if cell < self.limit(len(step))}
        self.cancel()
        cells = []
        for seq, position in step:
            cells.append(self.choose(self.owned[seq], free))
            free.remove(cells[-1])
            self.n_written += 1
            self.owned[seq].cells[position] = cells[-1]
            self.owned[seq].contents[position] = self.n_written
        self.step = step
        return cells

    def undo_step(self, n_keep: int) -> None:
        if self.step is None:
            raise NothingToUndoError
        if not 0 <= n_keep <= len(self.step):
            raise BadRangeError(str(n_keep), str(len(self.step)))
        for seq, position in self.step[n_keep:]:
            self.owned[seq].keep(set(self.owned[seq].cells) - {position})
        self.cancel()

    def can_extend(self, n: int) -> bool:
        return n <= len(self.free())

    def length(self, seq: int) -> int:
        return len(self.find(seq).cells)

    def next_pos(self, seq: int) -> int:
        return self.find(seq).next_pos()


# ---- the machine ----

WINDOWS = [(1,), (2,), (3, 1), (4, 5), (), (2, 0)]
WHICH = st.integers(0, 99)  # of the open sequences; the last ten: no open one
POSITION = st.integers(-1, 20)
BACK = ["clone", "rewind", "remove"]
NEAR = st.integers(-1, 6)  # to the end of a sequence


def ask(target: Any, verb: str, arguments: tuple[Any, ...]) -> tuple[Any, CellkvError | None]:
    try:
        return getattr(target, verb)(*arguments), None
    except CellkvError as error:
        return None, error


class CellsMachine(RuleBasedStateMachine):
    """Each rule asks the cache and the model; they must agree in answers, refusals and words."""

    cache: Cache

    @initialize(
        capacity=st.integers(1, 40), max_seqs=st.integers(1, 7), windows=st.sampled_from(WINDOWS)
    )
    def start(self, capacity: int, max_seqs: int, windows: tuple[int, ...]) -> None:
        layers = [Layer(1, 8, 8, window) for window in windows]
        self.cache = Cache(layers, backend="cells", capacity=capacity, max_seqs=max_seqs)
        self.model = Model(capacity, max_seqs, windows)
        self.other = Cache(backend="cells", capacity=1, max_seqs=1)
        self.dead = [*NO_HANDLES, self.other.open()]  # handles that name no sequence of this cache
        self.contents = [0] * capacity  # of the rows, as a storage would hold them

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
            self.other.close()

    def agree(self, verb: str, *arguments: Any) -> tuple[Any, Any]:
        """Ask both; return what the cache and what the model says, None where they refuse."""
        expected, refusal = ask(self.model, verb, arguments)
        actual, error = ask(self.cache, verb, arguments)
        assert type(error) is type(refusal), f"{error!r}, expected {refusal!r}"
        if error is not None and refusal is not None:
            assert all(words in str(error) for words in refusal.args), f"{error}: {refusal.args}"
        if isinstance(error, OutOfCellsError):
            assert error.shortfall == len(arguments[0]) - len(self.model.free())
        return actual, expected

    def pick(self, which: int) -> int:
        alive = list(self.model.owned)
        if which >= 90 or not alive:
            return self.dead[which % len(self.dead)]
        return alive[which % len(alive)]

    def near_end(self, seq: int, back: int) -> int:
        owned = self.model.owned.get(seq)
        return (owned.next_pos() if owned else 0) - back

    def adopt(self, seq: int | None, owned: Owned | None) -> None:
        if seq is not None:
            assert owned is not None
            assert seq > 0
            assert seq not in self.model.owned
            assert seq not in self.dead
            self.model.owned[seq] = owned

    # ---- sequences ----

    @rule()
    def open(self) -> None:
        self.adopt(*self.agree("open"))

    @rule(which=WHICH, upto=st.none() | POSITION)
    def clone(self, which: int, upto: int | None) -> None:
        self.adopt(*self.agree("clone", self.pick(which), upto))

    @rule(which=WHICH, back=NEAR)
    def clone_near_end(self, which: int, back: int) -> None:
        seq = self.pick(which)
        self.adopt(*self.agree("clone", seq, self.near_end(seq, back)))

    @rule(which=WHICH, pos=POSITION)
    def rewind(self, which: int, pos: int) -> None:
        self.agree("rewind", self.pick(which), pos)

    @rule(which=WHICH, back=NEAR)
    def rewind_near_end(self, which: int, back: int) -> None:
        seq = self.pick(which)
        self.agree("rewind", seq, self.near_end(seq, back))

    @rule(which=WHICH, p0=POSITION, p1=st.none() | POSITION)
    def remove(self, which: int, p0: int, p1: int | None) -> None:
        self.agree("remove", self.pick(which), p0, p1)

    @rule(which=WHICH, back=NEAR, width=NEAR)
    def remove_near_end(self, which: int, back: int, width: int) -> None:
        seq = self.pick(which)
        start = self.near_end(seq, back)
        self.agree("remove", seq, start, start + width)

    @rule(which=WHICH)
    def close_seq(self, which: int) -> None:
        seq = self.pick(which)
        self.agree("close_seq", seq)
        self.dead.append(seq)

    @rule(really=st.integers(0, 4))
    def clear(self, really: int) -> None:
        if really == 0:
            self.dead.extend(self.model.owned)
            self.agree("clear")

    @rule()
    def trim_windows(self) -> None:
        actual, expected = self.agree("trim_windows")
        assert actual == expected

    @precondition(lambda self: self.model.windows and 0 not in self.model.windows)
    @rule(which=WHICH, n=st.integers(1, 6), off=st.integers(-2, 2), verb=st.sampled_from(BACK))
    def trim_and_go_back(self, which: int, n: int, off: int, verb: str) -> None:
        """Ask for an end about the oldest one that trims have left, also of a clone."""
        self.extend(which, n)
        self.trim_windows()
        seq = self.pick(which)
        self.adopt(*self.agree("clone", seq, None))
        self.extend(which, n)
        trimmed = [s for s, owned in self.model.owned.items() if owned.trimmed]
        for seq in trimmed:
            oldest_end = self.model.owned[seq].trimmed + max(self.model.windows) - 1
            if verb == "clone":
                self.adopt(*self.agree(verb, seq, oldest_end + off))
            elif verb == "rewind":
                self.agree(verb, seq, oldest_end + off)
            else:
                self.agree(verb, seq, oldest_end + off, None)

    # ---- steps ----

    @rule(which=st.lists(WHICH, max_size=8))
    def declare(self, which: list[int]) -> None:
        self.agree("declare", [self.pick(w) for w in which])

    def place_and_write(self, positions: list[int] | None, n: int | None) -> None:
        used, limit = self.model.used(), self.model.limit(len(self.model.declared))
        lasts = {seq: owned.last_cell() for seq, owned in self.model.owned.items()}
        cells, expected = self.agree("place", positions, n)
        if cells is None:
            return
        assert self.model.step is not None
        self.check_promises(cells.tolist(), used, limit, lasts)
        assert cells.tolist() == expected
        for cell, (seq, position) in zip(expected, self.model.step, strict=True):
            self.contents[cell] = self.model.owned[seq].contents[position]

    def check_promises(
        self, cells: list[int], used: set[int], limit: int, lasts: dict[int, int | None]
    ) -> None:
        """Check what a placement promises, whichever cells the model would choose.

        `used`, `limit` and each sequence's last cell are those before it.
        """
        assert self.cache.stats.extent <= limit
        taken = set(used)
        for (seq, _), cell in zip(self.model.step or [], cells, strict=True):
            last = lasts[seq]
            if last is not None and (last + 1) % BLOCK and last + 1 < limit:
                assert cell == last + 1 or last + 1 in taken
            assert cell not in taken
            taken.add(cell)
            lasts[seq] = cell

    @rule(n=st.none() | st.integers(0, 8))
    def place(self, n: int | None) -> None:
        self.place_and_write(None, n)

    @precondition(lambda self: self.model.declared)
    @rule(errors=st.dictionaries(st.integers(0, 7), st.integers(-2, 2), max_size=2))
    def place_at_positions(self, errors: dict[int, int]) -> None:
        positions = self.model.expected_positions()
        for i, error in errors.items():
            positions[i % len(positions)] += error
        self.place_and_write(positions, None)

    @rule(which=st.integers(0, 89), n=st.integers(1, 6))
    def extend(self, which: int, n: int) -> None:
        """Lengthen a sequence in one go, so that histories grow."""
        if self.model.owned:
            self.agree("declare", [self.pick(which)] * n)
            if self.model.declared:
                self.place_and_write(None, None)

    @rule()
    def extend_all(self) -> None:
        """Do what a decode step does: one token of each sequence."""
        self.agree("declare", list(self.model.owned))
        if self.model.declared:
            self.place_and_write(None, None)

    @rule(n_keep=st.integers(-1, 7))
    def undo_step(self, n_keep: int) -> None:
        self.agree("undo_step", n_keep)

    # ---- what holds at any time ----

    @rule(which=WHICH, n=st.integers(0, 41))
    def read(self, which: int, n: int) -> None:
        seq = self.pick(which)
        for verb, argument in (("length", seq), ("next_pos", seq), ("can_extend", n)):
            actual, expected = self.agree(verb, argument)
            assert actual == expected
        if seq not in self.model.owned:
            with pytest.raises(UnknownSequenceError):
                self.cache.cells(seq)

    @invariant()
    def owns_what_the_model_says(self) -> None:
        if not hasattr(self, "cache"):
            return
        for seq, owned in self.model.owned.items():
            cells, positions = self.cache.cells(seq)
            assert positions.tolist() == sorted(owned.cells)
            assert cells.tolist() == [owned.cells[p] for p in sorted(owned.cells)]

    @invariant()
    def rows_hold_what_each_sequence_wrote(self) -> None:
        """No sequence's cell was given to another: what a query would see is its own history."""
        if not hasattr(self, "cache"):
            return
        for owned in self.model.owned.values():
            for position, cell in owned.cells.items():
                assert self.contents[cell] == owned.contents[position]

    @invariant()
    def stats_are_the_models(self) -> None:
        if not hasattr(self, "cache"):
            return
        stats, used = self.cache.stats, self.model.used()
        assert stats.used_cells == len(used)
        assert stats.free_cells == self.model.capacity - len(used)
        assert stats.extent == max(used, default=-1) + 1
        assert stats.n_seqs == len(self.model.owned)
        assert stats.owned_cells == sum(len(owned.cells) for owned in self.model.owned.values())
        assert stats.declared_tokens == len(self.model.declared)


CellsMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestCells = CellsMachine.TestCase


class BlocksMachine(CellsMachine):
    """The same where there are several blocks, and sequences longer than one."""

    @initialize(capacity=st.integers(200, 1600), max_seqs=st.integers(2, 7))
    def start(self, capacity: int, max_seqs: int) -> None:
        super().start(capacity, max_seqs, (300,))

    @rule(which=WHICH, n=st.sampled_from([1, 100, 254, 255, 256, 257, 300]))
    def extend_far(self, which: int, n: int) -> None:
        self.extend(which % 90, n)

    @rule(which=WHICH, back=st.sampled_from([1, 100, 255, 256, 257, 500]))
    def rewind_far(self, which: int, back: int) -> None:
        seq = self.pick(which)
        self.agree("rewind", seq, max(0, self.near_end(seq, back)))

    @rule(n=st.integers(2, 70))
    def extend_all_far(self, n: int) -> None:
        """Do what n decode steps do, as one step."""
        self.agree("declare", list(self.model.owned) * n)
        if self.model.declared:
            self.place_and_write(None, None)


BlocksMachine.TestCase.settings = settings(
    CellsMachine.TestCase.settings, max_examples=50, stateful_step_count=40
)
TestBlocks = BlocksMachine.TestCase
