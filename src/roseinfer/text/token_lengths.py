"""Turns a `tokenizer.json` into the most characters that one token can stand for, where that is certain.

A text of more than so many for each token of the context cannot fit, and need not be encoded to know it.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

_SPACE = " "
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})  # pre-tokenizers that drop no character


class _Model(msgspec.Struct):
    type: str | None = None
    byte_fallback: bool = False


class _AddedToken(msgspec.Struct):
    lstrip: bool = False
    rstrip: bool = False


class _TokenizerFile(msgspec.Struct):
    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    added_tokens: list[_AddedToken] = []


def most_chars_per_token(content: bytes, pieces: Iterable[bytes]) -> int | None:
    """The longest of the vocabulary's pieces, each of which is spelled as bytes; None where text may vanish.

    Text vanishes in normalizers that fold or strip, in pre-tokenizers that remove, around added tokens that take the
    space beside them, and where a character can become unknown: where the vocabulary has not every single byte.
    """
    try:
        file = msgspec.json.decode(content, type=_TokenizerFile)
    except ValueError:  # of an older form
        return None
    known = set(pieces)
    is_certain = (
        file.model.type == "BPE"
        and (file.model.byte_fallback or "ByteLevel" in _kinds(file.pre_tokenizer))
        and all(bytes([byte]) in known for byte in range(256))
        and all(_keeps(part) for part in _parts(file.normalizer, "normalizers"))
        and all(_drops_nothing(part) for part in _parts(file.pre_tokenizer, "pretokenizers"))
        and not any(token.lstrip or token.rstrip for token in file.added_tokens)
    )
    return max(map(len, known)) if is_certain else None


def _parts(step: dict[str, Any] | None, sequence: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [leaf for part in step[sequence] for leaf in _parts(part, sequence)] if sequence in step else [step]


def _kinds(pre_tokenizer: dict[str, Any] | None) -> set[str]:
    return {part["type"] for part in _parts(pre_tokenizer, "pretokenizers")}


def _keeps(normalizer: dict[str, Any]) -> bool:
    """It adds, or writes spaces otherwise, as SentencePiece vocabularies have it."""
    is_about_spaces = normalizer["type"] == "Replace" and normalizer.get("pattern") == {"String": _SPACE}
    return normalizer["type"] == "Prepend" or (is_about_spaces and normalizer.get("content") == "\u2581")


def _drops_nothing(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return kind in _KEEPING or (kind == "Split" and pre_tokenizer.get("behavior") != "Removed")
