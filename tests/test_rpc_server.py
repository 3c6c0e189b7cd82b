"""`python -m cellkv rpc-server`: what it refuses, and what becomes of those it served."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_gguf
from cellkv import Cache, Layer, Model, NetworkError, UnsupportedError, WorkerDiedError
from cellkv import __main__ as command_line

Serve = Callable[[int], "subprocess.Popen[str]"]


def has_rpc() -> bool:
    """Whether this ggml has RPC; nobody listens on port 1."""
    try:
        Cache([Layer(1, 64, 64)], device="rpc://127.0.0.1:1")
    except UnsupportedError:
        return False
    except NetworkError:
        return True
    raise AssertionError("a cache on a server that is not there")


needs_rpc = pytest.mark.skipif(not has_rpc(), reason="this ggml was built without RPC")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--host", "localhost"], "localhost"),
        (["--host", "0.0.0.0"], "no authentication"),
        (["--host", "192.0.2.1"], "no loopback address"),
        (["--port", "0"], "port is 0"),
        (["--port", "65536"], "port is 65536"),
        (["--port", str(2**40)], "port is 1099511627776"),
        (["--threads", "-1"], "threads is -1"),
        (["--host", "a\0b"], "NUL"),
    ],
)
def test_a_server_that_cannot_be_is_refused(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["rpc-server", *options]) == 1
    assert complaint in capsys.readouterr().err


def test_lending_to_others_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    # The port is refused, so that nothing ever listens there.
    arguments = ["rpc-server", "--host", "0.0.0.0", "--port", "0", "--allow-remote"]
    assert command_line.main(arguments) == 1
    errors = capsys.readouterr().err
    assert "no authentication and no encryption" in errors
    assert "port is 0" in errors
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(has_rpc(), reason="this ggml has RPC")
def test_without_rpc_it_is_said_how_to_build_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["rpc-server"]) == 1
    errors = capsys.readouterr().err
    assert "built without RPC" in errors
    assert "GGML_RPC=ON" in errors


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that lend the CPU, each listening when it is handed over."""
    servers: list[subprocess.Popen[str]] = []

    def serve(port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "cellkv", "rpc-server", "--port", str(port)]
        server = subprocess.Popen(
            [*command, "--device", "CPU", "--threads", "1"], stdout=subprocess.PIPE, text=True
        )
        servers.append(server)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return server
            assert server.poll() is None
            time.sleep(0.05)
        raise AssertionError("the server does not listen")

    yield serve
    for server in servers:
        server.kill()
        server.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@needs_rpc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_server(number: signal.Signals, serve: Serve) -> None:
    server = serve(free_port())
    server.send_signal(number)
    assert server.wait(5) == -number


@needs_rpc
def test_a_port_that_is_taken_and_a_device_that_is_none_are_refused(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    serve(port)
    assert command_line.main(["rpc-server", "--port", str(port)]) == 1
    assert "cannot listen" in capsys.readouterr().err
    assert command_line.main(["rpc-server", "--device", "Nothing"]) == 1
    assert "Nothing" in capsys.readouterr().err


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write_tiny(
        tmp_path_factory.mktemp("rpc") / "tiny.gguf", tiny_gguf.VARIANTS["plain"]
    )


def answers(model: Model, device: Any) -> np.ndarray:
    cache = model.new_cache(capacity=256, device=device)
    executor = model.executor(cache, strategy="dense", n_threads=1)
    seq = cache.open()
    return np.concatenate([executor.run([1, 2, 3], seq), executor.run([4], seq)])


@needs_rpc
def test_layers_on_two_servers_give_what_they_give_locally(path: Path, serve: Serve) -> None:
    ports = [free_port(), free_port()]
    for port in ports:
        serve(port)
    devices = [f"rpc://127.0.0.1:{port}" for port in ports]
    with Model.load(path, device="CPU", repack=False) as model:
        expected = answers(model, "CPU")
    for device in (devices, dict.fromkeys(devices, 1)):
        with Model.load(path, device=device, isolated=True, timeout=60) as model:
            assert model.info.devices.count("127.0.0.1") == 2
            np.testing.assert_allclose(answers(model, device), expected, rtol=0, atol=1e-5)


@needs_rpc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_goes_in_mid_step_is_an_exception(
    number: signal.Signals, path: Path, serve: Serve
) -> None:
    port = free_port()
    server, device = serve(port), f"rpc://127.0.0.1:{port}"
    model = Model.load(path, device=device, isolated=True, timeout=60)
    before = answers(model, device)
    cache = model.new_cache(capacity=32768, max_seqs=1, device=device)
    executor = model.executor(cache)
    seq = cache.open()
    caught: list[WorkerDiedError] = []
    model._worker._timeout = 4.0 if number == signal.SIGSTOP else None  # type: ignore[attr-defined]

    def step() -> None:
        try:
            executor.run(np.ones(32768, np.int32), seq)
        except WorkerDiedError as error:
            caught.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(1.0)
    assert thread.is_alive()
    server.send_signal(number)
    thread.join(10)
    assert not thread.is_alive()
    expected = "SIGABRT" if number == signal.SIGKILL else "no answer to run within 4 s"
    assert expected in str(caught[0])
    server.kill()
    server.wait()
    serve(port)
    with Model.load(path, device=device, isolated=True, timeout=60) as again:
        np.testing.assert_array_equal(answers(again, device), before)
