#!/bin/bash
# Builds and installs the wheel and, apart from it, the C library; then uses both from outside the
# source tree: Python, C and C++ by pkg-config, C and C++ with cellkv as a meson subproject.
# Usage: test-wheel.sh PYTHON (one that has meson and libggml-python)
set -euo pipefail

python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
tree=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "== wheel"
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "$tree"
cd "$work"
env -u CELLKV_LIBRARY -u PYTHONPATH "$work/venv/bin/python" "$tree/tests/consumer/main.py"

echo "== pkg-config"
"$python" -m mesonbuild.mesonmain setup "$work/build" "$tree" --prefix="$work/prefix" \
    --libdir=lib -Dggml=package >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$python" -m mesonbuild.mesonmain install -C "$work/build" --quiet
export PKG_CONFIG_PATH="$work/prefix/lib/pkgconfig"
# unquoted on purpose: pkg-config prints a list of arguments
${CC:-cc} -std=c11 -Wall -Wextra -Wpedantic -Werror "$tree/tests/consumer/main.c" -o c-program \
    $(pkg-config --cflags --libs cellkv) -Wl,-rpath,"$work/prefix/lib"
${CXX:-c++} -std=c++17 -Wall -Wextra -Wpedantic -Werror "$tree/tests/consumer/main.cpp" -o cpp-program \
    $(pkg-config --cflags --libs cellkv) -Wl,-rpath,"$work/prefix/lib"
./c-program
./cpp-program

echo "== meson subproject"
mkdir -p consumer/subprojects
cp "$tree"/tests/consumer/{main.c,main.cpp,meson.build} consumer/
ln -s "$tree" consumer/subprojects/cellkv
"$python" -m mesonbuild.mesonmain setup consumer/build consumer -Dcellkv:ggml=package >"$work/log" 2>&1 ||
    { cat "$work/log"; exit 1; }
"$python" -m mesonbuild.mesonmain test -C consumer/build
echo "test-wheel: passed"
