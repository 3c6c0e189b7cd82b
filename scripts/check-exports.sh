#!/bin/bash
# Fails when a shared library exports a symbol that is not in cellkv's public API.
# Usage: check-exports.sh LIBRARY
set -euo pipefail

case $(uname -s) in
Darwin) symbols=$(nm -gU "$1") ;;
*) symbols=$(nm -D --defined-only "$1") ;;
esac
awk '$NF !~ /^_?cellkv_/ { print $NF " is exported"; strays++ } END { exit NR == 0 || strays > 0 }' \
    <<<"$symbols"
