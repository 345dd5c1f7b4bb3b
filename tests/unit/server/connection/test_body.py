"""Bodies of more values than any request needs are refused before they are decoded, and no others."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.errors import InvalidRequest, PromptTooLong, RequestError
from roseinfer.server.connection.body import FEW_VALUES, _num_values, check_num_values, check_num_values_within

CONTEXT = 100
MANY = FEW_VALUES + 2 * CONTEXT + 1


def refusal(body: Any) -> RequestError | None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        check_num_values(bytearray(raw), CONTEXT)
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tokens": [1] * MANY}, "tokens"),
        ({"prompt": [[1] * (MANY // 8)] * 9}, "prompt"),
        ({"prompt": "a", "stop": ["a"] * MANY}, "stop"),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(MANY)}}, "logit_bias"),
        ({"prompt": "a", "unknown": [[]] * MANY}, "unknown"),
        ({"messages": [{"role": "user", "content": "a, [{"}] * (MANY // 2)}, "messages"),
        (b"[" * MANY, None),
        (b'{"prompt": ' + b"[" * MANY, None),
    ],
)
def test_too_many_values_are_refused_with_their_field(body: Any, param: str | None) -> None:
    error = refusal(body)
    assert isinstance(error, InvalidRequest)
    assert error.param == param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([1] * MANY, "The body must be a JSON object."),
        (b'{"tokens": [1' + b",1" * MANY, "The body is not valid JSON, or nested too deeply."),
    ],
    ids=["an array", "cut short"],
)
def test_what_is_no_object_is_not_what_is_no_json(body: Any, message: str) -> None:
    error = refusal(body)
    assert isinstance(error, InvalidRequest)
    assert error.message == message


def test_one_prompt_of_too_many_token_ids_is_too_long_for_the_context() -> None:
    error = refusal(b'{"prompt": [ \n 1' + b",1" * MANY + b"]}")
    assert isinstance(error, PromptTooLong)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    "text",
    ["," * 500_000, "[{" * 300_000, '","' * 200_000, '\\",' * 200_000, "\\," * 300_000, '\\\\",[' * 100_000],
)
def test_what_stands_in_a_text_is_no_value(text: str) -> None:
    assert refusal({"prompt": text, "messages": [{"content": text}]}) is None


def test_the_longest_prompts_that_can_be_served_pass() -> None:
    assert refusal({"prompt": [[1] * 1000] * 64}) is None
    assert refusal({"prompt": [1] * (2 * CONTEXT), "stop": ["a"] * 16}) is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(max_size=8)
    | st.sampled_from(['"', "\\", '\\"', ",", "[{"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=20,
)


def num_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(num_values, inner))


@given(JSON, st.sampled_from([False, True]))
def test_the_count_is_of_separators_outside_texts(value: Any, is_ascii: bool) -> None:
    """Each value but the first follows one, unless it is the first in an object or a list, which is one itself."""
    raw = json.dumps(value, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    assert _num_values(raw, 1000) == separators(value)
    assert num_values(value) - 1 <= separators(value) <= 2 * num_values(value)


def separators(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return max(1, len(value)) + sum(map(separators, inner))


def test_the_sentence_has_the_limit_as_it_is() -> None:
    error = refusal({"tokens": [1] * MANY})
    assert error is not None
    assert str(FEW_VALUES + 2 * CONTEXT) in error.message
    assert refusal({"tokens": [1] * (FEW_VALUES + 2 * CONTEXT - 1)}) is None


def refusal_within(**texts: str) -> InvalidRequest | None:
    try:
        check_num_values_within(texts.items(), CONTEXT)
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.parametrize(
    ("texts", "param"),
    [
        ({"a": json.dumps([[]] * MANY)}, "a"),
        ({"a": "{}", "b": "[" * MANY}, "b"),  # no JSON; decoding it would go as far as it can
        ({"a": json.dumps([1] * (MANY // 2)), "b": json.dumps([10] * (MANY // 2 + 1))}, "b"),
        ({"a": json.dumps({str(i): i for i in range(MANY)}), "b": "\ud800"}, "a"),
    ],
)
def test_json_in_the_texts_of_a_body_is_counted_together(texts: dict[str, str], param: str) -> None:
    error = refusal_within(**texts)
    assert error is not None
    assert error.param == param
    assert f"`{param}` " in error.message
    assert str(FEW_VALUES + 2 * CONTEXT) in error.message


@pytest.mark.parametrize("text", ["," * 500_000, "[{" * 300_000, '\\",' * 200_000])
def test_what_stands_in_the_texts_of_such_json_is_no_value(text: str) -> None:
    assert refusal_within(a=json.dumps({"a": text}), b=json.dumps([1] * (MANY - 3))) is None
