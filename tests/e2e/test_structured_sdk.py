"""Structured output and tools with the `openai` SDK's own parsers, against a real process with the embedded model."""

import enum
import json
import os
from collections.abc import Iterator

import openai
import pydantic
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.server import Server

pytestmark = pytest.mark.e2e
MODEL = "roseinfer-demo"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What does os.path.join do?"}]


class Kind(enum.StrEnum):
    FUNCTION = "function"
    MODULE = "module"


class Answer(pydantic.BaseModel):
    kind: Kind
    arity: int = pydantic.Field(ge=0, le=9)
    flags: list[bool] = pydantic.Field(max_length=3)


class LookUp(pydantic.BaseModel):
    """Looks a name up."""

    kind: Kind
    line: int = pydantic.Field(ge=0, le=9999)


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_pydantic_model_comes_back_whatever_the_seed(client: OpenAI, temperature: float) -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Answer, max_tokens=80, temperature=temperature, n=4, seed=5
    )
    parsed = [choice.message.parsed for choice in reply.choices]
    assert all(isinstance(answer, Answer) for answer in parsed)
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}


def test_streamed_is_whole_with_logprobs_and_a_stop_string(client: OpenAI) -> None:
    arguments = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "seed": 3, "temperature": 1.0}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": Answer.model_json_schema()}}
    for more in ({}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["flags"]}, {"extra_body": {"min_tokens": 20}}):
        asked = {**arguments, **more, "response_format": schema}
        whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
        chunks = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
        if "stop" in more:
            assert text.endswith('"')
        else:
            Answer.model_validate_json(text)


def test_a_required_call_is_parsed(client: OpenAI) -> None:
    tools = [openai.pydantic_function_tool(LookUp, name="look_up")]
    for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
        reply = client.chat.completions.parse(
            model=MODEL,
            messages=MESSAGES,
            tools=tools,
            tool_choice=choice,  # type: ignore[arg-type]
            parallel_tool_calls=False,
            max_tokens=120,
            temperature=1.0,
            seed=1,
        )
        assert reply.choices[0].finish_reason == "tool_calls"
        assert reply.choices[0].message.content is None
        [call] = reply.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, LookUp)


def test_a_streamed_call_is_the_whole_one_and_goes_back_with_its_result(client: OpenAI) -> None:
    tools = [openai.pydantic_function_tool(LookUp, name="look_up")]
    with client.chat.completions.stream(
        model=MODEL,
        messages=MESSAGES,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=120,
        temperature=0,
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message
    [call] = streamed.tool_calls or []
    assert isinstance(call.function.parsed_arguments, LookUp)
    again: list[ChatCompletionMessageParam] = [
        *MESSAGES,
        streamed,  # type: ignore[list-item]  # the SDK writes a message that it gave
        {"role": "tool", "tool_call_id": call.id, "content": "It joins paths."},
    ]
    reply = client.chat.completions.create(model=MODEL, messages=again, tools=tools, max_tokens=8, temperature=0)
    assert reply.choices[0].finish_reason in {"stop", "length"}


def test_vllms_forms_on_completions(client: OpenAI) -> None:
    def ask(**form: object) -> str:
        reply = client.completions.create(
            model=MODEL, prompt="Say", max_tokens=30, seed=2, extra_body={"structured_outputs": form}
        )
        return reply.choices[0].text

    assert ask(choice=["yes", "no"]) in {"yes", "no"}
    assert ask(regex="[0-9]{3}-[a-f]{2}")[3] == "-"
    assert json.loads(ask(json={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}))
    assert ask(grammar='start: "ha"{2,4} "!"').strip("ha") == "!"


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(["},
        {"json": {"type": "nonsense"}},
        {"json": {"$ref": "#"}},
        {"grammar": "start: start"},
        {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
        {"json": {"properties": {f"p{i}": {"type": "string", "pattern": f"^x{{{i}}}$"} for i in range(3400)}}},
    ],
)
def test_a_hostile_grammar_is_a_400_and_the_engine_lives(
    server: Server, client: OpenAI, form: dict[str, object]
) -> None:
    engine = server.engine_pid()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", extra_body={"structured_outputs": form})
    assert str(caught.value.param).startswith("structured_outputs.")
    os.kill(engine, 0)
    reply = client.completions.create(
        model=MODEL, prompt="x", max_tokens=3, extra_body={"structured_outputs": {"regex": "[ab]{3}"}}
    )
    assert len(reply.choices[0].text) == 3
