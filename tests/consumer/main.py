"""Imports the installed package from outside the source tree and opens a sequence."""

import cellkv

print("Python: cellkv", cellkv.__file__)
