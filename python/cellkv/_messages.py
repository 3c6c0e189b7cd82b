"""What a worker process and its parent say to each other."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MODELS = 0  # the class Model, which makes the worker's first object


_PLAIN = (type(None), bool, int, float, str, bytes)


class Request(NamedTuple):
    """A call of a method of `target`, or, with arguments None, the reading of a property.

    Objects of the worker are known by the number of the request that made them.
    """

    number: int
    target: int
    name: str
    arguments: tuple[Any, ...] | None = None
    keywords: Mapping[str, Any] = {}


class Drop(NamedTuple):
    """The parent has no reference to the object left."""

    number: int


class Abandon(NamedTuple):
    """Nobody waits for the request any more: its step is to stop, what it makes is to go."""

    number: int


class Reply(NamedTuple):
    """A request's result, or its exception; `made` names the class of what it made."""

    number: int
    result: Any = None
    error: BaseException | None = None
    made: str | None = None


class Reference(NamedTuple):
    """Stands for an object of the worker among a request's arguments."""

    number: int


def plain(value: Any) -> Any:
    """Make of an argument what can be sent, and is taken or refused as the argument itself.

    The worker does not know the caller's classes: numbers, strings, mappings and iterables become
    Python's own, anything else an object of no use but with its class's name, for the refusal.
    """
    if type(value) in _PLAIN or isinstance(value, np.generic):
        return value
    if isinstance(value, np.ndarray):
        return _plain_array(value)
    if isinstance(value, str):
        return str.__str__(value)  # without what a subclass makes of it
    if isinstance(value, (float, bytes)):
        return float(value) if isinstance(value, float) else bytes(value)
    if hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0:
        return operator.index(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return _Nameless(type(value).__name__)


def _plain_array(array: npt.NDArray[Any]) -> Any:
    if array.dtype.hasobject:  # refused for its type wherever an array is taken
        return np.empty(array.shape, object)
    if array.flags.c_contiguous:
        return np.asarray(array)
    return _Strided(array)


class _Strided:
    """An array that is sent with its strides, for which it is to be refused."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    def __reduce__(self) -> Any:
        return _lay_out, (np.ascontiguousarray(self._array), self._array.strides)


def _lay_out(values: npt.NDArray[Any], strides: tuple[int, ...]) -> npt.NDArray[Any]:
    reaches = [(n - 1) * stride for n, stride in zip(values.shape, strides, strict=True)]
    before = -sum(reach for reach in reaches if reach < 0)
    after = sum(reach for reach in reaches if reach > 0)
    memory = bytearray(before + after + values.itemsize)
    array: npt.NDArray[Any] = np.ndarray(values.shape, values.dtype, memory, before, strides)
    array[...] = values
    return array


class _Nameless:
    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return _make_object, (self._name,)


def _make_object(name: str) -> Any:
    return type(name, (), {})()
