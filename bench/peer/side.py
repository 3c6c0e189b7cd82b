"""How compare.py talks to the two sides, each a process of its own: a line of JSON for an order, a
line of JSON for the answer. It runs in both environments, so it needs the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import NamedTuple, Protocol

N_RANDOM = 64  # tokens to choose from at random are [N_RANDOM, n_vocab)


class Case(NamedTuple):
    """Sequences of `context` tokens, the first `shared` of which all have in common."""

    n_seqs: int
    context: int
    shared: int = 0

    def __str__(self) -> str:
        words = f"{self.n_seqs} x {self.context}"
        return f"{words} ({self.shared} shared)" if self.shared else words


class Side(Protocol):
    """A model with the sequences of one case in its cache."""

    def fill(self) -> None:
        """Give the sequences their tokens."""

    def step(self) -> float:
        """Decode one token of each sequence, with the logits of all; the seconds it took."""

    def prompt(self, n_tokens: int) -> float:
        """Compute a prompt in one new sequence, with its last logits; the seconds it took."""


def parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model")
    parser.add_argument("--n-seqs", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024, help="tokens in each sequence")
    parser.add_argument("--shared", type=int, default=0, help="tokens that are the same cells")
    parser.add_argument("--n-steps", type=int, default=64, help="steps to have room for")
    parser.add_argument("--threads", type=int, default=2)
    return parser


def answer(**values: object) -> None:
    print(json.dumps(values), flush=True)


def serve(side: Side) -> None:
    """Follow orders until there are no more."""
    for line in sys.stdin:
        order, argument = json.loads(line)
        if order == "fill":
            side.fill()
            answer(filled=True)
        elif order == "step":
            side.step()  # memory and caches were somebody else's
            answer(seconds=[side.step() for _ in range(argument)])
        elif order == "prompt":
            answer(seconds=[side.prompt(argument)])
        else:
            raise SystemExit(f"unknown order {order!r}")
