"""What crosses between host and device in a step, counted on the wire to an RPC server.

A step sends its tokens, positions, rows, sight and which outputs are wanted, and reads back the
rows of these outputs: nothing else. docs/devices.md states it.
"""

from __future__ import annotations

import collections
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cellkv import Cache, Executor, Model
from layouts import last_layout
from rpc_servers import Server
from rpc_wire import ANSWER_HEADER, OFFSET_BYTES, REQUEST_HEADER, TENSOR_BYTES, Message, Wire
from table_program import random_tables
from world import World

N_SENT = REQUEST_HEADER + TENSOR_BYTES + OFFSET_BYTES  # beside the data of set_tensor
N_READ = N_SENT + 8 + ANSWER_HEADER  # get_tensor says the size, too
N_AGAIN = REQUEST_HEADER + 4  # graph_recompute

RESULT = "result"


@pytest.fixture(scope="module")
def wires(with_servers: None) -> Iterator[tuple[Wire, Wire]]:
    with Server() as one, Server() as other, Wire(one.port) as a, Wire(other.port) as b:
        yield a, b
        gc.collect()


@pytest.fixture(scope="module")
def wire(wires: tuple[Wire, Wire]) -> Wire:
    return wires[0]


def name_of(tensor: str) -> str:
    """Its name in the graph: the scheduler calls an input's copy "device#name#number"."""
    found = re.fullmatch(r"[^#]+#(.+)#\d+", tensor)
    return found[1] if found else RESULT


def sent(messages: list[Message]) -> dict[str, int]:
    """Bytes of tensor data to the device, by tensor."""
    return _by_tensor((m.tensor, m.n_to_server) for m in messages)


def read(messages: list[Message]) -> dict[str, int]:
    """Bytes of tensor data from the device, by tensor."""
    return _by_tensor((m.tensor, m.n_to_client) for m in messages)


def _by_tensor(pairs: Iterator[tuple[str, int]]) -> dict[str, int]:
    total: collections.Counter[str] = collections.Counter()
    for tensor, n in pairs:
        total[name_of(tensor)] += n
    return {name: n for name, n in total.items() if n > 0}


def commands(messages: list[Message]) -> collections.Counter[str]:
    return collections.Counter(message.command for message in messages)


def padded(n: int) -> int:
    return -(-n // 256) * 256


def inputs(n_tokens: int, extent: int, n_masks: int = 1) -> dict[str, int]:
    """Tokens and positions of 4 bytes, rows of 8, and 2 for each cell that a mask speaks of."""
    return {
        "tokens": 4 * n_tokens,
        "positions": 4 * n_tokens,
        "rows": 8 * n_tokens,
        "mask": 2 * n_masks * n_tokens * padded(extent),
    }


@pytest.fixture(scope="module")
def smollm2(wire: Wire, smollm2_path: Path) -> Iterator[Model]:
    with Model.load(smollm2_path, device=wire.device) as model:
        yield model


def start(model: Model, device: str, n_seqs: int) -> tuple[Cache, Executor, list[int]]:
    """Sequences of 8 tokens, and the graph of a step of one token of each."""
    cache = model.new_cache(type_k="f16", type_v="f16", device=device, initial_rows=256)
    executor = model.executor(cache, n_threads=1)
    seqs = [cache.open() for _ in range(n_seqs)]
    executor.run(np.arange(8 * n_seqs), np.repeat(seqs, 8), outputs=[])
    executor.run(range(n_seqs), seqs)
    return cache, executor, seqs


@pytest.mark.parametrize("n_seqs", [1, 4, 16])
def test_a_decode_step_moves_its_inputs_and_the_rows_of_its_outputs(
    wire: Wire, smollm2: Model, root: Path, n_seqs: int
) -> None:
    cache, executor, seqs = start(smollm2, wire.device, n_seqs)
    with cache, executor:
        n_result = executor.n_result
        wire.take()
        executor.run(range(n_seqs), seqs)
        step = wire.take()
        to_device = inputs(n_seqs, cache.stats.extent) | {"outputs": 4 * n_seqs}
        assert sent(step) == to_device
        assert read(step) == {RESULT: 4 * n_result * n_seqs}
        assert commands(step) == {"set_tensor": 5, "graph_recompute": 1, "get_tensor": 1}
        overhead = sum(m.n_wire - m.n_to_server - m.n_to_client for m in step)
        assert overhead == 5 * N_SENT + N_AGAIN + N_READ

        executor.run(range(n_seqs), seqs, outputs=[])  # another graph
        wire.take()
        executor.run(range(n_seqs), seqs, outputs=[])
        silent = wire.take()
        assert sent(silent) == inputs(n_seqs, cache.stats.extent)
        assert read(silent) == {}
        assert commands(silent) == {"set_tensor": 4, "graph_recompute": 1}
    stated = [n_seqs, sum(to_device.values()), 4 * n_result * n_seqs, overhead]
    row = "| " + " | ".join(f"{n:,}" for n in stated) + " |"
    assert row in (root / "docs" / "devices.md").read_text().splitlines()


def test_only_the_outputs_asked_for_are_read(wire: Wire, smollm2: Model) -> None:
    cache, executor, seqs = start(smollm2, wire.device, 4)
    with cache, executor:
        executor.run(range(4), seqs, outputs=[2])
        wire.take()
        executor.run(range(4), seqs, outputs=[1])
        step = wire.take()
        assert sent(step)["outputs"] == 4
        assert read(step) == {RESULT: 4 * executor.n_result}


def test_freed_rows_are_zeroed_once_and_without_data(wire: Wire, smollm2: Model) -> None:
    cache, executor, seqs = start(smollm2, wire.device, 4)
    with cache, executor:
        cache.rewind(seqs[3], 5)
        wire.take()
        executor.run(range(4), seqs)
        step = wire.take()
        zeroed = [m for m in step if m.command == "memset_tensor"]
        n_layers = smollm2.info.n_layers
        assert {m.tensor for m in zeroed} == {
            f"cells.{which}.{layer}" for which in "kv" for layer in range(n_layers)
        }
        assert sent(step) == inputs(4, cache.stats.extent) | {"outputs": 16}
        assert commands(step) == {
            "set_tensor": 5,
            "graph_recompute": 1,
            "get_tensor": 1,
            "memset_tensor": len(zeroed),
        }
        executor.run(range(4), seqs)
        assert "memset_tensor" not in commands(wire.take())


def test_each_window_has_a_mask_of_its_own(wire: Wire) -> None:
    tables = random_tables(np.random.default_rng(5), windows=(8, 0, 3, 8))
    with World(tables, device=wire.device, strategy="dense") as world:
        world.open("a", "b")
        world.prefill("a", 30)
        for _ in range(2):
            wire.take()
            world.step(["a", "b"])
        step = wire.take()
        extent = world.cache.stats.extent
        assert sent(step) == without(inputs(2, extent, 3) | {"outputs": 8}, "positions")
        assert read(step) == {RESULT: 4 * world.executor.n_result * 2}


@pytest.mark.parametrize("n_new", [1, 4])
def test_sequences_in_blocks_of_their_own_have_shorter_masks_which_go_once(
    wire: Wire, n_new: int
) -> None:
    """Once for all pieces, and for all layers of a window."""
    tables = random_tables(np.random.default_rng(5), windows=(0, 0, 100, 0, 100))
    with World(tables, device=wire.device, strategy="dense") as world:
        names = [f"s{i}" for i in range(8)]
        world.open(*names)
        for name in names:
            world.prefill(name, 240)
        for _ in range(2):
            wire.take()
            world.step([name for name in names for _ in range(n_new)])
        step, n_tokens = wire.take(), len(names) * n_new
        layouts = [last_layout(world.executor, window) for window in range(2)]
        assert min(layout.n_pieces for layout in layouts) > 1
        n_looked_at = sum(layout.n_looked_at for layout in layouts)
        common = inputs(n_tokens, world.cache.stats.extent) | {"outputs": 4 * n_tokens}
        assert sent(step) == without(common, "positions") | {"mask": 2 * n_looked_at}
        in_one_call = 2 * n_tokens * padded(world.cache.stats.extent)
        assert n_looked_at < in_one_call / 2
        assert commands(step) == {"set_tensor": 5, "graph_recompute": 1, "get_tensor": 1}
        assert read(step) == {RESULT: 4 * world.executor.n_result * n_tokens}


def without(sizes: dict[str, int], name: str) -> dict[str, int]:
    """The program of tables has no use for the positions."""
    return {other: n for other, n in sizes.items() if other != name}


def test_between_two_devices_the_hidden_state_crosses_and_the_inputs_go_to_both(
    wires: tuple[Wire, Wire], smollm2_path: Path
) -> None:
    device, n_seqs = ",".join(wire.device for wire in wires), 4
    with Model.load(smollm2_path, device=device) as model:
        cache, executor, seqs = start(model, device, n_seqs)
        with cache, executor:
            for wire in wires:
                wire.take()
            executor.run(range(n_seqs), seqs)
            first, second = (wire.take() for wire in wires)
            n_embd = model.info.n_embd
            common = inputs(n_seqs, cache.stats.extent)
            hidden = 4 * n_embd * n_seqs
            assert sent(first) == common
            assert read(first) == {RESULT: hidden}
            of_second = sent(second)
            assert of_second.pop("outputs") == 4 * n_seqs
            crossing = {k: n for k, n in of_second.items() if k not in common}
            assert list(crossing.values()) == [hidden]
            assert {k: n for k, n in of_second.items() if k in common} == without(common, "tokens")
            assert read(second) == {RESULT: 4 * executor.n_result * n_seqs}
