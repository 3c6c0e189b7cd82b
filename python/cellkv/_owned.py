"""Ownership of one C object: freed once, and never while a call is inside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from .errors import ClosedError

Self = TypeVar("Self", bound="Owner")


class Owned:
    """A reference to a C object. `with owned as address:` holds the object alive for one call.

    The object is freed by `close`, or, if calls of other threads are inside by then, by the last of
    them as it leaves.
    """

    def __init__(self, address: int, free: Callable[[int], None], what: str) -> None:
        self._address = address
        self._free = free
        self._what = what
        self._n_inside = 0
        self._closed = False
        # Reentrant: a signal handler may come between two lines here and use the same object.
        self._left = threading.Condition(threading.RLock())

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    def __enter__(self) -> int:
        with self._left:
            # Counted before `_closed` is read: who closes after that sees this call inside.
            self._n_inside += 1
            if not self._closed:
                return self._address
        self._leave()
        raise ClosedError(f"this {self._what} is closed")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        with self._left:
            self._n_inside -= 1
            self._left.notify_all()
            address = self._take_if_done()
        if address:
            self._free(address)

    def _take_if_done(self) -> int:
        """Take the address, for freeing, from an object that is closed and left by all."""
        if not self._closed or self._n_inside:
            return 0
        address, self._address = self._address, 0
        return address

    def close(self) -> None:
        """Refuse further calls and free the object, at once or when the last call leaves it."""
        with self._left:
            self._closed = True
            address = self._take_if_done()
        if address:
            self._free(address)

    def finish(self, interrupt: Callable[[int], object], seconds: float) -> None:
        """Close, and see calls in other threads out: interrupt them, wait at most so long."""
        deadline = time.monotonic() + seconds
        self.close()
        with self._left:
            # Once is not enough: a call may be on its way in, not yet interruptible.
            while self._n_inside and time.monotonic() < deadline:
                interrupt(self._address)
                self._left.wait(0.02)


class Owner:
    """The Python side of one C object: a context manager that closes it."""

    _owned: Owned

    def close(self) -> None:
        """Give the C object up; closing twice is fine."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._owned.closed

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<cellkv.{name}{' closed' if self.closed else ''} at {id(self):#x}>"
