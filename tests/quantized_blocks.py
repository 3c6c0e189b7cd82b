"""Random quantized tensors: any bit pattern of the quants, with scales that make usable weights."""

from __future__ import annotations

from collections.abc import Mapping

import gguf
import numpy as np
import numpy.typing as npt

from oracle import Doubles

Bytes = npt.NDArray[np.uint8]

gguf.GGML_QUANT_SIZES.setdefault(42, (64, 18))  # type: ignore[arg-type] # not in gguf 0.19

NUMBERS = {t.name: int(t) for t in gguf.GGMLQuantizationType} | {"Q1_0": 41, "Q2_0": 42}

# Where a block has its f16 scales: offset, and the size of that one beside the first. Types with a
# minimum get one that centres their weights.
SCALES: Mapping[str, list[tuple[int, float]]] = {
    "Q1_0": [(0, 1)],
    "Q2_0": [(0, 1)],
    "Q4_0": [(0, 1)],
    "Q4_1": [(0, 1), (2, -7.5)],
    "Q5_0": [(0, 1)],
    "Q5_1": [(0, 1), (2, -15.5)],
    "Q8_0": [(0, 1)],
    "Q2_K": [(80, 1), (82, 1.5)],
    "Q3_K": [(108, 1)],
    "Q4_K": [(0, 1), (2, 7.5)],
    "Q5_K": [(0, 1), (2, 15.5)],
    "Q6_K": [(208, 1)],
    "IQ2_XXS": [(0, 1)],
    "IQ2_XS": [(0, 1)],
    "IQ2_S": [(0, 1)],
    "IQ3_XXS": [(0, 1)],
    "IQ3_S": [(0, 1)],
    "IQ1_S": [(0, 1)],
    "IQ4_NL": [(0, 1)],
    "IQ4_XS": [(0, 1)],
    "TQ1_0": [(52, 1)],
    "TQ2_0": [(64, 1)],
}
TYPES = [*SCALES, "IQ1_M", "MXFP4", "NVFP4"]


def random_tensor(name: str, shape: tuple[int, int], rng: np.random.Generator) -> Bytes:
    """A tensor's bytes, [rows, bytes per row]; its weights are of about 1 / sqrt(columns)."""
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[NUMBERS[name]]  # type: ignore[index]
    rows, columns = shape
    blocks = rng.integers(0, 256, (rows * columns // n_weights, n_bytes), np.uint8)
    if name == "TQ1_0":  # bytes are sums of five digits of base 3: 243 values, spread over 256
        digits = rng.integers(0, 243, (len(blocks), 52))
        blocks[:, :52] = -(-digits * 256 // 243)
    elif name == "TQ2_0":  # the fourth value of two bits has no meaning
        digits = rng.integers(0, 3, (len(blocks), 64, 4), np.uint8)
        blocks[:, :64] = digits @ np.array([1, 4, 16, 64], np.uint8)
    target = columns**-0.5
    if name in SCALES or name == "IQ1_M":
        _set_scale(name, blocks, 1.0)
        _set_scale(name, blocks, target / weights(name, blocks).std())
    elif name == "MXFP4":  # one exponent of two; quants are up to 12 halves
        blocks[:, 0] = 128 + np.round(np.log2(target / 6))
    elif name == "NVFP4":  # four scales of 4 bits exponent, 3 bits mantissa
        exponent = int(np.round(np.log2(target / 6))) + 8
        blocks[:, :4] = (exponent << 3) + rng.integers(0, 8, (len(blocks), 4))
    return blocks.reshape(rows, -1)


def weights(name: str, tensor: Bytes) -> Doubles:
    """The weights that the bytes stand for, [rows, columns]."""
    if name == "Q1_0":
        return _by_digits(tensor, 18, 1, np.array([-1.0, 1.0]))
    if name == "Q2_0":
        return _by_digits(tensor, 18, 2, np.array([-1.0, 0.0, 1.0, 2.0]))
    kind = gguf.GGMLQuantizationType[name]
    return np.asarray(gguf.quants.dequantize(tensor, kind), np.float64)


def _by_digits(tensor: Bytes, n_bytes: int, n_bits: int, values: Doubles) -> Doubles:
    """A block of one f16 scale, then quants of n_bits, the lowest first."""
    blocks = tensor.reshape(-1, n_bytes)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float64)
    shifts = np.arange(0, 8, n_bits, dtype=np.uint8)
    digits = (blocks[:, 2:, None] >> shifts) & np.uint8(2**n_bits - 1)
    return (values[digits.reshape(len(blocks), -1)] * scale).reshape(len(tensor), -1)


def _set_scale(name: str, blocks: Bytes, scale: float) -> None:
    if name == "IQ1_M":  # the scale's four nibbles are the upper ones of four 16-bit words
        bits = int(np.float16(scale).view(np.uint16))
        for i in range(4):
            high = blocks[:, 48 + 2 * i + 1]
            high[:] = (high & 0x0F) | (((bits >> (4 * i)) & 0xF) << 4)
        return
    for offset, factor in SCALES[name]:
        value = np.array([scale * factor], np.float16)
        blocks[:, offset : offset + 2] = value.view(np.uint8)
