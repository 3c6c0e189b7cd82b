"""The programs of examples/: they build against the public headers, and print what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def examples(root: Path) -> Path:
    return root / "examples"


def run(*command: str | Path) -> list[str]:
    """Runs a program to its end and returns the lines that it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def built(name: str) -> Path:
    """A C example, as meson built it beside the library under test."""
    for folder in Path(os.environ["CELLKV_LIBRARY"]).resolve().parents:
        if (folder / "meson-info").is_dir():
            break
    program = folder / "examples" / name
    if not program.exists():
        pytest.skip(f"no {name}: meson setup -Dexamples=true, with a shared ggml for some")
    return program


def test_cells_alone_in_c() -> None:
    assert run(built("cells_alone")) == [
        "write rows  0 1 2 3 4 5",
        "write rows  6 7 8",
        "a reads rows 0 1 2 3 4 5 6",
        "b reads rows 0 1 2 3 7 8",
        "b reads rows 0 1 2 3",
        "write rows  4 5 6 7",
        "a reads rows 0 1 6",
        "b reads rows 0 1 2 3 4 5 7",
        "12 more tokens: 8 cells are missing",
    ]


def test_cells_alone_in_python(examples: Path) -> None:
    lines = run(sys.executable, examples / "cells_alone.py")
    assert lines == ["the same attention: True", "11 rows in use, 14 owned"]


def test_a_program_of_ones_own_answers_the_same_together_and_apart() -> None:
    (line,) = run(built("program"))
    words = line.split()
    within, difference = float(words[3].rstrip(";")), float(words[-1])
    assert within > 1.0
    assert difference < 1e-5


def test_shared_prefix_in_c_and_python_answers_alike(examples: Path, smollm2_path: Path) -> None:
    from cellkv import Tokenizer

    *texts, figures = run(sys.executable, examples / "shared_prefix.py", smollm2_path)
    assert texts[0].startswith(" France is Paris")
    *steps, c_figures = run(built("shared_prefix"), smollm2_path)
    assert c_figures == figures == "26 cells in use, by sequences that own 77"
    rows = [[int(word) for word in step.split()] for step in steps]
    answers = [*zip(*rows[:3], strict=True), *zip(*rows[3:], strict=True)]
    tokenizer = Tokenizer.from_gguf(smollm2_path)
    for text, answer in zip(texts, answers, strict=True):
        assert text.endswith(tokenizer.decode(answer))
