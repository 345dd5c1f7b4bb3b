"""What a program may give as prompts, and what is none."""

from typing import Any

import pytest

from roseinfer.errors import InvalidRequest
from roseinfer.prompts import as_prompts, as_token_ids


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


@pytest.mark.parametrize("given", [5, None, 1.5, b"text"])
def test_what_holds_no_prompts_is_told(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected a text") as caught:
        as_prompts(given)
    assert caught.value.param == "prompts"
    with pytest.raises(InvalidRequest, match="expected a text or a list of token ids; got") as caught:
        as_token_ids(given, "prompts[1]")
    assert caught.value.param == "prompts[1]"
