"""SmolLM2 and Gemma 3 on every device but the CPU, against the logits that llama.cpp recorded.

Weights and rows are on the device, or their layers split between two RPC servers. The tolerances
are those of the CPU, where the same suites run on every strategy.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import recorded
import test_gemma3_vectors
import test_smollm2_vectors
from recorded import Float, read_cases, serving


def test_smollm2_as_one_of_eight(
    smollm2_path: Path,
    vectors: Path,
    far_device: str,
    kv: Float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = read_cases(vectors / "smollm2-135m.json", kv)
    with serving(smollm2_path, far_device, kv) as (cache, executor):
        logits = recorded.one_of_eight(cache, executor, cases)
    how, tolerance = f"{far_device}, {kv}", test_smollm2_vectors.TOLERANCE
    for name, of_case in logits.items():
        recorded.check(capsys, how, cases[name], of_case, tolerance)


def test_gemma3_among_six_longer_than_the_window(
    gemma3_path: Path,
    vectors: Path,
    far_device: str,
    kv: Float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = read_cases(vectors / "gemma3-270m.json", kv)
    window, tolerance = test_gemma3_vectors.WINDOW, test_gemma3_vectors.TOLERANCE
    with serving(gemma3_path, far_device, kv) as (cache, executor):
        for how, case, logits in recorded.among_six(cache, executor, cases, window):
            recorded.check(capsys, f"{how}, {far_device}, {kv}", case, logits, tolerance)
