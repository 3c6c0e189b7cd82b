"""The tokenizer against recorded ids, against naive encoders, and on malformed metadata."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellkv import InvalidArgumentError, Tokenizer, TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CASES = ["short", "code", "unicode", "chat", "long"]


# ---- a real vocabulary ----


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_path)


@pytest.fixture(scope="module")
def cases(vectors: Path) -> dict[str, Any]:
    recorded = json.loads((vectors / "smollm2-135m.json").read_text())["cases"]
    return {case["name"]: case for case in recorded if case["kv"] == "f32"}


@pytest.mark.parametrize("name", CASES)
def test_recorded_ids_come_from_their_text(
    smollm2: Tokenizer, cases: dict[str, Any], name: str
) -> None:
    assert sorted(cases) == sorted(CASES)
    ids = smollm2.encode(cases[name]["text"])
    assert ids.dtype == np.int32
    assert ids.tolist() == cases[name]["prompt_ids"]
    assert smollm2.decode(ids, special=True) == cases[name]["text"]


def test_recorded_chat_is_what_the_template_writes(
    smollm2: Tokenizer, cases: dict[str, Any]
) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Name three rivers in Europe."},
    ]
    assert smollm2.chat_text(messages) == cases["chat"]["text"]
    assert smollm2.encode_chat(messages).tolist() == cases["chat"]["prompt_ids"]


def test_smollm2_ends_its_answers_by_its_own_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.piece(smollm2.eos_id) == "<|im_end|>"
    assert {smollm2.piece(token) for token in smollm2.end_ids} == {"<|im_end|>", "<|endoftext|>"}


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.characters(min_codepoint=32, max_codepoint=0x3FFFF, exclude_categories=["Cs"]))
)
def test_any_text_comes_back(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text, parse_special=False)
    assert smollm2.decode(ids) == text
    stream = smollm2.stream()
    assert "".join(stream.feed(token) for token in ids) + stream.finish() == text


# ---- byte-level vocabularies ----


def byte_level(
    words: list[str] = (), pre: str | None = "gpt-2", specials: dict[str, int] | None = None
) -> dict[str, Any]:
    """Metadata of a vocabulary of single bytes and these words, each merged from its left."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    tokens = [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]
    merges = []
    for word in words:
        piece = word.replace(" ", "Ġ").replace("\n", "Ċ")
        for i in range(1, len(piece)):
            if piece[: i + 1] not in tokens:
                tokens.append(piece[: i + 1])
                merges.append(f"{piece[:i]} {piece[i]}")
    types = [NORMAL] * len(tokens)
    for special, kind in (specials or {}).items():
        tokens.append(special)
        types.append(kind)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    return metadata if pre is None else {**metadata, "tokenizer.ggml.pre": pre}


def pieces(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.decode([t], special=True) for t in tokenizer.encode(text, **options)]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 1234  now!!", ["it", "'s", " 1234", " ", " now", "!!"]),
        ("gpt-2", "a\n\n b", ["a", "\n\n", " b"]),
        ("smollm", "it's 1234", ["it", "'s", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "IT'S 12345!\n\nx", ["IT", "'S", " ", "123", "45", "!\n\n", "x"]),
        ("llama-bpe", "a \n b", ["a", " \n", " b"]),
        ("qwen2", "IT'S 123", ["IT", "'S", " ", "1", "2", "3"]),
        (None, "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_says(
    pre: str | None, text: str, words: list[str]
) -> None:
    # Were the text cut otherwise, the decoys would be merged.
    decoys = ["it's", "IT'S", "1234", "12345", "S 1", "a\n\n b", "!\n\nx", "a \n b", "a+b"]
    tokenizer = Tokenizer(byte_level([*words, *decoys], pre))
    assert pieces(tokenizer, text) == words


def test_llama3_takes_a_whole_word_that_is_a_token_whatever_the_merges_say() -> None:
    for pre, expected in (("llama-bpe", ["word"]), ("qwen2", ["w", "o", "r", "d"])):
        metadata = byte_level(pre=pre)
        metadata["tokenizer.ggml.tokens"].append("word")
        metadata["tokenizer.ggml.token_type"].append(NORMAL)
        assert pieces(Tokenizer(metadata), "word", bos=False) == expected


def test_unknown_bytes_are_left_out_of_a_byte_level_vocabulary() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"][0] = "gone"  # was "!"
    assert pieces(Tokenizer(metadata), "a!b") == ["a", "b"]


# ---- tokens in text ----


def test_control_tokens_are_parsed_only_where_asked() -> None:
    tokenizer = Tokenizer(byte_level(specials={"<end>": CONTROL, "<end>>": CONTROL, "[u]": 4}))
    assert pieces(tokenizer, "a<end>b<end>>[u]") == ["a", "<end>", "b", "<end>>", "[u]"]
    plain = pieces(tokenizer, "a<end>[u]", parse_special=False)
    assert plain == ["a", "<", "e", "n", "d", ">", "[u]"]
    ids = tokenizer.encode("a<end>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, special=True) == "a<end>b"
    assert tokenizer.is_special(ids[1])
    assert not tokenizer.is_special(ids[0])


def test_bos_and_eos_are_added_as_the_model_or_the_caller_asks() -> None:
    metadata = byte_level(specials={"<s>": CONTROL, "</s>": CONTROL})
    n = len(metadata["tokenizer.ggml.tokens"])
    ids = {"tokenizer.ggml.bos_token_id": n - 2, "tokenizer.ggml.eos_token_id": n - 1}
    assert pieces(Tokenizer({**metadata, **ids}), "a") == ["a"]
    assert pieces(Tokenizer({**metadata, **ids}), "a", bos=True, eos=True) == ["<s>", "a", "</s>"]
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    asking = Tokenizer({**metadata, **ids, **flags})
    assert pieces(asking, "a") == ["<s>", "a", "</s>"]
    assert pieces(asking, "a", bos=False, eos=False) == ["a"]
    assert asking.end_ids == {n - 1}
    with pytest.raises(TokenizerError, match="bos_token_id"):
        Tokenizer(metadata).encode("a", bos=True)


# ---- score-based vocabularies ----


def scored(words: dict[str, float], *, bytes_too: bool = True, **options: Any) -> dict[str, Any]:
    """Metadata of a "llama" vocabulary: <unk>, <s>, </s>, bytes, then these pieces."""
    tokens, types = ["<unk>", "<s>", "</s>"], [UNKNOWN, CONTROL, CONTROL]
    scores = [0.0, 0.0, 0.0]
    if bytes_too:
        tokens += [f"<0x{byte:02X}>" for byte in range(256)]
        types += [BYTE] * 256
        scores += [0.0] * 256
    tokens += words
    types += [NORMAL] * len(words)
    scores += words.values()
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **options,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def naive_scored(words: dict[str, float], text: str) -> list[str]:
    """Join the best-scored neighbours, the leftmost of equals, until none are a token."""
    parts = list(text)
    while True:
        joins = [(words.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
        best = max(
            (j for j in joins if j[0] is not None), key=lambda j: (j[0], -j[1]), default=None
        )
        if best is None:
            return parts
        parts[best[1] : best[1] + 2] = ["".join(parts[best[1] : best[1] + 2])]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_best_scored_neighbours_are_joined_first(data: st.DataObject) -> None:
    letters = "ab▁"
    longer = data.draw(st.lists(st.text(letters, min_size=2, max_size=5), unique=True, max_size=25))
    ranks = data.draw(st.permutations(range(len(letters) + len(longer))))
    words = {w: -float(r) for w, r in zip([*letters, *longer], ranks, strict=True)}
    text = data.draw(st.text("ab ", max_size=30))
    tokenizer = Tokenizer(scored(words, add_space_prefix=False))
    got = [tokenizer.piece(token) for token in tokenizer.encode(text, bos=False)]
    assert got == naive_scored(words, text.replace(" ", "▁"))


def test_what_no_piece_spells_becomes_bytes_and_comes_back() -> None:
    tokenizer = Tokenizer(scored({"▁": -1.0, "a": -2.0, "▁a": -3.0}))
    ids = tokenizer.encode("a é🙂")
    assert [tokenizer.piece(t) for t in ids] == [
        "<s>", "▁a", "▁", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "a é🙂"
    stream = tokenizer.stream()
    assert [stream.feed(t) for t in ids] == ["", " a", " ", "", "é", "", "", "", "🙂"]


def test_without_byte_tokens_the_unknown_token_stands_in() -> None:
    tokenizer = Tokenizer(scored({"▁": -1.0, "a": -2.0}, bytes_too=False))
    assert [tokenizer.piece(t) for t in tokenizer.encode("aé")] == ["<s>", "▁", "a", "<unk>"]


def test_the_space_that_encode_puts_before_text_is_taken_off() -> None:
    words = {"▁": -1.0, "a": -2.0, "b": -3.0, "▁a": -4.0}
    tokenizer = Tokenizer(scored(words))
    ids = tokenizer.encode("a</s> a<s>b")
    assert [tokenizer.piece(t) for t in ids] == [
        "<s>", "▁a", "</s>", "▁", "▁a", "<s>", "▁", "b",
    ]  # fmt: skip
    assert tokenizer.decode(ids, special=True) == "<s>a</s> a<s>b"
    bare = Tokenizer(scored(words, add_space_prefix=False))
    assert [bare.piece(t) for t in bare.encode("a a", bos=False)] == ["a", "▁a"]


# ---- streaming ----


def test_a_stream_waits_for_a_characters_last_byte_and_ends_a_broken_one() -> None:
    tokenizer = Tokenizer(byte_level(specials={"<end>": CONTROL}))
    ids = tokenizer.encode("é日")
    stream = tokenizer.stream(special=True)
    assert [stream.feed(int(token)) for token in ids] == ["", "é", "", "", "日"]
    assert stream.feed(ids[2:4]) == ""
    assert stream.feed(tokenizer.encode("<end>x")) == "\N{REPLACEMENT CHARACTER}<end>x"
    assert stream.feed(ids[:1]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""


# ---- chat templates ----


def chatting(template: str) -> Tokenizer:
    specials = {"<s>": CONTROL, "</s>": CONTROL}
    metadata = byte_level(specials=specials)
    n = len(metadata["tokenizer.ggml.tokens"])
    return Tokenizer(
        {
            **metadata,
            "tokenizer.ggml.bos_token_id": n - 2,
            "tokenizer.ggml.eos_token_id": n - 1,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": template,
        }
    )


def test_a_template_that_writes_the_bos_gets_no_second_one() -> None:
    template = "{{ bos_token }}{% for m in messages %}\n{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = chatting(template)
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.chat_text(messages) == "<s>a</s>"
    assert tokenizer.decode(tokenizer.encode_chat(messages), special=True) == "<s>a</s>"
    without = chatting("{{ messages[0].content }}")
    assert without.decode(without.encode_chat(messages), special=True) == "<s>a"


def test_templates_have_what_they_commonly_use() -> None:
    tokenizer = chatting(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ tools | tojson(indent=1) }}"
        "{{ strftime_now('%Y') | length }}"
        "{% if add_generation_prompt %}!{% endif %}"
    )
    text = tokenizer.chat_text([{"a": "é<"}, {"b": "c"}], tools=[1])
    assert text == '{"a": "é<"}[\n 1\n]4!'


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{% for %}", "failed"),
        ("{{ messages.append(1) }}", "failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),
        ("{{ messages[0].role.nothing.at.all }}", "failed"),
    ],
)
def test_a_template_that_refuses_fails_or_reaches_out_raises(template: str, complaint: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(TokenizerError, match=complaint):
        chatting(template).chat_text(messages)
    assert len(messages) == 1


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer(byte_level()).chat_text([])


# ---- refusals ----


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        ("gpt2", {"model": None}, "lacks tokenizer.ggml.model"),
        ("gpt2", {"model": "rwkv"}, "'rwkv'"),
        ("gpt2", {"model": 3}, "int"),
        ("gpt2", {"tokens": None}, "lacks tokenizer.ggml.tokens"),
        ("gpt2", {"tokens": []}, "empty"),
        ("gpt2", {"tokens": [1, 2]}, "no string"),
        ("gpt2", {"token_type": [1]}, "shape"),
        ("gpt2", {"token_type": ["x"] * 256}, "type"),
        ("gpt2", {"merges": None}, "lacks tokenizer.ggml.merges"),
        ("gpt2", {"merges": ["ab"]}, "merges.0. is 'ab'"),
        ("gpt2", {"merges": ["a "]}, "no pair"),
        ("gpt2", {"merges": ["a bcd"]}, "does not fit"),
        ("gpt2", {"pre": "martian"}, "'martian'"),
        ("gpt2", {"bos_token_id": 10**6}, "bos_token_id"),
        ("gpt2", {"eos_token_id": "x"}, "eos_token_id"),
        ("gpt2", {"add_bos_token": "yes"}, "add_bos_token"),
        ("gpt2", {"add_eos_token": True}, "asks for no token"),
        ("llama", {"scores": None}, "lacks tokenizer.ggml.scores"),
        ("llama", {"scores": [0.0]}, "shape"),
        ("llama", {"tokens": ["a"], "token_type": [BYTE], "scores": [0.0]}, "<0x0A>"),
    ],
)
def test_malformed_metadata_is_refused_by_name(
    base: str, changes: dict[str, Any], complaint: str
) -> None:
    metadata = byte_level() if base == "gpt2" else scored({"a": 0.0})
    if "tokens" in changes and base == "llama":
        metadata = {"tokenizer.ggml.model": "llama"}
    for name, value in changes.items():
        metadata[f"tokenizer.ggml.{name}"] = value
    with pytest.raises(TokenizerError, match=complaint):
        Tokenizer({key: value for key, value in metadata.items() if value is not None})


def test_a_template_that_is_no_string_is_refused() -> None:
    with pytest.raises(TokenizerError, match="chat_template"):
        Tokenizer({**byte_level(), "tokenizer.chat_template": 3})


def test_arguments_that_are_no_text_or_no_tokens_are_refused() -> None:
    tokenizer = Tokenizer(byte_level())
    with pytest.raises(TypeError, match="text"):
        tokenizer.encode(b"a")
    with pytest.raises(InvalidArgumentError, match="text"):
        tokenizer.encode("\ud800")
    with pytest.raises(InvalidArgumentError, match=r"tokens\[1\]"):
        tokenizer.decode([0, tokenizer.n_vocab])
    with pytest.raises(InvalidArgumentError, match=r"tokens\[0\]"):
        tokenizer.decode([-1])
    with pytest.raises(TypeError, match="tokens"):
        tokenizer.decode([1.0])
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.decode([]) == ""


# ---- files ----


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_gives_what_its_metadata_gives(tmp_path: Path) -> None:
    metadata = byte_level(["hello", " world"])
    write_gguf(tmp_path / "t.gguf", metadata)
    read = Tokenizer.from_gguf(tmp_path / "t.gguf")
    assert read.encode("hello world").tolist() == Tokenizer(metadata).encode("hello world").tolist()


def test_a_file_that_is_damaged_or_has_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    with pytest.raises(OSError, match=r"t\.gguf"):
        Tokenizer.from_gguf(path)
    path.write_bytes(b"no GGUF at all, but long enough for a header")
    with pytest.raises(TokenizerError, match=r"t\.gguf"):
        Tokenizer.from_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"t\.gguf"):
        Tokenizer.from_gguf(path)
    write_gguf(path, {})
    with pytest.raises(TokenizerError, match=r"lacks tokenizer\.ggml"):
        Tokenizer.from_gguf(path)
    write_gguf(path, byte_level(["hello"]))
    whole = path.read_bytes()
    for size in (20, 60, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(TokenizerError, match=r"t\.gguf"):
            Tokenizer.from_gguf(path)
