"""Every decoder against a float64 decoder without a cache, on tiny models with f32 weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cellkv import Cache, Executor, Model, TrimmedError
from oracle_decoder import Decoder
from tiny_gguf import LARGEST, VARIANTS, Tiny, metadata_of, tensors_of, write_tiny

TOLERANCE = 1e-4  # of a logit, absolute; measured: 1.6e-5 where logits reach 15, else 2e-6
BY_ARRAYS = [
    name
    for name, tiny in VARIANTS.items()
    if not any(isinstance(value, list) for value in metadata_of(tiny).values())
]
SOURCES = [(name, "gguf", "auto") for name in VARIANTS] + [
    (name, "arrays" if name in BY_ARRAYS else "gguf", "dense") for name in VARIANTS
]
# Keys of variants that say what holds without them.
SAYING_NOTHING = {
    ("rope_linear", "rope.scaling.type"),
    ("rope_scaling_none", "rope.scaling.factor"),
    ("gemma3", "rope.scaling.type"),
}


class Served:
    """A model over a cache, each result compared with the oracle's."""

    def __init__(
        self, model: Model, truth: Decoder, *, n_threads: int = 1, **executor: Any
    ) -> None:
        self.truth = truth
        self.cache: Cache = model.new_cache(
            type_k="f32", type_v="f32", initial_rows=1, device="CPU"
        )
        self.executor = Executor(model, self.cache, n_threads=n_threads, **executor)
        self.tokens: dict[int, list[int]] = {}

    def open(self, *prompt: int) -> int:
        seq = self.cache.open()
        self.tokens[seq] = []
        if prompt:
            self.step([(seq, token) for token in prompt])
        return seq

    def clone(self, src: int, upto: int) -> int:
        seq = self.cache.clone(src, upto)
        self.tokens[seq] = self.tokens[src][:upto]
        return seq

    def step(self, tokens: list[tuple[int, int]], outputs: list[int] | None = None) -> None:
        """Run (sequence, token) pairs as one step and compare the logits of `outputs`."""
        wanted = list(range(len(tokens))) if outputs is None else outputs
        expected = []
        for seq, token in tokens:
            self.tokens[seq].append(token)
            expected.append((seq, len(self.tokens[seq]) - 1))
        logits = self.executor.run(
            [token for _, token in tokens], [seq for seq, _ in tokens], outputs=wanted
        )
        truth = {seq: self.truth.logits(self.tokens[seq]) for seq in {seq for seq, _ in tokens}}
        for row, i in zip(logits, wanted, strict=True):
            seq, position = expected[i]
            np.testing.assert_allclose(row, truth[seq][position], rtol=0, atol=TOLERANCE)


def load(tiny: Tiny, source: str, folder: Path) -> Model:
    if source == "arrays":
        return Model.from_arrays(metadata_of(tiny), tensors_of(tiny), device="CPU")
    return Model.load(write_tiny(folder / "tiny.gguf", tiny), device="CPU")


@pytest.fixture(params=SOURCES, ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    name, source, strategy = request.param
    tiny = VARIANTS[name]
    with load(tiny, source, tmp_path) as model:
        yield Served(model, Decoder(metadata_of(tiny), tensors_of(tiny)), strategy=strategy)


@pytest.fixture
def grouped(tmp_path: Path) -> tuple[Model, Decoder]:
    tiny = VARIANTS["grouped"]
    return load(tiny, "gguf", tmp_path), Decoder(metadata_of(tiny), tensors_of(tiny))


def prompt(length: int, seed: int = 0) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(0, 97, length)))


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, tiny in VARIANTS.items() for key in tiny.more]
)
def test_variants_would_be_seen_if_ignored(name: str, key: str) -> None:
    tiny = VARIANTS[name]
    more = {other: value for other, value in tiny.more.items() if other != key}
    without = dataclasses.replace(tiny, more=more)
    tokens = prompt(9)
    logits = Decoder(metadata_of(tiny), tensors_of(tiny)).logits(tokens)
    others = Decoder(metadata_of(without), tensors_of(tiny)).logits(tokens)
    differ = np.abs(logits - others).max() > 100 * TOLERANCE
    assert differ == ((name, key) not in SAYING_NOTHING)


def test_alone_in_one_step_and_token_by_token(served: Served) -> None:
    seq = served.open(*prompt(9))
    for token in prompt(6, seed=1):
        served.step([(seq, token)])


def test_sequences_interleaved_in_one_forward(served: Served) -> None:
    a, b, c = served.open(), served.open(*prompt(4)), served.open(*prompt(7, seed=2))
    mixed = [(a, 3), (c, 5), (a, 8), (b, 1), (a, 2), (c, 9), (b, 96), (a, 0)]
    served.step(mixed, outputs=[7, 0, 5, 6])
    for token in prompt(4, seed=3):
        served.step([(c, token), (a, token), (b, (token + 1) % 97)])


def test_clone_goes_on_from_the_shared_prefix(served: Served) -> None:
    source = served.open(*prompt(8))
    clone = served.clone(source, 6)
    for token in prompt(4, seed=4):
        served.step([(source, token), (clone, (token + 7) % 97)])
    served.cache.close_seq(source)
    served.step([(clone, 11), (clone, 12)])


@pytest.mark.parametrize("name", ["grouped", "gemma3", "qwen3moe"])
def test_threads_share_the_work(name: str, strategy: str, tmp_path: Path) -> None:
    tiny = VARIANTS[name]
    truth = Decoder(metadata_of(tiny), tensors_of(tiny))
    served = Served(load(tiny, "gguf", tmp_path), truth, n_threads=2, strategy=strategy)
    a, b = served.open(*prompt(9)), served.open(*prompt(6, seed=1))
    for token in prompt(3, seed=2):
        served.step([(a, token), (b, token)])


@pytest.mark.parametrize("length", [63, 64, 65, 130])
def test_wide_prefill(grouped: tuple[Model, Decoder], length: int) -> None:
    served = Served(*grouped, n_threads=2)
    seq = served.open(*prompt(length))
    served.step([(seq, 1)])


def test_wide_prefill_past_a_window(tmp_path: Path) -> None:
    tiny = dataclasses.replace(VARIANTS["window"], more={"attention.sliding_window": 50})
    served = Served(load(tiny, "gguf", tmp_path), Decoder(metadata_of(tiny), tensors_of(tiny)))
    seq = served.open(*prompt(140))
    served.step([(seq, 1)])


def test_prefill_in_slices(grouped: tuple[Model, Decoder]) -> None:
    served = Served(*grouped, max_batch=7)
    a, b = served.open(*prompt(20)), served.open()
    served.step([(a, 1), (b, 2)] * 10, outputs=[19, 0, 6, 7, 8])


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_rewinds_go_back_to_before_the_window(name: str, strategy: str, tmp_path: Path) -> None:
    """Local and global layers in one model: what a window does not show any more is still there."""
    tiny = VARIANTS[name]
    truth = Decoder(metadata_of(tiny), tensors_of(tiny))
    served = Served(load(tiny, "gguf", tmp_path), truth, strategy=strategy)
    a, b = served.open(*prompt(15)), served.open(*prompt(13, seed=2))
    clone = served.clone(a, 14)
    served.step([(a, 1), (b, 2), (clone, 3)])
    for seq, position in ((a, 6), (b, 1), (clone, 13)):
        served.cache.rewind(seq, position)
        del served.tokens[seq][position:]
    for token in prompt(4, seed=3):
        served.step([(clone, token), (a, 96 - token), (b, token)])


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_what_no_window_shows_again_can_be_trimmed(
    name: str, strategy: str, tmp_path: Path
) -> None:
    """Where all layers have windows: the largest of 5 still sees four tokens back."""
    more = {"attention.sliding_window": [3, 5]}
    tiny = Tiny(name, n_kv_heads=2, tied=True, more=more)
    truth = Decoder(metadata_of(tiny), tensors_of(tiny))
    served = Served(load(tiny, "gguf", tmp_path), truth, strategy=strategy)
    seq = served.open(*prompt(20))
    clone = served.clone(seq, 12)
    served.step([(clone, token) for token in prompt(5, seed=2)])
    used = served.cache.stats.used_cells
    freed = served.cache.trim_windows()
    assert freed == used - served.cache.stats.used_cells == 25 - 2 * 4
    other = served.open(*prompt(18, seed=3))  # in the cells that became free
    for token in prompt(6, seed=4):
        served.step([(seq, token), (other, token), (clone, token)])
    with pytest.raises(TrimmedError, match="oldest end that can be reached is 20"):
        served.cache.rewind(seq, 19)
    served.cache.rewind(seq, 20)
    served.tokens[seq] = served.tokens[seq][:20]
    late = served.clone(seq, 20)
    served.step([(seq, 3), (late, 4), (seq, 5), (late, 6)])


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_gemmas_scale_by_the_hidden_width_per_head(name: str, tmp_path: Path) -> None:
    tiny = LARGEST[name]
    truth = Decoder(metadata_of(tiny), tensors_of(tiny))
    other = Decoder(metadata_of(tiny) | {f"{name}.attention.scale": 8**-0.5}, tensors_of(tiny))
    tokens = prompt(9)
    assert np.abs(truth.logits(tokens) - other.logits(tokens)).max() > 100 * TOLERANCE
    Served(load(tiny, "gguf", tmp_path), truth).open(*tokens)


def test_step_without_outputs_still_writes_every_layer(served: Served) -> None:
    seq = served.open()
    served.step([(seq, token) for token in prompt(7)], outputs=[])
    served.step([(seq, 5), (seq, 6)], outputs=[1])


def test_outputs_may_repeat_and_come_in_any_order(served: Served) -> None:
    seq = served.open()
    served.step([(seq, token) for token in prompt(6)], outputs=[5, 0, 5, 3, 0])


def test_graphs_kept_and_built_anew_agree_bit_for_bit(grouped: tuple[Model, Decoder]) -> None:
    results: list[npt.NDArray[np.float32]] = []
    for reuse in (True, False):
        served = Served(*grouped, reuse_graphs=reuse)
        seq = served.open(*prompt(5))
        results.append(np.concatenate([served.executor.run([t], seq) for t in prompt(5, seed=6)]))
    np.testing.assert_array_equal(results[0], results[1])


def test_one_model_serves_two_caches_at_once(grouped: tuple[Model, Decoder]) -> None:
    model, truth = grouped
    first, second = Served(model, truth), Served(model, truth)
    a, b = first.open(*prompt(5)), second.open(*prompt(9, seed=8))
    model.close()  # the executors hold it
    first.step([(a, 1)])
    second.step([(b, 2)])


def test_file_read_and_file_mapped_agree_bit_for_bit(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", VARIANTS["grouped"])
    results = []
    for use_mmap in (True, False):
        with Model.load(path, device="CPU", use_mmap=use_mmap) as model:
            info = model.info
            assert info.mapped_bytes == (info.weight_bytes if use_mmap else 0)
            served = Served(model, Decoder(metadata_of(VARIANTS["grouped"]), {}))
            results.append(served.executor.run(prompt(9), served.cache.open()))
    np.testing.assert_array_equal(results[0], results[1])


def test_info_states_the_models_figures(tmp_path: Path) -> None:
    tiny = VARIANTS["layers_differ"]
    tensors = tensors_of(tiny)
    with load(tiny, "gguf", tmp_path) as model:
        info = model.info
    assert (info.architecture, info.n_vocab, info.n_layers) == ("llama", 97, 2)
    assert (info.n_embd, info.n_heads, info.n_context) == (64, 4, 512)
    assert info.n_parameters == sum(tensor.size for tensor in tensors.values())
    assert info.weight_bytes == 4 * info.n_parameters
    assert info.repacked_bytes == 0
    shapes = [(layer.n_kv_heads, layer.head_dim_k, layer.head_dim_v) for layer in info.layers]
    assert shapes == [(2, 16, 16), (1, 16, 16)]
