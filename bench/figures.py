"""What the benchmarks measured, and the tables of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast the work of a figure went, beside the machine's limit from the same run."""

    value: float
    limit: float
    unit: str  # of both: "GB/s" or "GFLOP/s"
    of: str  # what the limit is

    def __str__(self) -> str:
        return f"{self.value:.1f} {self.unit}, {self.value / self.limit:.0%}"


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measurement; `group`'s first one is what its others are compared with."""

    question: str
    group: str
    case: str
    median: float  # seconds
    quartiles: tuple[float, float]
    n_rounds: int
    n_tokens: int  # computed in that time; 0: not a forward
    rates: tuple[Rate, ...] = ()


@dataclasses.dataclass(frozen=True)
class Errors:
    """Relative L2 errors of one case, by strategy: not a time."""

    question: str
    group: str
    case: str
    by_strategy: dict[str, float]


def n_rounds(call: Callable[[], object], budget: float = 5.0) -> int:
    """How often to time `call`, given seconds for it all. It is called twice: as a warm-up, and to
    see how long it takes."""
    call()
    start = time.perf_counter()
    call()
    return min(60, max(10, int(budget / (time.perf_counter() - start))))


class Figures:
    """The figures of one run."""

    def __init__(self) -> None:
        self.all: list[Figure] = []
        self.errors: list[Errors] = []

    def add(
        self,
        question: str,
        group: str,
        case: str,
        seconds: Sequence[float],
        n_tokens: int = 0,
        rates: Iterable[Rate] = (),
    ) -> Figure:
        low, median, high = (round(float(x), 9) for x in np.percentile(seconds, (25, 50, 75)))
        n_rounds = len(seconds)
        quartiles = (low, high)
        figure = Figure(question, group, case, median, quartiles, n_rounds, n_tokens, tuple(rates))
        self.all.append(figure)
        return figure

    def add_errors(
        self, question: str, group: str, case: str, by_strategy: dict[str, float]
    ) -> None:
        self.errors.append(Errors(question, group, case, by_strategy))

    def table(self) -> Iterator[str]:
        question = group = None
        for figure in self.all:
            if figure.question != question:
                question, group = figure.question, None
                scale, unit = (1e3, "ms") if figure.n_tokens else (1e6, "us")
                yield ""
                yield question
                yield (
                    f"{'':50}{unit + ' (median)':>14}{'middle half':>20}"
                    f"{'tokens/s' if figure.n_tokens else '':>11}{'ratio':>8}"
                    + "".join(f"{'of ' + rate.of:>20}" for rate in figure.rates)
                )
            if figure.group != group:
                group, first = figure.group, figure
            low, high = (x * scale for x in figure.quartiles)
            speed = f"{figure.n_tokens / figure.median:.1f}" if figure.n_tokens else ""
            yield (
                f"{group if figure is first else '':28}{figure.case:22}"
                f"{figure.median * scale:14.2f}{f'{low:.2f} .. {high:.2f}':>20}{speed:>11}"
                f"{figure.median / first.median:8.2f}"
                + "".join(f"{rate!s:>20}" for rate in figure.rates)
            )

    def errors_table(self) -> Iterator[str]:
        question = group = None
        for errors in self.errors:
            if errors.question != question:
                question, group = errors.question, None
                yield ""
                yield question
                yield f"{'':50}" + "".join(f"{name:>14}" for name in errors.by_strategy)
            shown = "" if errors.group == group else errors.group
            group = errors.group
            values = "".join(f"{value:14.1e}" for value in errors.by_strategy.values())
            yield f"{shown:28}{errors.case:22}{values}"
