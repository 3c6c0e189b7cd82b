"""RPC servers on loopback, each a process of its own."""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Server:
    """A server that lends this machine's CPU; a context manager that ends it."""

    def __init__(self, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.device = f"rpc://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "cellkv", "rpc-server", "--device=CPU", "--threads=1"]
        self._process = subprocess.Popen(
            [*command, f"--port={self.port}"],
            stdout=subprocess.DEVNULL,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            self._wait_until_it_listens(seconds=30)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """How the process ended, as `subprocess.Popen.returncode` says it."""
        return self._process.wait(seconds)

    def _wait_until_it_listens(self, seconds: float) -> None:
        """By connecting, which the server sees as a client that leaves without a word."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server does not listen"
                time.sleep(0.02)
            else:
                return


def _end_with_parent() -> None:
    """However these tests end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
