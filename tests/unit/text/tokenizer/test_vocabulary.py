"""The texts of tokens, and the most characters that one stands for."""

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from roseinfer.text.tokenizer.tokenizer import Tokenizer
from roseinfer.text.tokenizer.vocabulary import TokenTexts, most_chars_per_token
from tests.unit.server.harness import HUGE_TEXT, byte_tokenizer


def bound(inner: tokenizers.Tokenizer) -> int | None:
    return Tokenizer.from_bytes(inner.to_str().encode())._most_chars_per_token


def test_it_is_the_longest_piece() -> None:
    assert bound(byte_tokenizer()) == len(HUGE_TEXT)


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": normalizers.NFC()},
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace("  ", "_")])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {
            "pre_tokenizer": pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
            )
        },
    ],
)
def test_where_text_may_vanish_there_is_none(changed: dict[str, Any]) -> None:
    inner = byte_tokenizer()
    for name, value in changed.items():
        setattr(inner, name, value)
    assert bound(inner) is None


def test_a_token_that_swallows_space_leaves_none() -> None:
    inner = byte_tokenizer()
    inner.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert bound(inner) is None


def test_a_missing_byte_leaves_none() -> None:
    content = byte_tokenizer().to_str().encode()
    assert most_chars_per_token(content, TokenTexts(bytes([byte]) for byte in range(255))) is None
    assert most_chars_per_token(b"{}", TokenTexts([])) is None


def test_texts_of_tokens_are_found_by_their_ids() -> None:
    texts = [b"a", b"", b"\xff", b"bc", b""]
    together = TokenTexts(texts)
    assert [together[token_id] for token_id in range(len(together))] == texts
    assert together.lengths.tolist() == [1, 0, 1, 2, 0]
    assert together.find(b"c|a").tolist() == [0, 3]


def test_spaces_written_otherwise_are_still_there() -> None:
    file = json.loads(byte_tokenizer().to_str())
    file["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    }
    file["pre_tokenizer"] = None
    file["model"]["byte_fallback"] = True
    texts = TokenTexts([b"abc", *(bytes([byte]) for byte in range(256))])
    assert most_chars_per_token(json.dumps(file).encode(), texts) == 3
