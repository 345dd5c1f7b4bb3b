"""POST /v1/responses over a scripted engine: its items, their events, and what of a conversation the template gets."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from roseinfer.errors import EngineFailed
from roseinfer.messages import Request, Thought, TokenOutput
from roseinfer.records import FinishReason
from roseinfer.text.answers.answer import AnswerParser
from tests.integration.test_http_tools import Checks
from tests.unit.server.harness import (
    Answer,
    Reply,
    ScriptedEngine,
    engine_info,
    ids,
    logprobs_of,
    says,
    serving,
    text_model,
    times,
)

TEMPLATE = (
    "{{ tools | length if tools else '' }}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or () %}[{{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.id }}]"
    "{% endfor %}"
    "{{ m.tool_call_id or '' }}{% endfor %}<assistant>"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WHOLE = TypeAdapter(Response)


def parsed(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, each of which the `openai` package knows."""
    *frames, rest = answer.body.decode().replace(": keep-alive\n\n", "").split("\n\n")
    assert rest == ""
    events: list[dict[str, Any]] = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        assert type(EVENTS.validate_python(event)).model_fields["type"].annotation is not str
        if "response" in event:
            WHOLE.validate_python(event["response"])
        events.append(event)
    return events


async def ask(reply: Reply | str, **body: Any) -> tuple[Answer, Request]:
    engine = ScriptedEngine(
        says(reply, FinishReason.STOP) if isinstance(reply, str) else reply, engine_info(max_model_len=2000)
    )
    async with serving(engine, text=text_model(template=TEMPLATE)) as server:
        server.service.grammar_checker = Checks()
        answer = await server.request("POST", "/v1/responses", json={"input": "Hi"} | body)
        assert answer.status == 200, answer.body
        [request] = engine.requests
        return answer, request


async def prompt_of(**body: Any) -> str:
    _, request = await ask("x", **body)
    return bytes(request.prompt_token_ids).decode()


async def refusal(**body: Any) -> dict[str, Any]:
    async with serving(ScriptedEngine(says("x")), text=text_model(template=TEMPLATE)) as server:
        server.service.grammar_checker = Checks()
        answer = await server.request("POST", "/v1/responses", json={"input": "Hi"} | body)
        assert answer.status == 400, answer.body
        return answer.error


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in {"id", "call_id"}}


TEXTS = [
    ("Hello", {}),
    ("", {}),
    ("<think>\nSum.\n</think>\n\nFour.", {}),
    ("<think>\nSum.\n</think>\n\n", {"reasoning": {"summary": "auto"}}),
    (
        f"<think>Maybe {CALL}?</think>So: {CALL}\n{CALL}",
        {"tools": [TOOL], "reasoning": {"generate_summary": "concise"}},
    ),
    (f"{CALL}", {"tools": [TOOL]}),
    (f"{CALL} then {CALL} or", {"tools": [TOOL]}),
    (f"{CALL} then {CALL} or", {"tools": [TOOL], "stream_interval": 50}),  # a delta ends one call, and begins another
]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize(("text", "body"), TEXTS)
async def test_a_stream_and_a_whole_answer_hold_the_same(text: str, body: dict[str, Any], reason: FinishReason) -> None:
    reply = (
        says(text, reason)
        if text
        else lambda request: [TokenOutput(request.request_id, [], None, reason, None, times())]
    )
    whole, _ = await ask(reply, **body)
    WHOLE.validate_python(whole.json)
    stream, _ = await ask(reply, stream=True, **body)
    events = parsed(stream)
    final = events[-1]["response"]
    is_whole = reason is FinishReason.STOP
    assert events[-1]["type"] == ("response.completed" if is_whole else "response.incomplete")
    assert (final["incomplete_details"] is None) is is_whole
    assert {final["completed_at"] is None, whole.json["completed_at"] is None} == {not is_whole}
    for name in ("status", "incomplete_details", "usage", "tools", "text"):
        assert final[name] == whole.json[name]
    assert [without_ids(item) for item in final["output"]] == [without_ids(item) for item in whole.json["output"]]
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    check_items(events, final["output"])


def check_items(events: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Each item is added empty, extended, and done as it is in the end, one after the other."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    position = 2
    for index, item in enumerate(output):
        of_item = [event for event in events[2:-1] if event["output_index"] == index]
        assert events[position : position + len(of_item)] == of_item
        position += len(of_item)
        added, *between, done = of_item
        assert added["type"] == "response.output_item.added"
        assert added["item"]["status"] == "in_progress"
        assert not added["item"].get("content")
        assert not added["item"].get("arguments")
        assert done["type"] == "response.output_item.done"
        assert done["item"] == item
        assert {event["item_id"] for event in between} <= {item["id"]} == {added["item"]["id"]}
        for kind, text in texts_of(item).items():
            assert "".join(event["delta"] for event in between if event["type"] == f"response.{kind}.delta") == text
    assert position == len(events) - 1


def texts_of(item: dict[str, Any]) -> dict[str, str]:
    match item["type"]:
        case "message":
            return {"output_text": item["content"][0]["text"]}
        case "function_call":
            return {"function_call_arguments": item["arguments"]}
    thoughts = item["content"][0]["text"]
    return {"reasoning_text": thoughts} | ({"reasoning_summary_text": thoughts} if item["summary"] else {})


@pytest.mark.parametrize(("include", "encrypted"), [([], None), (["reasoning.encrypted_content"], "")])
async def test_the_items_of_an_answer_with_everything(include: list[str], encrypted: str | None) -> None:
    answer, _ = await ask(f"<think>\nSum.\n</think>\n\nSo: {CALL}", tools=[TOOL], include=include)
    thoughts, message, call = answer.json["output"]
    assert thoughts["encrypted_content"] == encrypted
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Sum."}]
    assert thoughts["summary"] == []
    assert message["content"] == [{"type": "output_text", "text": "So: ", "annotations": [], "logprobs": []}]
    assert (call["name"], call["arguments"], call["status"]) == ("f", '{"a": 1}', "completed")
    assert [item["id"].partition("_")[0] for item in (thoughts, message, call)] == ["rs", "msg", "fc"]
    assert call["call_id"].startswith("call_")
    assert answer.json["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>\nSum.\n</think>")}


async def test_a_call_that_a_stop_string_cuts_is_not_complete() -> None:
    answer, _ = await ask(CALL, tools=[TOOL], stop=['": 1'])
    [call] = answer.json["output"]
    assert (answer.json["status"], call["status"], call["arguments"]) == ("incomplete", "incomplete", '{"a')
    assert answer.json["incomplete_details"] is None


async def test_thoughts_that_a_limit_cuts_are_not_complete() -> None:
    answer, _ = await ask(says("<think>Su"))
    [thoughts] = answer.json["output"]
    assert (thoughts["type"], thoughts["status"]) == ("reasoning", "incomplete")
    assert answer.json["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("text", "body"), [("<think>", {}), ("<tool_call>", {"tools": [TOOL], "tool_choice": "required"})]
)
async def test_a_limit_before_all_text_leaves_a_whole_stream_with_its_ledger(text: str, body: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(says(text)), text=text_model(template=TEMPLATE)) as server:
        server.service.grammar_checker = Checks()
        body = {"input": "Hi", "stream": True} | body
        answer = await server.request("POST", "/v1/responses", json=body, headers={"x-roseinfer-ledger": "1"})
    events = parsed(answer)
    assert [event["type"] for event in events] == [
        f"response.{kind}" for kind in ("created", "in_progress", "incomplete")
    ]
    [ledger] = events[-1]["response"]["roseinfer_ledger"]
    assert ledger["finish_reason"] == "length"


async def test_the_order_of_the_events() -> None:
    answer, _ = await ask(f"<think>T</think>t{CALL}", stream=True, tools=[TOOL], reasoning={"summary": "auto"})
    kinds = [event["type"].removeprefix("response.") for event in parsed(answer)]
    assert list(dict.fromkeys(kinds)) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_summary_part.added"),
        *("reasoning_text.delta", "reasoning_summary_text.delta", "reasoning_text.done", "content_part.done"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_text.delta", "output_text.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("stop", [[], ["c"]])
async def test_log_probabilities_are_those_of_the_text(is_streamed: bool, stop: list[str]) -> None:
    def reply(request: Request) -> list[TokenOutput]:
        assert request.params.num_logprobs == 2
        text = ids("<think>a</think>bc")
        outputs = [TokenOutput(request.request_id, [token], [logprobs_of(token, 2)]) for token in text]
        outputs.append(TokenOutput(request.request_id, [], None, FinishReason.STOP, None, times()))
        return outputs

    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": is_streamed, "stop": stop}
    answer, _ = await ask(reply, **body)
    events = parsed(answer) if is_streamed else []
    output = events[-1]["response"]["output"] if is_streamed else answer.json["output"]
    logprobs = output[1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["b", "c"]
    assert [top["token"] for top in logprobs[0]["top_logprobs"]] == ["b", "c"]
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert not is_streamed or [entry for delta in deltas for entry in delta] == logprobs
    _, request = await ask("x", stream=is_streamed)
    assert request.params.num_logprobs is None, "they were not asked for"


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("interval", [1, 7, 1000])
async def test_tokens_of_calls_are_not_scored_as_text(is_streamed: bool, interval: int) -> None:
    text = f"<think>T</think>So: {CALL} or {CALL}"

    def reply(request: Request) -> list[TokenOutput]:
        outputs = [TokenOutput(request.request_id, [token], [logprobs_of(token, 0)]) for token in ids(text)]
        outputs.append(TokenOutput(request.request_id, [], None, FinishReason.STOP, None, times()))
        return outputs

    body = {"include": ["message.output_text.logprobs"], "tools": [TOOL], "stream_interval": interval}
    answer, _ = await ask(reply, stream=is_streamed, **body)
    output = parsed(answer)[-1]["response"]["output"] if is_streamed else answer.json["output"]
    _, first, _, second, _ = output
    scored = ["".join(entry["token"] for entry in item["content"][0]["logprobs"]) for item in (first, second)]
    assert scored == ["So: ", "}\n</tool_call> or "], "a text has the end of the call before it, too"


async def test_scored_thoughts_are_read_once_each() -> None:
    text = ids(f"<think>{'T' * 300}</think>So")

    def reply(request: Request) -> Iterator[TokenOutput]:
        for token in text:
            yield TokenOutput(request.request_id, [token], [logprobs_of(token, 0)])
        yield TokenOutput(request.request_id, [], None, FinishReason.STOP, None, times())

    with mock.patch.object(AnswerParser, "read", autospec=True, side_effect=AnswerParser.read) as read:
        await ask(reply, stream=True, include=["message.output_text.logprobs"])
    assert read.call_count <= len(text) + 1


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_stream_that_fails_says_so_to_every_client(has_begun: bool) -> None:
    engine = ScriptedEngine()
    async with serving(engine, text=text_model(template=TEMPLATE), keepalive_interval_s=0.02) as server:
        body = {"input": "Hi", "stream": True}
        asked = asyncio.create_task(server.request("POST", "/v1/responses", json=body))
        await engine.received()
        if has_begun:
            engine.say("Hel")
        await asyncio.sleep(0.1)  # a comment has opened the stream
        engine.fail(EngineFailed("It broke."))
        answer = await asked
    *_, error, failed = parsed(answer)
    assert parsed(answer)[0]["type"] == "response.created"
    assert (error["type"], error["code"], error["message"]) == ("error", "engine_failed", "It broke.")
    assert error["error"] == {"type": "server_error", "code": "engine_failed", "message": "It broke.", "param": None}
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "It broke."}
    texts = [item["content"][0]["text"] for item in failed["response"]["output"]]
    assert (texts, failed["response"]["usage"]["output_tokens"]) == ((["Hel"], 3) if has_begun else ([], 0))
    ended = [event["item"]["status"] for event in parsed(answer) if event["type"] == "response.output_item.done"]
    assert ended == ["incomplete"] * has_begun


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}], "encrypted_content": None}
SAID = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
    {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}]}  # fmt: skip
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'}
RETURNED = {"type": "function_call_output", "call_id": "call_1", "output": "4"}
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"input": "Hi"}, "<user>Hi"),
        ({"input": [USER], "instructions": "I"}, "<system>I<user>Hi"),
        ({"input": [{"role": "developer", "content": "D"}, {"role": "system", "content": "S"}, USER],
          "instructions": "I"}, "<system>I\n\nD\n\nS<user>Hi"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}]}, "<user>a\nb"),
        ({"input": [USER, THOUGHT, SAID, CALLED, RETURNED]},
         '<user>Hi<assistant><think>T</think>Yes.[f {"a": 1} call_1]<tool>4call_1'),
        ({"input": [USER, SUMMARY, CALLED, {**CALLED, "call_id": "b"}, {**RETURNED, "output": [
            {"type": "input_text", "text": "4"}]}]},
         '<user>Hi<assistant><think>S</think>[f {"a": 1} call_1][f {"a": 1} b]<tool>4call_1'),
        ({"input": [USER, {"type": "item_reference", "id": "rs_1"}, SAID, USER]}, "<user>Hi<assistant>Yes.<user>Hi"),
        ({"input": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]},
         "<user>Hi<assistant>No."),
        ({"input": [USER, {**CALLED, "arguments": "no JSON"}]}, '<user>Hi<assistant>[f "no JSON" call_1]'),
        # The template refuses this as it is.
        ({"input": [{"role": "system", "content": "S"}, USER, {"role": "developer", "content": "D"}, SAID]},
         "<system>S<user>Hi\n\nD<assistant>Yes."),
        ({"input": "Hi", "tools": [TOOL, {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}]},
         "1<user>Hi"),
        ({"input": "Hi", "tools": [TOOL, {**TOOL, "name": "g"}],
          "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}},
         "1<user>Hi"),
        ({"input": "Hi", "tools": [TOOL], "tool_choice": "none"}, "<user>Hi"),
    ],
)  # fmt: skip
async def test_the_items_become_turns(body: dict[str, Any], prompt: str) -> None:
    assert await prompt_of(**body) == prompt + "<assistant>"


async def test_the_effort_turns_the_templates_switch() -> None:
    for effort, end in (("none", "False"), ("minimal", "True"), (None, "")):
        assert await prompt_of(reasoning={"effort": effort}) == f"<user>Hi<assistant>{end}"


async def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer, _ = await ask(f"<think>T</think>Yes.{CALL}", tools=[TOOL])
    output = answer.json["output"]
    history = [USER, *output, {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "4"}]
    prompt = await prompt_of(input=history)
    assert f'<assistant><think>T</think>Yes.[f {{"a": 1}} {output[2]["call_id"]}]<tool>4' in prompt


IMAGE = {"type": "input_image", "image_url": "a"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": None}, "input", "must not be null"),
        ({"messages": [USER], "input": None}, "messages", "/v1/chat/completions takes `messages`"),
        ({"max_tokens": 5}, "max_tokens", "`max_output_tokens` is its name here"),
        ({"input": []}, "input", "length >= 1"),
        ({"input": [USER, {"role": "boss", "content": "a"}]}, "input[1].role", "'developer'"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type", "[0]`: Only text content"),
        ({"input": [{**RETURNED, "output": [IMAGE]}]}, "input[0].output[0].type", "Only text"),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "input[0].content[0].type",
         "one of 'input_text'"),
        ({"input": [{"type": "message", "role": "user"}]}, "input[0].content", "Missing field"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "Missing field"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0].type", "'function_call_output'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "nothing is stored here"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type", "only functions are served as tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "Missing field"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "form of /v1/chat/completions"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools[0].type", "form of /v1/messages"),
        ({"tools": [TOOL, TOOL]}, "tools", "two functions"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs a function"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "no function g"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "'allowed_tools'"),
        ({"tools": [TOOL, {**TOOL, "name": "g"}], "tool_choice": {**ALLOWED, "name": "g"}}, "tool_choice",
         "`name` does not belong to the type `allowed_tools`"),
        ({"tools": [TOOL], "tool_choice": {**ALLOWED, "type": "function", "name": "f"}}, "tool_choice",
         "`tools` does not belong to the type `function`"),
        *(({"text": {"format": {"type": kind, "schema": {"type": "object"}}}}, "text.format",
           f"`schema` does not belong to the type `{kind}`") for kind in ("text", "json_object")),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "Missing field"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"title": "refused"}}}},
         "text.format.schema", "no"),
        ({"top_logprobs": 1}, "top_logprobs", "needs `message.output_text.logprobs`"),
        ({"include": ["everything"]}, "include[0]", "'message.output_text.logprobs'"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored here"),
        ({"background": True}, "background", "nothing is stored here"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "`prompt` with /v1/completions"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"reasoning": {"effort": "hard"}}, "reasoning.effort", "'high'"),
        ({"reasoning": {"max_tokens": 100}}, "reasoning.max_tokens", "Unknown field"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "'standard'"),
        ({"thinking_token_budget": -2}, "thinking_token_budget", ">= -1"),
        ({"truncation": "on"}, "truncation", "'auto'"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "user", "content": "y" * 500}]}, "input", "context"),
    ],
)  # fmt: skip
async def test_a_refusal_names_the_field(body: dict[str, Any], param: str, words: str) -> None:
    error = await refusal(**body)
    assert error["param"] == param
    assert words in error["message"]


# What clients send that changes nothing here.
IDLE = {
    "store": True,
    "background": False,
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "metadata": {"a": "b"},
    "user": "u",
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "stream_options": {"include_obfuscation": False},
    "max_tool_calls": 3,
    "truncation": "auto",
    "text": {"verbosity": "low"},
    "reasoning": None,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "client_metadata": {"a": "b"},
    "context_management": None,
    "access_programs": {"cyber": True},
    "image": {"model": "i"},
    "background_options": {"completion_window": "2h"},
}


async def test_what_clients_send_is_accepted_and_repeated() -> None:
    answer, _ = await ask("x", instructions="I", temperature=0.5, top_p=0.25, **IDLE)
    told = {name: answer.json[name] for name in ("instructions", "temperature", "top_p", "metadata", "user", "store")}
    assert told == {
        "instructions": "I",
        "temperature": 0.5,
        "top_p": 0.25,
        "metadata": {"a": "b"},
        "user": "u",
        "store": False,
    }


@pytest.mark.parametrize("choice", ["none", {"type": "function", "name": "f"}, ALLOWED], ids=str)
async def test_the_answer_repeats_the_choice_of_tools_as_it_was_sent(choice: Any) -> None:
    answer, _ = await ask(CALL, tools=[TOOL], tool_choice=choice)
    assert answer.json["tool_choice"] == choice


async def test_the_limit_is_no_reservation() -> None:
    _, request = await ask("x", max_output_tokens=1_000_000)
    assert request.params.max_tokens == 2000 - len(request.prompt_token_ids)


@pytest.mark.parametrize(("budget", "thought"), [(7, Thought("<think>", "</think>", False, 7)), (-1, None)])
async def test_thoughts_may_have_a_limit(budget: int, thought: Thought | None) -> None:
    _, request = await ask("x", thinking_token_budget=budget)
    assert (request.params.grammar and request.params.grammar.thought) == thought


async def test_a_form_and_a_forced_call_have_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    _, request = await ask("x", text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}})
    assert request.params.grammar is not None
    assert json.loads(request.params.grammar.source) == schema
    named = {"type": "function", "name": "f"}
    for body, is_single in (
        ({"tool_choice": named}, True),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, True),
    ):
        _, request = await ask(CALL, tools=[TOOL], **body)
        assert request.params.grammar is not None
        assert request.params.grammar.kind == "calls"
        assert (json.loads(request.params.grammar.source)["most"] == 1) is is_single


async def test_what_asks_for_an_earlier_response() -> None:
    async with serving(ScriptedEngine(says("x")), text=text_model(template=TEMPLATE)) as server:
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            answer = await server.request(method, f"/v1/responses/resp_1{path}")
            assert (answer.status, answer.error["code"]) == (404, "unknown_route")
            assert "not stored here" in answer.error["message"]
        for path in ("/", "/compact"):
            answer = await server.request("POST", f"/v1/responses{path}", json={})
            assert "There is /v1/responses. " in answer.error["message"] or "There are " in answer.error["message"]
        counted = await server.request("POST", "/v1/responses/input_tokens", json={"input": "Hi"})
        whole = await server.request("POST", "/v1/responses", json={"input": "Hi"})
        assert counted.json == {"object": "response.input_tokens", "input_tokens": whole.json["usage"]["input_tokens"]}
