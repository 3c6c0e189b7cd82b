"""The process in which an isolated model lives: it answers its parent's requests.

Each request has a thread, so that several may be under way, as threads in one process are: an abort
reaches a step, and an object that is in use says so itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ._messages import MODELS, Abandon, Drop, Reference, Reply, Request
from ._owned import Owner
from .errors import ClosedError
from .model import Model

_MANY = 1 << 16  # threads: as many as there are requests, idle ones are used again
_COMPUTING = ("run", "embed")  # an executor's requests that have a step to stop
_AGAIN = 0.02  # seconds between attempts to stop one


def main(descriptor: int, parent: int) -> None:
    """Serve the process `parent` over a socket until it goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _Worker(Connection(descriptor), parent).serve()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # whatever still runs


class _Call(NamedTuple):
    target: Any
    name: str


class _Worker:
    def __init__(self, connection: Connection[Any, Any], parent: int) -> None:
        self._connection = connection
        self._parent = parent
        self._threads = ThreadPoolExecutor(_MANY)
        self._sending = threading.Lock()
        self._lock = threading.Lock()  # of the three below
        self._objects: dict[int, Any] = {MODELS: Model}
        self._under_way: dict[int, _Call] = {}
        self._abandoned: set[int] = set()

    def serve(self) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            # A fork of the parent's keeps the socket open: there is no end of file then.
            while os.getppid() == self._parent:
                if self._connection.poll(1.0):
                    self._take(self._connection.recv())

    def _take(self, message: Request | Drop | Abandon) -> None:
        if isinstance(message, Request):
            with self._lock:
                target = self._objects[message.target]
                self._under_way[message.number] = _Call(target, message.name)
            self._threads.submit(self._answer, message)
        elif isinstance(message, Drop):
            with self._lock:
                dropped = self._objects.pop(message.number, None)
            if dropped is not None:  # else the request that made it was abandoned, too
                self._threads.submit(dropped.close)
        else:
            self._abandon(message.number)

    def _answer(self, request: Request) -> None:
        with self._lock:
            is_abandoned = request.number in self._abandoned
        try:
            reply = Reply(request.number)
            if not is_abandoned:
                reply = self._settle(request.number, self._run(request))
        except BaseException as error:
            reply = Reply(request.number, error=_portable(error))
        with self._lock:
            del self._under_way[request.number]
            self._abandoned.discard(request.number)
        try:
            with self._sending:
                self._connection.send(reply)
        except BaseException:  # the parent is gone, or would wait for ever
            traceback.print_exc()
            os._exit(1)

    def _run(self, request: Request) -> Any:
        member = getattr(self._under_way[request.number].target, request.name)
        if request.arguments is None:
            return member
        arguments = [self._found(argument) for argument in request.arguments]
        keywords = {name: self._found(argument) for name, argument in request.keywords.items()}
        return member(*arguments, **keywords)

    def _found(self, argument: Any) -> Any:
        return self._objects[argument.number] if isinstance(argument, Reference) else argument

    def _settle(self, number: int, result: Any) -> Reply:
        if not isinstance(result, Owner):
            return Reply(number, result)
        with self._lock:
            abandoned = number in self._abandoned
            if not abandoned:
                self._objects[number] = result
        if abandoned:
            result.close()
        return Reply(number, made=type(result).__name__)

    def _abandon(self, number: int) -> None:
        with self._lock:
            made = self._objects.pop(number, None)
            call = self._under_way.get(number)
            if call is not None and made is None:
                self._abandoned.add(number)
        if made is not None:
            self._threads.submit(made.close)
        if call is not None and call.name in _COMPUTING:
            self._threads.submit(self._stop, number)

    def _stop(self, number: int) -> None:
        # Once is not enough: the step may be on its way in, not yet to be stopped.
        while self._abort_step_of(number):
            time.sleep(_AGAIN)

    def _abort_step_of(self, number: int) -> bool:
        """Abort the request's step if it is certain to be the one; whether it is under way still.

        Of several requests that compute with one executor all but one are about to get BusyError,
        and which one is not known.
        """
        with self._lock:
            call = self._under_way.get(number)
            if call is None:
                return False
            calls = self._under_way.values()
            rivals = [c for c in calls if c.target is call.target and c.name in _COMPUTING]
            if len(rivals) == 1:
                with contextlib.suppress(ClosedError):
                    call.target.abort()
        return True


def _portable(error: BaseException) -> BaseException:
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return copy
