"""What llama.cpp computed on real models (tests/vectors), and how logits are held to it.

The recorded tokens are fed, not generated: ggml rounds activations to 8 bits before each product
with quantized weights, and a difference of 1e-6 between two ways to sum grows to tenths of a logit.
The tolerance is a measured one, each model's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

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


def read_cases(path: Path) -> dict[str, Case]:
    """The cases with K and V in f32, by name."""
    recorded = json.loads(path.read_text())["cases"]
    return {case["name"]: _case(case) for case in recorded if case["kv"] == "f32"}


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
