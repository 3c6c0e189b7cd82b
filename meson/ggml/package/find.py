"""Prints where the installed libggml-python keeps its headers, then its libraries."""

import importlib.util
import pathlib
import sys

spec = importlib.util.find_spec("libggml")
if spec is None or spec.origin is None:
    sys.exit("libggml-python is not installed")
root = pathlib.Path(spec.origin).resolve().parent
libraries = [root / name for name in ("lib64", "lib") if list((root / name).glob("libggml-base.*"))]
if not libraries:
    sys.exit("libggml-python has no library folder")
print(root / "include")
print(libraries[0])
