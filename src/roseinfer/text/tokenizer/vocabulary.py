"""The pieces of a vocabulary: the bytes that each spells, and the most characters that one stands for.

Any vocabulary is a table from id to bytes: byte-level ones (GPT-2, Llama 3, Qwen) spell each byte as one printable
character, SentencePiece ones (Llama 2, Mistral) write a space as U+2581 and odd bytes as `<0xNN>`; WordPiece marks what
goes on with a word (`##`), older BPE what ends one (`</w>`).
"""

import re
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from roseinfer.errors import ConfigError

_SPACE = " "
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})  # pre-tokenizers that drop no character


class TokenTexts:
    """The bytes of a vocabulary's tokens, in one object: 150,000 take 10 MB more."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        joined, self._starts = bytearray(), array("I", [0])
        for text in texts:
            joined += text
            joined.append(0xFF)  # a byte that is in no text but its own token's
            self._starts.append(len(joined))
        self._joined = bytes(joined)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, token_id: int) -> bytes:
        return self._joined[self._starts[token_id] : self._starts[token_id + 1] - 1]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """How many bytes each token has."""
        starts = np.array(self._starts, np.int64)
        return starts[1:] - starts[:-1] - 1

    def find(self, pattern: bytes) -> npt.NDArray[np.intp]:
        """The tokens in which a pattern is found that does not match the byte 255."""
        places = [found.start() for found in re.finditer(pattern, self._joined)]
        return np.searchsorted(np.array(self._starts, np.int64), places, side="right") - 1


class _DecoderFile(msgspec.Struct):
    """What of tokenizer.json decides how a token spells its bytes."""

    decoder: dict[str, Any] | None = None


def byte_spelling(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    """How pieces spell bytes; None where they spell words, with blanks between them that no piece has."""
    kinds = _kinds(decoder, "decoders")
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    return _sentencepiece_bytes if kinds & {"ByteFallback", "Metaspace"} else None


def spelling_of(content: bytes) -> Callable[[str], bytes]:
    """How the pieces of a tokenizer.json spell bytes. Raises ValueError, or ConfigError for an unknown decoder."""
    decoder = msgspec.json.decode(content, type=_DecoderFile).decoder
    if (spell := byte_spelling(decoder)) is not None:
        return spell
    if decoder is None:
        return _word_bytes
    for part in _parts(decoder, "decoders"):
        if part["type"] == "WordPiece":
            return partial(_word_piece_bytes, part["prefix"])
        if part["type"] == "BPEDecoder":
            return partial(_suffixed_bytes, part["suffix"])
    raise ConfigError(
        "tokenizer.json: its decoder is none of those whose tokens are bytes: ByteLevel, ByteFallback, Metaspace, "
        "WordPiece, BPEDecoder.",
        param="model.path",
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bijection: a printable Latin-1 character is its own byte, the other 68 bytes are U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, piece))
    except KeyError:  # an added token is plain text
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if found := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    return piece.replace("\u2581", " ").encode()


def _word_bytes(piece: str) -> bytes:
    """Without a decoder `tokenizers` puts a space between tokens."""
    return f" {piece}".encode()


def _word_piece_bytes(prefix: str, piece: str) -> bytes:
    """A piece with the prefix goes on with a word, any other begins one behind a space."""
    return piece.removeprefix(prefix).encode() if piece.startswith(prefix) else f" {piece}".encode()


def _suffixed_bytes(suffix: str, piece: str) -> bytes:
    """A piece with the suffix ends a word, and a space follows."""
    return (piece.removesuffix(suffix) + " " if piece.endswith(suffix) else piece).encode()


class AddedToken(msgspec.Struct):
    """A token beside those of the model, by the library's names."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class _Model(msgspec.Struct):
    type: str | None = None
    byte_fallback: bool = False


class _TokenizerFile(msgspec.Struct):
    """What of tokenizer.json decides whether text can vanish."""

    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    added_tokens: list[AddedToken] = []


def most_chars_per_token(content: bytes, texts: TokenTexts) -> int | None:
    """Most characters that one token stands for, the longest piece, to refuse long texts; None where text may vanish.

    Text vanishes in normalizers that fold or strip, in pre-tokenizers that remove, around added tokens that take the
    space beside them, and where the vocabulary has not every single byte.
    """
    try:
        file = msgspec.json.decode(content, type=_TokenizerFile)
    except ValueError:  # of an older form
        return None
    lengths = texts.lengths
    of_one_byte = {texts[token_id] for token_id in np.flatnonzero(lengths == 1).tolist()}
    is_certain = (
        file.model.type == "BPE"
        and (file.model.byte_fallback or "ByteLevel" in _kinds(file.pre_tokenizer, "pretokenizers"))
        and len(of_one_byte) == 256
        and all(_keeps(part) for part in _parts(file.normalizer, "normalizers"))
        and all(_drops_nothing(part) for part in _parts(file.pre_tokenizer, "pretokenizers"))
        and not any(token.lstrip or token.rstrip for token in file.added_tokens)
    )
    return int(lengths.max()) if is_certain else None


def _kinds(step: dict[str, Any] | None, sequence: str) -> set[str]:
    return {part["type"] for part in _parts(step, sequence)}


def _parts(step: dict[str, Any] | None, sequence: str) -> list[dict[str, Any]]:
    """The parts of a step that is a sequence, at any depth, or the step alone."""
    if step is None:
        return []
    return [leaf for part in step[sequence] for leaf in _parts(part, sequence)] if sequence in step else [step]


def _keeps(normalizer: dict[str, Any]) -> bool:
    """It only adds text, or writes spaces as SentencePiece does."""
    is_about_spaces = normalizer["type"] == "Replace" and normalizer.get("pattern") == {"String": _SPACE}
    return normalizer["type"] == "Prepend" or (is_about_spaces and normalizer.get("content") == "\u2581")


def _drops_nothing(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return kind in _KEEPING or (kind == "Split" and pre_tokenizer.get("behavior") != "Removed")
