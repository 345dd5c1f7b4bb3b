"""Calls in a text: whatever the arguments hold and wherever it is cut, each comes out whole, and no more of it."""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roseinfer.config.options import StructuredConfig
from roseinfer.text.tool_calls import (
    CALL_TAGS,
    FORMATS,
    MAX_RESCANNED_CHARS,
    ObjectScanner,
    Parts,
    ToolCallParser,
)

OPENING, CLOSING = CALL_TAGS
NAMES = ["f", "get_weather"]
# Inside strings: all that could be taken for structure, for an escape or for a tag.
TEXTS = st.text(st.sampled_from('{}[]",:\\/ \n\t\x01aé\u2028\U0001f600')) | st.sampled_from(
    [OPENING, CLOSING, '"}', '\\"}', "\\", "\\u0022", '{"name": "f"}', "null"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=5)
LAYOUTS = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "indent": st.sampled_from([None, 1, "\t"]),
        "separators": st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\r\n")]),
    }
)
CUTS = st.lists(st.integers(0, 2000), max_size=12) | st.just(range(4000))  # at some places, or at all


def cut(text: str, at: Iterable[int]) -> list[str]:
    places = sorted({0, len(text), *(place for place in at if place < len(text))})
    return [text[start:end] for start, end in pairwise(places)]


def read(
    pieces: Iterable[str],
    tool_format: str = "hermes",
    *,
    names: Sequence[str] = NAMES,
    is_parallel: bool = True,
    is_forced: bool = False,
) -> tuple[str, list[tuple[str | None, str]], int, bool]:
    """Text, names and arguments of the calls, their number, and whether the last one was cut."""
    parser = ToolCallParser(FORMATS[tool_format], names, is_parallel=is_parallel, is_forced=is_forced)
    parts = Parts()
    for piece in pieces:
        parts.extend(parser.push(piece))
    parts.extend(parser.finish())
    return parts.content, [(call.name, call.arguments) for call in parts.calls], parser.num_calls, parser.is_cut


def test_every_format_can_be_chosen() -> None:
    assert {"auto", *FORMATS} == set(get_args(get_type_hints(StructuredConfig)["tool_format"]))


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), LAYOUTS, TEXTS, CUTS)
def test_an_object_ends_where_it_ends_and_its_values_are_whole(
    value: dict[str, Any], layout: dict[str, Any], behind: str, cuts: Iterable[int]
) -> None:
    scanner, found, rest = ObjectScanner(), list[tuple[str, str]](), ""
    raw = ""
    for text in cut(f" \n{json.dumps(value, **layout)}{behind}", cuts):
        position = 0
        while position < len(text) and not scanner.is_done:
            piece, position = scanner.feed(text, position)
            assert not scanner.is_malformed
            if piece is None:
                continue
            raw += piece.text
            if piece.is_last:
                found.append((piece.key, raw))
                raw = ""
        rest += text[position:]
    assert scanner.is_done
    assert rest == behind
    assert [(key, json.loads(raw)) for key, raw in found] == list(value.items())


@given(
    st.text(st.sampled_from('ab {}"\\\n'), max_size=20),
    st.lists(st.tuples(st.sampled_from(NAMES), OBJECTS), min_size=1, max_size=3),
    LAYOUTS,
    st.sampled_from([CLOSING, f"\n{CLOSING}", ""]),
    st.text(st.sampled_from('ab {}"\\\n'), max_size=20),
    CUTS,
)
def test_any_arguments_come_out_whole_with_the_text_around_them(
    before: str, calls: list[tuple[str, dict[str, Any]]], layout: dict[str, Any], closing: str, after: str, cuts: Any
) -> None:
    written = [(name, json.dumps(arguments, **layout)) for name, arguments in calls]
    text = before + "\n".join(
        f'{OPENING}\n{{"name": "{name}", "arguments": {arguments}}}{closing}' for name, arguments in written
    )
    content = before.rstrip() + after.strip()
    assert read(cut(text + after, cuts)) == (content, written, len(written), False)


@given(OBJECTS, LAYOUTS, st.booleans(), st.text(st.sampled_from('ab {}"\\\n'), max_size=20), CUTS)
def test_a_bare_object_is_a_call_with_any_arguments(
    arguments: dict[str, Any], layout: dict[str, Any], is_name_first: bool, after: str, cuts: Iterable[int]
) -> None:
    raw = json.dumps(arguments, **layout)
    keys = ['"name": "f"', f'"parameters": {raw}']
    text = " {" + ", ".join(keys if is_name_first else keys[::-1]) + "}"
    assert read(cut(text + after, cuts), "llama3_json") == ("", [("f", raw)], 1, False)


FRAGMENTS = st.sampled_from(
    [
        *(OPENING, CLOSING, "<tool_", "</tool", "<", ">", "{", "}", "[", "]", '"', ":", ",", "\\", " ", "\n", "a", "1"),
        *('"name"', '"name": "f"', '"name": "nobody"', '"arguments"', '"arguments": {', '"parameters": {"a": 1}', "{}"),
        *('{"name": "f", "arguments": {"a": "}"}}', '{"name": "nobody", "arguments": {}}', "x" * 300, '"\\ud800"'),
    ]
)


@given(
    st.lists(FRAGMENTS, max_size=16).map("".join),
    CUTS,
    st.sampled_from(["hermes", "llama3_json"]),
    st.booleans(),
    st.booleans(),
)
@example(f"{OPENING}{'x' * 600} {OPENING}" + '{"name": "f"}', [], "hermes", True, False)
@example(f'{OPENING}{{"name": "nobody"}} {"x" * 600} {OPENING}{{"name": "f"}}', [], "hermes", True, False)
@example(f'{OPENING}{{"arguments": "{"x" * 600}{OPENING}{{"name": "f"}}', [], "hermes", True, False)
def test_what_comes_out_does_not_depend_on_how_the_text_was_cut(
    text: str, cuts: Iterable[int], tool_format: str, is_parallel: bool, is_forced: bool
) -> None:
    by_character = read(text, tool_format, is_parallel=is_parallel, is_forced=is_forced)
    assert read(cut(text, cuts), tool_format, is_parallel=is_parallel, is_forced=is_forced) == by_character
    assert read([text], tool_format, is_parallel=is_parallel, is_forced=is_forced) == by_character


@pytest.mark.parametrize("num_chars", [10, MAX_RESCANNED_CHARS + 10])
@pytest.mark.parametrize("start", ['{"name": "nobody", "a": ', '{"arguments": ', '{"a": ', '{"a": 1] ', "[", ""])
def test_what_is_no_call_is_text_once_and_a_call_behind_it_is_found(start: str, num_chars: int) -> None:
    text = f'{OPENING}{start}"{"x" * num_chars}", "name": "nobody"}}'
    assert read([text + " bye"]) == (f"{text} bye", [], 0, False)
    assert read([f'{text} {OPENING}{{"name": "f"}}']) == (text, [("f", "{}")], 1, False)
