"""What llama.cpp computed on real models (tests/vectors), and how logits are held to it.

The recorded tokens are fed, not generated: ggml rounds activations to 8 bits before each product
with quantized weights, and a difference of 1e-6 between two ways to sum grows to tenths of a logit.
The tolerance is a measured one, each model's own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from cellkv import Cache, Executor, Model, NotWindowedError

Float = Literal["f32", "f16"]

CASES = ["short", "code", "unicode", "chat", "long"]
N_STEPS = 24


class Case(NamedTuple):
    name: str
    text: str
    prompt: list[int]
    greedy: list[int]
    ids: npt.NDArray[np.int64]  # [N_STEPS, 8]
    logits: npt.NDArray[np.float64]  # [N_STEPS, 8]
    gaps: npt.NDArray[np.float64]  # [N_STEPS]

    def fed(self, step: int) -> int:
        """The token whose logits are those of `step`: at step 0 the prompt's last."""
        return self.greedy[step - 1] if step > 0 else self.prompt[-1]


def read_cases(path: Path, kv: Float = "f32") -> dict[str, Case]:
    """The cases with K and V of this type, by name."""
    recorded = json.loads(path.read_text())["cases"]
    return {case["name"]: _case(case) for case in recorded if case["kv"] == kv}


def _case(case: dict[str, Any]) -> Case:
    steps = case["steps"]
    assert len(steps) == len(case["greedy"]) == N_STEPS
    return Case(
        case["name"],
        case["text"],
        case["prompt_ids"],
        case["greedy"],
        np.array([step["ids"] for step in steps]),
        np.array([step["logits"] for step in steps]),
        np.array([step["gap"] for step in steps]),
    )


def check(
    capsys: pytest.CaptureFixture[str],
    how: str,
    case: Case,
    logits: npt.NDArray[np.float32],
    tolerance: float,
) -> None:
    """All 8 logits of all steps within the tolerance; the best token wherever it leads enough."""
    assert logits.shape[0] == N_STEPS
    errors = np.abs(np.take_along_axis(logits, case.ids, axis=1) - case.logits)
    same = logits.argmax(axis=1) == case.ids[:, 0]
    clear = case.gaps > 2 * tolerance
    with capsys.disabled():
        print(
            f"\n{how}, {case.name}: worst {errors.max():.2f}, median {np.median(errors):.3f}; best "
            f"token the same in {same.sum()} of {N_STEPS}, in {(same & clear).sum()} of the "
            f"{clear.sum()} that had to be",
            end="",
        )
    assert errors.max() <= tolerance
    assert same[clear].all()


def one_of_eight(
    cache: Cache, executor: Executor, cases: dict[str, Case]
) -> dict[str, npt.NDArray[np.float32]]:
    """Each case's logits [N_STEPS, n_vocab], as sequences of one cache beside three others.

    The prompts are interleaved, token by token, in one step.
    """
    chosen = [cases[name] for name in CASES]
    prompts = [case.prompt for case in chosen]
    prompts += [chosen[4].prompt[:100], chosen[1].prompt[3:], chosen[2].prompt[::-1]]
    others = [chosen[0].greedy, chosen[3].greedy, chosen[4].greedy]
    seqs = [cache.open() for _ in prompts]
    tokens, owners = _interleave(prompts, seqs)
    rows = [executor.run(tokens, owners)[[_rank(owners, seq) for seq in seqs]]]
    for step in range(1, N_STEPS):
        fed = [case.fed(step) for case in chosen] + [other[step - 1] for other in others]
        rows.append(executor.run(fed, seqs))
    logits = np.stack(rows, axis=1)
    return {case.name: of_case for case, of_case in zip(chosen, logits, strict=False)}


def _interleave(prompts: list[list[int]], seqs: list[int]) -> tuple[list[int], list[int]]:
    """One token of each prompt in turn, while it lasts."""
    longest = max(map(len, prompts))
    pairs = [
        (prompt[i], seq)
        for i in range(longest)
        for prompt, seq in zip(prompts, seqs, strict=True)
        if i < len(prompt)
    ]
    return [token for token, _ in pairs], [seq for _, seq in pairs]


def _rank(owners: list[int], seq: int) -> int:
    """Which row of results by "last_of_each" is this sequence's."""
    return list(dict.fromkeys(owners)).index(seq)


def among_six(
    cache: Cache, executor: Executor, cases: dict[str, Case], window: int
) -> Iterator[tuple[str, Case, npt.NDArray[np.float32]]]:
    """Each case and its logits, as one of six sequences that are longer than the window.

    Clones go on past the window and rewinds go back to before it: no cell is ever dropped.
    """
    long, code = cases["long"], cases["code"]
    a, b = cache.open(), cache.open()
    starts = [(a, long.prompt[:-1]), (b, code.prompt[:-1] + long.prompt[1:521])]
    pairs = [(token, seq) for seq, tokens in starts for token in tokens]
    executor.run([token for token, _ in pairs], [seq for _, seq in pairs], outputs=[])
    clone = cache.clone(a)
    seqs = [a, b, clone, cache.clone(a, 600), cache.clone(b, 530), cache.clone(b)]
    assert cache.stats.used_cells == len(pairs)
    of_long, of_code = ([case.fed(step) for step in range(N_STEPS)] for case in (long, code))
    other = long.prompt[300 : 300 + N_STEPS]

    # All longer than the window. The first and its clone are what was recorded.
    fed = [of_long, other, of_long, other[::-1], other, of_code]
    rows = _decode(executor, list(zip(seqs, fed, strict=True)))
    assert min(cache.next_pos(seq) for seq in seqs) > window
    assert cache.stats.used_cells == len(pairs) + 6 * N_STEPS
    yield "one of six", long, rows[0]
    yield "clone among six", long, rows[2]

    # Back to where nothing is left of what the window showed at the end.
    with pytest.raises(NotWindowedError, match="layer 5"):
        cache.trim_windows()
    for seq in (b, seqs[4]):
        cache.rewind(seq, len(code.prompt) - 1)
    cache.rewind(a, len(long.prompt) - 1)
    fed = [of_long, of_code, other, other, of_code, other]
    rows = _decode(executor, list(zip(seqs, fed, strict=True)))
    yield "one of six again", long, rows[0]
    yield "rewound to before the window", code, rows[1]
    yield "rewound to before the window", code, rows[4]


def _decode(executor: Executor, fed: list[tuple[int, list[int]]]) -> list[npt.NDArray[np.float32]]:
    """Interleaved: each sequence takes its next token, one forward a step."""
    seqs = [seq for seq, _ in fed]
    rows = [executor.run(list(tokens), seqs) for tokens in zip(*(t for _, t in fed), strict=True)]
    return list(np.stack(rows, axis=1))


@contextlib.contextmanager
def serving(path: Path, device: str, kv: Float) -> Iterator[tuple[Cache, Executor]]:
    """A model with weights and rows on the device; rows grow from one, past a block of 256."""
    with (
        Model.load(path, device=device, repack=False) as model,
        model.new_cache(type_k=kv, type_v=kv, initial_rows=1, device=device) as cache,
        model.executor(cache, n_threads=1, strategy="dense") as executor,
    ):
        yield cache, executor
        stats = executor.stats
        assert stats.n_attention_strayed == 0
        assert stats.n_row_growths >= 1
        assert cache.stats.rows > 256
