"""Decoders as the papers define them, in float64: one sequence at a time, no cache.

RMS norm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), grouped-query attention
(Ainslie et al. 2023), SiLU- and GELU-gated feed-forward (Shazeer 2020), mixtures of experts
(Shazeer et al. 2017), norms of q and k (Henry et al. 2020), soft caps, norms after each part and
local layers (Gemma Team 2024, 2025). Hyperparameters and tensors bear their GGUF names; a tensor
[out, in] is numpy's view of ggml's [in, out].
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


def gelu(x: Doubles) -> Doubles:
    """GELU (Hendrycks and Gimpel 2016) in the form with tanh."""
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def soft_capped(x: Doubles, cap: float) -> Doubles:
    return cap * np.tanh(x / cap) if cap > 0 else x


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
    """A decoder of the architecture that the metadata names."""

    def __init__(
        self, metadata: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        self._metadata = metadata
        self._tensors = {name: np.asarray(t, np.float64) for name, t in tensors.items()}
        self._architecture = str(metadata["general.architecture"])
        self._is_gemma = self._architecture in ("gemma2", "gemma3")

    def hidden(self, tokens: Sequence[int]) -> Doubles:
        """The hidden state after each of the tokens and the last norm, [n, n_embd]."""
        x = self._tensors["token_embd.weight"][np.asarray(tokens)]
        if self._is_gemma:
            x = x * np.sqrt(self._value("embedding_length"))
        for layer in range(int(self._value("block_count"))):
            y = self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm"))
            x = x + self._post_norm(y, f"blk.{layer}.post_attention_norm")
            y = self._feed_forward(layer, self._norm(x, f"blk.{layer}.ffn_norm"))
            x = x + self._post_norm(y, f"blk.{layer}.post_ffw_norm")
        return self._norm(x, "output_norm")

    def logits(self, tokens: Sequence[int]) -> Doubles:
        """The logits after each of the tokens, [n, n_vocab]."""
        head = self._tensors.get("output.weight", self._tensors["token_embd.weight"])
        logits = self.hidden(tokens) @ head.T
        if not self._is_gemma:
            return logits
        default = 30.0 if self._architecture == "gemma2" else 0.0
        return soft_capped(logits, self._value("final_logit_softcapping", default))

    def _value(self, key: str, default: Any = None, layer: int = 0) -> Any:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        return value[layer] if isinstance(value, list) else value

    def _is_list(self, key: str) -> bool:
        return isinstance(self._metadata.get(f"{self._architecture}.{key}"), list)

    def _norm(self, x: Doubles, name: str) -> Doubles:
        epsilon = np.float32(self._value("attention.layer_norm_rms_epsilon"))
        return rms_norm(x, self._tensors[f"{name}.weight"], float(epsilon))

    def _post_norm(self, x: Doubles, name: str) -> Doubles:
        return self._norm(x, name) if self._is_gemma else x

    def _linear(self, x: Doubles, layer: int, name: str) -> Doubles:
        out = x @ self._tensors[f"blk.{layer}.{name}.weight"].T
        return out + self._tensors.get(f"blk.{layer}.{name}.bias", 0.0)

    def _window(self, layer: int) -> int:
        """How far back the layer looks; 0: to the beginning."""
        key, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
        window = int(self._value(key, 4096 if self._architecture == "gemma2" else 0, layer))
        if not self._is_gemma or (self._is_list(key) and self._value(pattern) is None):
            return window
        if self._is_list(pattern):
            return window if self._value(pattern, layer=layer) else 0
        period = self._value(pattern, 2 if self._architecture == "gemma2" else 6)
        return 0 if (layer + 1) % period == 0 else window

    def _scale(self, width_k: int) -> float:
        largest = {"gemma2": 46, "gemma3": 62}.get(self._architecture)
        if self._is_gemma and self._value("attention.scale") is not None:
            return float(np.float32(self._value("attention.scale")))
        if self._value("block_count") == largest:
            n_heads = self._value("attention.head_count")
            return float((self._value("embedding_length") / n_heads) ** -0.5)
        return float(width_k**-0.5)

    def _attention(self, layer: int, x: Doubles) -> Doubles:
        n_heads = self._value("attention.head_count", layer=layer)
        n_kv_heads = self._value("attention.head_count_kv", n_heads, layer)
        shared_width = self._value("embedding_length") // self._value("attention.head_count")
        width_k = self._value("attention.key_length", shared_width)
        width_v = self._value("attention.value_length", shared_width)
        q = self._linear(x, layer, "attn_q").reshape(len(x), n_heads, width_k)
        k = self._linear(x, layer, "attn_k").reshape(len(x), n_kv_heads, width_k)
        v = self._linear(x, layer, "attn_v").reshape(len(x), n_kv_heads, width_v)
        if self._architecture in ("gemma3", "qwen3", "qwen3moe"):
            q = self._norm(q, f"blk.{layer}.attn_q_norm")
            k = self._norm(k, f"blk.{layer}.attn_k_norm")
        q, k = self._rotate_all(q, layer), self._rotate_all(k, layer)
        window, scale = self._window(layer), self._scale(width_k)
        gemma2 = self._architecture == "gemma2"
        cap = self._value("attn_logit_softcapping", 50.0) if gemma2 else 0.0
        heads = np.empty((len(x), n_heads * width_v))
        for i in range(len(x)):
            seen = slice(max(0, i - window + 1) if window else 0, i + 1)
            heads[i] = attention(q[i], k[seen], v[seen], scale, cap).ravel()
        return self._linear(heads, layer, "attn_output")

    def _rotate_all(self, x: Doubles, layer: int) -> Doubles:
        kind = self._value("rope.scaling.type", "linear")
        factor = self._value("rope.scaling.factor", self._value("rope.scale_linear", 0.0))
        options = {
            "n_dims": self._value("rope.dimension_count", x.shape[2]),
            "base": self._value("rope.freq_base", 10000.0),
            "scale": 1.0 / factor if factor and kind == "linear" else 1.0,
            "factors": self._tensors.get("rope_freqs.weight"),
            "neighbours": self._architecture == "llama",
        }
        if self._architecture == "gemma3" and self._window(layer) > 0:
            options |= {"base": self._value("rope.freq_base_swa", 10000.0), "scale": 1.0}
        return np.stack([rotate(row, position, **options) for position, row in enumerate(x)])

    def _feed_forward(self, layer: int, x: Doubles) -> Doubles:
        if self._value("expert_count"):
            return np.stack([self._mixture(layer, row) for row in x])
        activation = gelu if self._is_gemma else silu
        gate = activation(self._linear(x, layer, "ffn_gate"))
        return self._linear(gate * self._linear(x, layer, "ffn_up"), layer, "ffn_down")

    def _mixture(self, layer: int, x: Doubles) -> Doubles:
        """One token's best experts, weighed by the softmax of their scores."""
        scores = self._tensors[f"blk.{layer}.ffn_gate_inp.weight"] @ x
        best = np.argsort(-scores)[: self._value("expert_used_count")]
        shares = np.exp(scores[best] - scores[best].max())
        gate, up, down = (
            self._tensors[f"blk.{layer}.ffn_{name}_exps.weight"] for name in ("gate", "up", "down")
        )
        out = np.zeros_like(x)
        for expert, share in zip(best, shares / shares.sum(), strict=True):
            out += share * (down[expert] @ (silu(gate[expert] @ x) * (up[expert] @ x)))
        return out
