"""What Python adds to the C library: checks, exceptions, lifetimes, threads."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cellkv
import table_program
from cellkv import Cache, CacheKind, CellkvError, Executor, Layer, Model, Strategy, _lib, errors
from table_program import Fault, TableProgram, cache_layers, random_tables

INT32_MAX = 2**31 - 1


@pytest.fixture
def cells() -> Iterator[Cache]:
    """Give a cache of eight cells, without storage."""
    with Cache(backend="cells", capacity=8, max_seqs=4) as cache:
        yield cache


@pytest.fixture
def program() -> Iterator[TableProgram]:
    program = TableProgram(random_tables(np.random.default_rng(0)))
    yield program
    program.close()


@pytest.fixture
def storage() -> Iterator[Cache]:
    """Give a cache that fits the program."""
    layers = cache_layers(random_tables(np.random.default_rng(0)), "f32", "f32")
    with Cache(layers, capacity=256) as cache:
        yield cache


@pytest.fixture
def executor(program: TableProgram, storage: Cache) -> Iterator[Executor]:
    with Executor(program.address, storage, n_threads=1) as executor:
        yield executor


# ---- arguments ----


@pytest.mark.parametrize(
    ("seqs", "error", "complaint"),
    [
        (lambda s: [s, 1.0], TypeError, r"seqs\[1\] is float"),
        (lambda s: [s, "1"], TypeError, r"seqs\[1\] is str"),
        (lambda s: [[s, s]], TypeError, r"seqs\[0\] is list"),
        (lambda s: [[s], [s, s]], TypeError, r"seqs\[0\] is list"),
        (lambda s: [True, False], TypeError, r"seqs\[0\] is a bool"),
        (lambda s: "12", TypeError, "seqs is str"),
        (lambda s: None, TypeError, "seqs is NoneType"),
        (lambda s: s, TypeError, "seqs is int"),
        (lambda s: np.array([s, s], np.float64), TypeError, "seqs is an array of float64"),
        (lambda s: np.array([True]), TypeError, "seqs is an array of bool"),
        (lambda s: np.array([s], object), TypeError, "seqs is an array of object"),
        (lambda s: np.array([[s]]), cellkv.InvalidArgumentError, r"seqs has shape \(1, 1\)"),
        (lambda s: np.array(s), cellkv.InvalidArgumentError, r"seqs has shape \(\)"),
        (lambda s: np.array([s] * 4)[::2], cellkv.InvalidArgumentError, "seqs has stride 16"),
        (lambda s: np.array([s] * 2)[::-1], cellkv.InvalidArgumentError, "seqs has stride -8"),
        (lambda s: [s, 2**63], cellkv.InvalidArgumentError, r"seqs\[1\] is 9223372036854775808"),
        (lambda s: [s, 2**70], cellkv.InvalidArgumentError, r"seqs\[1\] is 11805"),
        (lambda s: np.array([2**64 - 1], np.uint64), cellkv.InvalidArgumentError, r"seqs\[0\]"),
    ],
)
def test_what_is_no_contiguous_row_of_integers_is_refused_by_name(
    cells: Cache, seqs: Callable[[int], Any], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        cells.declare(seqs(cells.open()))
    assert cells.stats.declared_tokens == 0


def test_integers_of_every_kind_are_taken_exactly(cells: Cache) -> None:
    seq = cells.open()
    for seqs in (
        [seq],
        (seq,),
        [np.int64(seq)],
        (s for s in [seq]),
        range(seq, seq + 1),
        np.array([seq]),
        np.array([seq], ">i8"),
        np.array([seq], np.uint64),
        np.array([seq, 0])[:1],
        np.array([[seq]])[0],
    ):
        cells.declare(seqs)
        cells.place(np.array([0], np.int8))
        cells.undo_step()
    assert cells.next_pos(np.int32(seq)) == 0


@pytest.mark.parametrize("value", [1.0, "1", None, [1], True, np.float32(1)])
def test_a_single_number_must_be_an_integer(cells: Cache, value: Any) -> None:
    seq = cells.open()
    for call in (
        lambda: cells.rewind(value, 0),
        lambda: cells.rewind(seq, value),
        lambda: cells.remove(seq, value),
        lambda: cells.undo_step(value),
        lambda: cells.can_extend(value),
        lambda: cells.length(value),
        lambda: Cache.find(value),
        lambda: Cache(backend="cells", capacity=value),
    ):
        with pytest.raises(TypeError):
            call()


def test_a_number_beyond_its_c_type_is_refused_not_truncated(cells: Cache) -> None:
    seq = cells.open()
    for call in (
        lambda: cells.rewind(seq, 2**32),
        lambda: cells.rewind(seq + 2**64, 0),
        lambda: cells.clone(seq, -(2**31)),  # what stands for "unset" in C
        lambda: cells.remove(seq, 0, -(2**31)),
        lambda: cells.can_extend(2**31),
        lambda: cells.place(n=2**31),
        lambda: Cache.unpublish(2**63),
    ):
        with pytest.raises(cellkv.InvalidArgumentError):
            call()


def test_a_caches_configuration_is_checked() -> None:
    layer = Layer(1, 32, 32)
    for options, error in (
        ({"capacity": 0}, cellkv.InvalidArgumentError),
        ({"capacity": -1}, cellkv.InvalidArgumentError),
        ({"capacity": INT32_MAX}, cellkv.InvalidArgumentError),
        ({"max_seqs": 0}, cellkv.InvalidArgumentError),
        ({"initial_rows": -1}, cellkv.InvalidArgumentError),
        ({"capacity": 10, "initial_rows": 11}, cellkv.InvalidArgumentError),
        ({"max_step": 0}, cellkv.InvalidArgumentError),
        ({"max_step": -1}, cellkv.InvalidArgumentError),
        ({"max_step": 1.5}, TypeError),
        ({"layers": [layer._replace(n_kv_heads=0)]}, cellkv.InvalidArgumentError),
        ({"layers": [layer._replace(window=-1)]}, cellkv.InvalidArgumentError),
        ({"layers": [layer._replace(type_k="f64")]}, cellkv.InvalidArgumentError),
        ({"layers": [layer._replace(type_k=1)]}, TypeError),
        ({"layers": [layer._replace(head_dim_v=1.5)]}, TypeError),
        ({"kind": "heap"}, cellkv.InvalidArgumentError),
        ({"kind": 99}, CellkvError),
        ({"backend": "cells\0"}, cellkv.InvalidArgumentError),
        ({"backend": b"cells"}, TypeError),
        ({"backend": "vapour"}, cellkv.NoBuilderError),
        ({"device": "abacus"}, cellkv.UnknownDeviceError),
        ({"device": "\ud800"}, cellkv.InvalidArgumentError),
    ):
        with pytest.raises(error):
            Cache(**{"layers": [layer], **options})
    for kind in (*CacheKind, *(kind.name.lower() for kind in CacheKind)):
        Cache(backend="cells", kind=kind).close()


def test_a_step_is_checked(executor: Executor, storage: Cache) -> None:
    seq = storage.open()
    invalid = cellkv.InvalidArgumentError
    for arguments, error, complaint in (
        ({"tokens": [1.5]}, TypeError, "tokens"),
        ({"tokens": np.ones(2, np.float32)}, TypeError, "tokens"),
        ({"tokens": np.ones((1, 2), np.int32)}, invalid, "tokens"),
        ({"tokens": np.ones(4, np.int32)[::2]}, invalid, "tokens"),
        ({"tokens": [2**31]}, invalid, r"tokens\[0\]"),
        ({"seqs": [seq] * 3}, invalid, "seqs has 3 entries, 2 are expected"),
        ({"seqs": 1.0}, TypeError, "seqs"),
        ({"positions": [0]}, invalid, "positions has 1 entries, 2 are expected"),
        ({"positions": [0, 2**31]}, invalid, r"positions\[1\]"),
        ({"outputs": "some"}, invalid, "'some'"),
        ({"outputs": [0.0]}, TypeError, r"outputs\[0\]"),
        ({"outputs": [2]}, invalid, "output"),
        ({"outputs": [-1]}, invalid, "output"),
        ({"seqs": None}, invalid, "needs seqs"),
    ):
        with pytest.raises(error, match=complaint):
            executor.run(**{"tokens": [1, 2], "seqs": seq, **arguments})
        assert storage.stats.used_cells == 0
    executor.run([1, 2], seq)


def test_an_executors_configuration_is_checked(program: TableProgram, storage: Cache) -> None:
    invalid = cellkv.InvalidArgumentError
    for options, error in (
        ({"cache": None}, invalid),
        ({"cache": 3}, TypeError),
        ({"cache_key": 1}, invalid),
        ({"cache": None, "cache_key": 2**40}, cellkv.UnknownKeyError),
        ({"program": 0}, invalid),
        ({"program": ctypes.c_void_p()}, invalid),
        ({"program": "program"}, TypeError),
        ({"strategy": "sparse"}, invalid),
        ({"strategy": 99}, invalid),
        ({"n_threads": -1}, invalid),
        ({"n_threads": 513}, invalid),
        ({"n_threads": 1.0}, TypeError),
        ({"max_batch": 0}, invalid),
        ({"max_graphs": 0}, invalid),
    ):
        with pytest.raises(error):
            Executor(**{"program": program.address, "cache": storage, **options})
    with Executor(ctypes.c_void_p(program.address), storage, strategy=Strategy.DENSE) as executor:
        assert executor.stats.strategy is Strategy.DENSE
        assert executor.cache is storage


def test_a_model_from_arrays_is_checked() -> None:
    array = np.zeros((4, 4), np.float32)
    for metadata, arrays, error, complaint in (
        ({}, {"a": array.astype(np.float64)}, TypeError, "'a'.* float64"),
        ({}, {"a": [1.0]}, TypeError, "'a'.* list"),
        ({}, {"a": array.T[:2].T}, cellkv.InvalidArgumentError, "contiguous"),
        ({}, {"a": array.astype(">f4")}, TypeError, "'a'"),
        ({}, {"a": np.zeros((1, 1, 1, 1), np.float32)}, cellkv.InvalidArgumentError, "shape"),
        ({}, {"a": np.zeros((), np.float32)}, cellkv.InvalidArgumentError, "shape"),
        ({}, {"a\0": array}, cellkv.InvalidArgumentError, "NUL"),
        ({"k": None}, {}, TypeError, "'k'"),
        ({"k": [1]}, {}, TypeError, "'k'"),
        ({"k": 2**60}, {}, cellkv.InvalidArgumentError, "2.53"),
        ({"k": "a\0"}, {}, cellkv.InvalidArgumentError, "NUL"),
        ({1: 1}, {}, TypeError, "int"),
    ):
        with pytest.raises((error, AttributeError), match=complaint):
            Model.from_arrays(metadata, arrays)
    with pytest.raises(TypeError, match=r"Model\.load"):
        Model()


# ---- results ----


def test_results_are_the_callers_own(executor: Executor, storage: Cache) -> None:
    seq = storage.open()
    first = executor.run([1, 2, 3], seq, outputs="all")
    kept = first.copy()
    second = executor.run([4, 5, 6], seq, outputs="all")
    assert first.dtype == np.float32
    assert first.shape == (3, executor.n_result)
    assert first.flags.owndata
    assert first.flags.writeable
    assert first.flags.c_contiguous
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, kept)


def test_outputs_choose_rows(executor: Executor, storage: Cache) -> None:
    a, b, c = (storage.open() for _ in range(3))
    seqs = [b, a, a, c, b]
    every = executor.run(range(5), seqs, outputs="all")

    def again(outputs: Any) -> np.ndarray:
        storage.undo_step()
        return executor.run(range(5), seqs, outputs=outputs)

    for outputs, rows in (
        ("last_of_each", [4, 2, 3]),  # b, a, c: as they first appear
        ("last", [4]),
        ([3, 0, 3], [3, 0, 3]),
        (np.array([1]), [1]),
        ([], []),
    ):
        results = again(outputs)
        assert results.shape == (len(rows), executor.n_result)
        np.testing.assert_allclose(results, every[rows], rtol=1e-5, atol=1e-6)


def test_a_declared_step_needs_no_handles(executor: Executor, storage: Cache) -> None:
    a, b = storage.open(), storage.open()
    storage.declare([a, b, a])
    results = executor.run([1, 2, 3], positions=[0, 0, 1], outputs="all")
    storage.undo_step()
    np.testing.assert_array_equal(executor.run([1, 2, 3], [a, b, a], outputs="all"), results)
    with pytest.raises(cellkv.NotDeclaredError):
        executor.run([1], outputs="last")


def test_cells_are_listed_in_order_of_position(cells: Cache) -> None:
    seq = cells.open()
    cells.declare([seq] * 5)
    placed = cells.place()
    assert placed.dtype == np.int32
    cells.remove(seq, 1, 3)
    listed = cells.cells(seq)
    assert listed.positions.tolist() == [0, 3, 4]
    assert listed.cells.tolist() == placed[[0, 3, 4]].tolist()
    assert (cells.length(seq), cells.next_pos(seq)) == (3, 5)
    assert cells.cells(cells.open()).cells.shape == (0,)


def test_a_published_cache_is_found_and_run_by_its_key(
    program: TableProgram, storage: Cache
) -> None:
    key = storage.publish()
    assert storage.publish() == key
    seq = storage.open()
    with Cache.find(key) as found, Executor(program.address, cache_key=key) as by_key:
        assert by_key.cache is None
        by_key.run([1], seq)
        assert found.stats == storage.stats
        with pytest.raises(cellkv.OutOfCellsError) as caught:
            by_key.run([1] * 300, seq)
        assert caught.value.shortfall is None
    assert storage.length(seq) == 1  # the found reference was one of its own
    Cache.unpublish(key)
    with pytest.raises(cellkv.UnknownKeyError):
        Cache.find(key)
    other = storage.publish()
    assert other != key
    storage.close()
    with pytest.raises(cellkv.UnknownKeyError):
        Cache.find(other)


# ---- every status has its exception ----


def test_a_programs_own_status_comes_out_as_its_exception(storage: Cache) -> None:
    seq = storage.open()
    layers = cache_layers(random_tables(np.random.default_rng(0)), "f32", "f32")
    c_layers = (_lib.cellkv_layer * len(layers))()
    for c_layer, layer in zip(c_layers, layers, strict=True):
        c_layer.n_kv_heads, c_layer.head_dim_k, c_layer.head_dim_v = layer[:3]
    for status, error_class in errors.BY_STATUS.items():

        @_lib.BUILD_CALLBACK
        def give_up(_context: int, graph: int, status: int = status) -> int:
            return int(_lib.lib.cellkv_graph_fail(graph, status, b"gave up as asked"))

        program = _lib.sized(_lib.cellkv_program)
        program.n_vocab, program.n_result = 64, 4
        program.n_layers, program.layers = len(layers), c_layers
        program.build = give_up
        with (
            Executor(program, storage) as executor,
            pytest.raises(error_class, match="gave up as asked") as caught,
        ):
            executor.run([1], seq)
        assert type(caught.value) is error_class
        assert (caught.value.status, caught.value.n_done) == (status, 0)
        assert storage.stats.used_cells == 0


def test_exceptions_are_what_python_would_raise() -> None:
    for builtin, ours in (
        (ValueError, cellkv.InvalidArgumentError),
        (MemoryError, cellkv.OutOfMemoryError),
        (OSError, cellkv.FileError),
        (LookupError, cellkv.UnknownSequenceError),
        (ValueError, cellkv.ClosedError),
    ):
        assert issubclass(ours, builtin)
        assert str(ours("why")) == "why"
        assert ours.__doc__


def test_handles_that_are_no_open_sequence_are_refused(cells: Cache) -> None:
    stale = cells.open()
    cells.close_seq(stale)
    cleared = cells.open()
    cells.clear()
    with Cache(backend="cells") as other:
        foreign = other.open()
        for handle in (stale, cleared, foreign, 0, -1, INT32_MAX, 2**63 - 1, -(2**63)):
            for call in (
                lambda h: cells.clone(h),
                lambda h: cells.rewind(h, 0),
                lambda h: cells.remove(h, 0),
                lambda h: cells.close_seq(h),
                lambda h: cells.declare([h]),
                lambda h: cells.extend(h, 1),
                lambda h: cells.length(h),
                lambda h: cells.next_pos(h),
                lambda h: cells.cells(h),
            ):
                with pytest.raises(cellkv.UnknownSequenceError):
                    call(handle)


def refusals_of_cells() -> Iterator[tuple[type[CellkvError], Callable[[Cache, int], object]]]:
    """Give what a cache of 8 cells and 4 slots refuses, with a sequence of 3 tokens in it."""
    yield cellkv.BadRangeError, lambda c, s: c.rewind(s, 4)
    yield cellkv.BadRangeError, lambda c, s: c.rewind(s, -1)
    yield cellkv.BadRangeError, lambda c, s: c.rewind(s, INT32_MAX)
    yield cellkv.BadRangeError, lambda c, s: c.clone(s, 4)
    yield cellkv.BadRangeError, lambda c, s: c.clone(s, -1)
    yield cellkv.BadRangeError, lambda c, s: c.remove(s, 2, 1)
    yield cellkv.BadRangeError, lambda c, s: c.remove(s, 0, INT32_MAX)
    yield cellkv.BadRangeError, lambda c, s: c.undo_step(4)
    yield cellkv.BadRangeError, lambda c, s: c.undo_step(-1)
    yield cellkv.EmptyStepError, lambda c, s: c.declare([])
    yield cellkv.OutOfCellsError, lambda c, s: c.declare([s] * 9)
    yield cellkv.NotDeclaredError, lambda c, s: c.place()
    yield cellkv.NotDeclaredError, lambda c, s: c.place([3])
    yield cellkv.NotWindowedError, lambda c, s: c.trim_windows()
    yield cellkv.UnknownKeyError, lambda c, s: Cache.find(INT32_MAX)
    yield cellkv.UnknownKeyError, lambda c, s: Cache.unpublish(-1)
    yield cellkv.InvalidArgumentError, lambda c, s: c.can_extend(-1)
    yield cellkv.InvalidArgumentError, lambda c, s: c.place([1], n=2)
    yield cellkv.NoBuilderError, lambda c, s: Cache([Layer(1, 8, 8)], backend="abacus")
    yield cellkv.OutOfCellsError, lambda c, s: c.extend(s, 6)
    yield cellkv.EmptyStepError, lambda c, s: c.extend(s, 0)
    yield cellkv.InvalidArgumentError, lambda c, s: c.extend(s, -1)


@pytest.mark.parametrize(("error", "call"), list(refusals_of_cells()))
def test_a_refusal_changes_nothing(
    cells: Cache, error: type[CellkvError], call: Callable[[Cache, int], object]
) -> None:
    seq = cells.open()
    cells.declare([seq] * 3)
    cells.place()
    before = cells.stats, cells.cells(seq).cells.tolist()
    with pytest.raises(error) as caught:
        call(cells, seq)
    assert str(caught.value)
    assert (cells.stats, cells.cells(seq).cells.tolist()) == before
    cells.undo_step()  # still the last changing call


def test_a_shortfall_is_reported(cells: Cache, executor: Executor, storage: Cache) -> None:
    seq = cells.open()
    cells.declare([seq] * 5)
    cells.place()
    with pytest.raises(cellkv.OutOfCellsError) as caught:
        cells.declare([seq] * 6)
    assert caught.value.shortfall == 3
    seq = storage.open()
    with pytest.raises(cellkv.OutOfCellsError) as caught:
        executor.run([0] * 300, seq)
    assert caught.value.shortfall == 300 - 256


def test_slots_positions_undo_and_trimming_are_refused(cells: Cache) -> None:
    seqs = [cells.open() for _ in range(4)]
    with pytest.raises(cellkv.NoSlotError):
        cells.open()
    with pytest.raises(cellkv.NoSlotError):
        cells.clone(seqs[0])
    with pytest.raises(cellkv.NothingToUndoError):
        cells.undo_step()
    cells.declare(seqs)
    with pytest.raises(cellkv.BadPositionError, match=r"token 2.*\b0\b"):
        cells.place([0, 0, 1, 0])
    cells.place([0, 0, 0, 0])  # the declaration has been kept
    with Cache([Layer(1, 32, 32, window=2)], backend="cells", capacity=16) as windowed:
        seq = windowed.open()
        windowed.declare([seq] * 10)
        windowed.place()
        assert windowed.trim_windows() == 9
        assert windowed.trim_windows() == 0
        with pytest.raises(cellkv.TrimmedError):
            windowed.rewind(seq, 5)
        with pytest.raises(cellkv.TrimmedError):
            windowed.clone(seq, 5)


def test_refusals_of_executors(program: TableProgram, storage: Cache, cells: Cache) -> None:
    with pytest.raises(cellkv.NoStorageError):
        Executor(program.address, cells)
    with (
        Cache([Layer(1, 32, 32)], capacity=16) as narrow,
        pytest.raises(cellkv.MismatchError, match="layer"),
    ):
        Executor(program.address, narrow)
    seq = storage.open()
    with Executor(program.address, storage) as executor:
        for token in (64, -1, INT32_MAX):
            with pytest.raises(cellkv.BadTokenError, match="token"):
                executor.run([1, token], seq)
        with pytest.raises(cellkv.EmptyStepError):
            executor.run([], seq)
        with pytest.raises(cellkv.UnknownSequenceError):
            executor.run([1], -1)
        with pytest.raises(cellkv.BadPositionError):
            executor.run([1], seq, [1])
        program.set_fault(Fault.NO_RESULT)
        with pytest.raises(cellkv.BadGraphError):
            executor.run([1], seq)
        assert storage.stats.used_cells == 0


def test_refusals_of_models(tmp_path: Path) -> None:
    with pytest.raises(cellkv.FileError, match="nowhere"):
        Model.load(tmp_path / "nowhere.gguf")
    with pytest.raises(cellkv.InvalidArgumentError):
        Model.load("a\0b")
    with pytest.raises(TypeError):
        Model.load(3)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"nothing of the kind")
    with pytest.raises(cellkv.BadFileError):
        Model.load(bad)
    with pytest.raises(cellkv.UnknownArchitectureError, match="martian"):
        Model.from_arrays({"general.architecture": "martian"}, {})
    with pytest.raises(cellkv.BadMetadataError):
        Model.from_arrays({"general.architecture": "llama"}, {})
    metadata, arrays = tiny_llama()
    for change, error in (
        ({"output_norm.weight": None}, cellkv.MissingTensorError),
        ({"output_norm.weight": np.ones(7, np.float32)}, cellkv.BadTensorError),
    ):
        changed = {name: a for name, a in {**arrays, **change}.items() if a is not None}
        with pytest.raises(error, match=r"output_norm\.weight"):
            Model.from_arrays(metadata, changed)


@pytest.mark.skipif(
    not hasattr(_lib.lib._library, "cellkv_test_fail_allocation_after"),
    reason="only builds with checks can make allocations fail",
)
def test_failing_allocations_are_memory_errors() -> None:
    fail_after = _lib.lib._library.cellkv_test_fail_allocation_after
    n_failed = 0
    for n in itertools.count():
        fail_after(n)
        try:
            Cache(backend="cells").close()
        except cellkv.OutOfMemoryError:
            n_failed += 1
        finally:
            fail_after(-1)
        if n_failed < n + 1:
            break
    assert n_failed > 0


# ---- models ----


def tiny_llama() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A random model of one layer: 32 tokens, width 64, two heads."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) / 8

    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": 32,
    }
    arrays = {
        "token_embd.weight": normal(32, 64),
        "output_norm.weight": np.ones(64, np.float32),
        "blk.0.attn_norm.weight": np.ones(64, np.float32),
        "blk.0.ffn_norm.weight": np.ones(64, np.float32),
        "blk.0.attn_q.weight": normal(64, 64),
        "blk.0.attn_k.weight": normal(32, 64),
        "blk.0.attn_v.weight": normal(32, 64),
        "blk.0.attn_output.weight": normal(64, 64),
        "blk.0.ffn_gate.weight": normal(96, 64),
        "blk.0.ffn_up.weight": normal(96, 64),
        "blk.0.ffn_down.weight": normal(64, 96),
    }
    return metadata, arrays


def test_a_model_from_arrays_runs_after_its_arrays_and_itself_are_gone() -> None:
    model = Model.from_arrays(*tiny_llama())
    info = model.info
    assert (info.architecture, info.n_vocab, info.n_layers, info.n_embd) == ("llama", 32, 1, 64)
    assert info.layers == (Layer(1, 32, 32, 0, "f16", "f16"),)
    cache = model.new_cache(capacity=64, type_k="f32", type_v="bf16")
    executor = model.executor(cache, n_threads=1)
    seq = cache.open()
    logits = executor.run([1, 2, 3], seq)
    assert logits.shape == (1, 32)
    model.close()
    del model
    gc.collect()
    cache.rewind(seq, 0)
    np.testing.assert_array_equal(executor.run([1, 2, 3], seq), logits)
    assert info.layers[0].n_kv_heads == 1
    with pytest.raises(cellkv.BadTokenError):
        executor.run([32], seq)


def test_a_model_without_a_tokenizer_says_so() -> None:
    metadata, arrays = tiny_llama()
    with Model.from_arrays(metadata, arrays) as model, pytest.raises(cellkv.TokenizerError):
        _ = model.tokenizer
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["▁", "a"],
        "tokenizer.ggml.scores": [0.0, 0.0],
    }
    with Model.from_arrays({**metadata, **keys}, arrays) as model:
        assert model.tokenizer.encode("a").tolist() == [0, 1]


# ---- closing ----


def test_calls_after_close_are_refused(program: TableProgram, storage: Cache) -> None:
    seq = storage.open()
    executor = Executor(program.address, storage)
    model = Model.from_arrays(*tiny_llama())
    for thing in (executor, storage, model):
        assert not thing.closed
        thing.close()
        thing.close()
        assert thing.closed
        assert "closed" in repr(thing)
    for call in (
        storage.open,
        lambda: storage.clone(seq),
        lambda: storage.rewind(seq, 0),
        lambda: storage.remove(seq, 0),
        lambda: storage.close_seq(seq),
        storage.clear,
        storage.trim_windows,
        lambda: storage.declare([seq]),
        storage.place,
        storage.undo_step,
        lambda: storage.can_extend(1),
        lambda: storage.length(seq),
        lambda: storage.next_pos(seq),
        lambda: storage.cells(seq),
        lambda: storage.stats,
        storage.publish,
        lambda: executor.run([1], seq),
        executor.abort,
        lambda: executor.stats,
        lambda: Executor(program.address, storage),
        lambda: Executor(model, storage),
        lambda: model.info,
        model.program,
        model.new_cache,
    ):
        with pytest.raises(cellkv.ClosedError, match="closed"):
            call()


def test_an_executor_outlives_its_cache(program: TableProgram, storage: Cache) -> None:
    seq = storage.open()
    with Executor(program.address, storage) as executor:
        before = executor.run([1, 2], seq)
        storage.close()
        np.testing.assert_array_equal(executor.run([1, 2], seq).shape, before.shape)


def test_what_is_not_closed_goes_with_its_last_reference() -> None:
    n_before = table_program.n_alive()
    tables = random_tables(np.random.default_rng(0))
    program = TableProgram(tables)
    cache = Cache(cache_layers(tables, "f32", "f32"), capacity=16)

    class Owner:
        """Its executor's callback refers to it: a cycle, which must not keep either alive."""

        def __init__(self, cache: Cache) -> None:
            self.executor = Executor(program.address, cache, should_abort=self.should_abort)

        def should_abort(self) -> bool:
            return self.executor.closed

    owner = Owner(cache)
    owner.executor.run([1], cache.open())
    program.close()
    assert table_program.n_alive() == n_before + 1
    gone = weakref.ref(owner.executor), weakref.ref(cache)
    del owner, cache
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert table_program.n_alive() == n_before


def test_a_refused_executor_leaves_nothing_behind(program: TableProgram, cells: Cache) -> None:
    n_before = table_program.n_alive()
    for _ in range(3):
        with pytest.raises(cellkv.NoStorageError):
            Executor(program.address, cells)
    assert table_program.n_alive() == n_before


SETTING = """
import gc, sys, threading, time
import numpy as np
from table_program import TableProgram, cache_layers, random_tables
from cellkv import Cache, CellkvError, Executor
tables = random_tables(np.random.default_rng(0))
program = TableProgram(tables)
cache = Cache(cache_layers(tables, "f16", "f16"), capacity=1024)
executor = Executor(program.address, cache, n_threads=2)
seq = cache.open()
executor.run([1, 2, 3], seq)
"""


def run_script(root: Path, script: str) -> str:
    """Run Python in a process of its own; it must end well, with nothing on stderr."""
    path = [str(root / "tests"), *filter(None, sys.path)]
    code = f"import sys; sys.path[:0] = {path!r}\n" + SETTING + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; import cellkv"],
        env={**os.environ, "CELLKV_LIBRARY": str(tmp_path / "no-library.so")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "no-library.so" in done.stderr
    assert "CELLKV_LIBRARY" in done.stderr


def test_objects_may_be_closed_or_dropped_in_any_order(root: Path) -> None:
    run_script(
        root,
        """
        import itertools
        for order in itertools.permutations(["program", "cache", "executor"]):
            for drop in (False, True):
                objects = {"program": TableProgram(tables)}
                objects["cache"] = Cache(cache_layers(tables, "f16", "f16"), capacity=16)
                objects["executor"] = Executor(objects["program"].address, objects["cache"])
                objects["executor"].run([1], objects["cache"].open())
                for name in order:
                    if drop and name != "program":
                        del objects[name]
                        gc.collect()
                    else:
                        objects.pop(name).close()
        """,
    )


def test_objects_may_be_alive_at_exit(root: Path) -> None:
    run_script(root, "held = [program, cache, executor]; held.append(held)")


def test_a_step_in_a_daemon_thread_at_exit_is_stopped(root: Path) -> None:
    run_script(
        root,
        """
        started = threading.Event()
        def work():
            try:
                while True:
                    cache.rewind(seq, 3)
                    executor.run([1] * 900, seq)
                    started.set()
            except CellkvError:
                pass  # aborted, or closed before the next one
        threading.Thread(target=work, daemon=True).start()
        started.wait(60)
        """,
    )


# ---- threads ----


class Gate:
    """Holds a step inside its forward: `should_abort` waits here until the gate opens."""

    def __init__(self, abort: bool = False) -> None:
        self.abort = abort
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> bool:
        self.entered.set()
        assert self.opened.wait(60)
        return self.abort


class Running:
    """A step that another thread runs and a gate holds."""

    def __init__(self, executor: Executor, gate: Gate, *step: Any) -> None:
        self.gate = gate
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, args=(executor, step))
        self._thread.start()
        assert gate.entered.wait(60)

    def _run(self, executor: Executor, step: tuple[Any, ...]) -> None:
        try:
            self.result = executor.run(*step)
        except CellkvError as error:
            self.result = error

    def finish(self) -> Any:
        self.gate.opened.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.result


def test_everything_is_busy_while_a_step_runs(program: TableProgram, storage: Cache) -> None:
    gate = Gate()
    seq = storage.open()
    with Executor(program.address, storage, should_abort=gate) as executor:
        running = Running(executor, gate, [1, 2], seq)
        try:
            for call in (
                storage.open,
                lambda: storage.clone(seq),
                lambda: storage.rewind(seq, 0),
                lambda: storage.remove(seq, 0),
                lambda: storage.close_seq(seq),
                storage.clear,
                storage.trim_windows,
                lambda: storage.declare([seq]),
                lambda: storage.place(n=1),
                storage.undo_step,
                lambda: storage.can_extend(1),
                lambda: storage.length(seq),
                lambda: storage.next_pos(seq),
                lambda: storage.cells(seq),
                lambda: storage.stats,
                lambda: executor.run([1], seq),
                lambda: executor.stats,
            ):
                with pytest.raises(cellkv.BusyError):
                    call()
            with (
                Executor(program.address, storage) as other,
                pytest.raises(cellkv.BusyError),
            ):
                other.run([1], seq)
        finally:
            result = running.finish()
        assert result.shape == (1, executor.n_result)
        assert storage.next_pos(seq) == 2


def test_abort_stops_another_threads_step(program: TableProgram, storage: Cache) -> None:
    gate = Gate()
    seq = storage.open()
    with Executor(program.address, storage, should_abort=gate) as executor:
        executor.abort()  # nothing runs: nothing happens
        running = Running(executor, gate, [1, 2], seq)
        executor.abort()
        error = running.finish()
        assert type(error) is cellkv.AbortedError
        assert error.n_done == 0
        assert storage.length(seq) == 2  # claimed until undone
        storage.undo_step()
        assert storage.length(seq) == 0
        gate.abort = True
        with pytest.raises(cellkv.AbortedError) as caught:
            executor.run([1, 2], seq)
        assert caught.value.__cause__ is None
        storage.undo_step()
        gate.abort = False
        executor.run([1, 2], seq)


def test_an_exception_in_should_abort_stops_the_step(program: TableProgram, storage: Cache) -> None:
    seq = storage.open()
    raised: list[BaseException] = []

    def should_abort() -> bool:
        if raised:
            raise raised[0]
        return False

    with Executor(program.address, storage, should_abort=should_abort) as executor:
        executor.run([1], seq)
        raised.append(RuntimeError("enough"))
        with pytest.raises(cellkv.AbortedError) as caught:
            executor.run([1], seq)
        assert caught.value.__cause__ is raised[0]
        storage.undo_step()
        raised[0] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            executor.run([1], seq)
        storage.undo_step()
        raised.clear()
        executor.run([1], seq)


def test_closing_during_a_step_lets_it_end(program: TableProgram, storage: Cache) -> None:
    n_before = table_program.n_alive()
    gate = Gate()
    seq = storage.open()
    executor = Executor(program.address, storage, should_abort=gate)
    running = Running(executor, gate, [1, 2, 3], seq)
    executor.close()
    storage.close()
    program.close()
    with pytest.raises(cellkv.ClosedError):
        executor.abort()
    assert table_program.n_alive() == n_before
    assert running.finish().shape == (1, executor.n_result)
    assert table_program.n_alive() == n_before - 1  # freed by the step that was inside


def test_the_gil_is_released_while_a_step_computes() -> None:
    tables = random_tables(np.random.default_rng(0), n_heads=8, head_dim_k=64, head_dim_v=64)
    program = TableProgram(tables)
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    cache = Cache(cache_layers(tables, "f32", "f32"), capacity=4096)
    with cache, Executor(program.address, cache, n_threads=1, max_batch=4096) as executor:
        thread = threading.Thread(target=tick)
        thread.start()
        before, start = ticks[0], time.monotonic()
        executor.run(np.ones(4096, np.int32), cache.open())
        seconds, n_ticks = time.monotonic() - start, ticks[0] - before
        stop.set()
        thread.join()
    program.close()
    # With the GIL held there would be one tick or two, whatever the time.
    assert n_ticks > max(5, seconds * 20), f"{n_ticks} ticks in {seconds:.2f} s"


def test_threads_on_one_cache_are_refused_or_served_never_mixed_up(cells: Cache) -> None:
    seq = cells.open()
    counts = {"served": 0, "busy": 0}
    lock = threading.Lock()
    problems: list[BaseException] = []

    def work() -> None:
        served = busy = 0
        for _ in range(2000):
            try:
                clone = cells.clone(seq)
            except cellkv.BusyError:
                busy += 1
                continue
            except cellkv.NoSlotError:
                continue
            while True:
                try:
                    cells.close_seq(clone)
                    break
                except cellkv.BusyError:
                    busy += 1
            served += 1
        with lock:
            counts["served"] += served
            counts["busy"] += busy

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert counts["served"] > 0
    assert (cells.stats.n_seqs, cells.stats.used_cells) == (1, 0)


def test_closing_while_threads_call_is_safe() -> None:
    for _ in range(20):
        cache = Cache(backend="cells")
        outcomes: list[type[BaseException]] = []

        def work(cache: Cache = cache, outcomes: list[type[BaseException]] = outcomes) -> None:
            while True:
                try:
                    _ = cache.stats
                except cellkv.BusyError:
                    continue
                except BaseException as error:
                    outcomes.append(type(error))
                    return

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.005)
        cache.close()
        for thread in threads:
            thread.join(60)
        assert outcomes == [cellkv.ClosedError] * 3
