"""Writes one Metal source without includes, and an assembly file that embeds it.

Usage: embed.py GGML_SRC ASSEMBLY EMBEDDED_METAL
ggml looks for the source between the symbols ggml_metallib_start and ggml_metallib_end.
"""

import pathlib
import sys

source, assembly, embedded = map(pathlib.Path, sys.argv[1:])
metal = source / "ggml-metal" / "ggml-metal.metal"
inserted = {
    "__embed_ggml-common.h__": source / "ggml-common.h",
    '#include "ggml-metal-impl.h"': source / "ggml-metal" / "ggml-metal-impl.h",
}

lines = []
for line in metal.read_text(encoding="utf-8").splitlines():
    header = inserted.pop(line.strip(), None)
    lines.append(header.read_text(encoding="utf-8") if header else line)
if inserted:
    sys.exit(f"{metal} has no line {' or '.join(inserted)}")
embedded.write_text("\n".join(lines) + "\n", encoding="utf-8")

assembly.write_text(
    ".section __DATA,__ggml_metallib\n"
    ".globl _ggml_metallib_start\n"
    "_ggml_metallib_start:\n"
    f'.incbin "{embedded.resolve()}"\n'
    ".globl _ggml_metallib_end\n"
    "_ggml_metallib_end:\n"
)
