"""Text to tokens and back, as a GGUF file's metadata describes it, and the chat template."""

from __future__ import annotations

import codecs
import datetime
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, cast

import gguf
import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import models, pre_tokenizers

from ._arguments import Ints, as_ints
from .errors import InvalidArgumentError, TokenizerError

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

# How each tokenizer.ggml.pre cuts text into words, one pattern after the other.
_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS: dict[str, list[str]] = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "llama-bpe": [_LLAMA3 % "{1,3}"],
    "qwen2": [_LLAMA3 % ""],
    # Of files that don't say.
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
_SAME_AS = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
}

# Tokens by which a model ends its turn though the metadata may name another one as EOS.
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "</s>",
)

_SPACE = "▁"  # how score-based ("llama") vocabularies write a space


class Tokenizer:
    """A model's tokenizer. Immutable: any number of threads may use one."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Make a tokenizer of GGUF metadata: the keys that begin with "tokenizer.".

        TokenizerError: missing, malformed, or of a kind that is not known here.
        """
        read = _Metadata(metadata)
        self._pieces: list[str] = read.strings("tokens")
        if not self._pieces:
            raise TokenizerError("tokenizer.ggml.tokens is empty")
        self._types = read.ints("token_type", len(self._pieces), _NORMAL)
        self.bos_id = read.token("bos_token_id", len(self._pieces))
        self.eos_id = read.token("eos_token_id", len(self._pieces))
        self._template_text = read.template()
        kind = read.text("model")
        if kind == "gpt2":
            pre = read.text("pre", "default")
            self._encode_words = _merging_encoder(self._by_piece(), read.strings("merges"), pre)
            self._space_prefix = read.flag("add_space_prefix", False)
            self._bytes = [
                _bytes_of_gpt2(p, t) for p, t in zip(self._pieces, self._types, strict=True)
            ]
            add_bos = _SAME_AS.get(pre, pre) == "llama-bpe"
        elif kind == "llama":
            scores = read.floats("scores", len(self._pieces))
            unknown = read.token("unknown_token_id", len(self._pieces))
            self._encode_words = _scoring_encoder(self._by_piece(), scores, self._pieces, unknown)
            self._space_prefix = read.flag("add_space_prefix", True)
            self._bytes = [
                _bytes_of_llama(p, t) for p, t in zip(self._pieces, self._types, strict=True)
            ]
            add_bos = True
        else:
            raise TokenizerError(f"tokenizer.ggml.model is {kind!r}, not one of gpt2, llama")
        self._add_bos = read.flag("add_bos_token", add_bos and self.bos_id is not None)
        self._add_eos = read.flag("add_eos_token", False)
        if (self._add_bos and self.bos_id is None) or (self._add_eos and self.eos_id is None):
            raise TokenizerError("tokenizer.ggml.add_bos_token or add_eos_token asks for no token")
        self._split_always = self._splitter(_USER_DEFINED)
        self._split_special = self._splitter(_USER_DEFINED, _CONTROL, _UNKNOWN)
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        ends = {self._ids[p] for p in _ENDS if self._type_of(p) == _CONTROL}
        self.end_ids = frozenset(ends | ({self.eos_id} if self.eos_id is not None else set()))
        """Tokens that end a model's answer."""

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read the tokenizer of a GGUF file.

        OSError: the file cannot be read. TokenizerError: as `Tokenizer`, or damaged metadata.
        """
        try:
            fields = _Reader(path).fields
            metadata = {k: f.contents() for k, f in fields.items() if k.startswith("tokenizer.")}
        except OSError:
            raise
        except Exception as error:  # gguf raises whatever its parsing ran into
            raise TokenizerError(f"{os.fspath(path)}: unreadable metadata: {error}") from error
        return cls(metadata)

    @property
    def n_vocab(self) -> int:
        """How many tokens there are."""
        return len(self._pieces)

    def piece(self, token: int) -> str:
        """Return a token as the vocabulary writes it. InvalidArgumentError: no such token."""
        return self._pieces[self._checked([token])[0]]

    def is_special(self, token: int) -> bool:
        """Tell whether a token is a control token, which stands for no text."""
        return bool(self._types[self._checked([token])[0]] in (_CONTROL, _UNKNOWN, _UNUSED))

    # ---- text to tokens ----

    def encode(
        self,
        text: str,
        *,
        parse_special: bool = True,
        bos: bool | None = None,
        eos: bool | None = None,
    ) -> npt.NDArray[np.int32]:
        """Turn text into tokens, int32 [n].

        `parse_special`: whether control tokens written in the text ("<|im_start|>") become those
        tokens; False for text that a user wrote. `bos`, `eos`: whether to add these tokens; None:
        as the model asks for.

        Characters that the vocabulary cannot write become its unknown token, or, in a byte-level
        one, are left out.

        TypeError: no string. InvalidArgumentError: text with lone surrogates. TokenizerError: there
        is no BOS or EOS where one is asked for.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is {type(text).__name__}, a string is expected")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"text is not Unicode: {error}") from None
        tokens: list[int] = []
        if self._add_bos if bos is None else bos:
            tokens.append(self._required(self.bos_id, "bos"))
        split = self._split_special if parse_special else self._split_always
        for i, part in enumerate(split(text)):
            if i % 2:  # the splitter's odd parts are whole tokens
                tokens.append(self._ids[part])
            elif part:
                # Each stretch of text between tokens begins a word of its own.
                tokens += self._encode_words(" " + part if self._space_prefix else part)
        if self._add_eos if eos is None else eos:
            tokens.append(self._required(self.eos_id, "eos"))
        return np.array(tokens, np.int32)

    def _required(self, token: int | None, name: str) -> int:
        if token is None:
            raise TokenizerError(f"the tokenizer has no tokenizer.ggml.{name}_token_id")
        return token

    def _splitter(self, *types: int) -> Callable[[str], list[str]]:
        """Make a function that cuts text at the tokens of these types: text, token, text, ..."""
        pieces = {p for p, t in zip(self._pieces, self._types, strict=True) if t in types and p}
        if not pieces:
            return lambda text: [text]
        longest_first = sorted(pieces, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split

    def _by_piece(self) -> dict[str, int]:
        """Map the tokens that plain text may become: control tokens are not among them."""
        plain = (_NORMAL, _UNKNOWN, _BYTE)
        return {p: i for i, p in enumerate(self._pieces) if self._types[i] in plain}

    def _type_of(self, piece: str) -> int | None:
        token = self._ids.get(piece)
        return None if token is None else int(self._types[token])

    # ---- tokens to text ----

    def decode(self, tokens: Ints, *, special: bool = False) -> str:
        """Turn tokens into text. Bytes that are no UTF-8 become U+FFFD.

        `special`: whether control tokens are written out or left out.

        TypeError, InvalidArgumentError: not tokens of this vocabulary.
        """
        return "".join(self._texts(self._checked(tokens), special))

    def _texts(self, tokens: Iterable[int], special: bool) -> Iterable[str]:
        """Decode each stretch between control tokens, without the space that encode put before."""
        stretch = bytearray()
        for token in (*tokens, None):
            if token is not None and not self.is_special(token):
                stretch += self._bytes[token]
                continue
            text = stretch.decode("utf-8", "replace")
            yield text[1:] if self._space_prefix and text.startswith(" ") else text
            stretch.clear()
            if token is not None and special:
                yield self._pieces[token]

    def stream(self, *, special: bool = False) -> StreamDecoder:
        """Make a decoder for tokens that come one after the other."""
        return StreamDecoder(self, special)

    def _checked(self, tokens: Ints) -> list[int]:
        ids = as_ints(tokens, "tokens", np.int32)
        outside = np.flatnonzero((ids < 0) | (ids >= self.n_vocab))
        if outside.size:
            at = outside[0]
            raise InvalidArgumentError(f"tokens[{at}] is {ids[at]}, outside [0, {self.n_vocab})")
        return list(map(int, ids))

    # ---- chats ----

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Write messages ({"role": ..., "content": ...}) as the model's chat template asks for.

        `add_generation_prompt`: whether the text ends where the model's answer begins.
        `variables`: whatever else the template knows (tools, ...). The template comes from the
        model's file: it runs in a sandbox and cannot change what it is given. A control token
        written in a message is, as with every model's template, not told from the template's own.

        TokenizerError: no template, a malformed one, or messages that it refuses.
        """
        if not self._template_text:
            raise TokenizerError("the model has no chat template (tokenizer.chat_template)")
        words = {
            name: "" if token is None else self._pieces[token]
            for name, token in (("bos_token", self.bos_id), ("eos_token", self.eos_id))
        }
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            template = _template_environment().from_string(self._template_text)
            return template.render(**{**words, **given, **variables})
        except TokenizerError:
            raise
        except Exception as error:  # a template can fail in any way that Python can
            raise TokenizerError(f"the chat template failed: {error}") from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> npt.NDArray[np.int32]:
        """`chat_text` as tokens, int32 [n], with one BOS where the model asks for one."""
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt, **variables)
        written = self.bos_id is not None and text.startswith(self._pieces[self.bos_id])
        return self.encode(text, bos=False if written else None, eos=False)


class StreamDecoder:
    """Turns tokens into text as they come; a character split over tokens waits for its last byte.

    What `feed` and `finish` return, joined, is the text of all tokens. Unlike `Tokenizer.decode` it
    keeps a leading space.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Ints | SupportsIndex) -> str:
        """Take one token, or several, and return the text that is complete by now."""
        one = hasattr(tokens, "__index__") and getattr(tokens, "ndim", 0) == 0
        text = ""
        for token in self._tokenizer._checked(cast(Ints, [tokens] if one else tokens)):
            if not self._tokenizer.is_special(token):
                text += self._utf8.decode(self._tokenizer._bytes[token])
                continue
            text += self.finish()
            if self._special:
                text += self._tokenizer.piece(token)
        return text

    def finish(self) -> str:
        """End the text: return U+FFFD for a character that never became complete, else nothing."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


# ---- metadata ----


class _Reader(gguf.GGUFReader):
    """gguf's reader over a plain view of its map: slicing that is a third of the time."""

    @property
    def data(self) -> Any:
        return self._view

    @data.setter
    def data(self, data: Any) -> None:
        self._view = np.asarray(data)


class _Metadata:
    """GGUF metadata, read with complaints that name the key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def _get(self, name: str, wanted: type | tuple[type, ...], default: Any = None) -> Any:
        key = f"tokenizer.ggml.{name}"
        value = self._metadata.get(key, default)
        if value is None:
            raise TokenizerError(f"the tokenizer lacks {key}")
        if not isinstance(value, wanted):
            raise TokenizerError(f"{key} is {type(value).__name__}, which it cannot be")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        return str(self._get(name, str, default))

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._get(name, (bool, np.bool_), default))

    def token(self, name: str, n_vocab: int) -> int | None:
        if f"tokenizer.ggml.{name}" not in self._metadata:
            return None
        token = int(self._get(name, (int, np.integer)))
        if not 0 <= token < n_vocab:
            raise TokenizerError(f"tokenizer.ggml.{name} is {token}, outside [0, {n_vocab})")
        return token

    def strings(self, name: str) -> list[str]:
        values = self._get(name, (list, tuple))
        if not all(isinstance(value, str) for value in values):
            raise TokenizerError(f"tokenizer.ggml.{name} has an entry that is no string")
        return list(values)

    def ints(self, name: str, length: int, default: int) -> npt.NDArray[np.int64]:
        return self._numbers(name, length, np.int64, [default] * length)

    def floats(self, name: str, length: int) -> npt.NDArray[np.float64]:
        return self._numbers(name, length, np.float64, None)

    def _numbers(self, name: str, length: int, dtype: Any, default: Any) -> npt.NDArray[Any]:
        values = self._get(name, (list, tuple, np.ndarray), default)
        try:
            array = np.asarray(values).astype(dtype, casting="same_kind")
        except (TypeError, ValueError):
            raise TokenizerError(f"tokenizer.ggml.{name} has an entry of a wrong type") from None
        if array.shape != (length,):
            raise TokenizerError(
                f"tokenizer.ggml.{name} has shape {array.shape}; there are {length} tokens"
            )
        return array

    def template(self) -> str | None:
        template = self._metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise TokenizerError("tokenizer.chat_template is no string")
        return template


# ---- byte-level BPE ("gpt2") ----


def _gpt2_alphabet() -> dict[str, int]:
    """List the characters that byte-level vocabularies write bytes as.

    Printable ones of Latin-1 stand for themselves, the others follow from U+0100 on in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _gpt2_alphabet()


def _bytes_of_gpt2(piece: str, kind: int) -> bytes:
    if kind == _USER_DEFINED or any(character not in _BYTE_OF for character in piece):
        return piece.encode("utf-8", "replace")
    return bytes(_BYTE_OF[character] for character in piece)


def _merging_encoder(
    vocab: dict[str, int], merges: list[str], pre: str
) -> Callable[[str], list[int]]:
    """Make the encoder of a byte-level BPE vocabulary, for text without special tokens."""
    name = _SAME_AS.get(pre, pre)
    if name not in _PATTERNS:
        known = ", ".join([*_PATTERNS, *_SAME_AS])
        raise TokenizerError(f"tokenizer.ggml.pre is {pre!r}, not one of {known}")
    pairs = []
    for i, merge in enumerate(merges):
        cut = merge.find(" ", 1)  # a piece is never empty, but may begin with a space
        left, right = merge[: max(cut, 0)], merge[cut + 1 :]
        if not (left and right):
            raise TokenizerError(f"tokenizer.ggml.merges[{i}] is {merge!r}, which is no pair")
        pairs.append((left, right))
    try:
        # Llama 3 takes a word that is a token as that token, whatever the merges say.
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=name == "llama-bpe")
    except Exception as error:  # tokenizers raises plain Exception
        raise TokenizerError(f"tokenizer.ggml.merges does not fit its tokens: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    words = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in _PATTERNS[name]
    ]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, as_bytes])

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


# ---- score-based BPE ("llama") ----


def _bytes_of_llama(piece: str, kind: int) -> bytes:
    if kind == _BYTE:
        try:
            return bytes([int(piece[3:-1], 16)])  # "<0x0A>"
        except ValueError:
            raise TokenizerError(f"the byte token {piece!r} is not of the form <0x0A>") from None
    return piece.replace(_SPACE, " ").encode("utf-8", "replace")


def _scoring_encoder(
    vocab: dict[str, int], scores: npt.NDArray[np.float64], pieces: list[str], unknown: int | None
) -> Callable[[str], list[int]]:
    """Make the encoder of a score-based vocabulary, for text without special tokens.

    Of all neighbours whose union is a token, the best-scored are joined first. That is BPE whose
    merges are every way to cut a token into two, ranked by the token's score.
    """
    pairs = []
    for piece in sorted(vocab, key=lambda piece: (-scores[vocab[piece]], vocab[piece])):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                pairs.append((left, right))
    model = models.BPE(
        vocab=vocab,
        merges=pairs,
        byte_fallback=True,
        fuse_unk=False,
        unk_token=None if unknown is None else pieces[unknown],
    )
    tokenizer = tokenizers.Tokenizer(model)

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text.replace(" ", _SPACE), add_special_tokens=False).ids
        return list(ids)

    return encode


# ---- the chat template ----


def _template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TokenizerError(f"the chat template refuses these messages: {message}")
