"""Every weight type that ggml's CPU computes with, repacked or not, against the weights' values.

ggml rounds the other operand of each product to 8 bits per block (to f16 or bf16 for those types):
that, and nothing else, is what the tolerances are for.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from cellkv import BadTensorError, Model
from oracle import Doubles
from oracle_decoder import Decoder
from quantized_blocks import NUMBERS, TYPES, random_tensor, weights
from tiny_gguf import Tiny, metadata_of, tensors_of, write

TINY = Tiny(n_embd=256, n_kv_heads=2, n_ff=512, n_vocab=96)
# The experts are chosen clearly: a rounding difference should not change the choice.
MIXTURE = Tiny(
    "qwen3moe",
    n_layers=1,
    n_embd=256,
    n_kv_heads=2,
    n_ff=256,
    n_vocab=96,
    n_experts=4,
    n_experts_used=2,
)
CLEARLY = 6.0
MIXTURE_TYPES = ["F32", "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4"]
PROMPT = np.random.default_rng(5).integers(0, 96, 9).tolist()

# Relative L2 error of the logits; measured: 4.5e-7, 9.0e-4, 6.6e-3.
TOLERANCE = {"F32": 1e-5, "F16": 2e-3, "BF16": 2e-2}
TOLERANCE_QUANTIZED = 5e-2  # measured: 3e-3 (Q4_0) to 2.9e-2 (IQ2_XXS)


class Made(NamedTuple):
    path: Path
    truth: Doubles
    matrix_bytes: int  # of the weights that are multiplied by


def is_matrix(name: str, tensor: npt.NDArray[np.generic]) -> bool:
    return tensor.ndim > 1 and name != "token_embd.weight" and "ffn_gate_inp" not in name


def quantized(
    kind: str, dense: npt.NDArray[np.float32], rng: np.random.Generator
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    """A tensor of that type as it is stored, and its weights' values."""
    rows = dense.reshape(-1, dense.shape[-1])
    if kind in ("F16", "BF16"):
        number = gguf.GGMLQuantizationType[kind]
        stored = gguf.quants.quantize(rows, number)
        values = gguf.quants.dequantize(stored, number)
    else:
        stored = random_tensor(kind, rows.shape, rng)
        values = weights(kind, stored)
    return stored.reshape(*dense.shape[:-1], -1), values.reshape(dense.shape)


def make(name: str, folder: Path, tiny: Tiny = TINY) -> Made:
    rng = np.random.default_rng(3)
    tensors: dict[str, npt.NDArray[np.generic]] = dict(tensors_of(tiny))
    for router in [tensor for tensor in tensors if "ffn_gate_inp" in tensor]:
        tensors[router] = np.float32(CLEARLY) * tensors[router]
    values: dict[str, npt.NDArray[np.generic]] = dict(tensors)
    types = {}
    for tensor, dense in list(tensors.items()):
        if name != "F32" and (is_matrix(tensor, dense) or tensor == "token_embd.weight"):
            tensors[tensor], values[tensor] = quantized(name, dense, rng)
            types[tensor] = NUMBERS[name]
    path = write(folder / f"{name}.gguf", metadata_of(tiny), tensors, types)
    return Made(
        path,
        Decoder(metadata_of(tiny), values).logits(PROMPT),
        sum(stored.nbytes for tensor, stored in tensors.items() if is_matrix(tensor, stored)),
    )


@pytest.fixture(scope="module", params=["F32", "F16", "BF16", *TYPES])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Made]:
    return request.param, make(request.param, tmp_path_factory.mktemp("quantized"))


def logits_of(model: Model) -> npt.NDArray[np.float32]:
    """A prefill's logits and those of single tokens: ggml has a kernel for either."""
    with (
        model.new_cache(type_k="f32", type_v="f32", device="CPU") as cache,
        model.executor(cache, n_threads=2) as executor,
    ):
        seq = cache.open()
        rows = [executor.run(PROMPT[:7], seq, outputs="all")]
        rows += [executor.run([token], seq) for token in PROMPT[7:]]
    return np.concatenate(rows)


def check_logits(name: str, made: Made, repack: bool) -> None:
    with Model.load(made.path, device="CPU", repack=repack) as model:
        info = model.info
        logits = logits_of(model)
    error = np.linalg.norm(logits - made.truth) / np.linalg.norm(made.truth)
    print(f"{name}: relative L2 {error:.2e}, repacked {info.repacked_bytes}, {made.matrix_bytes}")
    assert error < TOLERANCE.get(name, TOLERANCE_QUANTIZED)
    assert info.repacked_bytes in ((0, made.matrix_bytes) if repack else (0,))
    assert info.mapped_bytes == info.weight_bytes - info.repacked_bytes


@pytest.mark.parametrize("repack", [True, False], ids=["repacked", "as_stored"])
def test_logits_are_those_of_the_weights_values(made: tuple[str, Made], repack: bool) -> None:
    check_logits(*made, repack)


@pytest.mark.parametrize("name", MIXTURE_TYPES)
def test_experts_too(name: str, tmp_path: Path) -> None:
    mixture = make(name, tmp_path, MIXTURE)
    for repack in (True, False):
        check_logits(name, mixture, repack)


def test_q4_0_is_repacked_on_every_cpu_we_test_on(tmp_path: Path) -> None:
    path, _, matrix_bytes = make("Q4_0", tmp_path)
    with Model.load(path, device="CPU") as model:
        assert model.info.repacked_bytes == matrix_bytes
    with Model.load(path, device="CPU", use_mmap=False) as model:
        assert model.info.repacked_bytes == matrix_bytes
        assert model.info.mapped_bytes == 0


def test_tied_embedding_stays_as_stored_beside_a_repacked_head(tmp_path: Path) -> None:
    tiny = Tiny(n_embd=256, n_vocab=96, tied=True)
    rng = np.random.default_rng(4)
    tensors: dict[str, npt.NDArray[np.generic]] = dict(tensors_of(tiny))
    embedding = random_tensor("Q4_0", (96, 256), rng)
    values = tensors | {"token_embd.weight": weights("Q4_0", embedding)}
    tensors["token_embd.weight"] = embedding
    path = write(
        tmp_path / "tied.gguf", metadata_of(tiny), tensors, {"token_embd.weight": NUMBERS["Q4_0"]}
    )
    truth = Decoder(metadata_of(tiny), values).logits(PROMPT)
    with Model.load(path, device="CPU") as model:
        assert model.info.repacked_bytes == embedding.nbytes
        assert model.info.mapped_bytes == model.info.weight_bytes
        logits = logits_of(model)
    assert np.linalg.norm(logits - truth) / np.linalg.norm(truth) < TOLERANCE_QUANTIZED


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_norms_and_biases_in_half_precision_are_converted(tmp_path: Path, kind: str) -> None:
    tiny = Tiny(biases=True, rope_factors=True)
    tensors: dict[str, npt.NDArray[np.generic]] = dict(tensors_of(tiny))
    values: dict[str, npt.NDArray[np.generic]] = dict(tensors)
    types = {}
    for name, tensor in list(tensors.items()):
        if tensor.ndim == 1:
            types[name] = gguf.GGMLQuantizationType[kind]
            tensors[name] = gguf.quants.quantize(tensor, types[name])
            values[name] = gguf.quants.dequantize(tensors[name], types[name])
    path = write(tmp_path / "half.gguf", metadata_of(tiny), tensors, types)
    truth = Decoder(metadata_of(tiny), values).logits(PROMPT)
    with Model.load(path, device="CPU") as model:
        np.testing.assert_allclose(logits_of(model), truth, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.float64])
def test_types_without_a_product_are_refused(tmp_path: Path, dtype: type[np.generic]) -> None:
    tiny = Tiny()
    for name in ("blk.1.ffn_up.weight", "token_embd.weight", "output_norm.weight"):
        tensors: dict[str, npt.NDArray[np.generic]] = dict(tensors_of(tiny))
        tensors[name] = tensors[name].astype(dtype)
        path = write(tmp_path / "odd.gguf", metadata_of(tiny), tensors)
        with pytest.raises(BadTensorError, match=name):
            Model.load(path, device="CPU")
