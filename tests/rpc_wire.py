"""A proxy before one of ggml's RPC servers that counts what crosses, by command and tensor.

The protocol (version 5 of ggml 0.20): a request is a command byte, the size of its body in 8 bytes
and the body; most are answered by a size and a body, in order. A tensor is described in 296 bytes,
of which the 64 before the last 4 are its name.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

COMMANDS = (
    "alloc_buffer",
    "get_alignment",
    "get_max_size",
    "buffer_get_base",
    "free_buffer",
    "buffer_clear",
    "set_tensor",
    "set_tensor_hash",
    "get_tensor",
    "copy_tensor",
    "graph_compute",
    "get_device_memory",
    "init_tensor",
    "get_alloc_size",
    "hello",
    "device_count",
    "graph_recompute",
    "memset_tensor",
)
UNANSWERED = ("set_tensor", "graph_compute", "graph_recompute")
OF_A_TENSOR = ("set_tensor", "set_tensor_hash", "get_tensor", "memset_tensor")

TENSOR_BYTES = 296
NAME_AT = TENSOR_BYTES - 4 - 64
REQUEST_HEADER, ANSWER_HEADER, OFFSET_BYTES = 9, 8, 8


class Message(NamedTuple):
    """A request with its answer, if it has one."""

    command: str
    tensor: str  # its name; "" where the request is not about one
    n_to_server: int  # bytes of tensor data
    n_to_client: int
    n_wire: int  # bytes in both directions, those of the data included


class _Pending(NamedTuple):
    command: str
    tensor: str
    n_data: int
    n_wire: int


class Wire:
    """Listens on a port of its own, forwards to `port` of loopback; a context manager."""

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.device = f"rpc://127.0.0.1:{self.port}"
        self._lock = threading.Lock()
        self._messages: list[Message] = []
        self._links: list[_Link] = []
        self._before: dict[str, Callable[[], None]] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.close()
        for link in self._links:
            link.close()

    def take(self) -> list[Message]:
        """What crossed since the last call. Waits until nothing is under way any more."""
        deadline = time.monotonic() + 30
        while not all(link.is_idle() for link in list(self._links)):
            assert time.monotonic() < deadline, "the wire does not come to rest"
            time.sleep(0.001)
        with self._lock:
            taken, self._messages = self._messages, []
        return taken

    def before_next(self, command: str, action: Callable[[], None]) -> None:
        """Calls `action` when the next request of this command arrives, before it is forwarded."""
        self._before[command] = action

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._links.append(_Link(self, client, socket.create_connection(self._server)))

    def _arrived(self, command: str) -> None:
        action = self._before.pop(command, None)
        if action is not None:
            action()

    def _count(self, message: Message) -> None:
        with self._lock:
            self._messages.append(message)


class _Link:
    """One client's connection."""

    def __init__(self, wire: Wire, client: socket.socket, server: socket.socket) -> None:
        self._wire, self._client, self._server = wire, client, server
        self._unanswered: collections.deque[_Pending] = collections.deque()
        self._busy = {client: False, server: False}
        self._open = True
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pump in (self._pump_requests, self._pump_answers):
            threading.Thread(target=self._run, args=(pump,), daemon=True).start()

    def close(self) -> None:
        self._open = False
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):  # it has gone already
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def is_idle(self) -> bool:
        return not self._open or not (
            any(self._busy.values())
            or self._unanswered
            or any(_n_waiting(end) for end in (self._client, self._server))
        )

    def _run(self, pump: Callable[[], None]) -> None:
        try:
            while self._open:
                pump()
        except (ConnectionError, OSError, ValueError):
            self.close()

    def _pump_requests(self) -> None:
        header = self._receive(self._client, REQUEST_HEADER)
        self._busy[self._client] = True
        command = COMMANDS[header[0]]
        body = self._receive(self._client, struct.unpack_from("<Q", header, 1)[0])
        tensor, n_data = "", 0
        if command in OF_A_TENSOR:
            name = bytes(body[NAME_AT : NAME_AT + 64])
            tensor = name.partition(b"\0")[0].decode()
        if command == "set_tensor":
            n_data = len(body) - TENSOR_BYTES - OFFSET_BYTES
        n_wire = len(header) + len(body)
        self._wire._arrived(command)
        if command in UNANSWERED:
            self._wire._count(Message(command, tensor, n_data, 0, n_wire))
        else:
            self._unanswered.append(_Pending(command, tensor, n_data, n_wire))
        self._server.sendall(header)
        self._server.sendall(body)
        self._busy[self._client] = False

    def _pump_answers(self) -> None:
        header = self._receive(self._server, ANSWER_HEADER)
        self._busy[self._server] = True
        body = self._receive(self._server, struct.unpack("<Q", header)[0])
        asked = self._unanswered[0]
        n_data = len(body) if asked.command == "get_tensor" else 0
        n_wire = asked.n_wire + len(header) + len(body)
        self._wire._count(Message(asked.command, asked.tensor, asked.n_data, n_data, n_wire))
        self._unanswered.popleft()
        self._client.sendall(header)
        self._client.sendall(body)
        self._busy[self._server] = False

    def _receive(self, end: socket.socket, n: int) -> bytearray:
        data = bytearray(n)
        view = memoryview(data)
        while view:
            got = end.recv_into(view)
            if got == 0:
                raise ConnectionError("closed")
            view = view[got:]
        return data


def _n_waiting(end: socket.socket) -> int:
    """Bytes that have arrived and were not read yet."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(end, termios.FIONREAD, b"\0" * 4))[0])
    except (OSError, ValueError):  # closed
        return 0
