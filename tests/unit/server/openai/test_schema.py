"""What a body may hold, and how an error names what it may not. The many single cases are in test_http_errors.py."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.errors import InvalidRequest
from roseinfer.messages import SamplingParams
from roseinfer.server.anthropic.schema import MessagesBody
from roseinfer.server.api.errors import error_body
from roseinfer.server.api.fields import SamplingBody
from roseinfer.server.api.parsing import parse_body
from roseinfer.server.openai.chat_schema import ChatBody
from roseinfer.server.openai.responses_schema import ResponseBody
from roseinfer.server.openai.schema import CompletionBody, GenerationBody

MESSAGES = [{"role": "user", "content": "a"}]
BODIES: list[tuple[type[SamplingBody], dict[str, Any]]] = [
    (CompletionBody, {"prompt": "a"}),
    (ChatBody, {"messages": MESSAGES}),
    (ResponseBody, {"input": "a"}),
    (MessagesBody, {"messages": MESSAGES, "max_tokens": 5}),
]


@pytest.mark.parametrize(("body_type", "least"), BODIES)
def test_null_is_the_default(body_type: type[SamplingBody], least: dict[str, Any]) -> None:
    nulls = dict.fromkeys((*body_type.__struct_fields__, *body_type.unserved))
    assert parse_body(json.dumps(nulls | least).encode(), body_type) == parse_body(
        json.dumps(least).encode(), body_type
    )


@pytest.mark.parametrize(("body_type", "least"), BODIES)
def test_what_is_not_served_is_accepted_only_where_it_has_no_effect(
    body_type: type[SamplingBody], least: dict[str, Any]
) -> None:
    for name, field in body_type.unserved.items():
        other = {"something": "else"}
        for value in (*field.neutral, None, *([other] if field.is_ignored else [])):
            assert parse_body(json.dumps(least | {name: value}).encode(), body_type) == parse_body(
                json.dumps(least).encode(), body_type
            )
        if not field.is_ignored:
            with pytest.raises(InvalidRequest, match=f"`{name}` is not supported") as caught:
                parse_body(json.dumps(least | {name: other}).encode(), body_type)
            assert caught.value.param == name
            assert field.instead in caught.value.message


@pytest.mark.parametrize(("body_type", "least"), BODIES)
def test_a_field_of_any_body_is_either_served_or_not(body_type: type[SamplingBody], least: dict[str, Any]) -> None:
    """Where unknown fields are ignored, one that another endpoint serves must not be."""
    assert body_type.unserved.keys().isdisjoint(body_type.__struct_fields__)
    of_any = {name for other, _ in BODIES for name in other.__struct_fields__}
    assert of_any <= {*body_type.unserved, *body_type.__struct_fields__}


@pytest.mark.parametrize("body_type", [CompletionBody, ChatBody])
def test_what_both_edges_bound_they_bound_alike(body_type: type[GenerationBody]) -> None:
    """A number in a body may be what `SamplingParams` may hold; a seed, -1 and 0 tokens mean something beyond."""
    of_params = msgspec.json.schema(SamplingParams)["$defs"]["SamplingParams"]["properties"]
    of_body = msgspec.json.schema(body_type)["$defs"][body_type.__name__]["properties"]
    shared = of_params.keys() & of_body.keys() - {"seed"}
    assert {"temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "stop_token_ids"} <= shared
    for name in shared:
        of_field = of_body[name]
        described = {"description": of_field["description"], "default": of_field.get("default")}
        bounds = of_field if "anyOf" not in of_field else of_field["anyOf"][0]
        if name in {"max_tokens", "top_k"}:
            assert bounds["minimum"] == -1
            bounds = {key: value for key, value in bounds.items() if key != "not"}
            bounds["minimum"] = of_params[name]["minimum"]
        assert {**of_params[name], **described} == {**bounds, **described}, name


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
json_like = st.text(alphabet='{}[]":,0123456789eE.-+truefalsn\\u ', max_size=60)
names = st.sampled_from([*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, *ChatBody.unserved, "other"])


@settings(derandomize=True, deadline=None, max_examples=400)
@given(fields=st.dictionaries(names, values, max_size=6))
def test_any_json_is_a_body_or_an_invalid_request(fields: dict[str, Any]) -> None:
    for body_type, least in BODIES:
        outcome: SamplingBody | InvalidRequest
        try:
            outcome = parse_body(json.dumps(least | fields).encode(), body_type)
        except InvalidRequest as error:
            outcome = error
        assert isinstance(outcome, body_type) or (isinstance(outcome, InvalidRequest) and outcome.param)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(raw=st.binary(max_size=60) | json_like.map(str.encode))
def test_any_bytes_are_an_invalid_request(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(raw, CompletionBody)


def test_an_error_with_bytes_that_are_no_text_is_still_json() -> None:
    body = error_body(InvalidRequest("got \udcff", param="\ud800"))
    assert msgspec.json.decode(body)["error"]["message"] == "got \\udcff"
