"""A llama decoder as the papers define it, in float64: one sequence at a time, no cache.

RMS norm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), grouped-query attention
(Ainslie et al. 2023), SiLU-gated feed-forward (Shazeer 2020). Hyperparameters and tensors bear
their GGUF names; a tensor [out, in] is numpy's view of ggml's [in, out].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle import Doubles, attention


def rms_norm(x: Doubles, weight: Doubles, epsilon: float) -> Doubles:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


def silu(x: Doubles) -> Doubles:
    return x / (1.0 + np.exp(-x))


def rotate(
    x: Doubles,
    position: int,
    *,
    n_dims: int,
    base: float,
    scale: float = 1.0,
    factors: Doubles | None = None,
    neighbours: bool = True,
) -> Doubles:
    """Turn the pairs in each row's first `n_dims` elements; the others stay.

    Pair i turns by position * scale / factors[i] * base^(-2i / n_dims). It is made of elements 2i
    and 2i + 1 (`neighbours`), or of i and i + n_dims / 2.
    """
    half = n_dims // 2
    i = np.arange(half)
    angle = position * scale * base ** (-2.0 * i / n_dims)
    if factors is not None:
        angle = angle / factors
    first, second = (2 * i, 2 * i + 1) if neighbours else (i, i + half)
    out = x.copy()
    out[:, first] = x[:, first] * np.cos(angle) - x[:, second] * np.sin(angle)
    out[:, second] = x[:, first] * np.sin(angle) + x[:, second] * np.cos(angle)
    return out


class Decoder:
    """A decoder of the architecture "llama"."""

    def __init__(
        self, metadata: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        self._metadata = metadata
        self._tensors = {name: np.asarray(t, np.float64) for name, t in tensors.items()}

    def logits(self, tokens: Sequence[int]) -> Doubles:
        """The logits after each of the tokens, [n, n_vocab]."""
        x = self._tensors["token_embd.weight"][np.asarray(tokens)]
        for layer in range(int(self._value("block_count"))):
            x = x + self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm"))
            x = x + self._feed_forward(layer, self._norm(x, f"blk.{layer}.ffn_norm"))
        head = self._tensors.get("output.weight", self._tensors["token_embd.weight"])
        return self._norm(x, "output_norm") @ head.T

    def _value(self, key: str, default: Any = None, layer: int = 0) -> Any:
        value = self._metadata.get(f"llama.{key}", default)
        return value[layer] if isinstance(value, list) else value

    def _norm(self, x: Doubles, name: str) -> Doubles:
        epsilon = np.float32(self._value("attention.layer_norm_rms_epsilon"))
        return rms_norm(x, self._tensors[f"{name}.weight"], float(epsilon))

    def _linear(self, x: Doubles, layer: int, name: str) -> Doubles:
        out = x @ self._tensors[f"blk.{layer}.{name}.weight"].T
        return out + self._tensors.get(f"blk.{layer}.{name}.bias", 0.0)

    def _attention(self, layer: int, x: Doubles) -> Doubles:
        n_heads = self._value("attention.head_count", layer=layer)
        n_kv_heads = self._value("attention.head_count_kv", n_heads, layer)
        shared_width = self._value("embedding_length") // self._value("attention.head_count")
        width_k = self._value("attention.key_length", shared_width)
        width_v = self._value("attention.value_length", shared_width)
        window = self._value("attention.sliding_window", 0, layer)
        q = self._linear(x, layer, "attn_q").reshape(len(x), n_heads, width_k)
        k = self._linear(x, layer, "attn_k").reshape(len(x), n_kv_heads, width_k)
        v = self._linear(x, layer, "attn_v").reshape(len(x), n_kv_heads, width_v)
        q, k = self._rotate_all(q), self._rotate_all(k)
        heads = np.empty((len(x), n_heads * width_v))
        for i in range(len(x)):
            seen = slice(max(0, i - window + 1) if window else 0, i + 1)
            heads[i] = attention(q[i], k[seen], v[seen], width_k**-0.5).ravel()
        return self._linear(heads, layer, "attn_output")

    def _rotate_all(self, x: Doubles) -> Doubles:
        kind = self._value("rope.scaling.type", "linear")
        factor = self._value("rope.scaling.factor", self._value("rope.scale_linear", 0.0))
        options = {
            "n_dims": self._value("rope.dimension_count", x.shape[2]),
            "base": self._value("rope.freq_base", 10000.0),
            "scale": 1.0 / factor if factor and kind == "linear" else 1.0,
            "factors": self._tensors.get("rope_freqs.weight"),
        }
        return np.stack([rotate(row, position, **options) for position, row in enumerate(x)])

    def _feed_forward(self, layer: int, x: Doubles) -> Doubles:
        gate = silu(self._linear(x, layer, "ffn_gate"))
        return self._linear(gate * self._linear(x, layer, "ffn_up"), layer, "ffn_down")
