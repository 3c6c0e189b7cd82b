"""A comparison's figures: as the rows of a table, and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEADER = (
    "sequences x tokens",
    "llama.cpp split, ms",
    "unified, ms",
    "cellkv, ms",
    "times as fast",
    "weights' share",
)
NOT_RUN = "-"


def figures_of(sides: Mapping[str, Any]) -> dict[str, Any]:
    """Median seconds of each side, their middle half, and how many there were."""
    figures: dict[str, Any] = {"median": {}, "quartiles": {}, "n": {}}
    for name, side in sides.items():
        low, median, high = statistics.quantiles(side.seconds, n=4, method="inclusive")
        figures["median"][name] = round(median, 6)
        figures["quartiles"][name] = [round(low, 6), round(high, 6)]
        figures["n"][name] = len(side.seconds)
    return figures


def speed_up(median: Mapping[str, float]) -> float:
    """How many times as fast as the better of llama.cpp's modes."""
    return min(median[name] for name in ("split", "unified") if name in median) / median["cellkv"]


def row(name: str, median: Mapping[str, float]) -> list[str]:
    def shown(side: str) -> str:
        return f"{median[side] * 1e3:.1f}" if side in median else NOT_RUN

    return [
        name,
        *(shown(side) for side in ("split", "unified", "cellkv")),
        f"{speed_up(median):.2f}",
        f"{median['weights'] / median['cellkv']:.0%}",
    ]


def rows(run: Mapping[str, Any]) -> list[list[str]]:
    """The table's rows: the cases, and the prompt."""
    table = [row(f"{case['model']}: {case['case']}", case["median"]) for case in run["cases"]]
    if "prompt" in run:
        prompt = run["prompt"]
        name = f"{run['cases'][0]['model']}: a prompt of {prompt['n_tokens']} tokens"
        table.append(row(name, prompt["median"]))
    return table


def attention_of_prompt(run: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds of the prompt's attention, ragged and dense: what it takes beyond the weights."""
    median = run["prompt"]["median"]
    return median["cellkv"] - median["weights"], median["dense"] - median["weights"]


def as_text(table: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns line up."""
    lines = [HEADER, *table]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


# ---- the plot ----

LINES = {
    "split": ("llama.cpp, split", "tab:orange", "-"),
    "unified": ("llama.cpp, unified", "tab:red", "-"),
    "cellkv": ("cellkv", "tab:blue", "-"),
    "weights": ("cellkv, 1 token in each sequence", "tab:gray", "--"),
}


def plot(run: Mapping[str, Any], path: Path) -> None:
    """Draw the step's time against the number of sequences, and against what they share."""
    import matplotlib.figure

    first = run["cases"][0]["model"]
    cases = [case for case in run["cases"] if case["model"] == first]
    figure = matplotlib.figure.Figure(figsize=(9, 3.8), layout="constrained", dpi=160)
    by_number, by_share = figure.subplots(1, 2)
    _, alike = _most_alike(cases, ("context", "shared"), "n_seqs")
    _draw(by_number, alike, "n_seqs")
    by_number.set_xlabel(f"sequences of {alike[0]['context']:,} tokens")
    _, alike = _most_alike(cases, ("n_seqs", "context"), "shared")
    _draw(by_share, alike, "shared")
    by_share.set_xlabel(
        f"tokens shared, of {alike[0]['context']:,} in each of {alike[0]['n_seqs']} sequences"
    )
    by_number.legend(fontsize="small")
    figure.suptitle(f"A decode step of {first} on {run['machine'] or 'some machine'}", size=9)
    figure.savefig(path)


def _most_alike(
    cases: Sequence[Mapping[str, Any]], fixed: tuple[str, str], varied: str
) -> tuple[tuple[int, ...], list[Mapping[str, Any]]]:
    """The largest group of cases that differ in one thing alone, in its order."""
    groups: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}
    for case in cases:
        groups.setdefault(tuple(case[name] for name in fixed), []).append(case)
    key = max(groups, key=lambda key: (len(groups[key]), key))
    return key, sorted(groups[key], key=lambda case: case[varied])


def _draw(axes: Any, cases: Sequence[Mapping[str, Any]], varied: str) -> None:
    for name, (label, color, style) in LINES.items():
        points = [
            (case[varied], case["median"][name] * 1e3) for case in cases if name in case["median"]
        ]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, color=color, marker="o")
    axes.set_ylabel("ms a step")
    axes.set_ylim(bottom=0)
    axes.set_xticks([case[varied] for case in cases])
    axes.grid(alpha=0.3)
