"""What a user would pick instead: llama.cpp decoding many sequences in one batch.

Run by compare.py in an environment with llama-cpp-python, never in one process with cellkv: it
carries a ggml of its own.

Prompts are computed once (--save) and loaded into every sequence of every case as states: llama.cpp
would compute 16 times 4,096 tokens for minutes. The steps after it are the same. With --computed
each sequence's prompt is computed.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import side

SEQUENCE_STEP = 256  # a sequence's cells are rounded up to it when they are split
STREAMS_AT = 12  # where a state's file has the number of streams


@llama_cpp.llama_log_callback
def say_nothing(_level: int, _text: bytes, _context: int | None) -> None:
    pass


class Batch:
    """Tokens for one call of llama_decode."""

    def __init__(self, tokens: Sequence[int], positions: Sequence[int], seqs: Sequence[int]):
        self.batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        self.batch.n_tokens = len(tokens)
        for i, (token, pos, seq) in enumerate(zip(tokens, positions, seqs, strict=True)):
            self.batch.token[i] = int(token)
            self.batch.pos[i] = int(pos)
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = int(seq)
            self.batch.logits[i] = 0

    def want_logits(self, indices: Sequence[int]) -> None:
        for i in indices:
            self.batch.logits[i] = 1

    def free(self) -> None:
        llama_cpp.llama_batch_free(self.batch)


class Llama:
    """A context whose cells are split among the sequences, or one pool for all ("unified")."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._case = side.Case(arguments.n_seqs, arguments.context, arguments.shared)
        self._unified = arguments.unified
        self._computed = arguments.computed
        self._states = arguments.states
        self._n_batch = 2048
        llama_cpp.llama_log_set(say_nothing, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(arguments.model.encode(), model)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = self._n_cells(arguments.n_steps) + SEQUENCE_STEP
        context.n_seq_max = max(arguments.n_seqs, 2 if arguments.save else 1)
        context.n_batch, context.n_ubatch = self._n_batch, 512
        context.kv_unified = self._unified
        context.n_threads = context.n_threads_batch = arguments.threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise SystemExit("llama.cpp made no context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self._rng = np.random.default_rng(0)
        self._pos = self._case.context

    def _n_cells(self, n_steps: int) -> int:
        n_seqs, context, shared = self._case
        length = context + n_steps
        if self._unified:
            return shared + n_seqs * (length - shared)
        return n_seqs * -(-length // SEQUENCE_STEP) * SEQUENCE_STEP

    def _random_tokens(self, n: int) -> np.ndarray:
        return self._rng.integers(side.N_RANDOM, self._n_vocab, n)

    def _decode(self, batch: Batch) -> None:
        status = llama_cpp.llama_decode(self._context, batch.batch)
        if status != 0:
            raise SystemExit(f"llama_decode returned {status}")

    def prompt(self, n_tokens: int) -> float:
        llama_cpp.llama_memory_seq_rm(self._memory, 0, -1, -1)
        return self._append(0, 0, n_tokens)

    def _append(self, seq: int, begin: int, end: int) -> float:
        """Compute random tokens at positions [begin, end) of a sequence, with the last's logits."""
        batches = []
        for start in range(begin, end, self._n_batch):
            n = min(self._n_batch, end - start)
            batches.append(Batch(self._random_tokens(n), range(start, start + n), [seq] * n))
        batches[-1].want_logits([n - 1])
        start_time = time.perf_counter()
        for batch in batches:
            self._decode(batch)
        llama_cpp.llama_get_logits_ith(self._context, n - 1)
        seconds = time.perf_counter() - start_time
        for batch in batches:
            batch.free()
        return seconds

    def step(self) -> float:
        n = self._case.n_seqs
        batch = Batch(self._random_tokens(n), [self._pos] * n, range(n))
        batch.want_logits(range(n))
        begin = time.perf_counter()
        self._decode(batch)
        llama_cpp.llama_get_logits_ith(self._context, n - 1)
        seconds = time.perf_counter() - begin
        batch.free()
        self._pos += 1
        return seconds

    # ---- states: the K and V of positions [start, end) of one prompt ----

    def save(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Compute one prompt and save these ranges of its positions."""
        self.prompt(max(end for _, end in ranges))
        for start, end in ranges:
            # the second sequence shares what is to be saved: a state is a sequence's
            llama_cpp.llama_memory_seq_cp(self._memory, 0, 1, start, end)
            path = str(self._path(start, end)).encode()
            if not llama_cpp.llama_state_seq_save_file(self._context, path, 1, None, 0):
                raise SystemExit(f"llama.cpp saved no {path.decode()}")
            llama_cpp.llama_memory_seq_rm(self._memory, 1, -1, -1)

    def _path(self, start: int, end: int) -> Path:
        return self._states / f"{start}-{end}.state"

    def _load(self, path: Path, seq: int) -> None:
        tokens = (llama_cpp.llama_token * 1)()
        n_tokens = ctypes.c_size_t()
        n_bytes = llama_cpp.llama_state_seq_load_file(
            self._context, str(path).encode(), seq, tokens, 1, ctypes.byref(n_tokens)
        )
        if not n_bytes:
            raise SystemExit(f"llama.cpp does not load {path}")

    def fill(self) -> None:
        if self._computed:
            self._compute()
        elif self._unified:
            self._fill_pool()
        else:
            self._fill_streams()

    def _compute(self) -> None:
        n_seqs, context, shared = self._case
        if shared:
            self._append(0, 0, shared)
            for seq in range(1, n_seqs):
                llama_cpp.llama_memory_seq_cp(self._memory, 0, seq, -1, -1)
        for seq in range(n_seqs):
            if shared < context:
                self._append(seq, shared, context)

    def _fill_pool(self) -> None:
        n_seqs, context, shared = self._case
        self._load(self._path(0, context), 0)
        for seq in range(1, n_seqs):
            if shared < context:
                self._load(self._path(shared, context), seq)
            if shared:
                llama_cpp.llama_memory_seq_cp(self._memory, 0, seq, 0, shared)

    def _fill_streams(self) -> None:
        """Nothing can be shared among streams: each sequence has it all."""
        state = bytearray(self._path(0, self._case.context).read_bytes())
        n_streams = self._case.n_seqs
        # It was saved from one stream; here the others' parts, which have no cells, follow.
        state[STREAMS_AT : STREAMS_AT + 4] = n_streams.to_bytes(4, "little")
        state += bytes(4 * (n_streams - 1))
        path = self._states / "streams.state"
        path.write_bytes(state)
        self._load(path, 0)
        path.unlink()
        for seq in range(1, n_streams):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, seq, -1, -1)


def main() -> None:
    parser = side.parser(__doc__)
    parser.add_argument("--unified", action="store_true")
    parser.add_argument("--computed", action="store_true", help="compute every prompt")
    parser.add_argument("--states", type=Path, required=True, help="the folder of the states")
    parser.add_argument("--save", metavar="START-END", nargs="*", help="save these states only")
    arguments = parser.parse_args()
    if arguments.save:
        ranges = [tuple(map(int, words.split("-"))) for words in arguments.save]
        arguments.context = max(end for _, end in ranges)
        arguments.unified = True
        Llama(arguments).save(ranges)
        return
    llama = Llama(arguments)
    version = llama_cpp.__version__
    features = llama_cpp.llama_print_system_info().decode()
    side.answer(version=version, features=features)
    side.serve(llama)


if __name__ == "__main__":
    main()
