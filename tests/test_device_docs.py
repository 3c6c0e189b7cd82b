"""docs/devices.md: its programs are those of examples/ and run on the devices it names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cellkv
from readme_tables import layout_rows
from rpc_servers import Server
from test_examples import built


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "devices.md").read_text()


@pytest.mark.parametrize(("language", "name"), [("python", "devices.py"), ("c", "devices.c")])
def test_its_programs_are_those_of_the_examples(
    root: Path, page: str, language: str, name: str
) -> None:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)
    assert text == (root / "examples" / name).read_text()


def test_its_links_lead_somewhere(root: Path, page: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page) if "://" not in link]
    assert links
    assert [link for link in links if not (root / "docs" / link.partition("#")[0]).exists()] == []


def test_it_says_of_each_device_whether_it_was_run(page: str) -> None:
    section = page.partition("## Which were run")[2].partition("##")[0]
    rows = re.findall(r"^\| (\w[^|]*) \| ([^|]+) \|$", section, re.M)
    assert {name.split(",")[0] for name, _ in rows} == {"CPU", "RPC", "Metal", "CUDA", "Vulkan"}
    for _, words in rows:
        assert re.match(r"run here on \d{4}-\d\d-\d\d|never run yet", words), words


@pytest.mark.parametrize(("title", "runs"), [("On the CPU", "[0-9]*"), ("Over RPC", "rpc-*")])
def test_the_rows_of_its_figures_are_those_of_the_run_that_is_kept(
    root: Path, page: str, title: str, runs: str
) -> None:
    (kept,) = (root / "bench" / "baselines").glob(f"{runs}.json")
    ran = json.loads(kept.read_text())
    section = page.partition(f"{title}, ")[2].partition("\n\n")[2].partition("\n\n")[0]
    _, _, *rows = section.splitlines()
    assert len(rows) >= 9
    assert set(rows) <= set(layout_rows(ran))
    assert ran["date"] in page.partition(f"{title}, ")[2].partition("\n\n")[0]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def check_programs(root: Path, model: Path, devices: list[str]) -> None:
    """Both answer with Oslo."""
    in_python = run(sys.executable, root / "examples" / "devices.py", model, *devices)
    assert in_python.stdout.splitlines()[:2] == [f"layers on {','.join(devices)}", " Oslo"]
    in_c = run(built("devices"), model, ",".join(devices))
    (oslo,) = cellkv.Tokenizer.from_gguf(model).encode(" Oslo").tolist()
    assert in_c.stdout == f"the likeliest next token is {oslo}\n"


def test_its_programs_run_here(root: Path, smollm2_path: Path) -> None:
    check_programs(root, smollm2_path, ["CPU"])


@pytest.mark.usefixtures("with_servers")
def test_its_programs_run_on_servers(root: Path, smollm2_path: Path) -> None:
    with Server() as one, Server() as other:
        check_programs(root, smollm2_path, [one.device, other.device])


def test_its_programs_name_the_devices_that_there_are(root: Path, smollm2_path: Path) -> None:
    in_python = run(sys.executable, root / "examples" / "devices.py", smollm2_path, "Abacus0")
    assert in_python.returncode == 1
    assert "Abacus0" in in_python.stderr
    assert "CPU" in in_python.stderr
    in_c = run(built("devices"))
    assert in_c.returncode == 2
    assert "CPU" in in_c.stderr.split()
