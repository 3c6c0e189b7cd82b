"""Prints the installed libggml-python's version, its header folder and its library folder."""

import importlib.metadata
import importlib.util
import pathlib
import sys

spec = importlib.util.find_spec("libggml")
if spec is None or spec.origin is None:
    sys.exit("libggml-python is not installed")
root = pathlib.Path(spec.origin).resolve().parent
libraries = [root / name for name in ("lib64", "lib") if list((root / name).glob("libggml-base.*"))]
if not libraries:
    sys.exit(f"{root} has no ggml libraries")
print(importlib.metadata.version("libggml-python"), root / "include", libraries[0], sep="\n")
