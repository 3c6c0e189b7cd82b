# ruff: noqa: N801 (structs bear their C names)
"""The C library as it is: every struct, every function, and one `check` of statuses.

tests/test_bindings_match_headers.py holds this file to the headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.resources
import os
import sys
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from typing import Any, TypeVar

from . import errors

VERSION = "0.1.0"

OK = 0
UNSET = -(2**31)  # CELLKV_UNSET
MAX_CAPACITY = 1 << 30
MAX_SEQS = 65535
MAX_WIDTH = 65536
MAX_DEVICES = 15

# Pointers to whole arrays travel as addresses (c_void_p): the caller holds the array meanwhile.

BUILD_CALLBACK = CFUNCTYPE(c_int, c_void_p, c_void_p)
CONTEXT_CALLBACK = CFUNCTYPE(None, c_void_p)
ABORT_CALLBACK = CFUNCTYPE(c_bool, c_void_p)


class cellkv_layer(Structure):
    _fields_ = (
        ("n_kv_heads", c_int32),
        ("head_dim_k", c_int32),
        ("head_dim_v", c_int32),
        ("window", c_int32),
        ("type_k", c_int),
        ("type_v", c_int),
    )


class cellkv_cache_config(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("backend", c_char_p),
        ("kind", c_int),
        ("capacity", c_int32),
        ("max_seqs", c_int32),
        ("initial_rows", c_int32),
        ("max_step", c_int32),
        ("n_layers", c_int32),
        ("layers", POINTER(cellkv_layer)),
        ("device", c_char_p),
    )


class cellkv_cache_stats(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("capacity", c_int32),
        ("free_cells", c_int32),
        ("used_cells", c_int32),
        ("extent", c_int32),
        ("rows", c_int32),
        ("n_seqs", c_int32),
        ("max_seqs", c_int32),
        ("declared_tokens", c_int32),
        ("owned_cells", c_int64),
        ("table_bytes", c_int64),
        ("storage_bytes", c_int64),
        ("n_growths", c_int64),
    )


class cellkv_program(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("context", c_void_p),
        ("n_vocab", c_int32),
        ("n_result", c_int32),
        ("n_layers", c_int32),
        ("layers", POINTER(cellkv_layer)),
        ("max_tensors", c_int32),
        ("build", BUILD_CALLBACK),
        ("retain", CONTEXT_CALLBACK),
        ("release", CONTEXT_CALLBACK),
    )


class cellkv_attend_params(Structure):
    _fields_ = (
        ("scale", c_float),
        ("soft_cap", c_float),
        ("sinks", c_void_p),
    )


class cellkv_executor_config(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("program", POINTER(cellkv_program)),
        ("cache", c_void_p),
        ("cache_key", c_int64),
        ("strategy", c_int),
        ("isa", c_int),
        ("n_threads", c_int32),
        ("max_batch", c_int32),
        ("max_graphs", c_int32),
        ("reuse_graphs", c_bool),
        ("should_abort", ABORT_CALLBACK),
        ("abort_context", c_void_p),
    )


class cellkv_step(Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("n_outputs", c_int32),
        ("tokens", c_void_p),
        ("seqs", c_void_p),
        ("positions", c_void_p),
        ("outputs", c_void_p),
        ("pooling", c_int),
    )


class cellkv_executor_stats(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("n_steps", c_int64),
        ("n_tokens", c_int64),
        ("n_graphs_built", c_int64),
        ("n_graphs_reused", c_int64),
        ("n_graphs_kept", c_int64),
        ("graph_bytes", c_int64),
        ("n_attention_strayed", c_int64),
        ("n_row_growths", c_int64),
        ("step_us", c_int64),
        ("compute_us", c_int64),
        ("strategy", c_int),
        ("isa", c_int),
        ("n_threads", c_int32),
    )


class cellkv_model_config(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("device", c_char_p),
        ("use_mmap", c_bool),
        ("repack", c_bool),
    )


class cellkv_model_value(Structure):
    _fields_ = (
        ("key", c_char_p),
        ("string", c_char_p),
        ("number", c_double),
        ("is_float", c_bool),
    )


class cellkv_model_array(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("data", c_void_p),
        ("n_dims", c_int32),
        ("shape", c_int64 * 3),
    )


class cellkv_model_info(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("architecture", c_char_p),
        ("n_vocab", c_int32),
        ("n_layers", c_int32),
        ("n_embd", c_int32),
        ("n_heads", c_int32),
        ("n_context", c_int32),
        ("n_parameters", c_int64),
        ("weight_bytes", c_int64),
        ("mapped_bytes", c_int64),
        ("repacked_bytes", c_int64),
        ("layers", POINTER(cellkv_layer)),
        ("devices", c_char_p),
    )


class cellkv_rpc_server_config(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("host", c_char_p),
        ("port", c_int32),
        ("allow_remote", c_bool),
        ("device", c_char_p),
        ("n_threads", c_int32),
    )


# name: (result, arguments). c_int as a result is a cellkv_status unless the name says otherwise.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "cellkv_version": (c_char_p, []),
    "cellkv_status_text": (c_char_p, [c_int]),
    "cellkv_status_name": (c_char_p, [c_int]),
    "cellkv_last_error": (c_char_p, []),
    # cache.h
    "cellkv_cache_config_default": (cellkv_cache_config, []),
    "cellkv_cache_kind_name": (c_char_p, [c_int]),
    "cellkv_cache_kind_by_name": (c_int, [c_char_p, POINTER(c_int)]),
    "cellkv_cache_new": (c_int, [POINTER(cellkv_cache_config), POINTER(c_void_p)]),
    "cellkv_cache_free": (None, [c_void_p]),
    "cellkv_cache_open": (c_int, [c_void_p, POINTER(c_int64)]),
    "cellkv_cache_clone": (c_int, [c_void_p, c_int64, c_int32, POINTER(c_int64)]),
    "cellkv_cache_rewind": (c_int, [c_void_p, c_int64, c_int32]),
    "cellkv_cache_remove": (c_int, [c_void_p, c_int64, c_int32, c_int32]),
    "cellkv_cache_close": (c_int, [c_void_p, c_int64]),
    "cellkv_cache_clear": (c_int, [c_void_p]),
    "cellkv_cache_trim_windows": (c_int, [c_void_p, POINTER(c_int32)]),
    "cellkv_cache_declare": (c_int, [c_void_p, c_void_p, c_int32, POINTER(c_int32)]),
    "cellkv_cache_extend": (c_int, [c_void_p, c_int64, c_int32, POINTER(c_int32)]),
    "cellkv_cache_place": (c_int, [c_void_p, c_void_p, c_int32, c_void_p]),
    "cellkv_cache_undo_step": (c_int, [c_void_p, c_int32]),
    "cellkv_cache_can_extend": (c_int, [c_void_p, c_int32, POINTER(c_bool)]),
    "cellkv_cache_length": (c_int, [c_void_p, c_int64, POINTER(c_int32)]),
    "cellkv_cache_next_pos": (c_int, [c_void_p, c_int64, POINTER(c_int32)]),
    "cellkv_cache_read_cells": (
        c_int,
        [c_void_p, c_int64, c_void_p, c_void_p, c_int32, POINTER(c_int32)],
    ),
    "cellkv_cache_get_stats": (c_int, [c_void_p, POINTER(cellkv_cache_stats)]),
    "cellkv_cache_publish": (c_int, [c_void_p, POINTER(c_int64)]),
    "cellkv_cache_unpublish": (c_int, [c_int64]),
    "cellkv_cache_find": (c_int, [c_int64, POINTER(c_void_p)]),
    # executor.h: a graph under construction
    "cellkv_graph_context": (c_void_p, [c_void_p]),
    "cellkv_graph_n_tokens": (c_int32, [c_void_p]),
    "cellkv_graph_n_outputs": (c_int32, [c_void_p]),
    "cellkv_graph_tokens": (c_void_p, [c_void_p]),
    "cellkv_graph_positions": (c_void_p, [c_void_p]),
    "cellkv_graph_outputs": (c_void_p, [c_void_p]),
    "cellkv_graph_place": (None, [c_void_p, c_int32, c_void_p]),
    "cellkv_graph_set_result": (None, [c_void_p, c_void_p]),
    "cellkv_graph_fail": (c_int, [c_void_p, c_int, c_char_p]),
    "cellkv_attend": (
        c_void_p,
        [c_void_p, c_int32, c_void_p, c_void_p, c_void_p, POINTER(cellkv_attend_params)],
    ),
    # device.h
    "cellkv_device_count": (c_int32, []),
    "cellkv_device_name": (c_char_p, [c_int32]),
    "cellkv_devices_of_layers": (c_int, [c_char_p, c_int32, c_void_p]),
    "cellkv_devices_enter": (None, [c_void_p, c_int32]),
    "cellkv_devices_leave": (None, [c_void_p, c_int32]),
    "cellkv_rpc_server_config_default": (cellkv_rpc_server_config, []),
    "cellkv_rpc_server_run": (c_int, [POINTER(cellkv_rpc_server_config)]),
    # executor.h: executors
    "cellkv_executor_config_default": (cellkv_executor_config, []),
    "cellkv_executor_new": (c_int, [POINTER(cellkv_executor_config), POINTER(c_void_p)]),
    "cellkv_executor_free": (None, [c_void_p]),
    "cellkv_executor_run": (c_int, [c_void_p, POINTER(cellkv_step), c_void_p, POINTER(c_int32)]),
    "cellkv_executor_abort": (c_int, [c_void_p]),
    "cellkv_executor_get_stats": (c_int, [c_void_p, POINTER(cellkv_executor_stats)]),
    # model.h
    "cellkv_model_config_default": (cellkv_model_config, []),
    "cellkv_model_load": (c_int, [c_char_p, POINTER(cellkv_model_config), POINTER(c_void_p)]),
    "cellkv_model_from_arrays": (
        c_int,
        [
            POINTER(cellkv_model_value),
            c_int32,
            POINTER(cellkv_model_array),
            c_int32,
            POINTER(cellkv_model_config),
            POINTER(c_void_p),
        ],
    ),
    "cellkv_model_free": (None, [c_void_p]),
    "cellkv_model_get_info": (c_int, [c_void_p, POINTER(cellkv_model_info)]),
    "cellkv_model_program": (c_int, [c_void_p, c_int, POINTER(cellkv_program)]),
    "cellkv_model_new_cache": (
        c_int,
        [c_void_p, POINTER(cellkv_cache_config), c_int, c_int, POINTER(c_void_p)],
    ),
}


class Library:
    """The loaded library; its functions are attributes, declared when first asked for."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self.path = path

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in FUNCTIONS:
            raise AttributeError(f"cellkv's C library has no function {name}")
        function = getattr(self._library, name)
        function.restype, function.argtypes = FUNCTIONS[name]
        setattr(self, name, function)
        return function  # type: ignore[no-any-return]


def _load() -> Library:
    file_name = "libcellkv.dylib" if sys.platform == "darwin" else "libcellkv.so"
    with contextlib.ExitStack() as stack:
        path = os.environ.get("CELLKV_LIBRARY")
        if not path:
            resource = importlib.resources.files("cellkv") / file_name
            path = os.fspath(stack.enter_context(importlib.resources.as_file(resource)))
        try:
            library = Library(path)
        except OSError as error:
            raise ImportError(
                f"cellkv's C library cannot be loaded: {error}. Install the package, or build the "
                "library and name it in the environment variable CELLKV_LIBRARY"
            ) from error
    found = library.cellkv_version().decode()
    if found != VERSION:
        raise ImportError(f"{path} is cellkv {found}; this Python package needs {VERSION}")
    return library


lib = _load()


def check(status: int) -> None:
    """Raise the exception of a status that is not OK, with the library's words for it."""
    if status == OK:
        return
    message = lib.cellkv_last_error().decode("utf-8", "replace")
    error_class = errors.BY_STATUS.get(status)
    if error_class is None:
        error = errors.CellkvError(message)
        error.status = status
        raise error
    raise error_class(message or lib.cellkv_status_text(status).decode())


AnyStruct = TypeVar("AnyStruct", bound=Structure)


def sized(struct_class: type[AnyStruct]) -> AnyStruct:
    """Make a zeroed struct whose `size` says how large it is."""
    struct = struct_class()
    struct.size = ctypes.sizeof(struct_class)
    return struct
