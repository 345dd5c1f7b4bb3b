"""Structured output and tools over a scripted engine: what is asked of it, what is refused, and how calls are told."""

import json
import re
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from roseinfer.errors import InvalidRequest
from roseinfer.messages import CallGrammar, Grammar, Request, TokenOutput
from roseinfer.records import FinishReason
from roseinfer.text.grammar.checker import GrammarChecker
from tests.unit.server import harness
from tests.unit.server.harness import Answer, ScriptedEngine, ids, logprobs_of, says, serving, text_model

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
OTHER = {"type": "function", "function": {"name": "g", "description": "G", "parameters": None}}
HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}({{ tool.function.description }}),"
    "{% endfor %}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"
)
LLAMA = HERMES.replace("<tool_call>", '{"name": "", "parameters": 1}')
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


class Checks(GrammarChecker):
    """Remembers what it was asked about, and refuses one word."""

    def __init__(self) -> None:
        self.asked: list[tuple[Grammar, str]] = []
        self.under_way = {}

    def check(self, grammar: Grammar, param: str) -> "Future[None]":
        self.asked.append((grammar, param))
        future: Future[None] = Future()
        if "refused" in grammar.source:
            future.set_exception(InvalidRequest(f"`{param}`: no.", param=param))
        else:
            future.set_result(None)
        return future


async def ask(engine: ScriptedEngine, *, path: str = "chat", template: str = HERMES, **body: Any) -> Answer:
    async with serving(engine, text=text_model(template=template)) as server:
        server.service.grammar_checker = Checks()
        return await (server.chat(**body) if path == "chat" else server.complete(**body))


def told(events: list[Any]) -> tuple[str, list[dict[str, str]], str | None]:
    """Text, calls and finish reason of a stream's only choice, joined as clients join them."""
    content, calls, reason = "", list[dict[str, str]](), None
    for event in events[:-1]:
        for choice in event["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(calls)
                    assert call["type"] == "function"
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return content, calls, reason


@pytest.mark.parametrize("path", ["chat", "completions"])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": None}}}},
            Grammar("json_schema", '{"const":null}'),
        ),
        *(
            ({"response_format": {"type": kind, field: {"const": None}}}, Grammar("json_schema", '{"const":null}'))
            for kind in ("json_object", "json_schema", "json")
            for field in ("schema", "value")
        ),
        (
            {"response_format": {"type": "json_schema", "value": {"name": "x", "schema": {"enum": [1]}}}},
            Grammar("json_schema", '{"enum":[1]}'),
        ),
        ({"response_format": {"type": "regex", "value": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"json": {"enum": [1]}}}, Grammar("json_schema", '{"enum":[1]}')),
        ({"structured_outputs": {"json": '{"a": 1}', "regex": None}}, Grammar("json_schema", '{"a": 1}')),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_schema", '{"type":"object"}')),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["x", 'y"']}}, Grammar("choice", '["x","y\\""]')),
        ({"structured_outputs": {"grammar": "start: X"}}, Grammar("lark", "start: X")),
        ({"response_format": {"type": "text"}}, None),
    ],
)
async def test_the_engine_is_asked_for_the_grammar(path: str, body: dict[str, Any], expected: Grammar | None) -> None:
    engine = ScriptedEngine(says("x"))
    assert (await ask(engine, path=path, n=2, **body)).status == 200
    assert [request.params.grammar for request in engine.requests] == [expected] * 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json"}}, "response_format.value"),
        ({"response_format": {"type": "regex", "value": {}}}, "response_format"),
        ({"response_format": {"type": "regex", "schema": {}}}, "response_format"),
        ({"response_format": {"type": "json", "value": "a+"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}, "value": {}}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json", "value": {"const": "refused"}}}, "response_format.value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x\n", "schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "refused"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "refused"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {}}, "guided_json"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "audio": {"id": "1"}}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_what_does_not_fit_is_a_400_that_names_the_field(body: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine(says("x"))
    answer = await ask(engine, **body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert engine.requests == []


async def test_a_format_of_any_object_is_named_by_what_asks_for_it() -> None:
    answer = await ask(ScriptedEngine(says("x")), response_format={"type": "json"})
    assert "for any object the type is `json_object`" in answer.error["message"]


@pytest.mark.parametrize(
    ("tool", "param", "path"),
    [
        ({"type": "function", "name": "f"}, "tools[0].function", "/v1/responses"),
        ({"name": "f", "input_schema": {"type": "object"}}, "tools[0].type", "/v1/messages"),
    ],
)
async def test_a_tool_in_the_form_of_another_api_gets_a_sentence_that_says_so(
    tool: dict[str, Any], param: str, path: str
) -> None:
    answer = await ask(ScriptedEngine(says("x")), tools=[tool])
    assert (answer.status, answer.error["param"]) == (400, param)
    assert f"the tool has the form of {path}" in answer.error["message"]


async def test_tools_need_a_template_that_renders_them() -> None:
    answer = await ask(ScriptedEngine(says("x")), template=harness.TEMPLATE, tools=[TOOL])
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert "template" in answer.error["message"]
    plain = await ask(ScriptedEngine(says("x")), template=harness.TEMPLATE, tools=[TOOL], tool_choice="none")
    assert plain.status == 200


@pytest.mark.parametrize(
    ("num_chars", "limit", "param"),
    [
        (5000, {}, "messages"),  # counted where it is encoded
        (1000, {}, "messages"),
        (50, {"max_tokens": 100}, "max_tokens"),
    ],
)
async def test_tools_that_do_not_fit_are_named_beside_the_messages(
    num_chars: int, limit: dict[str, Any], param: str
) -> None:
    long = {"type": "function", "function": {"name": "f", "description": "x" * num_chars}}
    answer = await ask(ScriptedEngine(says("x")), tools=[long], **limit)
    assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", param)
    assert "of `messages` with `tools` " in answer.error["message"]


async def test_tools_that_the_template_does_not_get_are_not_to_blame() -> None:
    messages = [{"role": "user", "content": "x" * 1000}]
    answer = await ask(ScriptedEngine(says("x")), tools=[TOOL], tool_choice="none", messages=messages)
    assert answer.error["code"] == "context_length_exceeded"
    assert "tools" not in answer.error["message"]


async def test_the_template_gets_tools_calls_and_results() -> None:
    engine = ScriptedEngine(says("x"))
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]},
    ]
    assert (await ask(engine, tools=[TOOL, OTHER], messages=messages)).status == 200
    prompt = '<tools>f(),g(G),<user>Hi<assistant><tool_call>{"a": 1}<tool>done#c1'
    assert engine.requests[0].prompt_token_ids == ids(prompt)
    assert engine.requests[0].params.grammar is None


@pytest.mark.parametrize(
    ("choice", "is_parallel", "names", "most"),
    [
        ("required", True, ["f", "g"], 16),
        ("required", False, ["f", "g"], 1),
        ({"type": "function", "function": {"name": "g"}}, True, ["g"], 1),
    ],
)
async def test_forced_calls_are_a_grammar(choice: object, is_parallel: bool, names: list[str], most: int) -> None:
    engine = ScriptedEngine(says("x"))
    await ask(engine, tools=[TOOL, OTHER], tool_choice=choice, parallel_tool_calls=is_parallel)
    grammar = engine.requests[0].params.grammar
    assert grammar is not None
    assert grammar.kind == "calls"
    source = json.loads(grammar.source)
    assert [shape["before"].count(f'"name": "{name}"') for shape, name in zip(source["shapes"], names, strict=True)]
    assert [len(source["shapes"]), source["most"]] == [len(names), most]
    assert all(shape["schema"]["type"] == "object" for shape in source["shapes"])


@pytest.mark.parametrize(
    ("text", "content", "calls", "reason"),
    [
        ("Hello", "Hello", [], "stop"),
        (CALL, None, [("f", {"a": 1})], "tool_calls"),
        (f"Wait.\n{CALL}\n{CALL}", "Wait.\n", [("f", {"a": 1})] * 2, "tool_calls"),
        ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', ..., [], "stop"),
        ("<tool_call>[1, 2]</tool_call> <tool", ..., [], "stop"),
        ('<tool_call>{"arguments": "x", "name": "f"}</tool_call>', ..., [], "stop"),
        ("a < b <tool_cal", ..., [], "stop"),
        ("Wait. <tool_call>", ..., [], "stop"),
        ('<tool_call>\n{"name": "', ..., [], "stop"),
        (f'{CALL}\n<tool_call>\n{{"name"', '\n<tool_call>\n{"name"', [("f", {"a": 1})], "tool_calls"),
        ('<tool_call>{"name": "f", "arguments": {}, "arguments": {"a": 1}}', None, [("f", {})], "tool_calls"),
    ],
)
async def test_calls_are_found_the_same_whole_and_streamed(
    text: str, content: Any, calls: list[tuple[str, Any]], reason: str
) -> None:
    content = text if content is ... else content
    whole = await ask(ScriptedEngine(says(text, FinishReason.STOP)), tools=[TOOL])
    [choice] = whole.json["choices"]
    assert choice["message"]["content"] == content
    assert choice["finish_reason"] == reason
    found = choice["message"].get("tool_calls", [])
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found] == calls
    assert len({call["id"] for call in found}) == len(found)
    for interval in (1, 3, 100):
        answer = await ask(
            ScriptedEngine(says(text, FinishReason.STOP)), tools=[TOOL], stream=True, stream_interval=interval
        )
        streamed, parts, streamed_reason = told(answer.events)
        assert (streamed, streamed_reason) == (content or "", reason)
        assert parts == [call["function"] for call in found]


async def test_no_event_of_a_call_is_empty() -> None:
    """As OpenAI's streams: the role at first, with content null, and nothing but the calls until it is over."""
    text = f"{CALL}\n{CALL}"
    engine = ScriptedEngine(says(text, FinishReason.STOP))
    answer = await ask(engine, tools=[TOOL], stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = answer.events
    first, *later, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": None}
    for choice in later:
        [call] = choice["delta"].pop("tool_calls")
        assert call["function"]["arguments"]
        assert choice["delta"] == {}, "content stays null"
    assert len(later) == 2 * len('{"a": 1}'), "a token of the arguments each, and none of what is around them"
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    assert (usage["usage"]["completion_tokens"], done) == (len(text), "[DONE]")
    assert len(engine.closed[0].write_ns) == len(chunks), "what was not written is not told to observers"


async def test_content_is_null_until_it_is_known_to_be_text() -> None:
    answer = await ask(ScriptedEngine(says("<to", FinishReason.STOP)), tools=[TOOL], stream=True)
    assert [event["choices"][0]["delta"] for event in answer.events[:-1]] == [
        {"role": "assistant", "content": None},
        {"content": "<to"},
    ]
    answer = await ask(ScriptedEngine(says("Hi")), tools=[TOOL], stream=True)
    assert answer.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "H"}


async def test_log_probabilities_of_a_tag_are_something_to_tell() -> None:
    def reply(request: Request) -> Iterable[TokenOutput]:
        for output in says(CALL, FinishReason.STOP)(request):
            yield msgspec.structs.replace(output, logprobs=[logprobs_of(output.token_ids[0], 0)])

    answer = await ask(ScriptedEngine(reply), tools=[TOOL], stream=True, logprobs=True)
    scored = [entry for event in answer.events[:-1] for entry in event["choices"][0]["logprobs"]["content"]]
    assert "".join(entry["token"] for entry in scored) == CALL


async def test_a_stream_that_writes_a_tag_is_kept_alive() -> None:
    engine, body = ScriptedEngine(), {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "stream": True}
    async with (
        serving(engine, text=text_model(template=HERMES), keepalive_interval_s=0.05) as server,
        server.session.post(server.url + "/v1/chat/completions", json=body) as response,
    ):
        engine.say("<")
        while b'"role"' not in (event := await response.content.readuntil(b"\n\n")):
            assert event == b": keep-alive\n\n"
        engine.say(CALL[1:20])
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        engine.say(CALL[20:], FinishReason.STOP)
        rest = await response.read()
    assert b'"name":"f"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_one_call_where_several_are_not_wanted() -> None:
    answer = await ask(
        ScriptedEngine(says(f"{CALL}\n{CALL} bye", FinishReason.STOP)), tools=[TOOL], parallel_tool_calls=False
    )
    message = answer.json["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == (None, 1)


async def test_choices_have_calls_of_their_own() -> None:
    def reply(request: Request) -> Iterable[TokenOutput]:
        text = CALL if (request.params.seed or 0) % 2 else "no"
        return says(text, FinishReason.STOP)(request)

    answer = await ask(ScriptedEngine(reply), tools=[TOOL], n=2, seed=4)
    assert [choice["finish_reason"] for choice in answer.json["choices"]] == ["stop", "tool_calls"]


@pytest.mark.parametrize(
    ("tag", "text", "call_id"),
    [
        ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', r"[a-z0-9]{9}"),
        ("[TOOL_CALLS][ARGS]", 'Wait.[TOOL_CALLS]f[ARGS]{"a": 1}', r"[a-z0-9]{9}"),
        (
            "<tool_call><function=",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
            "call_.{24}",
        ),
        ("[func_name1(a=1)]", "[f(a=1)]", "call_.{24}"),
        ("<|tool_call|>", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "call_.{24}"),
    ],
)
async def test_calls_are_as_the_template_writes_them(tag: str, text: str, call_id: str) -> None:
    """And come back with the next request, whatever the ids of earlier ones are."""
    template = HERMES.replace("<tool_call>", tag)
    async with serving(ScriptedEngine(says(text, FinishReason.STOP)), text=text_model(template=template)) as server:
        [choice] = (await server.chat(tools=[TOOL])).json["choices"]
        message, earlier = choice["message"], {"id": "other", "function": {"name": "f", "arguments": "{}"}}
        history = [
            {"role": "user", "content": "x"},
            message | {"tool_calls": [*message["tool_calls"], earlier]},
            {"role": "tool", "content": "1", "tool_call_id": message["tool_calls"][0]["id"]},
            {"role": "tool", "content": "2", "tool_call_id": "other"},
        ]
        assert (await server.chat(messages=history)).status == 200
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert re.fullmatch(call_id, call["id"])
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "Wait." if "Wait" in text else None)


async def test_llama_writes_a_bare_object() -> None:
    text = '{"name": "f", "parameters": {"a": 2}}'
    answer = await ask(ScriptedEngine(says(text, FinishReason.STOP)), template=LLAMA, tools=[TOOL])
    [call] = answer.json["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 2}'}
    for text in ('{"b": 1} is it', '{"name": "', '{"b": 1', '{"name": "f", "par'):
        said = await ask(ScriptedEngine(says(text, FinishReason.STOP)), template=LLAMA, tools=[TOOL])
        assert said.json["choices"][0]["message"]["content"] == text


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_fewer_tools_may_be_allowed_than_there_are(mode: str) -> None:
    engine = ScriptedEngine(says(CALL, FinishReason.STOP))
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}
    answer = await ask(engine, tools=[TOOL, OTHER], tool_choice=choice)
    assert answer.json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    [request] = engine.requests
    assert bytes(request.prompt_token_ids).startswith(b"<tools>f(),<user>")
    assert (request.params.grammar is not None) == (mode == "required")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [OTHER], "tool_choice": ALLOWED}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": ALLOWED}, "tool_choice"),
        ({"functions": [TOOL["function"]], "tools": [TOOL]}, "functions"),
        ({"functions": [TOOL["function"]], "tool_choice": "auto"}, "functions"),
        ({"functions": [TOOL["function"]] * 2}, "functions"),
        ({"functions": [TOOL["function"]], "function_call": {"name": "g"}}, "function_call.name"),
        ({"functions": [{"name": "f", "parameters": {"type": "array"}}]}, "functions[0].parameters"),
        ({"function_call": "auto"}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"function_call": "required"}, "function_call"),
    ],
    ids=str,
)
async def test_what_chooses_functions_that_are_not_there_is_named(body: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine(says("x"))
    answer = await ask(engine, **body)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("function_call", [None, {"name": "f"}])
async def test_the_older_form_of_tools_is_answered_in_its_own(function_call: dict[str, str] | None) -> None:
    engine = ScriptedEngine(says(f"{CALL}{CALL}", FinishReason.STOP))
    body: dict[str, Any] = {"functions": [TOOL["function"]], "function_call": function_call}
    [choice] = (await ask(engine, **body)).json["choices"]
    expected = {"name": "f", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, "function_call": expected}
    events = (await ask(engine, **body, stream=True)).events[:-1]
    deltas = [event["choices"][0]["delta"].get("function_call", {}) for event in events]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["f"]
    assert "".join(delta.get("arguments", "") for delta in deltas) == expected["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "function_call"
    assert (engine.requests[0].params.grammar is not None) == (function_call is not None)


async def test_earlier_calls_in_the_older_form_are_given_to_the_template() -> None:
    engine = ScriptedEngine(says("x"))
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "b"},
    ]
    assert (await ask(engine, messages=messages, functions=[], function_call="none")).status == 200
    prompt = bytes(engine.requests[0].prompt_token_ids).decode()
    assert prompt == '<user>a<assistant><tool_call>{"a": 1}<tool>b#function0'


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
async def test_a_form_applies_to_the_text_that_may_come_instead_of_calls(choice: str) -> None:
    engine = ScriptedEngine(says('{"a": 1}', FinishReason.STOP))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": None}}}
    answer = await ask(engine, tools=[TOOL], tool_choice=choice, response_format=form)
    grammar = engine.requests[0].params.grammar
    assert grammar is not None
    assert grammar.kind == ("json_schema" if choice == "none" else "calls")
    inner = None if choice == "none" else msgspec.json.decode(grammar.source, type=CallGrammar).form
    assert inner == (Grammar("json_schema", '{"const":null}') if choice == "auto" else None)
    assert choice == "required" or answer.json["choices"][0]["message"]["content"] == '{"a": 1}'
    refused = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "refused"}}}
    answer = await ask(ScriptedEngine(), tools=[TOOL], response_format=refused)
    assert answer.error["param"] == "response_format.json_schema.schema"
