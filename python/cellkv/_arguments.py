"""Checks of arguments before a number is converted or a pointer taken; nothing is truncated."""

from __future__ import annotations

import enum
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import InvalidArgumentError

Ints: TypeAlias = "npt.NDArray[np.integer[Any]] | Iterable[SupportsIndex]"

Devices: TypeAlias = "str | Sequence[str] | Mapping[str, int] | None"

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}


def as_int(value: SupportsIndex, name: str, dtype: type[np.integer[Any]] = np.int32) -> int:
    """Convert one integer exactly.

    TypeError: not an integer. InvalidArgumentError: outside the C type's range.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is a bool, an integer is expected")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {type(value).__name__}, an integer is expected") from None
    limits = np.iinfo(dtype)
    if not limits.min <= number <= limits.max:
        raise InvalidArgumentError(f"{name} is {number}, outside {limits.dtype}")
    return number


def as_position(value: SupportsIndex, name: str) -> int:
    """Convert one position: an int32, but for the value that means "unset" in C."""
    number = as_int(value, name)
    if number == INT32_MIN:
        raise InvalidArgumentError(f"{name} is {number}, which is no position")
    return number


def as_ints(
    values: Ints, name: str, dtype: type[np.integer[Any]], length: int | None = None
) -> npt.NDArray[Any]:
    """Make a contiguous [n] array of exactly `dtype`, a view where it is one already.

    An array must be one-dimensional, contiguous and of an integer type; other integer types are
    converted exactly. Any other iterable must hold integers.

    TypeError: not integers. InvalidArgumentError: shape, stride or value.
    """
    if isinstance(values, np.ndarray):
        array = _check_int_array(values, name)
    else:
        array = _from_iterable(values, name, dtype)
    if length is not None and len(array) != length:
        raise InvalidArgumentError(f"{name} has {len(array)} entries, {length} are expected")
    if array.dtype == dtype:
        return array
    limits = np.iinfo(dtype)
    outside = np.flatnonzero((array < limits.min) | (array > limits.max))
    if outside.size:
        at = int(outside[0])
        raise InvalidArgumentError(f"{name}[{at}] is {array[at]}, outside {limits.dtype}")
    return array.astype(dtype)


def _check_int_array(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} is an array of {array.dtype}, integers are expected")
    if array.ndim != 1:
        raise InvalidArgumentError(f"{name} has shape {array.shape}, one dimension is expected")
    if not array.flags.c_contiguous:
        raise InvalidArgumentError(f"{name} has stride {array.strides[0]}, it must be contiguous")
    return array


def _from_iterable(values: Any, name: str, dtype: type[np.integer[Any]]) -> npt.NDArray[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is {type(values).__name__}, a sequence of integers is expected")
    entries = list(values)
    try:
        array = np.asarray(entries)
    except ValueError:  # ragged
        array = np.empty(0, object)
    if array.dtype.kind in "iu" and array.ndim == 1:
        return array
    return np.array([as_int(v, f"{name}[{i}]", dtype) for i, v in enumerate(entries)], dtype)


def as_floats(array: Any, name: str) -> npt.NDArray[np.float32]:
    """Check that `array` is float32 and contiguous; it is never converted.

    TypeError: another type. InvalidArgumentError: stride.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} is {type(array).__name__}, a numpy array is expected")
    if array.dtype != np.float32:
        raise TypeError(f"{name} is an array of {array.dtype}, float32 is expected")
    if not array.flags.c_contiguous:
        raise InvalidArgumentError(f"{name} must be contiguous; its strides are {array.strides}")
    return array


def as_text(value: str, name: str) -> bytes:
    """Encode a string for C. TypeError: no string. InvalidArgumentError: a NUL, or no UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {type(value).__name__}, a string is expected")
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{name} cannot be encoded as UTF-8: {error}") from None
    return _without_nul(encoded, name)


def as_path(value: str | os.PathLike[str], name: str) -> bytes:
    """Encode a path for C. TypeError: no path. InvalidArgumentError: a NUL in it."""
    return _without_nul(os.fsencode(value), name)


def as_devices(value: Devices, name: str) -> bytes | None:
    """Make C's text of devices: one name, "name,name" or "name=layers,name=layers".

    TypeError: no strings, no integers. InvalidArgumentError: none at all, an empty name, one that
    would be read as several, fewer than one layer.
    """
    if value is None or isinstance(value, str):
        return None if value is None else as_text(value, name)
    if not isinstance(value, (Sequence, Mapping)) or isinstance(value, (bytes, bytearray)):
        raise TypeError(
            f"{name} is {type(value).__name__}, a string, a sequence of them or a mapping of them "
            "to numbers of layers is expected"
        )
    if not value:
        raise InvalidArgumentError(f"{name} is empty")
    texts = [_device(device, name) for device in value]
    if isinstance(value, Mapping):
        for i, (device, n_layers) in enumerate(value.items()):
            count = as_int(n_layers, f"{name}[{device!r}]")
            if count < 1:
                raise InvalidArgumentError(f"{name}[{device!r}] is {count}, not at least 1")
            texts[i] += b"=%d" % count
    return b",".join(texts)


def _device(device: str, name: str) -> bytes:
    text = as_text(device, f"a name in {name}")
    if not text or b"," in text or b"=" in text:
        raise InvalidArgumentError(f"{name} has {device!r} in it, which cannot be a device's name")
    return text


def _without_nul(encoded: bytes, name: str) -> bytes:
    if b"\0" in encoded:
        raise InvalidArgumentError(f"{name} has a NUL character in it")
    return encoded


def by_name(value: str, names: Mapping[str, int], name: str) -> int:
    """Look a name up. TypeError: no string. InvalidArgumentError: none of the names."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {type(value).__name__}, a string is expected")
    if value not in names:
        raise InvalidArgumentError(f"{name} is {value!r}, not one of {', '.join(names)}")
    return names[value]


def as_member(value: Any, members: type[enum.IntEnum], what: str) -> int:
    """Give the number of an enum's member, given as one, by its name or as a number."""
    if isinstance(value, str):
        return by_name(value, {member.name.lower(): member.value for member in members}, what)
    return as_int(value, what)
