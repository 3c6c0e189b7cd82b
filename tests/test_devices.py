"""Servers that lend their device, and layers split between them: RPC on loopback.

Run by `make test-devices`, whose ggml has RPC, and skipped elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest

import cellkv
import tiny_gguf
from cellkv import Cache, Executor, Layer, Model, WorkerDiedError
from layouts import last_layout
from recorded import Case, Float, read_cases, serving
from rpc_servers import Server, free_port
from rpc_wire import Wire
from table_program import random_tables
from world import World

N_LAYERS = 30  # of SmolLM2
BLOCK = 256  # rows that a sequence has to itself where it can


pytestmark = pytest.mark.usefixtures("with_servers")


@pytest.fixture(scope="module")
def cases(vectors: Path) -> dict[Float, dict[str, Case]]:
    """What llama.cpp recorded on SmolLM2, by the type of K and V."""
    path = vectors / "smollm2-135m.json"
    return {kv: read_cases(path, kv) for kv in get_args(Float)}


# ---- the same numbers as here ----


def few_steps(path: Path, device: str, kv: Float, case: Case) -> npt.NDArray[np.float32]:
    """Prompts apart and interleaved, a clone, a rewind: every result."""
    with serving(path, device, kv) as (cache, executor):
        a, b = cache.open(), cache.open()
        rows = [executor.run(case.prompt[:160], a), executor.run(case.prompt[:70], b)]
        clone = cache.clone(a, 90)
        rows.append(executor.run(case.prompt[90:110] * 2, [clone, b] * 20))
        for token in case.greedy[:2]:
            rows.append(executor.run([token] * 3, [b, clone, a]))
        cache.rewind(b, 20)
        rows.append(executor.run([*case.prompt[20:24], 5], [b, b, b, b, a], outputs="all"))
        return np.concatenate(rows)


@pytest.mark.parametrize("type_name", ["f32", "f16", "q8_0"])
def test_sequences_in_blocks_of_their_own_are_attended_apart(device: str, type_name: str) -> None:
    """In place and from copies of rows."""
    tables = random_tables(np.random.default_rng(41), (0, 200))
    with World(
        tables, type_k=type_name, type_v=type_name, device=device, strategy="dense"
    ) as world:
        names = [f"s{i}" for i in range(8)]
        world.open(*names)
        for name in names:
            world.prefill(name, BLOCK - 2)
        layouts = []
        for n_new in (1, 1, 1, 4):
            world.step([name for name in names for _ in range(n_new)])
            layouts.append(last_layout(world.executor))
        assert layouts[0].n_pieces > 1
        assert layouts[-1].n_runs > layouts[-1].n_pieces


@pytest.fixture(scope="module")
def local(
    smollm2_path: Path, cases: dict[Float, dict[str, Case]]
) -> Callable[[Float], npt.NDArray[np.float32]]:
    """The results of this process's CPU, of one thread, weights not repacked."""
    return functools.cache(lambda kv: few_steps(smollm2_path, "CPU", kv, cases[kv]["long"]))


def test_outputs_are_those_of_the_local_cpu_bit_for_bit(
    smollm2_path: Path,
    cases: dict[Float, dict[str, Case]],
    local: Callable[[Float], npt.NDArray[np.float32]],
    device: str,
    kv: Float,
) -> None:
    """One ggml and one thread on either side: the same ops, in the same order, on the same data."""
    there = few_steps(smollm2_path, device, kv, cases[kv]["long"])
    np.testing.assert_array_equal(there, local(kv))


@pytest.mark.parametrize("pattern", ["{a}=1,{b}=29", "{a}=29,CPU=1"])
def test_wherever_the_layers_are_split_the_outputs_are_the_same(
    smollm2_path: Path,
    cases: dict[Float, dict[str, Case]],
    local: Callable[[Float], npt.NDArray[np.float32]],
    servers: tuple[Server, Server],
    pattern: str,
) -> None:
    device = pattern.format(a=servers[0].device, b=servers[1].device)
    there = few_steps(smollm2_path, device, "f16", cases["f16"]["long"])
    np.testing.assert_array_equal(there, local("f16"))


def test_more_threads_here_change_nothing_there(device: str) -> None:
    """`n_threads` is the local CPU's; a server has its own."""
    tables = random_tables(np.random.default_rng(3))
    results = []
    for n_threads in (1, 2):
        with World(tables, device=device, strategy="dense", n_threads=n_threads) as world:
            assert world.executor.stats.n_threads == n_threads
            world.open("a")
            results.append(world.step(["a"] * 70))
    np.testing.assert_array_equal(*results)


def test_rows_without_weights_on_the_device(servers: tuple[Server, Server]) -> None:
    """A program on the CPU over rows elsewhere: k, v and q travel, attention stays by its rows."""
    tables = random_tables(np.random.default_rng(3))
    with World(tables, device="CPU", strategy="dense") as here:
        types = [Layer(t.k.shape[1], t.k.shape[2], t.v.shape[2], 0, "f32", "f32") for t in tables]
        with (
            Cache(types, initial_rows=1, device=servers[0].device) as cache,
            Executor(here.program.address, cache, n_threads=1, strategy="dense") as executor,
        ):
            here.open("a")
            seq, tokens = cache.open(), here.random_tokens(300)
            want = here.step(["a"] * 300, tokens)
            np.testing.assert_array_equal(executor.run(tokens, seq, outputs="all"), want)
            assert executor.stats.n_attention_strayed == 0


# ---- several at one server ----


def run_apart(function: Callable[..., None], *arguments: object) -> None:
    """Calls a function of this module in a process of its own, which may hang or be ended."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join(60)
    hangs = process.is_alive()
    process.kill()
    process.join()
    assert not hangs
    assert process.exitcode == 0


def decode(world: World, n: int) -> npt.NDArray[np.float32]:
    """The results of n steps from the same start."""
    world.cache.clear()
    world.open("a", "b")
    tokens = [1, 2, 3, 4]
    seqs = [world.handles[name] for name in "aabb"]
    return np.concatenate([world.executor.run(tokens, seqs, outputs="all") for _ in range(n)])


def decode_while_others_come_and_go(path: Path, device: str) -> None:
    n_steps, results = 150, [[], []]
    tables = [random_tables(np.random.default_rng(seed)) for seed in (8, 9)]
    with (
        World(tables[0], device=device, strategy="dense") as one,
        World(tables[1], device=device, strategy="dense") as other,
    ):
        alone = [decode(one, n_steps), decode(other, n_steps)]
        started = threading.Barrier(3)

        def work(world: World, into: list[npt.NDArray[np.float32]]) -> None:
            started.wait()
            into.append(decode(world, n_steps))

        pairs = zip((one, other), results, strict=True)
        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        started.wait()
        n_loaded = 0
        while any(thread.is_alive() for thread in threads):
            with Model.load(path, device=device) as model:
                for _ in range(5):
                    model.new_cache(initial_rows=256).close()
            n_loaded += 1
        assert n_loaded > 3
    for (together,), want in zip(results, alone, strict=True):
        np.testing.assert_array_equal(together, want)


def test_threads_take_turns_at_a_server(tmp_path: Path) -> None:
    """One connection for two executors, and for what is loaded, made and freed meanwhile."""
    path = tiny_gguf.write_tiny(tmp_path / "tiny.gguf", tiny_gguf.VARIANTS["plain"])
    with Server() as server:
        run_apart(decode_while_others_come_and_go, path, server.device)


def close_a_cache_when_asked_to_abort(path: Path, device: str) -> None:
    other = Cache(layers(), device=device)

    def should_abort() -> bool:
        other.close()
        Cache(layers(), device=device).close()
        return False

    with (
        Model.load(path, device=f"CPU=1,{device}=1") as model,
        model.new_cache() as cache,
        model.executor(cache, should_abort=should_abort) as executor,
    ):
        executor.run([1, 2, 3], cache.open())
    assert other.closed


def test_a_step_that_is_asked_to_abort_may_free_and_make_things_on_its_server(
    tmp_path: Path,
) -> None:
    path = tiny_gguf.write_tiny(tmp_path / "tiny.gguf", tiny_gguf.VARIANTS["plain"])
    with Server() as server:
        run_apart(close_a_cache_when_asked_to_abort, path, server.device)


# ---- a server that goes away ----


def prefill(model: Model, device: str) -> tuple[Cache, Executor, int]:
    cache = model.new_cache(type_k="f16", type_v="f16", initial_rows=1, device=device)
    executor = model.executor(cache, n_threads=1, strategy="dense")
    seq = cache.open()
    executor.run(range(40), seq, outputs=[])
    return cache, executor, seq


@pytest.mark.parametrize("where", ["graph_compute", "set_tensor", "get_tensor"])
def test_a_server_killed_in_mid_step_raises_and_another_serves_on(
    tmp_path: Path, where: str
) -> None:
    """Isolated: what ggml does then, it does to a worker process."""
    path = tiny_gguf.write_tiny(tmp_path / "tiny.gguf", tiny_gguf.VARIANTS["window"])
    with Server() as server, Wire(server.port) as wire:
        model = Model.load(path, device=wire.device, isolated=True)
        cache, executor, seq = prefill(model, wire.device)
        wire.before_next(where, server.kill)
        began = time.monotonic()
        with pytest.raises(WorkerDiedError):
            executor.run([7], seq)
        assert time.monotonic() - began < 20
        with pytest.raises(WorkerDiedError):
            executor.run([7], seq)
        for dead in (executor, cache, model):
            dead.close()
    results = []
    with Server() as server:
        for device, isolated in ((server.device, True), ("CPU", False)):
            with Model.load(path, device=device, isolated=isolated, repack=False) as model:
                cache, executor, seq = prefill(model, device)
                with cache, executor:
                    results.append(executor.run([7], seq))
    np.testing.assert_array_equal(*results)


def test_a_server_that_stops_answering_in_mid_step_raises_after_the_timeout(
    tmp_path: Path,
) -> None:
    path = tiny_gguf.write_tiny(tmp_path / "tiny.gguf", tiny_gguf.VARIANTS["window"])
    with (
        Server() as server,
        Wire(server.port) as wire,
        Model.load(path, device=wire.device, isolated=True, timeout=20) as model,
    ):
        cache, executor, seq = prefill(model, wire.device)
        wire.before_next("get_tensor", lambda: server.send_signal(signal.SIGSTOP))
        model._worker._timeout = 1.0  # type: ignore[attr-defined]
        with pytest.raises(WorkerDiedError, match="no answer to run within 1 s"):
            executor.run([7], seq)
        executor.close()
        cache.close()


# ---- what is refused ----


def layers(n: int = 2) -> list[Layer]:
    return [Layer(2, 32, 32, 0, "f16", "f16")] * n


def refused_soon(error: type[cellkv.CellkvError], device: str, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(error, match=words):
        Cache(layers(), device=device)
    assert time.monotonic() - began < 20


@contextlib.contextmanager
def listener(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that listens and is no RPC server; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])
                    behave(kept[-1])

        threading.Thread(target=accept, daemon=True).start()
        yield f"rpc://127.0.0.1:{server.getsockname()[1]}"
        for client in kept:
            client.close()


def test_a_server_that_is_not_there_is_a_network_error() -> None:
    refused_soon(cellkv.NetworkError, f"rpc://127.0.0.1:{free_port()}", "127.0.0.1")


def test_a_host_that_is_not_there_is_a_network_error() -> None:
    refused_soon(cellkv.NetworkError, "rpc://nowhere.invalid:50052", "nowhere.invalid")


GARBAGE = {
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "zeros": bytes(64),
    "huge": b"\xff" * 64,
    "another version": (28).to_bytes(8, "little") + bytes([4, 0, 0, 0]) + bytes(24),
    "cut short": (28).to_bytes(8, "little") + bytes([5]),
}


@pytest.mark.parametrize("answer", GARBAGE)
def test_what_answers_something_else_is_a_network_error(answer: str) -> None:
    def behave(client: socket.socket) -> None:
        client.sendall(GARBAGE[answer])
        client.shutdown(socket.SHUT_WR)

    with listener(behave) as device:
        refused_soon(cellkv.NetworkError, device, device)


def test_what_hangs_up_is_a_network_error() -> None:
    with listener(lambda client: client.close()) as device:
        refused_soon(cellkv.NetworkError, device, device)


def test_what_stays_silent_is_a_network_error() -> None:
    with listener(lambda client: None) as device:
        refused_soon(cellkv.NetworkError, device, device)


def test_a_server_that_serves_another_process_is_a_network_error() -> None:
    with Server() as server, socket.create_connection(("127.0.0.1", server.port)):
        refused_soon(cellkv.NetworkError, server.device, server.device)


def test_a_server_that_came_back_is_found_again() -> None:
    """Between its clients, that is: while objects use it, its end is that of the process."""
    with Server() as server:
        Cache(layers(), device=server.device).close()
    refused_soon(cellkv.NetworkError, server.device, server.device)
    with Server(server.port), Cache(layers(), device=server.device) as cache:
        assert cache.stats.rows > 0


NO_ADDRESSES = [
    *("rpc://", "rpc://127.0.0.1", "rpc://:50052", "rpc://127.0.0.1:0", "rpc://127.0.0.1:65536"),
    *("rpc://127.0.0.1:x", "rpc://127.0.0.1:50052/", "rpc://127.0.0.1:50052/-1"),
]


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(cellkv.InvalidArgumentError, match=re.escape(address)):
        Cache(layers(), device=address)


def test_a_device_that_the_server_does_not_lend_is_refused(
    servers: tuple[Server, Server],
) -> None:
    with pytest.raises(cellkv.UnknownDeviceError, match=r"127\.0\.0\.1:\d+ lends 1"):
        Cache(layers(), device=f"{servers[0].device}/1")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("{a},{b},CPU", "3 for 2 layers"),
        ("{a}=1,{b}=2", "3 layers; there are 2"),
        ("{a}=1", "1 layers; there are 2"),
        ("{a}=1,{b}", "for all or for none"),
        ("{a}=0,{b}=2", "number of layers"),
        ("{a}=,{b}=2", "number of layers"),
        ("{a}=2x", "number of layers"),
        ("{a},", "name is missing"),
        (",{a}", "name is missing"),
        ("", "name is missing"),
        (",".join(["CPU"] * 16), "more devices than"),
    ],
)
def test_lists_that_do_not_fit_the_layers_are_refused(
    servers: tuple[Server, Server], pattern: str, words: str
) -> None:
    text = pattern.format(a=servers[0].device, b=servers[1].device)
    with pytest.raises(cellkv.InvalidArgumentError, match=words):
        Cache(layers(), device=text)


def test_a_list_for_weights_is_held_to_the_models_layers(
    smollm2_path: Path, servers: tuple[Server, Server]
) -> None:
    text = f"{servers[0].device}={N_LAYERS},{servers[1].device}=1"
    with pytest.raises(cellkv.InvalidArgumentError, match=f"there are {N_LAYERS}"):
        Model.load(smollm2_path, device=text)
