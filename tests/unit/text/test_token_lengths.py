"""A text is refused unread only where no vocabulary could make it fit."""

import asyncio
import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from roseinfer.errors import PromptName, PromptTooLong
from roseinfer.text.token_lengths import most_chars_per_token
from roseinfer.text.tokenizer import Tokenizer
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
    assert most_chars_per_token(content, [bytes([byte]) for byte in range(255)]) is None
    assert most_chars_per_token(b"{}", []) is None


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
    assert most_chars_per_token(json.dumps(file).encode(), [b"abc", *(bytes([byte]) for byte in range(256))]) == 3


def test_a_text_that_is_refused_unread_is_told_in_characters() -> None:
    tokenizer = Tokenizer.from_bytes(byte_tokenizer().to_str().encode())
    most = 4 * len(HUGE_TEXT)
    tokenizer.check_length(["x" * most], 4, [PromptName("prompt")])
    with pytest.raises(PromptTooLong) as caught:
        tokenizer.check_length(["", "x" * (most + 1)], 4, [PromptName("prompt[0]"), PromptName("prompt[1]")])
    assert caught.value.param == "prompt[1]"
    assert caught.value.message == (
        f"This model's context is 4 tokens of at most {len(HUGE_TEXT)} characters each; "
        f"the {most + 1} characters of `prompt[1]` do not fit."
    )


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(1, 12))
def test_no_text_that_fits_is_refused(text: str, max_model_len: int) -> None:
    inner = byte_tokenizer()
    inner.add_tokens(["     ", "\u4e2d\u6587", "<|x|>"])
    tokenizer = Tokenizer.from_bytes(inner.to_str().encode())
    tokenizer._most_chars_per_token = 6  # without the huge token, whose text no example holds
    [token_ids] = asyncio.run(tokenizer.encode([text], add_special_tokens=False))
    try:
        tokenizer.check_length([text], max_model_len, [PromptName("prompt")])
    except PromptTooLong:
        assert len(token_ids) > max_model_len
