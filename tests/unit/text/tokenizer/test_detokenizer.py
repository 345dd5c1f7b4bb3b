"""Text does not depend on how its tokens were grouped, and nothing valid is held back."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.text.tokenizer.detokenizer import Detokenizer
from roseinfer.text.tokenizer.tokenizer import Tokenizer
from tests.unit.server.harness import BOS, EOS, TOOL, byte_tokenizer, ids

INNER = byte_tokenizer()
TOKENIZER = Tokenizer.from_bytes(INNER.to_str().encode())

reproducible = settings(derandomize=True, deadline=None, max_examples=200)
texts = st.text(max_size=30) | st.text(alphabet="aé世👩‍👩‍👧🏽\u0301\u200d\ufffd\0\n", max_size=12)
any_ids = st.lists(st.integers(0, 260), max_size=40)  # any bytes, valid or not, special tokens, ids without a token


def pieces_of(groups: Sequence[Sequence[int]], stop: Sequence[str] = ()) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER.text_bytes, stop)
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


def split(token_ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    bounds = [0, *sorted(cuts), len(token_ids)]
    return [token_ids[a:b] for a, b in pairwise(bounds)]


def every_split(token_ids: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    places = range(1, len(token_ids))
    for count in range(len(token_ids)):
        for cuts in combinations(places, count):
            yield split(token_ids, cuts)


@pytest.mark.parametrize("text", ["abc", "é世", "👋🏽", "a\u0301é", "\ufffd!", "x世y👋", "\0\n\t"])
def test_every_split_of_every_string(text: str) -> None:
    """All groupings of its bytes: 2 to the power of their number less one."""
    for groups in every_split(ids(text)):
        assert "".join(pieces_of(groups)) == text


@reproducible
@given(text=texts, data=st.data())
def test_any_grouping_of_any_text(text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(ids(text))), max_size=10))
    assert "".join(pieces_of(split(ids(text), cuts))) == text


@reproducible
@given(token_ids=any_ids, data=st.data())
def test_any_grouping_of_any_ids_is_the_full_decode(token_ids: list[int], data: st.DataObject) -> None:
    """Also where the bytes are no valid text: the library's own decoder puts its U+FFFD in the same places."""
    cuts = data.draw(st.lists(st.integers(0, len(token_ids)), max_size=10))
    assert "".join(pieces_of(split(token_ids, cuts))) == INNER.decode(token_ids, skip_special_tokens=True)


@reproducible
@given(text=texts)
def test_a_character_is_out_with_its_last_byte(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER.text_bytes)
    for character in text:
        *most, last = ids(character)
        assert detokenizer.push(most) == ""
        assert detokenizer.push([last]) == character
    assert detokenizer.flush() == ""


def test_bytes_that_never_become_text_do_not_pile_up() -> None:
    """The trap of decoders that wait for the last character to be valid: here at most three bytes wait."""
    detokenizer = Detokenizer(TOKENIZER.text_bytes)
    for num_pushed in range(1, 1000):
        detokenizer.push([0xE4])
        assert detokenizer.num_chars == num_pushed - 1
    assert detokenizer.push(ids("a")) == "\ufffda"


def test_special_tokens_are_silent_and_do_not_end_a_character() -> None:
    first, second = ids("é")
    assert "".join(pieces_of([[BOS, first], [EOS], [second, TOOL]])) == "é<tool call>"


def cut_at_first_completed(text: str, stop: Sequence[str]) -> str:
    """The meaning of stop strings, by brute force: look at ever longer beginnings."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


stops = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3)


@reproducible
@given(text=st.text(alphabet="abcé", max_size=24), stop=stops, data=st.data())
def test_stop_strings_in_any_grouping(text: str, stop: list[str], data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(ids(text))), max_size=12))
    assert "".join(pieces_of(split(ids(text), cuts), stop)) == cut_at_first_completed(text, stop)


@reproducible
@given(text=st.text(alphabet="abé", max_size=24), stop=stops)
def test_only_what_could_begin_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(TOKENIZER.text_bytes, stop)
    told = ""
    for character in text:
        told += detokenizer.push(ids(character))
        if detokenizer.stopped:
            break
        held = text[len(told) : detokenizer.num_chars]
        assert not held or any(s.startswith(held) for s in stop)


def test_after_a_stop_string_there_is_nothing() -> None:
    detokenizer = Detokenizer(TOKENIZER.text_bytes, ["b"])
    assert detokenizer.push(ids("abc")) == "a"
    assert detokenizer.stopped
    assert detokenizer.stop_string == "b"
    assert detokenizer.push(ids("abc")) == detokenizer.flush() == ""


def test_a_stop_string_can_be_completed_by_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER.text_bytes, ["\ufffd"])
    assert detokenizer.push([*ids("a"), 0xE4]) == "a"
    assert detokenizer.flush() == ""
    assert detokenizer.stopped
