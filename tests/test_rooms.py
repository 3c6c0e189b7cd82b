"""Which room may use which: the dependencies of the sources, read from their #include lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# Rooms from the bottom up, each with the rooms whose headers it may include. `model` and `engine`
# use the executor by the public headers, as any program does.
MAY_USE = {
    "cells": set(),
    "storage": {"cells"},
    "attention": {"cells", "storage"},
    "executor": {"cells", "storage", "attention"},
    "model": set(),
    "engine": set(),
}
WITHOUT_GGML = {"cells", "engine"}

# How a call fails and how memory is had, which is the same in the whole library.
PLUMBING = {"cells/error.h", "cells/memory.h"}

LIBC = {
    "assert.h", "errno.h", "inttypes.h", "limits.h", "pthread.h", "stdarg.h", "stdatomic.h",
    "stdbool.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h",
}  # fmt: skip
CELLS_PUBLIC = {"cellkv/cache.h", "cellkv/status.h", "cellkv/version.h"}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
COMMENT_OR_STRING = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"', re.DOTALL)


def misuses(room: str, text: str, own_headers: set[str]) -> list[str]:
    """List the headers that a file of the room must not include."""
    bad = []
    for quote, header in INCLUDE.findall(text):
        if quote == "<":
            allowed = room != "cells" or header in LIBC | CELLS_PUBLIC
            if header.startswith(("ggml", "gguf")) and room in WITHOUT_GGML:
                allowed = False
        elif "/" in header:
            target = header.split("/")[0]
            allowed = target == room or target in MAY_USE[room] or header in PLUMBING
        else:
            allowed = header in own_headers
        if not allowed:
            bad.append(header)
    return bad


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in {".c", ".h", ".cpp"})


def test_every_room_is_known(root: Path) -> None:
    rooms = {path.name for path in (root / "src").iterdir() if path.is_dir()}
    assert rooms <= set(MAY_USE)
    assert "cells" in rooms


@pytest.mark.parametrize("room", MAY_USE)
def test_room_uses_only_the_rooms_below_it(root: Path, room: str) -> None:
    files = sources(root / "src" / room)
    own_headers = {path.name for path in files if path.suffix == ".h"}
    bad = {path.name: misuses(room, path.read_text(), own_headers) for path in files}
    assert {name: headers for name, headers in bad.items() if headers} == {}


def test_cells_know_no_float(root: Path) -> None:
    for path in sources(root / "src" / "cells"):
        code = COMMENT_OR_STRING.sub("", path.read_text())
        assert not re.search(r"\b(float|double)\b", code), path.name


def test_public_headers_include_no_private_header_and_no_ggml(root: Path) -> None:
    headers = sources(root / "include")
    public = {path.name for path in headers}
    for path in headers:
        for quote, header in INCLUDE.findall(path.read_text()):
            assert header in (LIBC if quote == "<" else public), f"{path.name}: {header}"


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("cells", "#include <ggml.h>"),
        ("cells", '  # include "ggml.h"'),
        ("cells", "#include <math.h>"),
        ("cells", "#include <cellkv/executor.h>"),
        ("cells", '#include "storage/storage.h"'),
        ("storage", '#include "attention/dense.h"'),
        ("attention", '#include "executor/graph.h"'),
        ("model", '#include "cells/cells.h"'),
        ("model", '#include "executor/graph.h"'),
        ("model", '#include "../executor/graph.h"'),
        ("engine", "#include <ggml-backend.h>"),
    ],
)
def test_forbidden_includes_are_found(room: str, line: str) -> None:
    assert misuses(room, f"/* A file. */\n{line}\n", {"own.h"})
