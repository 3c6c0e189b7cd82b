"""`python -m cellkv rpc-server`: what it refuses, and how it ends. Its clients: test_devices.py."""

from __future__ import annotations

import signal

import pytest

from cellkv import Cache, Layer, NetworkError, UnsupportedError
from cellkv import __main__ as command_line
from rpc_servers import Server, free_port


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


def test_without_rpc_it_is_said_how_to_build_it(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        with pytest.raises(UnsupportedError, match="built without RPC"):
            Cache([Layer(1, 64, 64)], device=f"rpc://127.0.0.1:{free_port()}")
    except NetworkError:
        pytest.skip("this ggml has RPC")
    assert command_line.main(["rpc-server"]) == 1
    errors = capsys.readouterr().err
    assert "built without RPC" in errors
    assert "GGML_RPC=ON" in errors


@pytest.mark.usefixtures("with_servers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_server(number: signal.Signals) -> None:
    with Server() as server:
        server.send_signal(number)
        assert server.wait(5) == -number


@pytest.mark.usefixtures("with_servers")
def test_a_port_that_is_taken_and_a_device_that_is_none_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Server() as server:
        assert command_line.main(["rpc-server", "--port", str(server.port)]) == 1
    assert "cannot listen" in capsys.readouterr().err
    assert command_line.main(["rpc-server", "--device", "Nothing"]) == 1
    assert "Nothing" in capsys.readouterr().err
