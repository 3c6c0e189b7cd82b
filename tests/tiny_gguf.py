"""Tiny random models of the architecture "llama", as dictionaries and as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Metadata = dict[str, Any]
Tensors = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Tiny:
    """What a tiny model is like. A list has one entry per layer."""

    n_layers: int = 2
    n_vocab: int = 97
    n_embd: int = 64
    n_heads: int | list[int] = 4
    n_kv_heads: int | list[int] | None = None
    n_ff: int | list[int] = 96
    width_k: int | None = None
    width_v: int | None = None
    tied: bool = False
    biases: bool = False
    rope_factors: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)  # further keys, without "llama."
    seed: int = 1


VARIANTS = {
    "plain": Tiny(),
    "tied": Tiny(tied=True),
    "grouped": Tiny(n_kv_heads=2),
    "one_kv_head": Tiny(n_kv_heads=1, tied=True),
    "one_head": Tiny(n_heads=1),
    "wide_heads": Tiny(n_kv_heads=2, width_k=24, width_v=32),
    "partial_rope": Tiny(more={"rope.dimension_count": 6}),
    "rope_base": Tiny(more={"rope.freq_base": 500000.0}),
    "rope_factors": Tiny(rope_factors=True, more={"rope.freq_base": 500000.0}),
    "rope_linear": Tiny(more={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "rope_linear_legacy": Tiny(more={"rope.scale_linear": 2.0}),
    "rope_scaling_none": Tiny(more={"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "biases": Tiny(biases=True),
    "window": Tiny(n_kv_heads=2, more={"attention.sliding_window": 5}),
    "window_per_layer": Tiny(n_kv_heads=2, more={"attention.sliding_window": [0, 4]}),
    "layers_differ": Tiny(n_heads=[4, 2], n_kv_heads=[2, 1], n_ff=[96, 48], width_k=16, width_v=16),
    "epsilon": Tiny(more={"attention.layer_norm_rms_epsilon": 0.1}),
    "one_layer": Tiny(n_layers=1, n_kv_heads=2),
}


def _at(value: int | list[int], layer: int) -> int:
    return value[layer] if isinstance(value, list) else value


def metadata_of(tiny: Tiny) -> Metadata:
    """The model's keys and values."""
    values: Metadata = {
        "block_count": tiny.n_layers,
        "context_length": 512,
        "embedding_length": tiny.n_embd,
        "feed_forward_length": tiny.n_ff,
        "attention.head_count": tiny.n_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": tiny.n_vocab,
    }
    optional = {
        "attention.head_count_kv": tiny.n_kv_heads,
        "attention.key_length": tiny.width_k,
        "attention.value_length": tiny.width_v,
    }
    values.update({key: value for key, value in optional.items() if value is not None})
    values.update(tiny.more)
    return {"general.architecture": "llama"} | {f"llama.{k}": v for k, v in values.items()}


def _linears(tiny: Tiny, layer: int) -> dict[str, tuple[int, int]]:
    """Each linear map's [out, in]."""
    n_heads = _at(tiny.n_heads, layer)
    n_kv_heads = n_heads if tiny.n_kv_heads is None else _at(tiny.n_kv_heads, layer)
    width_k = tiny.width_k or tiny.n_embd // n_heads
    width_v = tiny.width_v or tiny.n_embd // n_heads
    n_ff = _at(tiny.n_ff, layer)
    return {
        "attn_q": (n_heads * width_k, tiny.n_embd),
        "attn_k": (n_kv_heads * width_k, tiny.n_embd),
        "attn_v": (n_kv_heads * width_v, tiny.n_embd),
        "attn_output": (tiny.n_embd, n_heads * width_v),
        "ffn_gate": (n_ff, tiny.n_embd),
        "ffn_up": (n_ff, tiny.n_embd),
        "ffn_down": (tiny.n_embd, n_ff),
    }


def tensors_of(tiny: Tiny) -> Tensors:
    """The model's tensors, [out, in]: sizes at which each part of the forward has its weight."""
    rng = np.random.default_rng(tiny.seed)

    def normal(shape: tuple[int, ...], scale: float) -> npt.NDArray[np.float32]:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def norm(width: int) -> npt.NDArray[np.float32]:
        return 1.0 + normal((width,), 0.2)

    tensors = {"token_embd.weight": normal((tiny.n_vocab, tiny.n_embd), 0.5)}
    for layer in range(tiny.n_layers):
        tensors[f"blk.{layer}.attn_norm.weight"] = norm(tiny.n_embd)
        tensors[f"blk.{layer}.ffn_norm.weight"] = norm(tiny.n_embd)
        for name, (n_out, n_in) in _linears(tiny, layer).items():
            tensors[f"blk.{layer}.{name}.weight"] = normal((n_out, n_in), 1.5 * n_in**-0.5)
            if tiny.biases:
                tensors[f"blk.{layer}.{name}.bias"] = normal((n_out,), 0.3)
    tensors["output_norm.weight"] = norm(tiny.n_embd)
    if not tiny.tied:
        tensors["output.weight"] = normal((tiny.n_vocab, tiny.n_embd), tiny.n_embd**-0.5)
    if tiny.rope_factors:
        width_k = tiny.width_k or tiny.n_embd // _at(tiny.n_heads, 0)
        factors = rng.uniform(1.0, 8.0, width_k // 2)
        tensors["rope_freqs.weight"] = factors.astype(np.float32)
    return tensors


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any]],
    types: Mapping[str, int] | None = None,
    alignment: int = 32,
) -> Path:
    """Write a GGUF file. A tensor with a type is given as that type's bytes, uint8 [out, bytes]."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()  # the architecture it has put there
    writer.data_alignment = alignment
    for key, value in metadata.items():
        writer.add_key_value(key, value, *_value_types(value))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=(types or {}).get(name))  # type: ignore[arg-type]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _value_types(value: Any) -> tuple[gguf.GGUFValueType, gguf.GGUFValueType | None]:
    """GGUF's type of a Python or numpy value, and that of its elements."""
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        return kinds.ARRAY, _value_types(value[0])[0]
    if isinstance(value, np.generic):
        return kinds[value.dtype.name.upper()], None
    if isinstance(value, bool):
        return kinds.BOOL, None
    if isinstance(value, int):
        return (kinds.UINT32 if value >= 0 else kinds.INT32), None
    return (kinds.FLOAT32 if isinstance(value, float) else kinds.STRING), None


def write_tiny(path: Path, tiny: Tiny) -> Path:
    """Write the model as a GGUF file of f32 tensors."""
    return write(path, metadata_of(tiny), tensors_of(tiny))
