"""A worker process as its parent has it: started, asked, watched, ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from ._messages import Abandon, Drop, Reply, Request
from .errors import UnsupportedError, WorkerDiedError

_KEPT_BYTES, _TOLD_LINES = 4096, 10  # of its output, for the exception
_GRACE = 2.0  # seconds that an interrupted call waits for its step to stop
_WATCH = 1.0  # seconds between looks at the process itself; its end is most often told by the pipe

_START = "import sys; sys.path[:] = sys.argv[1:]; from cellkv._worker import main; main({}, {})"


class _Waiting:
    """One caller: `done` is set when the reply is there, or the worker is not."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.reply: Reply | None = None


class WorkerProcess:
    """A fresh interpreter that runs _worker.py, and lives while the parent refers to its objects.

    Any thread may ask, several at once. Callers only ever wait for an event: two threads of the
    worker's own read and write, so an interrupted caller leaves no half message, and a finalizer
    that comes in the midst of a call can drop an object.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self._objects: set[int] = set()
        self._waiting: dict[int, _Waiting] = {}
        self._death: str | None = None
        self._last_output = b""
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _start(theirs.fileno())
        except BaseException:
            self._socket.close()
            raise
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._at_exit = weakref.finalize(self, _end, self._process, self._listener, self._owner)
        self._sender.start()
        self._listener.start()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def ask(
        self,
        target: int,
        name: str,
        arguments: tuple[Any, ...] | None,
        keywords: Mapping[str, Any],
        receive: Callable[[WorkerProcess, Reply], Any],
    ) -> Any:
        """Have the worker call a method or read a property, and wait; what `receive` makes of it.

        What was made in the worker is dropped there if an interrupt comes before this returns.
        Raises what the call raised; WorkerDiedError.
        """
        if os.getpid() != self._owner:
            raise UnsupportedError("an isolated model cannot be used in a fork of its process")
        number = next(self._numbers)
        message = pickle.dumps(Request(number, target, name, arguments, keywords))
        waiting = _Waiting()
        try:
            self._waiting[number] = waiting
            self._outbox.put(message)
            if self._death is None and not waiting.done.wait(self._timeout):
                self._bury(f"gave no answer to {name} within {self._timeout:g} s and was ended")
                self._process.kill()
            reply = waiting.reply
            if reply is not None and reply.error is None:
                return receive(self, reply)
        except BaseException:  # Ctrl-C, or what another signal's handler raises
            self._outbox.put(pickle.dumps(Abandon(number)))
            waiting.done.wait(_GRACE)
            if number in self._objects:
                self.drop(number)
            raise
        finally:
            self._waiting.pop(number, None)
        if reply is None:
            raise WorkerDiedError(f"the worker process {self.pid} {self._death}")
        assert reply.error is not None
        raise reply.error

    def keep(self, number: int) -> None:
        """Count an object among those for which the worker lives."""
        self._objects.add(number)

    def drop(self, number: int) -> None:
        """Give up an object; with the last one the worker ends. A finalizer may call this.

        Doing so twice is fine.
        """
        if os.getpid() != self._owner:
            return
        self._objects.discard(number)
        if self._objects:
            self._outbox.put(pickle.dumps(Drop(number)))
        else:
            self.end()

    def end(self) -> None:
        """End the process. It holds nothing that outlives it, so nothing is asked of it."""
        self._bury("was closed")
        self._process.kill()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(message)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        try:
            while self._process.poll() is None:
                ready = wait([self._connection, output], _WATCH)
                if output in ready:
                    self._keep(os.read(output, _KEPT_BYTES))
                if self._connection in ready:
                    self._deliver(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as error:
            self._bury(f"sent what cannot be read: {error!r}")
        self._process.kill()  # it may have closed the pipe and live on
        status = self._process.wait()
        while wait([output], 0) and self._keep(os.read(output, _KEPT_BYTES)):
            pass
        self._bury(_how_it_ended(status))
        self._clean_up()

    def _deliver(self, reply: Reply) -> None:
        waiting = self._waiting.get(reply.number)
        if waiting is not None:
            waiting.reply = reply
            waiting.done.set()

    def _keep(self, output: bytes) -> bool:
        """Pass the worker's output on to where it would have gone from here; keep its end."""
        self._last_output = (self._last_output + output)[-_KEPT_BYTES:]
        with contextlib.suppress(OSError):
            os.write(2, output)
        return bool(output)

    def _bury(self, how: str) -> None:
        """Have every call fail from now on, those under way too; the first reason stands."""
        if self._death is None:
            lines = self._last_output.decode("utf-8", "replace").splitlines()[-_TOLD_LINES:]
            self._death = "\n".join([how + ("; the last it wrote:" if lines else ""), *lines])
        for waiting in list(self._waiting.values()):
            waiting.done.set()

    def _clean_up(self) -> None:
        self._at_exit.detach()
        self._outbox.put(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # frees a sender that is stuck
        self._sender.join()
        self._connection.close()
        self._socket.close()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    command = _START.format(descriptor, os.getpid())
    return subprocess.Popen(
        [sys.executable, "-c", command, *sys.path],
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[descriptor],
        start_new_session=True,  # Ctrl-C is for the parent
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _end(process: subprocess.Popen[bytes], listener: threading.Thread, owner: int) -> None:
    """At interpreter exit: leave neither process nor thread."""
    if os.getpid() == owner:
        process.kill()
        listener.join(5.0)
