"""Builds copies of the tree with one fault each and demands that the tests notice.

Each tests/mutants/*.patch starts with lines that say what must happen to its copy:

    tests: tests/test_founding.py     what is run
    fails: 3                          how many tests, parametrizations counted once, must fail at
                                      least, by a comparison and not by a crash
    infinite: yes                     results may be infinite or NaN; otherwise they must not be

The copy is built without invariant checks, so that it is the outcome that gives a mutant away.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BUILD_FLAGS = ["--buildtype=debugoptimized", "-Db_ndebug=true", "-Dtests=true"]


class Mutant(NamedTuple):
    """One patch, and what it demands."""

    path: Path
    tests: list[str]
    fails: int
    infinite: bool

    @classmethod
    def read(cls, path: Path) -> Mutant:
        text = path.read_text()
        tests = re.search(r"^tests: (.+)$", text, re.MULTILINE)
        fails = re.search(r"^fails: (\d+)$", text, re.MULTILINE)
        if tests is None or fails is None:
            raise SystemExit(f"{path.name}: lines `tests:` and `fails:` are needed")
        return cls(path, tests[1].split(), int(fails[1]), "\ninfinite: yes\n" in text)


def copy_tree(to: Path) -> None:
    """Copies the files that git tracks or would."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run(command: list[str], cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


def build(tree: Path) -> None:
    """Build what Python's tests load, not the C programs."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    run(["ninja", "-C", "build", f"tests/c/libtable_program.{suffix}"], tree)


def run_tests(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    library = "libcellkv.dylib" if sys.platform == "darwin" else "libcellkv.so"
    environment = {
        **os.environ,
        "CELLKV_LIBRARY": str(tree / "build" / "src" / library),
        "PYTHONPATH": str(tree / "python"),
    }
    flags = ["-q", "--tb=line", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *flags, *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def verdict(mutant: Mutant, done: subprocess.CompletedProcess[str]) -> tuple[bool, str]:
    """Tells whether the mutant is dead, and how it died."""
    failed = set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE))
    if done.returncode not in (0, 1) or re.search(r"^ERROR ", done.stdout, re.MULTILINE):
        return False, f"the run broke:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    if not mutant.infinite and re.search(r"error inf\b", done.stdout):
        return False, "a result was not finite: a comparison was to fail"
    return len(failed) >= mutant.fails, f"{len(failed)} failed: {', '.join(sorted(failed))}"


def main() -> int:
    mutants = [Mutant.read(path) for path in sorted((ROOT / "tests/mutants").glob("*.patch"))]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        run(["meson", "setup", "build", *BUILD_FLAGS], tree)
        build(tree)
        everything = sorted({test for mutant in mutants for test in mutant.tests})
        if (healthy := run_tests(tree, *everything)).returncode != 0:
            print(healthy.stdout)
            return 1
        survivors = 0
        for mutant in mutants:
            run(["patch", "-p1", "--fuzz=3", "-i", str(mutant.path)], tree)
            build(tree)
            enough = ["-x"] if mutant.fails == 1 else []
            dead, words = verdict(mutant, run_tests(tree, *enough, *mutant.tests))
            print(f"{'killed  ' if dead else 'SURVIVED'} {mutant.path.stem}: {words}", flush=True)
            survivors += not dead
            run(["patch", "-p1", "--fuzz=3", "-R", "-i", str(mutant.path)], tree)
    print(f"{len(mutants) - survivors} passed, {survivors} failed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
