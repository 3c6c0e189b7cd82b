"""Tiny random models of each architecture, as dictionaries and as GGUF files."""

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

    architecture: str = "llama"
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
    n_experts: int = 0
    n_experts_used: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)  # further keys, without "llama."
    seed: int = 1

    @property
    def is_gemma(self) -> bool:
        return self.architecture in ("gemma2", "gemma3")

    @property
    def has_head_norms(self) -> bool:
        return self.architecture in ("gemma3", "qwen3", "qwen3moe")


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
    "qwen2": Tiny("qwen2", n_kv_heads=2, more={"rope.freq_base": 1e6}),
    "qwen2_tied": Tiny("qwen2", tied=True, n_heads=2),
    "qwen3": Tiny("qwen3", n_kv_heads=2, width_k=32, width_v=32, more={"rope.freq_base": 1e6}),
    "qwen3_tied": Tiny("qwen3", tied=True, more={"rope.dimension_count": 8}),
    "qwen3_widths": Tiny("qwen3", n_kv_heads=1, width_k=24, width_v=8, biases=True),
    "qwen3moe": Tiny("qwen3moe", n_kv_heads=2, n_ff=32, n_experts=8, n_experts_used=3),
    "qwen3moe_all": Tiny("qwen3moe", tied=True, n_ff=16, n_experts=4, n_experts_used=4),
    "qwen3moe_one_of": Tiny("qwen3moe", n_ff=[32, 16], n_experts=5, n_experts_used=1),
    "qwen3moe_one": Tiny("qwen3moe", n_ff=32, n_experts=1, n_experts_used=1),
    "gemma2": Tiny(
        "gemma2",
        n_layers=3,
        n_kv_heads=2,
        tied=True,
        more={
            "attention.sliding_window": 4,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
        },
    ),
    "gemma2_defaults": Tiny("gemma2", tied=True),
    "gemma2_no_caps": Tiny(
        "gemma2",
        tied=True,
        more={
            "attn_logit_softcapping": 0.0,
            "final_logit_softcapping": 0.0,
            "attention.scale": 2.0,
        },
    ),
    "gemma3": Tiny(
        "gemma3",
        n_layers=7,
        n_embd=32,
        n_heads=2,
        n_kv_heads=1,
        n_ff=48,
        tied=True,
        more={
            "attention.sliding_window": 4,
            "rope.freq_base": 100.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 2.0,
        },
    ),
    "gemma3_soft_cap": Tiny(
        "gemma3",
        width_k=32,
        width_v=32,
        more={
            "attention.sliding_window": 4,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base_swa": 500.0,
            "final_logit_softcapping": 2.5,
        },
    ),
    "gemma3_pattern_listed": Tiny(
        "gemma3",
        tied=True,
        more={
            "attention.sliding_window": 3,
            "attention.sliding_window_pattern": [False, True],
            "rope.freq_base": 1e6,
        },
    ),
    "gemma3_windows_listed": Tiny(
        "gemma3", tied=True, more={"attention.sliding_window": [0, 3], "rope.freq_base": 1e6}
    ),
    "gemma3_no_window": Tiny("gemma3", tied=True, more={"rope.freq_base": 1e6}),
}

# Of a generation's largest, known by its layers: scores are scaled by the hidden width per head.
LARGEST = {
    "gemma2": Tiny("gemma2", n_layers=46, n_embd=32, n_heads=2, width_k=8, width_v=8, n_ff=16),
    "gemma3": Tiny("gemma3", n_layers=62, n_embd=32, n_heads=2, width_k=8, width_v=8, n_ff=16),
}


def _at(value: int | list[int], layer: int) -> int:
    return value[layer] if isinstance(value, list) else value


def metadata_of(tiny: Tiny) -> Metadata:
    """The model's keys and values."""
    values: Metadata = {
        "block_count": tiny.n_layers,
        "context_length": 512,
        "embedding_length": tiny.n_embd,
        "attention.head_count": tiny.n_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": tiny.n_vocab,
    }
    if tiny.n_experts > 0:
        values["expert_count"] = tiny.n_experts
        values["expert_used_count"] = tiny.n_experts_used
        values["expert_feed_forward_length"] = tiny.n_ff
    else:
        values["feed_forward_length"] = tiny.n_ff
    optional = {
        "attention.head_count_kv": tiny.n_kv_heads,
        "attention.key_length": tiny.width_k,
        "attention.value_length": tiny.width_v,
    }
    values.update({key: value for key, value in optional.items() if value is not None})
    values.update(tiny.more)
    name = tiny.architecture
    return {"general.architecture": name} | {f"{name}.{k}": v for k, v in values.items()}


def _linears(tiny: Tiny, layer: int) -> dict[str, tuple[int, ...]]:
    """Each linear map's [out, in], or [experts, out, in]."""
    n_heads = _at(tiny.n_heads, layer)
    n_kv_heads = n_heads if tiny.n_kv_heads is None else _at(tiny.n_kv_heads, layer)
    width_k = tiny.width_k or tiny.n_embd // n_heads
    width_v = tiny.width_v or tiny.n_embd // n_heads
    n_ff = _at(tiny.n_ff, layer)
    attention = {
        "attn_q": (n_heads * width_k, tiny.n_embd),
        "attn_k": (n_kv_heads * width_k, tiny.n_embd),
        "attn_v": (n_kv_heads * width_v, tiny.n_embd),
        "attn_output": (tiny.n_embd, n_heads * width_v),
    }
    if tiny.n_experts > 0:
        return attention | {
            "ffn_gate_inp": (tiny.n_experts, tiny.n_embd),
            "ffn_gate_exps": (tiny.n_experts, n_ff, tiny.n_embd),
            "ffn_up_exps": (tiny.n_experts, n_ff, tiny.n_embd),
            "ffn_down_exps": (tiny.n_experts, tiny.n_embd, n_ff),
        }
    return attention | {
        "ffn_gate": (n_ff, tiny.n_embd),
        "ffn_up": (n_ff, tiny.n_embd),
        "ffn_down": (tiny.n_embd, n_ff),
    }


def _norms(tiny: Tiny, layer: int) -> dict[str, int]:
    """Each norm's width."""
    norms = {"attn_norm": tiny.n_embd, "ffn_norm": tiny.n_embd}
    if tiny.is_gemma:
        norms |= {"post_attention_norm": tiny.n_embd, "post_ffw_norm": tiny.n_embd}
    if tiny.has_head_norms:
        width = tiny.width_k or tiny.n_embd // _at(tiny.n_heads, layer)
        norms |= {"attn_q_norm": width, "attn_k_norm": width}
    return norms


def _has_bias(tiny: Tiny, name: str) -> bool:
    if tiny.architecture == "qwen2":
        return name in ("attn_q", "attn_k", "attn_v")
    return tiny.biases


def tensors_of(tiny: Tiny) -> Tensors:
    """The model's tensors, [out, in]: sizes at which each part of the forward has its weight."""
    rng = np.random.default_rng(tiny.seed)

    def normal(shape: tuple[int, ...], scale: float) -> npt.NDArray[np.float32]:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def norm(width: int) -> npt.NDArray[np.float32]:
        return 1.0 + normal((width,), 0.2)

    scale = 0.2 if tiny.is_gemma else 0.5  # Gemma's is multiplied by sqrt(n_embd)
    tensors = {"token_embd.weight": normal((tiny.n_vocab, tiny.n_embd), scale)}
    for layer in range(tiny.n_layers):
        for name, width in _norms(tiny, layer).items():
            tensors[f"blk.{layer}.{name}.weight"] = norm(width)
        for name, shape in _linears(tiny, layer).items():
            tensors[f"blk.{layer}.{name}.weight"] = normal(shape, 1.5 * shape[-1] ** -0.5)
            if _has_bias(tiny, name):
                tensors[f"blk.{layer}.{name}.bias"] = normal((shape[-2],), 0.3)
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
