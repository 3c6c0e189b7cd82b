"""Attention as it is defined, in float64: one sequence at a time, no cell, no mask table.

The judge of every strategy. K and V are taken as stored (rounded to the storage type), so that only
the attention's own error is judged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

import c_library

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def round_to(values: Floats, type_name: str) -> Doubles:
    """`values` as they come back from storage in that type. Blocks are of the last axis."""
    values = np.asarray(values, np.float32)
    if type_name in ("q8_0", "q4_0"):
        return c_library.as_stored(values, type_name)
    if type_name == "f16":
        values = values.astype(np.float16).astype(np.float32)
    elif type_name == "bf16":
        bits = values.view(np.uint32)
        nearest_even = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        values = (nearest_even & np.uint32(0xFFFF0000)).view(np.float32)
    elif type_name != "f32":
        raise ValueError(type_name)
    return values.astype(np.float64)


def attention(
    q: Doubles,
    k: Doubles,
    v: Doubles,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Doubles | None = None,
) -> Doubles:
    """What one query attends: q [n_heads, width_k], k [n, n_kv_heads, width_k],
    v [n, n_kv_heads, width_v] of the tokens it sees; returns [n_heads, width_v].
    """
    n_heads, n_kv_heads = q.shape[0], k.shape[1]
    out = np.zeros((n_heads, v.shape[2]))
    for head in range(n_heads):
        shared = head // (n_heads // n_kv_heads)
        scores = scale * (k[:, shared] @ q[head])
        if soft_cap > 0:
            scores = soft_cap * np.tanh(scores / soft_cap)
        top = scores.max() if sinks is None else max(scores.max(), sinks[head])
        weights = np.exp(scores - top)
        total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head] - top))
        out[head] = (weights / total) @ v[:, shared]
    return out


@dataclass(frozen=True)
class LayerTables:
    """One layer of a table program: token t's q, k and v are row t of these."""

    q: Floats  # [n_vocab, n_heads, head_dim_k]
    k: Floats  # [n_vocab, n_kv_heads, head_dim_k]
    v: Floats  # [n_vocab, n_kv_heads, head_dim_v]
    window: int = 0
    scale: float = 1.0
    soft_cap: float = 0.0
    sinks: Floats | None = None  # [n_heads]
    _stored: dict[str, Doubles] = field(default_factory=dict, repr=False, compare=False)

    def stored(self, of: Literal["k", "v"], type_name: str) -> Doubles:
        """The whole table as it comes back from storage; the tables must not change after it."""
        key = f"{of} {type_name}"
        if key not in self._stored:
            self._stored[key] = round_to(getattr(self, of), type_name)
        return self._stored[key]


@dataclass
class Sequence:
    """What a sequence holds: a token for each position it still owns."""

    tokens: dict[int, int] = field(default_factory=dict)

    @property
    def next_pos(self) -> int:
        return max(self.tokens, default=-1) + 1

    def append(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens[self.next_pos] = token

    def clone(self, upto: int | None = None) -> Sequence:
        end = self.next_pos if upto is None else upto
        return Sequence({p: t for p, t in self.tokens.items() if p < end})

    def rewind(self, pos: int) -> None:
        self.tokens = {p: t for p, t in self.tokens.items() if p < pos}

    def remove(self, p0: int, p1: int) -> None:
        self.tokens = {p: t for p, t in self.tokens.items() if not p0 <= p < p1}

    def result(self, tables: list[LayerTables], pos: int, type_k: str, type_v: str) -> Doubles:
        """The table program's result row for this sequence's token at `pos`."""
        rows = []
        for layer in tables:
            first = pos - layer.window if layer.window > 0 else -1
            seen = [t for p, t in sorted(self.tokens.items()) if first < p <= pos]
            rows.append(
                attention(
                    layer.q[self.tokens[pos]].astype(np.float64),
                    layer.stored("k", type_k)[seen],
                    layer.stored("v", type_v)[seen],
                    layer.scale,
                    layer.soft_cap,
                    None if layer.sinks is None else layer.sinks.astype(np.float64),
                ).ravel()
            )
        return np.concatenate(rows)


def relative_error(got: npt.ArrayLike, want: npt.ArrayLike) -> float:
    """Relative L2 error; infinite if anything is not finite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
