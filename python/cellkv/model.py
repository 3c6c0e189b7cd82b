"""Models: decoders read from GGUF files, or given as arrays."""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _lib
from ._arguments import (
    TYPES,
    Devices,
    as_devices,
    as_floats,
    as_int,
    as_member,
    as_path,
    as_text,
    by_name,
)
from ._lib import check, lib
from ._owned import Owned, Owner
from .cache import Cache, CacheKind, KindName, Layer, TypeName, _config
from .errors import InvalidArgumentError, TokenizerError
from .executor import Executor

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


OutputName: TypeAlias = Literal["logits", "hidden"]


class Output(enum.IntEnum):
    """What a model's result rows are."""

    LOGITS = 0
    HIDDEN = 1


class ModelInfo(NamedTuple):
    """A model's figures.

    `n_embd` is the width of the hidden state, `n_heads` the query heads of the first layer,
    `n_context` the context length it was trained for (0: not stated); `weight_bytes` of all
    tensors as stored, `mapped_bytes` of those used where the file is mapped, `repacked_bytes` of
    those held in another layout; `layers` is what a cache for it needs; `devices` are the layers'
    devices as a text, as `device` takes it.
    """

    architecture: str
    n_vocab: int
    n_layers: int
    n_embd: int
    n_heads: int
    n_context: int
    n_parameters: int
    weight_bytes: int
    mapped_bytes: int
    repacked_bytes: int
    layers: tuple[Layer, ...]
    devices: str


class Model(Owner):
    """Weights and hyperparameters, immutable, shared by any number of executors and threads.

    A context manager that closes it. ClosedError after `close`; executors over it go on working.
    """

    def __init__(self) -> None:
        raise TypeError("use Model.load or Model.from_arrays")

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: Devices = None,
        use_mmap: bool = True,
        repack: bool = True,
        isolated: bool = False,
        timeout: float | None = None,
    ) -> Model:
        """Load a GGUF file.

        Architectures: "llama" (SmolLM2, Llama 2 and 3, Mistral), "gemma2", "gemma3" (text only),
        "qwen2" (Qwen 2 and 2.5), "qwen3" and "qwen3moe".

        `device`: which ggml device holds the weights; default the best one; several as in `Cache`.
        `use_mmap`: map the file instead of reading it. `repack`: hold weights in the layout of
        ggml's fastest CPU kernels, where one exists (a second copy of those).

        `isolated`: have model, caches and executors live in a process of their own (see
        cellkv.isolated), which a device that fails may end without ending the caller's. Then any
        call may raise WorkerDiedError; one does that takes longer than `timeout` seconds, this one
        included. None: no limit; a process that is gone is noticed at once all the same.

        FileError: it cannot be read. BadFileError: not GGUF, damaged or truncated.
        UnknownArchitectureError. BadMetadataError. MissingTensorError, BadTensorError.
        UnknownDeviceError. OutOfMemoryError.
        """
        if isolated:
            options = {"device": device, "use_mmap": use_mmap, "repack": repack}
            return cls._isolated("load", (path,), options, timeout)._read_from(path, {})
        _no_timeout(timeout)
        config, _kept = _model_config(device, use_mmap, repack)
        address = ctypes.c_void_p()
        file = as_path(path, "path")
        check(lib.cellkv_model_load(file, ctypes.byref(config), ctypes.byref(address)))
        return cls._adopt(address)._read_from(path, {})

    @classmethod
    def from_arrays(
        cls,
        metadata: Mapping[str, str | bool | int | float | Any],
        arrays: Mapping[str, npt.NDArray[np.float32]],
        *,
        device: Devices = None,
        repack: bool = True,
        isolated: bool = False,
        timeout: float | None = None,
    ) -> Model:
        """Make a model from arrays, which are copied.

        `metadata` and `arrays` have the keys of the GGUF format. An array is float32, contiguous,
        of one to three dimensions, the contiguous one last as always in numpy ([n_vocab, n_embd]
        for "token_embd.weight"). Keys under "tokenizer." are for `tokenizer` and may hold lists.

        TypeError, InvalidArgumentError: an array or a value that is none of these. Otherwise as
        `load`, but for the file's errors.
        """
        values = {key: v for key, v in metadata.items() if not key.startswith("tokenizer.")}
        if isolated:
            options = {"device": device, "repack": repack}
            model = cls._isolated("from_arrays", (values, arrays), options, timeout)
            return model._read_from(None, dict(metadata))
        _no_timeout(timeout)
        c_values, _kept_values = _c_values(values)
        c_arrays, _kept_arrays = _c_arrays(arrays)
        config, _kept = _model_config(device, False, repack)
        address = ctypes.c_void_p()
        check(
            lib.cellkv_model_from_arrays(
                c_values,
                len(c_values),
                c_arrays,
                len(c_arrays),
                ctypes.byref(config),
                ctypes.byref(address),
            )
        )
        return cls._adopt(address)._read_from(None, dict(metadata))

    @staticmethod
    def _isolated(
        maker: str, arguments: tuple[Any, ...], options: dict[str, Any], timeout: float | None
    ) -> Model:
        from .isolated import make_model

        return make_model(maker, arguments, options, timeout)

    @classmethod
    def _adopt(cls, address: ctypes.c_void_p) -> Model:
        assert address.value is not None
        model = cls.__new__(cls)
        model._owned = Owned(address.value, lib.cellkv_model_free, "model")
        model._finalizer = weakref.finalize(model, model._owned.close)
        return model

    def _read_from(self, path: str | os.PathLike[str] | None, metadata: dict[str, Any]) -> Model:
        """Keep what `tokenizer` is to be read from."""
        self._path, self._metadata = path, metadata
        return self

    _owned: Owned
    _finalizer: weakref.finalize[Any, Model]
    _path: str | os.PathLike[str] | None
    _metadata: dict[str, Any]

    def close(self) -> None:
        """Drop this reference; closing twice is fine. Executors over the model go on working."""
        self._finalizer()

    @functools.cached_property
    def info(self) -> ModelInfo:
        """The model's figures."""
        info = _lib.sized(_lib.cellkv_model_info)
        with self._owned as model:
            check(lib.cellkv_model_get_info(model, ctypes.byref(info)))
            values = {field: getattr(info, field) for field in ModelInfo._fields}
            values["architecture"] = info.architecture.decode("utf-8", "replace")
            values["devices"] = info.devices.decode("utf-8", "replace")
            values["layers"] = tuple(_layer(info.layers[i]) for i in range(info.n_layers))
        return ModelInfo(**values)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read when first asked for.

        TokenizerError: missing, malformed or of an unknown kind.
        """
        from .tokenizer import Tokenizer

        if self._path is not None:
            return Tokenizer.from_gguf(self._path)
        if not any(key.startswith("tokenizer.") for key in self._metadata):
            raise TokenizerError("this model was made from arrays, without a tokenizer")
        return Tokenizer(self._metadata)

    def program(self, output: Output | OutputName = "logits") -> _lib.cellkv_program:
        """Return the model as the C struct of a program; it lives as long as the model.

        `output`: what a result row is: "logits" [n_vocab], or "hidden": the hidden state after the
        last norm [n_embd], which logits are made of.
        """
        chosen = as_member(output, Output, "output")
        program = _lib.sized(_lib.cellkv_program)
        with self._owned as model:
            check(lib.cellkv_model_program(model, chosen, ctypes.byref(program)))
        return program

    def new_cache(
        self,
        *,
        capacity: int = 4096,
        max_seqs: int = 64,
        initial_rows: int | None = None,
        max_step: int | None = None,
        type_k: TypeName = "f16",
        type_v: TypeName = "f16",
        kind: CacheKind | KindName = CacheKind.BATCHED,
        device: Devices = None,
    ) -> Cache:
        """Make a cache for this model: its layers, stored in the given types. Errors as `Cache`."""
        c_type_k, c_type_v = by_name(type_k, TYPES, "type_k"), by_name(type_v, TYPES, "type_v")
        config, _kept = _config(
            "ggml", kind, capacity, max_seqs, initial_rows, max_step, (), device
        )
        address = ctypes.c_void_p()
        with self._owned as model:
            check(
                lib.cellkv_model_new_cache(
                    model, ctypes.byref(config), c_type_k, c_type_v, ctypes.byref(address)
                )
            )
        return Cache._adopt(address)

    def executor(
        self,
        cache: Cache | None = None,
        *,
        output: Output | OutputName = "logits",
        **options: Any,
    ) -> Executor:
        """Make an executor of this model over a cache.

        `output` as in `program`; other options and errors as `Executor`.
        """
        with self._owned:
            return Executor(self.program(output), cache, **options)


def _no_timeout(timeout: float | None) -> None:
    if timeout is not None:
        raise InvalidArgumentError("timeout is for isolated models")


def _model_config(
    device: Devices, use_mmap: bool, repack: bool
) -> tuple[_lib.cellkv_model_config, object]:
    config = lib.cellkv_model_config_default()
    name = as_devices(device, "device")
    config.device = name
    config.use_mmap = bool(use_mmap)
    config.repack = bool(repack)
    return config, name


def _layer(layer: _lib.cellkv_layer) -> Layer:
    names: dict[int, Any] = {value: name for name, value in TYPES.items()}
    return Layer(
        layer.n_kv_heads,
        layer.head_dim_k,
        layer.head_dim_v,
        layer.window,
        names[layer.type_k],
        names[layer.type_v],
    )


def _c_values(values: Mapping[str, Any]) -> tuple[Any, object]:
    c_values = (_lib.cellkv_model_value * len(values))()
    kept: list[bytes] = []
    for c_value, (key, value) in zip(c_values, values.items(), strict=True):
        kept.append(as_text(key, "a key of metadata"))
        c_value.key = kept[-1]
        if isinstance(value, str):
            kept.append(as_text(value, f"metadata[{key!r}]"))
            c_value.string = kept[-1]
        elif isinstance(value, (float, np.floating)):
            c_value.number, c_value.is_float = float(value), True
        elif isinstance(value, (bool, np.bool_)):
            c_value.number = float(value)
        else:
            number = as_int(value, f"metadata[{key!r}]", np.int64)
            if abs(number) > 2**53:
                raise InvalidArgumentError(f"metadata[{key!r}] is {number}, beyond 2^53")
            c_value.number = float(number)
    return c_values, kept


def _c_arrays(arrays: Mapping[str, Any]) -> tuple[Any, object]:
    c_arrays = (_lib.cellkv_model_array * len(arrays))()
    kept: list[object] = []
    for c_array, (name, value) in zip(c_arrays, arrays.items(), strict=True):
        array = as_floats(value, f"arrays[{name!r}]")
        if array.ndim not in (1, 2, 3):
            raise InvalidArgumentError(
                f"arrays[{name!r}] has shape {array.shape}, one to three dimensions are expected"
            )
        encoded = as_text(name, "a name in arrays")
        c_array.name = encoded
        c_array.data = array.ctypes.data
        c_array.n_dims = array.ndim
        for i, n in enumerate(reversed(array.shape)):
            c_array.shape[i] = n
        kept += [array, encoded]
    return c_arrays, kept
