"""Prints the rows of the tables in README.md and docs/devices.md from a run that was kept.

    python bench/readme_tables.py bench/baselines/NAME.json

Tables of attention, idle sequences and accuracy from a run of `make bench`, the one beside
llama.cpp from one of `make bench-peer`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peer import report

Run = Mapping[str, Any]
KV_TYPES = "K/V types"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def ms(figure: Mapping[str, Any]) -> str:
    return f"{figure['median'] * 1e3:.2f}"


def groups(run: Run, question: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The figures of the questions that start so: question, group, and its figures by case."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for figure in run["figures"]:
        if figure["question"].startswith(f"{question}:"):
            key = figure["question"], figure["group"]
            found.setdefault(key, {})[figure["case"]] = figure
    for (name, group), by_case in found.items():
        yield name, group, by_case


def shares(figure: Mapping[str, Any]) -> list[str]:
    return [f"{rate['value'] / rate['limit']:.0%}" for rate in figure["rates"]]


def attention_rows(run: Run) -> list[str]:
    """case | dense, ms | ragged, ms | times as fast | of reading | of multiply-adds | AVX2, ms"""
    rows = []
    for question, group, by_case in groups(run, "attention"):
        ragged, dense, avx2 = (by_case.get(name) for name in ("ragged", "dense", "ragged, AVX2"))
        faster = f"{dense['median'] / ragged['median']:.1f}"
        width = question.partition("width ")[2].partition(",")[0].partition(";")[0]
        held = ms(avx2) if avx2 else report.NOT_RUN
        name = f"width {width}: {group}"
        rows.append(line(name, ms(dense), ms(ragged), faster, *shares(ragged), held))
    return rows


def idle_rows(run: Run) -> list[str]:
    """what | without, ms | with, ms | times as long"""
    rows = []
    for _, group, by_case in groups(run, "idle"):
        without, with_idle = by_case.values()
        times = f"{with_idle['median'] / without['median']:.2f}"
        rows.append(line(group, ms(without), ms(with_idle), times))
    return rows


def sharers_rows(run: Run) -> list[str]:
    """strategy, sequences | ms | of multiply-adds"""
    return [
        line(f"{group}, {case}", ms(figure), shares(figure)[1])
        for _, group, by_case in groups(run, "sharers")
        for case, figure in by_case.items()
    ]


def by_strategy(errors: Mapping[str, Any]) -> list[str]:
    return [f"{errors['by_strategy'][name]:.1e}" for name in ("ragged", "dense")]


def accuracy_rows(run: Run) -> list[str]:
    """types, width | case | ragged | dense"""
    return [
        line(errors["group"], errors["case"], *by_strategy(errors))
        for errors in run.get("errors", ())
        if not errors["question"].startswith(KV_TYPES)
    ]


def kv_types_rows(run: Run) -> list[str]:
    """type | ragged, ms | dense, ms | error: ragged | dense | with rounding: ragged | dense"""
    steps: dict[str, dict[str, str]] = {}
    for _, strategy, by_case in groups(run, KV_TYPES):
        for case, figure in by_case.items():
            steps.setdefault(case, {})[strategy] = ms(figure)
    errors: dict[str, list[str]] = {}
    for found in run.get("errors", ()):
        if found["question"].startswith(KV_TYPES):
            errors.setdefault(found["group"], []).extend(by_strategy(found))
    return [
        line(f"K and V in {case}", times["ragged"], times["dense"], *errors[case.partition(",")[0]])
        for case, times in steps.items()
    ]


def layout_rows(run: Run) -> list[str]:
    """sequences x context | one call, mixed, ms | in blocks, ms | pieces, ms | gain | gain"""
    rows = []
    for _, group, by_case in groups(run, "dense attention"):
        *calls, pieces = by_case.values()
        gains = [f"{call['median'] / pieces['median']:.1f}" for call in calls]
        rows.append(line(group, *map(ms, (*calls, pieces)), *gains))
    return rows


def peer_rows(run: Run) -> list[str]:
    """sequences x tokens | split, ms | unified, ms | cellkv, ms | times as fast | weights' share"""
    return [line(*row) for row in report.rows(run)]


def tables(run: Run) -> list[tuple[str, Sequence[str]]]:
    """Each table's columns and rows."""
    makers = [
        attention_rows,
        layout_rows,
        idle_rows,
        sharers_rows,
        accuracy_rows,
        kv_types_rows,
    ]
    if "cases" in run:
        makers = [peer_rows]
    return [(str(maker.__doc__), maker(run)) for maker in makers]


if __name__ == "__main__":
    for columns, rows in tables(json.loads(Path(sys.argv[1]).read_text())):
        print(f"\n| {columns} |", *rows, sep="\n")
