"""Prints the requirements that pyproject.toml names, one a line.

Usage: requirements.py project|GROUP ...
`project` stands for what the package needs at run time, any other word for a dependency group.
"""

import pathlib
import sys

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

tree = tomllib.loads(pathlib.Path("pyproject.toml").read_text(encoding="utf-8"))
groups = {"project": tree["project"]["dependencies"], **tree["dependency-groups"]}
for name in sys.argv[1:]:
    print(*groups[name], sep="\n")
