"""The ctypes layer says what the headers say: functions, structs, constants, statuses."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cellkv import CacheKind, CellkvError, Isa, Output, Pooling, Strategy, _lib, errors
from cellkv._arguments import TYPES


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def headers(root: Path) -> str:
    """Every public header, without comments and preprocessor lines but #define."""
    paths = sorted((root / "include" / "cellkv").glob("*.h"))
    assert len(paths) >= 6
    return without_comments("\n".join(path.read_text() for path in paths))


def struct_bodies(headers: str) -> dict[str, str]:
    return dict(re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", headers, re.DOTALL))


def field_names(body: str) -> list[str]:
    """The declared names of a struct's fields, function pointers too, in order."""
    names = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        function = re.search(r"\(\*(\w+)\)", declaration)
        if function:
            names.append(function.group(1))
            continue
        for declarator in declaration.split(","):
            names.append(re.search(r"(\w+)\s*(\[\w+\])?$", declarator.strip()).group(1))
    return names


def functions(headers: str) -> dict[str, tuple[str, list[str]]]:
    """Each exported function's result type and parameter types, as written."""
    found = {}
    for result, name, parameters in re.findall(
        r"CELLKV_API\s+([\w\s]+?[\s*]+)(cellkv_\w+)\(([^)]*)\);", headers
    ):
        types = []
        if parameters.strip() != "void":
            for parameter in parameters.split(","):
                types.append(" ".join(re.sub(r"\w+$", "", parameter.strip()).split()))
        found[name] = (" ".join(result.split()), types)
    return found


def ctypes_structs() -> dict[str, type[ctypes.Structure]]:
    members = vars(_lib).items()
    return {n: c for n, c in members if n.startswith("cellkv_") and isinstance(c, type)}


def test_every_struct_is_declared_with_its_fields_in_order(headers: str) -> None:
    bodies = struct_bodies(headers)
    structs = ctypes_structs()
    assert sorted(structs) == sorted(bodies)
    for name, body in bodies.items():
        assert [field[0] for field in structs[name]._fields_] == field_names(body), name


def test_structs_have_the_compilers_sizes_and_offsets(tmp_path: Path, root: Path) -> None:
    compiler = shutil.which("cc")
    assert compiler, "a C compiler is needed"
    lines, expected = [], []
    for name, struct in ctypes_structs().items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            what = f"offsetof({name}, {field}), sizeof((({name} *)0)->{field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", {what});')
            place = getattr(struct, field)
            expected.append(f"{name}.{field} {place.offset} {place.size}")
    source = tmp_path / "layout.c"
    body = "\n    ".join(lines)
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <cellkv/cellkv.h>\n"
        f"int main(void) {{\n    {body}\n    return 0;\n}}\n"
    )
    program = tmp_path / "layout"
    include = f"-I{root / 'include'}"
    subprocess.run([compiler, "-std=c11", include, source, "-o", program], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == expected


def kind_of(c_type: str) -> object:
    """What ctypes must say for a C type as written; None: any pointer."""
    bare = c_type.replace("const ", "").strip()
    by_value = {
        "void": type(None),
        "bool": ctypes.c_bool,
        "int32_t": ctypes.c_int32,
        "int64_t": ctypes.c_int64,
        "cellkv_status": ctypes.c_int,
        "cellkv_cache_kind": ctypes.c_int,
        "cellkv_type": ctypes.c_int,
        "cellkv_output": ctypes.c_int,
        **ctypes_structs(),
    }
    if bare in ("char *", "char*"):
        return ctypes.c_char_p
    if "*" in bare:
        return None
    return by_value[bare]


def is_pointer(declared: object) -> bool:
    return declared is ctypes.c_void_p or (
        isinstance(declared, type) and issubclass(declared, ctypes._Pointer)
    )


def test_every_function_is_declared_as_its_prototype(headers: str) -> None:
    prototypes = functions(headers)
    assert headers.count("CELLKV_API ") - headers.count("#define CELLKV_API ") == len(prototypes)
    assert sorted(_lib.FUNCTIONS) == sorted(prototypes)
    for name, (result, parameters) in prototypes.items():
        declared_result, declared = _lib.FUNCTIONS[name]
        assert len(declared) == len(parameters), name
        all_declared = [type(None) if declared_result is None else declared_result, *declared]
        for c_type, ctypes_type in zip([result, *parameters], all_declared, strict=True):
            kind = kind_of(c_type)
            fits = is_pointer(ctypes_type) if kind is None else ctypes_type is kind
            assert fits, f"{name}: {c_type} is declared {ctypes_type}"


def test_the_library_exports_every_function() -> None:
    for name in _lib.FUNCTIONS:
        assert getattr(_lib.lib, name)
    with pytest.raises(AttributeError, match="cellkv_nothing"):
        _ = _lib.lib.cellkv_nothing


def test_statuses_and_exceptions_are_one_list(headers: str) -> None:
    listed = re.findall(r'X\((\w+), (-?\d+), (\w+),\s*"([^"]*)"\)', headers)
    assert len(listed) == len(errors.BY_STATUS) + 1  # and OK
    for name, value, exception, text in listed:
        status = int(value)
        assert _lib.lib.cellkv_status_name(status).decode() == name
        assert _lib.lib.cellkv_status_text(status).decode() == text
        if exception == "None":
            assert (name, status) == ("OK", _lib.OK)
            continue
        error = errors.BY_STATUS[status]
        assert (error.__name__, error.name, error.status) == (exception, name, status)
        assert issubclass(error, CellkvError)
    assert _lib.lib.cellkv_status_name(1) is None


def test_a_status_that_python_does_not_know_is_a_plain_error() -> None:
    with pytest.raises(CellkvError) as caught:
        _lib.check(-1000)
    assert type(caught.value) is CellkvError
    assert caught.value.status == -1000


def test_constants_and_enums_are_the_headers(headers: str) -> None:
    prefixes = {
        "CACHE": CacheKind,
        "STRATEGY": Strategy,
        "ISA": Isa,
        "POOLING": Pooling,
        "OUTPUT": Output,
    }
    found = re.findall(rf"CELLKV_((?:TYPE|{'|'.join(prefixes)})_\w+)\s*=\s*(\d+)", headers)
    known_enums = {f"TYPE_{name.upper()}": value for name, value in TYPES.items()} | {
        f"{prefix}_{member.name}": member.value
        for prefix, members in prefixes.items()
        for member in members
    }
    assert known_enums == {name: int(value) for name, value in found}
    defines = dict(re.findall(r"#define CELLKV_(\w+) +([^\n]+?)\s*\n", headers))
    known = {
        "VERSION": f'"{_lib.VERSION}"',
        "UNSET": {-(2**31): "INT32_MIN"}[_lib.UNSET],
        "MAX_CAPACITY": {2**30: "(1 << 30)"}[_lib.MAX_CAPACITY],
        "MAX_SEQS": str(_lib.MAX_SEQS),
        "MAX_DEVICES": str(_lib.MAX_DEVICES),
        "MAX_WIDTH": str(_lib.MAX_WIDTH),
    }
    assert known == {
        name: value
        for name, value in defines.items()
        if not name.startswith(("VERSION_", "STATUS_"))
        and not name.endswith("_H")
        and name != "API"
    }


def test_every_kind_has_its_name() -> None:
    for kind in CacheKind:
        name = _lib.lib.cellkv_cache_kind_name(kind)
        assert name.decode() == kind.name.lower()
        found = ctypes.c_int()
        _lib.check(_lib.lib.cellkv_cache_kind_by_name(name, ctypes.byref(found)))
        assert found.value == kind
    assert _lib.lib.cellkv_cache_kind_name(99) is None
