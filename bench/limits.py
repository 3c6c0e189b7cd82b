"""What this machine can do at most: machine_limits.c, compiled for it and run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from figures import Rate

SOURCE = Path(__file__).with_name("machine_limits.c")
FOR_THIS_MACHINE = (["-march=native"], ["-mcpu=native"], [])  # the first that the compiler takes


class Machine:
    """Measures its limits with a number of threads, at each call."""

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._folder = tempfile.TemporaryDirectory(prefix="cellkv-limits-")
        self._program = Path(self._folder.name) / "machine_limits"
        compiler = shlex.split(os.environ.get("CC", "cc"))
        common = ["-O3", "-ffp-contract=fast", str(SOURCE), "-o", str(self._program), "-lpthread"]
        for flags in FOR_THIS_MACHINE:
            done = subprocess.run([*compiler, *flags, *common], capture_output=True, text=True)
            if done.returncode == 0:
                return
        raise RuntimeError(f"{SOURCE.name} does not compile:\n{done.stderr}")

    def close(self) -> None:
        self._folder.cleanup()

    def _run(self, *arguments: str) -> str:
        command = [str(self._program), str(self._n_threads), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def reading(self, n_bytes: float) -> float:
        """Bytes per second of a streaming read of so many, over and over."""
        printed = self._run("read", f"{n_bytes / 1e6:.3f}")
        found = re.search(r"MB: ([\d.]+) GB/s", printed)
        assert found, printed
        return float(found[1]) * 1e9

    def multiply_adds(self) -> float:
        """Operations per second: f32 multiply-adds in registers, two for each."""
        printed = self._run("multiply-add")
        found = re.search(r"multiply-add: ([\d.]+) GFLOP/s", printed)
        assert found, printed
        return float(found[1]) * 1e9

    def limits(self, n_bytes: float) -> np.ndarray:
        """Both: [reading, multiply-adds]."""
        return np.array([self.reading(n_bytes), self.multiply_adds()])


def rates(
    seconds: Sequence[float], n_bytes: float, n_flops: float, limits: Sequence[float]
) -> list[Rate]:
    """How fast work went that took the median of the seconds, beside the machine's limits."""
    median = float(np.median(seconds))
    reading, multiply_adds = (round(limit / 1e9, 2) for limit in limits)
    return [
        Rate(round(n_bytes / median / 1e9, 2), reading, "GB/s", "reading"),
        Rate(round(n_flops / median / 1e9, 2), multiply_adds, "GFLOP/s", "multiply-adds"),
    ]
