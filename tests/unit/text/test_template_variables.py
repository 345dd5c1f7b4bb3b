"""Variables of a chat template that a client sets: within bounds, read by the template, and none of the server's."""

import json
from typing import Any

import pytest

from roseinfer.errors import InvalidRequest
from roseinfer.server.openai.parsing import parse_body
from roseinfer.server.openai.schema import ChatBody, ModelBody
from roseinfer.server.openai.tokenize import TokenizeBody
from roseinfer.text.template_variables import MAX_BYTES, MAX_LEVELS, MAX_VARIABLES
from roseinfer.text.templates import SWITCHES, ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]
QWEN3 = "{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}"


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, variables=variables)


def refused(source: str, **variables: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        render(source, **variables)
    return caught.value


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def parsed(variables: object, body_type: type[ModelBody] = ChatBody) -> dict[str, Any]:
    body = parse_body(json.dumps({"messages": MESSAGES, "chat_template_kwargs": variables}).encode(), body_type)
    assert isinstance(body, ChatBody | TokenizeBody)
    return body.chat_template_kwargs


def test_a_variable_reaches_the_template() -> None:
    assert render(QWEN3) == render(QWEN3, enable_thinking=True) == "Hi"
    assert render(QWEN3, enable_thinking=False) == "Hi<think></think>"
    assert ChatTemplate(QWEN3, {}).render_closed(MESSAGES, {"enable_thinking": False}) == "Hi<think></think>"


@pytest.mark.parametrize(
    "source",
    [
        "{% set budget = budget | default(5) %}{{ budget }}",
        "{% if not budget is defined %}{% set budget = 5 %}{% endif %}{{ budget }}",
        "{% macro told() %}{{ budget }}{% endmacro %}{{ told() }}",
        "{% for m in messages %}{% generation %}{{ budget }}{% endgeneration %}{% endfor %}",
        "{% set n = namespace(budget=budget) %}{{ n.budget }}",
    ],
)
def test_wherever_a_template_reads_it(source: str) -> None:
    assert render(source, budget=7) == "7"


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "raise_exception", "range", "lipsum"],
)
def test_what_the_server_gives_is_not_the_clients(name: str) -> None:
    error = refused("{{ messages }}{{ tools }}{{ documents }}{{ bos_token }}", **{name: "mine"})
    assert error.param == f"chat_template_kwargs.{name}"
    assert "The server gives the template this variable itself" in error.message


def test_what_a_template_does_not_read_is_told_with_what_it_does() -> None:
    error = refused(QWEN3 + "{{ budget }}", enable_thinkng=False)
    assert error.param == "chat_template_kwargs.enable_thinkng"
    assert error.message.endswith("no such variable; those to be set: `budget`, `enable_thinking`.")
    assert refused("{{ messages }}", self=1).message.endswith("those to be set: none.")


def test_the_switches_that_clients_send_to_every_model_are_taken_by_every_model() -> None:
    assert sorted(SWITCHES) == ["enable_thinking", "thinking"]
    for name in SWITCHES:
        for value in (True, False, None):
            assert render("{{ messages[0].content }}", **{name: value}) == "Hi"


def test_a_value_that_the_template_cannot_use_is_told_beside_the_messages() -> None:
    error = refused("{{ budget + 1 }}", budget="a")
    assert error.param == "messages"
    assert "refused the messages with `chat_template_kwargs`" in error.message


def test_a_value_stays_in_the_sandbox() -> None:
    assert "unsafe" in refused("{{ budget.__class__.__mro__ }}", budget="a").message
    assert "unsafe" in refused("{{ budget.append(1) }}", budget=[]).message


@pytest.mark.parametrize("body_type", [ChatBody, TokenizeBody])
def test_what_is_within_the_bounds_is_taken_as_it_stands(body_type: type[ModelBody]) -> None:
    variables = {"_a1": None, "B": [None, {"c d": 1.5}], "x" * 64: "\u00e9", "deep": nested(MAX_LEVELS)}
    assert parsed(variables, body_type) == variables
    assert parsed(None, body_type) == {}
    many = {f"a{i}": i for i in range(MAX_VARIABLES)}
    assert parsed(many, body_type) == many
    assert parsed({"a": "x" * (MAX_BYTES - len('{"a":""}'))}, body_type)


@pytest.mark.parametrize("body_type", [ChatBody, TokenizeBody])
@pytest.mark.parametrize(
    ("variables", "param", "told"),
    [
        (1, "chat_template_kwargs", "Expected `object`, got `int`"),
        ({"a b": 1}, "chat_template_kwargs", "as a key, 'a b'"),
        ({"é": 1}, "chat_template_kwargs", "as a key, 'é'"),
        ({"": 1}, "chat_template_kwargs", "as a key, ''"),
        ({"a\n": 1}, "chat_template_kwargs", "as a key, 'a\\n'"),
        ({"x" * 65: 1}, "chat_template_kwargs", "as a key, 'xxx"),
        ({f"a{i}": i for i in range(MAX_VARIABLES + 1)}, "chat_template_kwargs", f"length <= {MAX_VARIABLES}"),
        ({"a": 1, "b": nested(MAX_LEVELS + 1)}, "chat_template_kwargs.b", f"deeper than {MAX_LEVELS} levels"),
        ({"b": nested(900)}, "chat_template_kwargs.b", f"deeper than {MAX_LEVELS} levels"),
        ({"a": "x" * MAX_BYTES}, "chat_template_kwargs", f"at most {MAX_BYTES} are taken"),
        ({"a": list(range(9000))}, "chat_template_kwargs", f"at most {MAX_BYTES} are taken"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_is_named(variables: object, param: str, told: str, body_type: type[ModelBody]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(variables, body_type)
    assert caught.value.param == param
    assert told in caught.value.message


def test_whatever_the_depth_it_is_an_error_that_names_it() -> None:
    """Also where it is nearly too deep to be decoded."""
    before, after = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": ', b"}}"
    for levels in range(800, 1000):
        with pytest.raises(InvalidRequest, match=r"too deeply|deeper than"):
            parse_body(before + b"[" * levels + b"]" * levels + after, ChatBody)
