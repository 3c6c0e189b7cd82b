"""Files and arrays that are no model: each gets a status that names the cause, never a crash."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from cellkv import (
    BadFileError,
    BadMetadataError,
    BadTensorError,
    BadTokenError,
    CellkvError,
    FileError,
    InvalidArgumentError,
    MissingTensorError,
    Model,
    UnknownArchitectureError,
    UnknownDeviceError,
    _lib,
)
from oracle_decoder import Decoder
from tiny_gguf import Tiny, metadata_of, tensors_of, write, write_tiny

TINY = Tiny(
    n_layers=1,
    n_vocab=17,
    n_embd=16,
    n_heads=2,
    n_ff=24,
    biases=True,
    rope_factors=True,
    more={"rope.freq_base": 500000.0},
)
SMALL: dict[str, Any] = {"n_layers": 1, "n_vocab": 17, "n_embd": 16, "n_heads": 2, "n_ff": 24}
WINDOWS = {"attention.sliding_window": 3, "attention.sliding_window_pattern": 2}
OTHERS = {
    "gemma2": Tiny("gemma2", **SMALL, more=WINDOWS | {"attn_logit_softcapping": 5.0}),
    "gemma3": Tiny("gemma3", **SMALL, more=WINDOWS | {"final_logit_softcapping": 5.0}),
    "qwen2": Tiny("qwen2", **SMALL),
    "qwen3": Tiny("qwen3", **SMALL),
    "qwen3moe": Tiny("qwen3moe", **SMALL, n_experts=3, n_experts_used=2),
}
REQUIRED = [name for name in tensors_of(Tiny(n_layers=2, n_embd=16)) if name != "output.weight"]
Edit = Callable[[dict[str, Any], dict[str, npt.NDArray[Any]]], object]


def load(path: Path, **options: Any) -> Model:
    return Model.load(path, device="CPU", **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A tiny model's file."""
    return write_tiny(tmp_path_factory.mktemp("whole") / "tiny.gguf", TINY).read_bytes()


@pytest.fixture(scope="module")
def data_begin(whole: bytes) -> int:
    """Where the tensors' bytes begin in `whole`: they fill the rest of it."""
    sizes = [-(-tensor.nbytes // 32) * 32 for tensor in tensors_of(TINY).values()]
    return len(whole) - sum(sizes)


@pytest.fixture
def refuse(tmp_path: Path) -> Callable[..., None]:
    """Write a file of these bytes, or an edited tiny model, and expect a refusal."""

    def refuse(what: bytes | Edit, error: type[CellkvError], words: str, tiny: Tiny = TINY) -> None:
        path = tmp_path / "refused.gguf"
        if isinstance(what, bytes):
            path.write_bytes(what)
        else:
            metadata, tensors = metadata_of(tiny), dict(tensors_of(tiny))
            what(metadata, tensors)
            write(path, metadata, tensors)
        for use_mmap in (True, False):
            with pytest.raises(error, match=words):
                load(path, use_mmap=use_mmap)

    return refuse


def test_the_tiny_model_itself_is_fine(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "fine.gguf"
    path.write_bytes(whole)
    load(path).close()


# ---- files ----


def test_what_cannot_be_read_is_a_file_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "nowhere.gguf", tmp_path, tmp_path / "pipe"):
        with pytest.raises(FileError, match=str(path)):
            load(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "ends too early"),
        (b"GGU", "ends too early"),
        (b"ggml" + bytes(64), "not a GGUF file"),
        (b"%PDF-1.7" + bytes(64), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "impossible number"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "impossible number"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 16, 1 << 16), "ends too early"),
    ],
)
def test_what_is_no_gguf_is_a_bad_file(
    refuse: Callable[..., None], content: bytes, words: str
) -> None:
    refuse(content, BadFileError, words)


def test_a_file_without_keys_names_the_architecture_it_lacks(refuse: Callable[..., None]) -> None:
    refuse(b"GGUF" + struct.pack("<IQQ", 3, 0, 0), BadMetadataError, "general.architecture")


def test_every_cut_through_the_header_is_a_bad_file(
    whole: bytes, data_begin: int, tmp_path: Path
) -> None:
    path = tmp_path / "cut.gguf"
    for n in range(data_begin):
        path.write_bytes(whole[:n])
        with pytest.raises(BadFileError):
            load(path, use_mmap=n % 2 == 0)


def test_a_cut_through_the_data_names_the_first_tensor_that_is_not_whole(
    whole: bytes, data_begin: int, refuse: Callable[..., None]
) -> None:
    begin = data_begin
    for name, tensor in tensors_of(TINY).items():
        for n_kept in (0, 1, tensor.nbytes // 2, tensor.nbytes - 1):
            refuse(whole[: begin + n_kept], BadFileError, f"^{name}: the file ends")
        begin += -(-tensor.nbytes // 32) * 32


ALIGNMENT = b"general.alignment"


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _key(kind: int, value: bytes, name: bytes = b"some.key") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _string(name) + struct.pack("<I", kind) + value


def _tensor(
    dims: list[int], kind: int, offset: int = 0, name: bytes = b"t", data: int = 0
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + _string(name)
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    head += shape + struct.pack("<IQ", kind, offset)
    return head + bytes(-len(head) % 32 + data)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (_key(4, b"", name=b""), BadFileError, "an empty key"),
        (_key(13, bytes(8)), BadFileError, "some.key: a value of unknown type"),
        (_key(2**32 - 1, bytes(8)), BadFileError, "some.key: a value of unknown type"),
        (_key(8, struct.pack("<Q", 2**63)), BadFileError, "some.key: .*too early"),
        (_key(9, struct.pack("<IQ", 4, 2**62)), BadFileError, "some.key: .*too early"),
        (_key(9, struct.pack("<IQ", 8, 2**62)), BadFileError, "some.key: .*too early"),
        (_key(9, struct.pack("<IQ", 9, 1)), BadFileError, "some.key: a value of unknown type"),
        (_key(4, bytes(4), name=b"k" * 70000), BadFileError, "name is too long"),
        (
            _key(4, struct.pack("<I", 0), b"general.alignment"),
            BadFileError,
            "alignment: not a power",
        ),
        (
            _key(4, struct.pack("<I", 24), b"general.alignment"),
            BadFileError,
            "alignment: not a pow",
        ),
        (
            _key(10, struct.pack("<Q", 32), b"general.alignment"),
            BadFileError,
            "alignment: not a po",
        ),
        (_tensor([4], 0, name=b"t" * 64, data=16), BadFileError, "name is too long"),
        (_tensor([1] * 5, 0, data=4), BadFileError, "t: too many dimensions"),
        (_tensor([0, 4], 0), BadFileError, "t: an impossible shape"),
        (_tensor([2**64 - 1], 0), BadFileError, "t: an impossible shape"),
        (_tensor([2**32, 2**32], 0), BadFileError, "t: an impossible shape"),
        (_tensor([2**20, 2**20], 0), BadFileError, "t: the file ends"),
        (_tensor([4], 0, offset=32, data=64), BadFileError, "t: its data does not follow"),
        (_tensor([32], 4, data=64), BadTensorError, "t: type 4 is not known"),
        (_tensor([32], 2**31, data=64), BadTensorError, "t: type 2147483648 is not known"),
        (_tensor([33], 2, data=64), BadTensorError, "t: rows of 33 are no multiple"),
        (_tensor([32], 0, name=b"\xff\n\0", data=128), BadMetadataError, "general.architecture"),
    ],
)
def test_malformed_headers_are_told_apart(
    refuse: Callable[..., None], content: bytes, error: type[CellkvError], words: str
) -> None:
    refuse(content, error, words)


def test_a_name_given_twice_is_a_bad_file(whole: bytes, refuse: Callable[..., None]) -> None:
    for name, other in [
        (b"blk.0.attn_q.bias", b"blk.0.attn_k.bias"),
        (b"llama.rope.freq_base", b"llama.context_length"),
    ]:
        assert name in whole
        assert other in whole
        refuse(whole.replace(name, other), BadFileError, "ggml's reader refuses")


@pytest.mark.parametrize(("name", "n"), [("llama", 900)] + [(name, 600) for name in OTHERS])
def test_flipped_bytes_never_end_the_process(name: str, n: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    path = tmp_path / "flipped.gguf"
    tiny = TINY if name == "llama" else OTHERS[name]
    whole = write_tiny(path, tiny).read_bytes()
    data_begin = len(whole) - sum(-(-t.nbytes // 32) * 32 for t in tensors_of(tiny).values())
    outcomes: dict[str, int] = {}
    for i in range(n):
        content = bytearray(whole)
        for at in rng.integers(4, data_begin, 1 + i % 3):
            content[at] = rng.integers(0, 256) if i % 2 else content[at] ^ (1 << rng.integers(0, 8))
        path.write_bytes(content)
        try:
            with load(path, use_mmap=i % 4 < 2) as model:
                _run(model)
            outcome = "ran"
        except CellkvError as error:
            outcome = type(error).__name__
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert {"BadFileError", "BadMetadataError", "MissingTensorError", "ran"} <= set(outcomes)
    assert sum(outcomes.values()) == n


def _run(model: Model, tokens: tuple[int, ...] = (1, 2, 3)) -> npt.NDArray[np.float32]:
    with (
        model.new_cache(type_k="f32", type_v="f32", capacity=64, device="CPU") as cache,
        model.executor(cache, n_threads=1) as executor,
    ):
        return executor.run(tokens, cache.open(), outputs="all")


@pytest.mark.parametrize("alignment", [1, 2, 8, 32, 64, 4096])
def test_what_does_not_lie_as_the_device_needs_it_is_copied(alignment: int, tmp_path: Path) -> None:
    metadata = metadata_of(TINY) | {"general.alignment": alignment, "some.key": "filler"}
    path = write(tmp_path / "aligned.gguf", metadata, tensors_of(TINY), alignment=alignment)
    aligned = [t.n_bytes for t in gguf.GGUFReader(path).tensors if t.data_offset % 32 == 0]
    truth = Decoder(metadata, tensors_of(TINY)).logits([1, 2, 3])
    with load(path) as model:
        assert model.info.mapped_bytes == sum(map(int, aligned))
        np.testing.assert_allclose(_run(model), truth, rtol=0, atol=1e-4)


# ---- metadata ----


def test_another_architecture_is_named(refuse: Callable[..., None]) -> None:
    def edit(metadata: dict[str, Any], _: Any) -> None:
        metadata["general.architecture"] = "mamba"

    refuse(edit, UnknownArchitectureError, "mamba")


@pytest.mark.parametrize("name", ["", "Llama", "llam", "llama2", "l\xe4ma\n", "x" * 500])
def test_a_near_miss_is_another_architecture(refuse: Callable[..., None], name: str) -> None:
    def edit(metadata: dict[str, Any], _: Any) -> None:
        metadata["general.architecture"] = name

    refuse(edit, UnknownArchitectureError, r"^[ -~]{0,63}; there are: llama, [a-z0-9, ]+$")


MANDATORY = [
    "general.architecture",
    "llama.block_count",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
]
PER_LAYER = [
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.sliding_window",
]
INTEGERS = [
    *PER_LAYER,
    "llama.block_count",
    "llama.embedding_length",
    "llama.context_length",
    "llama.vocab_size",
    "llama.attention.key_length",
    "llama.attention.value_length",
    "llama.rope.dimension_count",
    "llama.expert_count",
]
FLOATS = [
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.freq_base",
    "llama.rope.scaling.factor",
    "llama.rope.scaling.attn_factor",
    "llama.rope.scale_linear",
]
STRINGS = ["general.architecture", "llama.rope.scaling.type"]
BOOLS = ["llama.attention.causal"]


@pytest.mark.parametrize("key", MANDATORY)
def test_a_key_that_is_missing_is_named(refuse: Callable[..., None], key: str) -> None:
    refuse(lambda metadata, _: metadata.pop(key), BadMetadataError, f"{key}: missing")


WRONG = [
    *[(key, value) for key in INTEGERS for value in ("4", -1, 1.0, True, [1, 1, 1], ["a"], 2**31)],
    *[(key, value) for key in INTEGERS for value in (np.int8(-1), np.int64(-(2**40)))],
    *[(key, value) for key in INTEGERS for value in (np.uint64(2**64 - 1), np.float64(1))],
    *[(key, value) for key in PER_LAYER for value in (["1"], [1.0], [-1], [True], [1, 1])],
    *[(key, value) for key in FLOATS for value in ("1", 1, [1.0], True, float("nan"))],
    *[(key, value) for key in FLOATS for value in (float("inf"), -1e-3, np.float64(1e300))],
    *[(key, value) for key in STRINGS for value in (1, 1.0, True, ["llama"])],
    *[(key, value) for key in BOOLS for value in ("no", 1.0, [False], 2)],
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=repr)
def test_a_key_of_another_type_or_out_of_range_is_named(
    refuse: Callable[..., None], key: str, value: Any
) -> None:
    refuse(lambda metadata, _: metadata.update({key: value}), BadMetadataError, f"^{key}: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 0),
        ("llama.block_count", 4097),
        ("llama.embedding_length", 0),
        ("llama.embedding_length", 2**30),
        ("llama.feed_forward_length", 0),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count", 2**20),
        ("llama.attention.head_count_kv", 0),
        ("llama.attention.key_length", 0),
        ("llama.attention.key_length", 7),
        ("llama.attention.key_length", 2**20),
        ("llama.attention.value_length", 0),
        ("llama.rope.dimension_count", 0),
        ("llama.rope.dimension_count", 3),
        ("llama.rope.dimension_count", 10),
        ("llama.rope.freq_base", 0.0),
        ("llama.rope.freq_base", 0.5),
        ("llama.rope.scaling.factor", 1e-20),
        ("llama.rope.scaling.attn_factor", 0.9),
        ("llama.rope.scaling.type", "yarn"),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.scaling.type", ""),
        ("llama.attention.layer_norm_rms_epsilon", 2.0),
        ("llama.context_length", 0),
        ("llama.vocab_size", 0),
        ("llama.expert_count", 8),
        ("llama.attention.causal", False),
        ("split.count", 2),
    ],
)
def test_an_impossible_or_unsupported_value_is_named(
    refuse: Callable[..., None], key: str, value: Any
) -> None:
    blamed = "llama.embedding_length" if value in (3, 2**30) and "head_count" in key else key
    refuse(lambda metadata, _: metadata.update({key: value}), BadMetadataError, f"^{blamed}: ")


def test_heads_that_do_not_divide_are_refused(refuse: Callable[..., None]) -> None:
    def edit(metadata: dict[str, Any], _: Any) -> None:
        metadata["llama.attention.head_count_kv"] = 3

    refuse(edit, BadMetadataError, "^llama.attention.head_count: not a multiple")


def test_a_width_that_does_not_divide_into_heads_is_refused(refuse: Callable[..., None]) -> None:
    def edit(metadata: dict[str, Any], _: Any) -> None:
        metadata["llama.embedding_length"] = 15

    refuse(edit, BadMetadataError, "^llama.embedding_length: does not divide")


def test_values_of_any_integer_type_are_taken(tmp_path: Path) -> None:
    for kind in (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64):
        metadata = metadata_of(TINY)
        for key in ("llama.block_count", "llama.embedding_length", "llama.attention.head_count"):
            metadata[key] = kind(metadata[key])
        metadata["llama.attention.layer_norm_rms_epsilon"] = np.float64(1e-5)
        load(write(tmp_path / "kinds.gguf", metadata, tensors_of(TINY))).close()


# ---- keys of the other architectures ----


def _with(name: str, key: str, value: Any) -> Edit:
    return lambda metadata, _: metadata.update({f"{name}.{key}": value})


def test_the_other_tiny_models_are_fine(tmp_path: Path) -> None:
    for name, tiny in OTHERS.items():
        with load(write_tiny(tmp_path / f"{name}.gguf", tiny)) as model:
            assert model.info.architecture == name
            _run(model)


@pytest.mark.parametrize("name", OTHERS)
def test_every_architecture_names_the_key_it_lacks(refuse: Callable[..., None], name: str) -> None:
    experts = ["expert_count", "expert_used_count", "expert_feed_forward_length"]
    keys = ["block_count", "embedding_length", "attention.head_count"]
    keys += experts if name == "qwen3moe" else ["feed_forward_length"]
    for key in [*keys, "attention.layer_norm_rms_epsilon"]:
        whole = f"{name}.{key}"
        refuse(
            lambda metadata, _, whole=whole: metadata.pop(whole),
            BadMetadataError,
            f"^{whole}: missing",
            OTHERS[name],
        )


NO_FLOAT = ["1", 1, [1.0], True, float("nan"), float("inf"), -1.0]
IMPOSSIBLE = [
    *[("gemma2", "attn_logit_softcapping", value) for value in (*NO_FLOAT, 1e-30, 1e20)],
    *[("gemma2", "final_logit_softcapping", value) for value in (*NO_FLOAT, 1e-30, 1e20)],
    *[("gemma3", "final_logit_softcapping", value) for value in (*NO_FLOAT, 1e-30)],
    *[("gemma3", "attention.scale", value) for value in (*NO_FLOAT, 0.0)],
    *[("gemma3", "rope.freq_base_swa", value) for value in (*NO_FLOAT, 0.5)],
    *[
        (name, "attention.sliding_window_pattern", value)
        for name in ("gemma2", "gemma3")
        for value in (0, -1, "2", 2.0, 2**31, [True, True], ["1"], [1.0], [2], [-1])
    ],
    *[(name, "attention.causal", False) for name in OTHERS],
    *[(name, "rope.scaling.type", "yarn") for name in OTHERS],
    *[(name, "attention.key_length", 7) for name in OTHERS],
    *[(name, "expert_count", 2) for name in OTHERS if name != "qwen3moe"],
    *[("qwen3moe", "expert_count", value) for value in (0, -1, 1, 2**13, 2**31, 3.0, "3", [3])],
    *[("qwen3moe", "expert_used_count", value) for value in (0, -1, 4, 2**31, 2.0, "2", [2])],
    *[("qwen3moe", "expert_feed_forward_length", v) for v in (0, -1, 2**30, 24.0, "24", [24] * 2)],
    *[("qwen3moe", "expert_gating_func", value) for value in (0, 2, 3, "softmax")],
    *[("qwen3moe", "expert_weights_norm", value) for value in (False, "yes", 2)],
    *[("qwen3moe", "expert_weights_scale", value) for value in (2.5, -1.0, float("nan"), 1)],
    *[("qwen3moe", "expert_shared_count", value) for value in (1, -1, "0")],
]


@pytest.mark.parametrize(("name", "key", "value"), IMPOSSIBLE, ids=repr)
def test_what_another_architecture_cannot_serve_is_named(
    refuse: Callable[..., None], name: str, key: str, value: Any
) -> None:
    # Fewer experts than are used: the smaller number may be the one that was meant.
    blamed = "expert_used_count" if (key, value) == ("expert_count", 1) else key
    refuse(_with(name, key, value), BadMetadataError, f"^{name}.{blamed}: ", OTHERS[name])


# ---- tensors ----


@pytest.mark.parametrize("name", REQUIRED)
def test_a_tensor_that_is_missing_is_named(refuse: Callable[..., None], name: str) -> None:
    refuse(
        lambda _, tensors: tensors.pop(name),
        MissingTensorError,
        f"^{name}$",
        Tiny(n_layers=2, n_embd=16),
    )


@pytest.mark.parametrize("name", tensors_of(TINY))
def test_a_tensor_of_another_shape_is_named(refuse: Callable[..., None], name: str) -> None:
    full = tensors_of(TINY)[name]
    others = [full[:-1], np.concatenate([full, full]), full[None], full[:, None]]
    if full.ndim == 2:
        others += [full[:, :-1], np.concatenate([full, full], axis=1), full.ravel()]
        others += [np.ascontiguousarray(full.T)] if full.shape[0] != full.shape[1] else []
    for other in others:
        if other.ndim == full.ndim + 1 and other.shape[0] == 1:
            continue  # a leading 1 is the same shape to ggml
        # The embedding's rows are the vocabulary: it is the head that does not fit them then.
        rows_only = name == "token_embd.weight" and other.ndim == 2
        rows_only = rows_only and other.shape[1] == full.shape[1]
        blamed = "output.weight" if rows_only else name

        def edit(
            _: Any, tensors: dict[str, npt.NDArray[Any]], other: npt.NDArray[Any] = other
        ) -> None:
            tensors[name] = np.ascontiguousarray(other)

        refuse(edit, BadTensorError, rf"^{blamed} has shape .* was expected")


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q_norm.weight", "blk.1.ffn_up.weight", "blk.0.ffn_up.scale", "extra"]
)
def test_a_tensor_that_no_llama_has_is_named(refuse: Callable[..., None], name: str) -> None:
    def edit(_: Any, tensors: dict[str, npt.NDArray[Any]]) -> None:
        tensors[name] = np.ones(4, np.float32)

    refuse(edit, BadTensorError, f"^{name} is no tensor")


@pytest.mark.parametrize("name", OTHERS)
def test_every_architecture_names_the_tensor_it_lacks(
    refuse: Callable[..., None], name: str
) -> None:
    for tensor in tensors_of(OTHERS[name]):
        if tensor != "output.weight":
            refuse(
                lambda _, tensors, tensor=tensor: tensors.pop(tensor),
                MissingTensorError,
                f"^{tensor}$",
                OTHERS[name],
            )


def _misshapen(full: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
    """Arrays of `full`'s values in other shapes, along each dimension."""
    others = [full[:, None], np.concatenate([full, full])]
    for axis, n in enumerate(full.shape):
        others += [full.take(range(n - 1), axis)] if n > 1 else []
    if full.ndim == 3:
        others += [full[0], full.transpose(0, 2, 1), full.transpose(2, 1, 0)]
    return [np.ascontiguousarray(other) for other in others]


@pytest.mark.parametrize("name", OTHERS)
def test_every_architecture_names_the_tensor_of_another_shape(
    refuse: Callable[..., None], name: str
) -> None:
    tensors = tensors_of(OTHERS[name])
    for tensor in set(tensors) - {"token_embd.weight"}:
        for other in _misshapen(tensors[tensor]):
            refuse(
                lambda _, edited, tensor=tensor, other=other: edited.update({tensor: other}),
                BadTensorError,
                rf"^{tensor} has shape .* was expected",
                OTHERS[name],
            )


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gemma2", "blk.0.attn_q_norm.weight"),
        ("gemma3", "rope_freqs.weight"),
        ("qwen2", "blk.0.attn_q_norm.weight"),
        ("qwen3", "blk.0.post_ffw_norm.weight"),
        ("qwen3", "blk.0.ffn_gate_exps.weight"),
        ("qwen3moe", "blk.0.ffn_gate.weight"),
        ("qwen3moe", "blk.0.ffn_gate_inp.bias"),
        ("qwen3moe", "blk.0.ffn_gate_exps.bias"),
        ("qwen3moe", "blk.0.ffn_gate_shexp.weight"),
    ],
)
def test_a_tensor_of_another_architecture_is_named(
    refuse: Callable[..., None], name: str, tensor: str
) -> None:
    refuse(
        lambda _, tensors: tensors.update({tensor: np.ones(4, np.float32)}),
        BadTensorError,
        f"^{tensor} is no tensor of the architecture {name}$",
        OTHERS[name],
    )


def test_tensors_of_old_files_are_not_minded(tmp_path: Path) -> None:
    old = {"blk.0.attn_rot_embd.weight": np.ones(4, np.float32)}
    with load(write(tmp_path / "old.gguf", metadata_of(TINY), tensors_of(TINY) | old)) as model:
        _run(model)


def test_a_quantized_norm_is_refused(refuse: Callable[..., None]) -> None:
    def edit(_: Any, tensors: dict[str, npt.NDArray[Any]]) -> None:
        tensors["output_norm.weight"] = tensors["output_norm.weight"].astype(np.int32)

    refuse(edit, BadTensorError, "^output_norm.weight has type i32; f32, f16 or bf16")


# ---- arrays ----


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ({"key": None}, InvalidArgumentError, "value 1 has no key"),
        ({"key": b""}, InvalidArgumentError, "value 1 has no key"),
        ({"key": b"general.architecture"}, BadMetadataError, "given twice"),
        ({"key": b"general.alignment", "number": 32}, BadMetadataError, "alignment has no meaning"),
        ({"key": b"llama.x", "number": 0.5}, BadMetadataError, "llama.x: 0.5 is no integer"),
        ({"key": b"llama.x", "number": 2.0**60}, BadMetadataError, "llama.x: .* is no integer"),
        ({"key": b"llama.x", "number": float("nan")}, BadMetadataError, "llama.x: -?nan is no"),
        ({"key": b"llama.x", "number": float("-inf")}, BadMetadataError, "llama.x: -inf is no"),
    ],
)
def test_values_are_checked(value: dict[str, Any], error: type[CellkvError], words: str) -> None:
    values = (_lib.cellkv_model_value * 2)()
    values[0].key, values[0].string = b"general.architecture", b"llama"
    for field, content in value.items():
        setattr(values[1], field, content)
    with pytest.raises(error, match=words):
        _from_arrays(values, (_lib.cellkv_model_array * 0)())


@pytest.mark.parametrize(
    ("array", "error", "words"),
    [
        ({"name": None}, InvalidArgumentError, "array 1 has no name"),
        ({"data": None}, InvalidArgumentError, "array 1 has no data"),
        ({"name": b""}, BadTensorError, "array 1: a name has 1 to 63 bytes"),
        ({"name": b"x" * 64}, BadTensorError, "array 1: a name has 1 to 63 bytes"),
        ({"name": b"first"}, BadTensorError, "first is given twice"),
        ({"n_dims": 0}, BadTensorError, "second: 0 dimensions"),
        ({"n_dims": 4}, BadTensorError, "second: 4 dimensions"),
        ({"n_dims": -1}, BadTensorError, "second: -1 dimensions"),
        ({"shape": (0, 1)}, BadTensorError, "second: an impossible shape"),
        ({"shape": (-4, 1)}, BadTensorError, "second: an impossible shape"),
        ({"n_dims": 2, "shape": (2**40, 2**40)}, BadTensorError, "second: an impossible shape"),
        ({"n_dims": 3, "shape": (2, 2)}, BadTensorError, "second: an impossible shape"),
    ],
)
def test_arrays_are_checked(array: dict[str, Any], error: type[CellkvError], words: str) -> None:
    data = np.ones(4, np.float32)
    arrays = (_lib.cellkv_model_array * 2)()
    for c_array, name in zip(arrays, (b"first", b"second"), strict=True):
        c_array.name, c_array.data, c_array.n_dims, c_array.shape[0] = name, data.ctypes.data, 1, 4
    for field, content in array.items():
        if field == "shape":
            arrays[1].shape[0], arrays[1].shape[1] = content
        else:
            setattr(arrays[1], field, content)
    with pytest.raises(error, match=words):
        _from_arrays((_lib.cellkv_model_value * 0)(), arrays)


def _from_arrays(values: Any, arrays: Any, n_values: int | None = None) -> None:
    model = ctypes.c_void_p()
    status = _lib.lib.cellkv_model_from_arrays(
        values,
        len(values) if n_values is None else n_values,
        arrays,
        0 if arrays is None else len(arrays),
        None,
        ctypes.byref(model),
    )
    assert model.value is None
    _lib.check(status)


def test_counts_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="negative"):
        _from_arrays((_lib.cellkv_model_value * 1)(), None, n_values=-1)
    with pytest.raises(InvalidArgumentError, match="values"):
        _from_arrays(None, None, n_values=3)


# ---- arguments ----


def test_null_pointers_and_wrong_sizes_are_invalid_arguments(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(whole)
    lib, out = _lib.lib, ctypes.c_void_p()
    config = lib.cellkv_model_config_default()
    info, program = _lib.cellkv_model_info(), _lib.cellkv_program()
    cache_config = lib.cellkv_cache_config_default()
    name = os.fsencode(path)
    with load(path) as loaded, loaded._owned as model:
        calls = [
            lambda: lib.cellkv_model_load(None, None, ctypes.byref(out)),
            lambda: lib.cellkv_model_load(name, None, None),
            lambda: lib.cellkv_model_from_arrays(None, 0, None, 0, None, None),
            lambda: lib.cellkv_model_get_info(model, None),
            lambda: lib.cellkv_model_get_info(model, ctypes.byref(info)),
            lambda: lib.cellkv_model_get_info(None, ctypes.byref(_lib.sized(type(info)))),
            lambda: lib.cellkv_model_program(model, 0, None),
            lambda: lib.cellkv_model_program(None, 0, ctypes.byref(program)),
            lambda: lib.cellkv_model_program(model, 2, ctypes.byref(program)),
            lambda: lib.cellkv_model_program(model, -1, ctypes.byref(program)),
            lambda: lib.cellkv_model_new_cache(None, ctypes.byref(cache_config), 0, 0, out),
            lambda: lib.cellkv_model_new_cache(model, None, 0, 0, ctypes.byref(out)),
            lambda: lib.cellkv_model_new_cache(model, ctypes.byref(cache_config), 0, 0, None),
        ]
        for call in calls:
            assert call() == InvalidArgumentError.status
        config.size -= 1
        assert (
            lib.cellkv_model_load(name, ctypes.byref(config), ctypes.byref(out))
            == InvalidArgumentError.status
        )
        cache_config.size += 8
        call = lib.cellkv_model_new_cache
        assert (
            call(model, ctypes.byref(cache_config), 0, 0, ctypes.byref(out))
            == InvalidArgumentError.status
        )
    assert out.value is None
    lib.cellkv_model_free(None)


def test_an_unknown_device_is_named(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(whole)
    with pytest.raises(UnknownDeviceError, match="Abacus0"):
        Model.load(path, device="Abacus0")


@pytest.mark.parametrize("token", [-1, 17, 2**31 - 1, -(2**31)])
def test_a_token_outside_the_vocabulary_is_refused(
    whole: bytes, tmp_path: Path, token: int
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(whole)
    with load(path) as model, pytest.raises(BadTokenError, match=str(token)):
        _run(model, (1, token))
