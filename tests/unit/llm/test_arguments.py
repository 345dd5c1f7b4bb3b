"""What a program may give as prompts, stop strings and settings, and what is none."""

from typing import Any

import pytest

from roseinfer.errors import InvalidRequest
from roseinfer.llm.arguments import as_prompt, as_prompts, as_stops


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("text", ["text"]),
        ([5, 6], [[5, 6]]),
        ((5, 6), [[5, 6]]),
        (["a", [5, 6]], ["a", [5, 6]]),
        ([[5, 6]], [[5, 6]]),
        ([], []),
    ],
)
def test_one_prompt_is_a_list_of_one(given: Any, prompts: Any) -> None:
    assert as_prompts(given) == prompts


@pytest.mark.parametrize("given", [5, None, 1.5, b"text", bytearray(b"text"), {"text": 1}, {5, 6}])
def test_an_argument_that_holds_no_prompts_is_named(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected a text") as caught:
        as_prompts(given)
    assert caught.value.param == "prompts"
    with pytest.raises(InvalidRequest, match="expected a text or a list of token ids; got") as caught:
        as_prompt(given, "prompts[1]")
    assert caught.value.param == "prompts[1]"


def test_a_prompt_is_a_text_or_a_list_of_its_own() -> None:
    given = [5, 6]
    made = as_prompt(given, "prompt")
    assert made == given
    assert made is not given, "who gave it may change it"
    assert as_prompt("text", "prompt") == "text"
    with pytest.raises(InvalidRequest, match="`prompts\\[3\\]` holds a lone surrogate") as caught:
        as_prompt("a\ud800", "prompts[3]")
    assert caught.value.param == "prompts[3]"


@pytest.mark.parametrize(("given", "stops"), [("a", ("a",)), (["a", "b"], ("a", "b")), ((), ()), ([], ())])
def test_stop_is_a_text_or_several(given: Any, stops: tuple[str, ...]) -> None:
    assert as_stops(given) == stops


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("", "stop"),
        ("\ud800", "stop"),
        (5, "stop"),
        (None, "stop"),
        (b"a", "stop"),
        ({"a": 1}, "stop"),
        (["a", ""], "stop[1]"),
        (["a", 5], "stop[1]"),
        (["a\udfff"], "stop[0]"),
    ],
)
def test_what_is_no_stop_string_is_named_with_its_place(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        as_stops(given)
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message
