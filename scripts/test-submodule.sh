#!/bin/bash
# Builds a copy of the tree by the submodule route, with the ggml sources that the libggml-python
# source distribution carries (the submodule's commit needs no git host then), and checks that the
# library needs no libggml, exports nothing of ggml, and works from C and Python.
# Usage: test-submodule.sh PYTHON (one that has meson, cmake and cellkv's requirements)
set -euo pipefail

python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
tree=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$(sed -n 's/.*"libggml-python == \([^"]*\)".*/\1/p' "$tree/pyproject.toml" | head -1)

echo "== ggml sources of libggml-python $version"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps \
    --no-binary libggml-python "libggml-python==$version" --dest "$work"
tar xf "$work"/libggml_python-*.tar.gz -C "$work"
mkdir -p "$work/tree/third_party"
(cd "$tree" && tar cf - --exclude=__pycache__ LICENSE pyproject.toml include meson meson.build meson.options python scripts src tests examples) |
    tar xf - -C "$work/tree"
mv "$work"/libggml_python-*/ggml "$work/tree/third_party/ggml"

echo "== build"
"$python" -m mesonbuild.mesonmain setup "$work/build" "$work/tree" -Dggml=submodule -Drpc=enabled -Dtests=true \
    >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$python" -m ninja -C "$work/build" --quiet
case $(uname -s) in
Darwin) library="$work/build/src/libcellkv.dylib" needed="otool -L" ;;
*) library="$work/build/src/libcellkv.so" needed="ldd" ;;
esac

echo "== what it exports and needs"
"$tree/scripts/check-exports.sh" "$library"
if $needed "$library" | grep libggml; then
    echo "the libraries above should be inside libcellkv" >&2
    exit 1
fi

echo "== C and Python"
"$python" -m mesonbuild.mesonmain test -C "$work/build" --no-rebuild --print-errorlogs
export PYTHONPATH="$work/tree/python"
CELLKV_LIBRARY="$library" "$python" "$tree/tests/consumer/main.py"
export CELLKV_LIBRARY=$(ls "$work"/build/tests/c/libcellkv_table_program.*[!p])
founding=("$python" -m pytest -q -p no:cacheprovider "$work/tree/tests/test_founding.py")
"${founding[@]}"
"${founding[@]}" --devices=rpc -k "f16 and kept"
echo "test-submodule: passed"
