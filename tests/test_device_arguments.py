"""The forms of a `device` argument, and the text that C gets."""

from __future__ import annotations

import types
from typing import Any

import pytest

from cellkv import Cache, InvalidArgumentError, Layer, UnknownDeviceError
from cellkv._arguments import as_devices


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, None),
        ("CPU", b"CPU"),
        ("CPU=1,GPU=2", b"CPU=1,GPU=2"),
        (["CPU"], b"CPU"),
        (("CPU", "rpc://127.0.0.1:50052/1"), b"CPU,rpc://127.0.0.1:50052/1"),
        ({"CPU": 3}, b"CPU=3"),
        (types.MappingProxyType({"B": 20, "A": 1}), b"B=20,A=1"),
    ],
)
def test_names_and_numbers_of_layers_become_one_text(given: Any, text: bytes | None) -> None:
    assert as_devices(given, "device") == text


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], InvalidArgumentError),
        ({}, InvalidArgumentError),
        ([""], InvalidArgumentError),
        (["CPU", "A,B"], InvalidArgumentError),
        (["A=1"], InvalidArgumentError),
        ({"A,B": 1}, InvalidArgumentError),
        ({"A=1": 1}, InvalidArgumentError),
        ({"CPU": 0}, InvalidArgumentError),
        ({"CPU": -1}, InvalidArgumentError),
        ({"CPU": 2**40}, InvalidArgumentError),
        (["C\0PU"], InvalidArgumentError),
        ({"CPU": True}, TypeError),
        ({"CPU": 1.0}, TypeError),
        ({"CPU": "1"}, TypeError),
        ([None], TypeError),
        ({1: 1}, TypeError),
        (b"CPU", TypeError),
        (1, TypeError),
        ({"CPU"}, TypeError),
    ],
)
def test_what_would_be_another_text_is_refused_by_name(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="device"):
        Cache([Layer(1, 32, 32)], device=given)


def test_layers_are_given_out_evenly_or_by_number() -> None:
    layers = [Layer(1, 32, 32)] * 2
    for device in ("CPU", ["CPU"], {"CPU": 2}):
        Cache(layers, device=device).close()
    for device in ({"CPU": 1}, {"CPU": 3}):
        with pytest.raises(InvalidArgumentError):
            Cache(layers, device=device)
    with pytest.raises(UnknownDeviceError, match="Nowhere"):
        Cache(layers, device=["CPU", "Nowhere"])
