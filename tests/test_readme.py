"""README.md: its programs are those of examples/, its commands work as shown, its links lead on."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import cellkv
from cellkv._arguments import TYPES
from readme_tables import peer_rows, tables

SCALES = {"ms": 1e3, "us": 1e6}


class Block(NamedTuple):
    language: str
    text: str


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text()


@pytest.fixture(scope="module")
def blocks(readme: str) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", readme, re.M | re.S)]


@pytest.fixture(scope="module")
def build() -> Path:
    """The meson build folder that the library under test lies in."""
    library = Path(os.environ["CELLKV_LIBRARY"]).resolve()
    folders = [folder for folder in library.parents if (folder / "meson-info").is_dir()]
    if not folders:
        pytest.skip("the library under test lies in no build folder")
    return folders[0]


def rows_of(readme: str, first: str) -> list[list[str]]:
    """The table rows whose first cell is `first`, and those below it with an empty first cell."""
    rows: list[list[str]] = []
    for line in readme.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and (cells[0] == first or (rows and not cells[0])):
            rows.append(cells)
        elif rows:
            break
    return rows


def names_of(readme: str, first: str) -> set[str]:
    return {name for row in rows_of(readme, first) for name in re.findall(r"`([\w ]+)`", row[1])}


# ---- programs and commands ----


@pytest.mark.parametrize(
    ("language", "name"), [("c", "shared_prefix.c"), ("python", "shared_prefix.py")]
)
def test_its_programs_are_those_of_the_examples(
    root: Path, blocks: list[Block], language: str, name: str
) -> None:
    (text,) = (block.text for block in blocks if block.language == language)
    assert text == (root / "examples" / name).read_text()


def run_as_shown(
    blocks: list[Block],
    language: str,
    name: str,
    model: Path,
    folder: Path,
    environment: dict[str, str],
) -> None:
    """Saves the program, runs the commands below it and compares with the output below these."""
    at = next(i for i, block in enumerate(blocks) if block.language == language)
    program, commands, output = blocks[at : at + 3]
    assert (commands.language, output.language) == ("sh", "text")
    (folder / name).write_text(program.text)
    (folder / "SmolLM2-135M-Instruct.gguf").symlink_to(model)
    printed = ""
    for line in commands.text.splitlines():
        words: str | list[str] = line
        if "$(" not in line:  # without a shell: that of macOS drops DYLD_LIBRARY_PATH
            words = [sys.executable if word == "python" else word for word in shlex.split(line)]
        done = subprocess.run(
            words,
            shell=isinstance(words, str),
            cwd=folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        printed += done.stdout
    assert printed == output.text


def test_its_python_program_runs_as_shown(
    blocks: list[Block], smollm2_path: Path, tmp_path: Path
) -> None:
    run_as_shown(blocks, "python", "shared_prefix.py", smollm2_path, tmp_path, {})


def test_its_c_program_compiles_and_runs_as_shown(
    blocks: list[Block], build: Path, smollm2_path: Path, tmp_path: Path
) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("no pkg-config")
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the command shown does not link a sanitizer's runtime")
    environment = {
        "PKG_CONFIG_PATH": str(build / "meson-uninstalled"),
        "LD_LIBRARY_PATH": str(build / "src"),
        "DYLD_LIBRARY_PATH": str(build / "src"),
    }
    run_as_shown(blocks, "c", "shared_prefix.c", smollm2_path, tmp_path, environment)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_the_make_targets_it_names_exist(root: Path, name: str) -> None:
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", (root / name).read_text(), re.M))
    there = set(re.findall(r"^([a-z-]+):.* ## ", (root / "Makefile").read_text(), re.M))
    assert named
    assert named <= there


def test_it_opens_with_the_commands(blocks: list[Block]) -> None:
    shown = [line.split("#")[0].strip() for line in blocks[0].text.splitlines()]
    assert shown == ["make demo", "make test", "make bench"]


# ---- claims ----


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_its_links_lead_somewhere(root: Path, name: str) -> None:
    links = re.findall(r"\]\(([^)]+)\)", (root / name).read_text())
    relative = [link for link in links if "://" not in link]
    assert relative
    assert [link for link in relative if not (root / link.partition("#")[0]).exists()] == []


def test_it_names_what_there_is(root: Path, readme: str) -> None:
    assert names_of(readme, "K/V types") == set(TYPES)
    strategies = {strategy.name.lower() for strategy in cellkv.Strategy} - {"auto"}
    assert names_of(readme, "attention") == strategies
    source = (root / "src/model/architecture.c").read_text()
    assert names_of(readme, "architectures") == set(re.findall(r"&ck_architecture_(\w+)", source))
    assert names_of(readme, "kinds of cache") == {kind.name.lower() for kind in cellkv.CacheKind}
    assert f"version is {cellkv.__version__}:" in readme


def test_it_names_every_weight_type(root: Path, readme: str) -> None:
    source = (root / "src/model/weights.c").read_text()
    known = {name.lower() for name in re.findall(r"case GGML_TYPE_(\w+):", source)}
    assert {name.lower() for name in names_of(readme, "weight types")} == known


@pytest.fixture(scope="module")
def kept_runs(root: Path) -> dict[str, dict[str, Any]]:
    """The runs in bench/baselines: one of `make bench`, and at most one beside llama.cpp.

    What ran over RPC is for docs/devices.md.
    """
    runs = {}
    for path in (root / "bench/baselines").glob("*.json"):
        if path.name.startswith("rpc-"):
            continue
        name = "peer" if path.name.startswith("peer-") else "bench"
        assert name not in runs, path
        runs[name] = json.loads(path.read_text())
    return runs


def test_its_figures_are_those_of_the_runs_that_are_kept(
    readme: str, kept_runs: dict[str, dict[str, Any]]
) -> None:
    for run in kept_runs.values():
        assert run["date"] in readme
    figures = kept_runs["bench"]["figures"]
    medians = {f"{f['median'] * s:.2f} {u}" for f in figures for u, s in SCALES.items()}
    speeds = {f"{f['n_tokens'] / f['median']:.1f} tokens/s" for f in figures}
    for case in kept_runs.get("peer", {"cases": []})["cases"]:
        medians |= {f"{seconds * 1e3:.1f} ms" for seconds in case["median"].values()}
    shown = set(re.findall(r"[\d.]+ (?:ms|us|tokens/s)", readme))
    assert len(shown) > 10
    assert shown <= medians | speeds


def test_the_rows_of_its_tables_are_those_of_the_runs_that_are_kept(
    readme: str, kept_runs: dict[str, dict[str, Any]]
) -> None:
    """It may leave rows out, but none of those beside llama.cpp."""
    lines = readme.splitlines()
    rows = [row for run in kept_runs.values() for _, rows in tables(run) for row in rows]
    names = {row.split("|")[1] for row in rows}
    assert {line for line in lines if line[:1] == "|" and line.split("|")[1] in names} <= set(rows)
    assert ("## Against llama.cpp" in lines) == ("peer" in kept_runs)
    if "peer" in kept_runs:
        assert set(peer_rows(kept_runs["peer"])) <= set(lines)


def test_it_says_of_each_device_whether_it_was_run(readme: str) -> None:
    rows = rows_of(readme, "[devices](docs/devices.md)")
    assert {row[1] for row in rows} == {"CPU", "RPC", "Metal", "CUDA", "Vulkan"}
    for row in rows:
        assert re.match(r"run here on \d{4}-\d\d-\d\d|never run yet", row[2]), row
