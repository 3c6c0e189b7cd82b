"""cellkv's side, run by compare.py in an environment whose ggml is built as llama.cpp's is.

K and V of the prompts are random: a program that has tables in the place of weights writes them
into the model's cache. A step takes as long over any numbers; --computed shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import numpy as np
import side

import cellkv
from table_program import TableProgram, random_tables

N_TABLE = 512


class Ours:
    """The model with one case's sequences."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._case = side.Case(arguments.n_seqs, arguments.context, arguments.shared)
        self._apart = arguments.apart
        self._computed = arguments.computed
        self._n_threads = arguments.threads
        n_seqs, context, shared = self._case
        n_cells = shared + n_seqs * (context - shared + arguments.n_steps)
        self._model = cellkv.Model.load(arguments.model)
        self._cache = self._model.new_cache(
            capacity=n_cells, initial_rows=n_cells, max_seqs=max(n_seqs, context)
        )
        self._executor = self._model.executor(
            self._cache, strategy=arguments.strategy, n_threads=arguments.threads, max_batch=512
        )
        self._rng = np.random.default_rng(0)
        self._seqs = np.empty(0, np.int64)

    def _random_tokens(self, n: int) -> np.ndarray:
        return self._rng.integers(side.N_RANDOM, self._model.info.n_vocab, n)

    def fill(self) -> None:
        n_seqs, context, shared = self._case
        with contextlib.ExitStack() as stack:
            executor, n_vocab = self._executor, self._model.info.n_vocab
            if not self._computed:
                executor, n_vocab = stack.enter_context(self._table_executor()), N_TABLE

            def append(n_tokens: int, seq: int) -> None:
                if n_tokens:
                    executor.run(self._rng.integers(0, n_vocab, n_tokens), seq, outputs=[])

            first = self._cache.open()
            append(shared, first)
            clones = [self._cache.clone(first) for _ in range(n_seqs - 1)]
            self._seqs = np.array([first, *clones])
            for seq in self._seqs:
                append(context - shared, seq)

    def _table_executor(self) -> cellkv.Executor:
        layers = self._model.info.layers
        tables = random_tables(
            np.random.default_rng(1),
            tuple(layer.window for layer in layers),
            n_vocab=N_TABLE,
            n_heads=layers[0].n_kv_heads,
            n_kv_heads=layers[0].n_kv_heads,
            head_dim_k=layers[0].head_dim_k,
            head_dim_v=layers[0].head_dim_v,
        )
        program = TableProgram(tables)
        executor = cellkv.Executor(program.address, self._cache, n_threads=self._n_threads)
        program.close()  # the executor keeps it
        return executor

    def step(self) -> float:
        tokens = self._random_tokens(len(self._seqs))
        begin = time.perf_counter()
        self._executor.run(tokens, self._seqs, outputs="all")
        return time.perf_counter() - begin

    def prompt(self, n_tokens: int) -> float:
        seqs = [self._cache.open() for _ in range(n_tokens if self._apart else 1)]
        owners = np.array(seqs) if self._apart else np.repeat(seqs, n_tokens)
        tokens = self._random_tokens(n_tokens)
        begin = time.perf_counter()
        self._executor.run(tokens, owners, outputs="last")
        seconds = time.perf_counter() - begin
        self._cache.clear()
        return seconds


def main() -> None:
    parser = side.parser(__doc__)
    parser.add_argument("--strategy", default="auto", choices=["auto", "dense", "ragged"])
    parser.add_argument("--apart", action="store_true", help="a sequence for each prompt token")
    parser.add_argument("--computed", action="store_true", help="compute prompts with the model")
    arguments = parser.parse_args()
    ours = Ours(arguments)
    side.answer(version=cellkv.__version__)
    side.serve(ours)


if __name__ == "__main__":
    main()
