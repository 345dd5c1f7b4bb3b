"""Anthropic's Messages API over a scripted engine: what the template gets, answers whole and streamed, and errors."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from roseinfer.errors import EngineFailed
from roseinfer.messages import Grammar, Request, TokenOutput
from roseinfer.records import FinishReason
from roseinfer.server.anthropic.replies import MessageErrorReply, MessageReply
from tests.integration.test_http_tools import Checks
from tests.unit.server.harness import (
    Answer,
    Reply,
    ScriptedEngine,
    Server,
    engine_info,
    ids,
    says,
    serving,
    text_model,
    times,
)

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}:{{ tool.function.description }},{% endfor %}"
    "{% endif %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "[{{ m.role }}]{% if m.tool_call_id %}#{{ m.tool_call_id }} {% endif %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined %}"
    "{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
TOOL = {"name": "f", "description": "F", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
LONG = engine_info(max_model_len=4096)
USER = {"role": "user", "content": "Hi"}


def in_steps(*texts: str) -> Reply:
    """Says each text in a step of its own."""

    def reply(request: Request) -> Iterable[TokenOutput]:
        *most, last = texts
        for text in most:
            yield TokenOutput(request.request_id, ids(text))
        yield TokenOutput(request.request_id, ids(last), None, FinishReason.STOP, None, times())

    return reply


async def post(server: Server, path: str = "", headers: dict[str, str] | None = None, **body: Any) -> Answer:
    body = {"max_tokens": 99, "messages": [USER]} | body
    fields = {name: value for name, value in body.items() if value is not ...}
    return await server.request("POST", f"/v1/messages{path}", json=fields, headers=headers)


async def ask(reply: Reply, path: str = "", template: str = TEMPLATE, **body: Any) -> tuple[Answer, ScriptedEngine]:
    engine = ScriptedEngine(reply, LONG)
    async with serving(engine, text=text_model(template=template)) as server:
        server.service.grammar_checker = Checks()
        return await post(server, path, **body), engine


async def prompt_of(**body: Any) -> str:
    """What the template makes of a body."""
    answer, engine = await ask(says("x"), **body)
    assert answer.status == 200, answer.body
    return bytes(engine.requests[0].prompt_token_ids).decode()


async def refusal_of(path: str = "", **body: Any) -> str:
    answer, engine = await ask(says("x"), path, **body)
    assert answer.status == 400, answer.body
    assert not engine.requests
    error = msgspec.json.decode(answer.body, type=MessageErrorReply)
    assert error.error.type == "invalid_request_error"
    return error.error.message


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, each of which has its type as its name too."""
    *frames, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    events: list[dict[str, Any]] = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, as Anthropic's SDKs put it together; anything out of order fails."""
    events = [event for event in events if event["type"] != "ping"]
    assert events[0]["type"] == "message_start"
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == []
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"] | {"json": ""})
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                _add(message["content"][-1], event["delta"])
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                is_open = False
                block = message["content"][-1]
                if raw := block.pop("json"):
                    block["input"] = json.loads(raw)
    assert not is_open
    assert events[-2]["type"] == "message_delta"
    assert events[-1] == {"type": "message_stop"}
    message |= events[-2]["delta"] | {"usage": events[-2]["usage"]}
    return message


def _add(block: dict[str, Any], delta: dict[str, str]) -> None:
    kind = delta.pop("type")
    [(field, text)] = delta.items()
    expected = {
        ("text", "text_delta"): "text",
        ("thinking", "thinking_delta"): "thinking",
        ("thinking", "signature_delta"): "signature",
        ("tool_use", "input_json_delta"): "partial_json",
    }
    assert expected[block["type"], kind] == field
    block["json" if field == "partial_json" else field] += text


async def both(server: Server, **body: Any) -> dict[str, Any]:
    """The message whole, which is also what the stream holds."""
    whole, streamed = await post(server, **body), await post(server, stream=True, **body)
    assert whole.status == 200, whole.body
    msgspec.json.decode(whole.body, type=MessageReply)
    messages: list[dict[str, Any]] = [whole.json, joined(events_of(streamed))]
    for message in messages:
        assert message.pop("id").startswith("msg_")
        for block in message["content"]:
            assert block.pop("id", "toolu_").startswith("toolu_")
    assert messages[0] == messages[1]
    return messages[0]


def content(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(value: str, **others: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **others}


USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": None}, "cache_control": None}
WRITTEN = '<tool_call>{"name": "f", "arguments": {"a": null}}'
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({}, "[user]Hi[assistant]"),
        ({"system": "Be brief."}, "[system]Be brief.[user]Hi[assistant]"),
        (
            {"system": [text("One.", cache_control={"type": "ephemeral"}), text("Two.")]},
            "[system]One.\nTwo.[user]Hi[assistant]",
        ),
        ({"messages": [USER, content(text("you")), USER]}, "[user]Hi\nyou\nHi[assistant]"),
        (
            {"messages": [USER, {"role": "system", "content": "Be brief."}]},
            "[user]Hi\n\nBe brief.[assistant]",
        ),
        (
            {
                "messages": [
                    USER,
                    content(
                        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        text("Wait."),
                        USE,
                        role="assistant",
                    ),
                    content(RESULT | {"content": "sunny", "is_error": False}, text("And?")),
                ]
            },
            f"[user]Hi[assistant]<think>Hm.</think>Wait.{WRITTEN}[tool]#toolu_1 sunny[user]And?[assistant]",
        ),
        (
            {
                "messages": [
                    USER,
                    content(USE, USE | {"id": "toolu_2"}, role="assistant"),
                    content(RESULT | {"content": [text("a"), text("b")]}, RESULT | {"tool_use_id": "toolu_2"}),
                    content(RESULT | {"content": "no", "is_error": True}),
                ]
            },
            f"[user]Hi[assistant]{WRITTEN * 2}[tool]#toolu_1 a\nb[tool]#toolu_2 [tool]#toolu_1 Error: no[assistant]",
        ),
        ({"tools": [TOOL | {"type": None}]}, "f:F,[user]Hi[assistant]"),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, "[user]Hi[assistant]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "[user]Hi[assistant]<think>\n"),
        ({"thinking": {"type": "disabled"}}, "[user]Hi[assistant]<think>\n\n</think>\n\n"),
        ({"thinking": {"type": "adaptive"}}, "[user]Hi[assistant]"),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
            "[user]Hi[assistant]<think>\n\n</think>\n\n",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "The answer: "}]}, "[user]Hi[assistant]The answer: "),
    ],
)
async def test_the_template_gets(body: dict[str, Any], prompt: str) -> None:
    assert await prompt_of(**body) == prompt


@pytest.mark.parametrize(
    ("said", "blocks"),
    [
        ("Four.", [text("Four.")]),
        ("<think>\nSum.\n</think>\n\nFour.", [("Sum."), text("Four.")]),
        ("<think>Sum.", ["Sum."]),
        (f"Now.\n{CALL}", [text("Now.\n"), {"a": 1}]),
        (f"{CALL} then {CALL} or", [{"a": 1}, text(" then "), {"a": 1}, text(" or")]),
        (f"<think>{CALL}</think>{CALL}\n{CALL.replace('1', '[2, 3]')}", [CALL, {"a": 1}, {"a": [2, 3]}]),
        ('<tool_call>{"name": "f"}</tool_call>', [{}]),
        ('<tool_call>{"name": "g"}</tool_call>', [text('<tool_call>{"name": "g"}</tool_call>')]),
        ('é\u2028\n"', [text('é\u2028\n"')]),
    ],
)
async def test_an_answer_is_blocks_in_order_however_the_stream_was_cut(said: str, blocks: list[Any]) -> None:
    expected = [
        block
        if isinstance(block, dict) and "type" in block
        else {"type": "tool_use", "name": "f", "input": block}
        if isinstance(block, dict)
        else {"type": "thinking", "thinking": block, "signature": "unsigned"}
        for block in blocks
    ]
    has_call = any(block["type"] == "tool_use" for block in expected)
    engine = ScriptedEngine(info=LONG)
    async with serving(engine, text=text_model(template=TEMPLATE)) as server:
        for cut in range(len(said)):
            engine.reply = in_steps(*(piece for piece in (said[:cut], said[cut:]) if piece))
            message = await both(server, tools=[TOOL])
            assert message["content"] == expected
            assert message["stop_reason"] == ("tool_use" if has_call else "end_turn")


@pytest.mark.parametrize(
    ("said", "body", "ending"),
    [
        (says("abc", FinishReason.STOP), {}, ("abc", "end_turn", None)),
        (says("abc"), {"max_tokens": 3}, ("abc", "max_tokens", None)),
        (says("abc"), {"max_tokens": 32000}, ("abc", "model_context_window_exceeded", None)),
        (says("abcd"), {"stop_sequences": ["bc", "c"]}, ("a", "stop_sequence", "bc")),
        (says("abc"), {"stop_sequences": ["abc"], "max_tokens": 3}, ("", "stop_sequence", "abc")),
        (says("<think>a"), {"max_tokens": 8}, (None, "max_tokens", None)),
        (says(CALL[:-20]), {"max_tokens": len(CALL) - 20, "tools": [TOOL]}, (None, "max_tokens", None)),
        (says(CALL), {"stop_sequences": ["1"], "tools": [TOOL]}, (None, "stop_sequence", "1")),
    ],
)
async def test_the_stop_reason(said: Reply, body: dict[str, Any], ending: tuple[str | None, str, str | None]) -> None:
    engine = ScriptedEngine(said, LONG)
    async with serving(engine, text=text_model(template=TEMPLATE)) as server:
        whole, streamed = await post(server, **body), await post(server, stream=True, **body)
    for message in (whole.json, events_of(streamed)[-2]["delta"]):
        assert (message["stop_reason"], message["stop_sequence"]) == ending[1:]
    texts = [block["text"] for block in whole.json["content"] if block["type"] == "text"]
    assert texts == ([] if ending[0] is None else [ending[0]])


async def test_a_number_that_no_float_holds_is_in_the_input_as_it_was_written() -> None:
    engine = ScriptedEngine(says(CALL.replace("1", "1e400"), FinishReason.STOP), LONG)
    async with serving(engine, text=text_model(template=TEMPLATE)) as server:
        answer = await post(server, tools=[TOOL])
    assert b'"input":{"a":1e400}' in answer.body


async def test_thoughts_that_are_not_wanted_are_empty_blocks() -> None:
    engine = ScriptedEngine(says(f"<think>Hm.</think>{CALL}", FinishReason.STOP), LONG)
    async with serving(engine, text=text_model(template=TEMPLATE)) as server:
        message = await both(server, tools=[TOOL], thinking={"type": "adaptive", "display": "omitted"})
    thoughts, call = message["content"]
    assert thoughts == {"type": "thinking", "thinking": "", "signature": "unsigned"}
    assert call["input"] == {"a": 1}
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_a_maximum_is_cut_to_what_the_context_leaves() -> None:
    _, engine = await ask(says("x"), max_tokens=32000)
    [request] = engine.requests
    assert request.params.max_tokens == 4096 - len(request.prompt_token_ids)


async def test_usage_counts_what_was_cached_and_thought() -> None:
    engine = ScriptedEngine(says("<think>ab</think>c", FinishReason.STOP, num_cached_tokens=16), LONG)
    async with serving(engine, text=text_model(template=TEMPLATE)) as server:
        message = await both(server)
    assert message["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 18,
        "output_tokens_details": {"thinking_tokens": 17},
    }


async def test_the_first_token_is_written_at_once_where_it_has_no_text() -> None:
    answer, engine = await ask(in_steps("<", "think>a"), stream=True)
    types = [event["type"] for event in events_of(answer)]
    assert types[:3] == ["message_start", "ping", "content_block_start"]
    assert len(engine.closed[0].write_ns) == 2


@pytest.mark.parametrize(
    ("body", "grammar", "param"),
    [
        (
            {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"const": None}}}},
            Grammar("json_schema", '{"const":null}'),
            "output_config.format.schema",
        ),
        (
            {"output_format": {"type": "json_schema", "schema": {"const": None}}},
            Grammar("json_schema", '{"const":null}'),
            "output_format.schema",
        ),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+"), "structured_outputs.regex"),
    ],
)
async def test_a_form_reaches_the_engine(body: dict[str, Any], grammar: Grammar, param: str) -> None:
    engine, checks = ScriptedEngine(says("x"), LONG), Checks()
    async with serving(engine, text=text_model(template=TEMPLATE)) as server:
        server.service.grammar_checker = checks
        assert (await post(server, thinking={"type": "disabled"}, **body)).status == 200
    assert checks.asked == [(grammar, param)]
    assert engine.requests[0].params.grammar == grammar


@pytest.mark.parametrize(
    ("choice", "names", "most"),
    [
        ({"type": "any"}, ["f", "g"], 16),
        ({"type": "tool", "name": "g"}, ["g"], 1),
        ({"type": "any", "disable_parallel_tool_use": True}, ["f", "g"], 1),
    ],
)
async def test_a_forced_call_is_a_grammar(choice: dict[str, Any], names: list[str], most: int) -> None:
    answer, engine = await ask(says(CALL), tools=[TOOL, TOOL | {"name": "g"}], tool_choice=choice)
    assert answer.status == 200, answer.body
    grammar = engine.requests[0].params.grammar
    assert grammar is not None
    calls = json.loads(grammar.source)
    assert (calls["most"], [name for name in "fg" if f'"name": "{name}"' in json.dumps(calls).replace("\\", "")]) == (
        most,
        names,
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": ...}, "Missing field `max_tokens`."),
        ({"max_tokens": 0}, "`max_tokens`: Expected"),
        ({"messages": []}, "`messages`: Expected"),
        ({"messages": [USER | {"role": "tool"}]}, "`messages[0].role`: what a tool gave is a `tool_result` block"),
        ({"messages": [USER, USER | {"role": "x"}]}, "`messages[1].role`: Expected one of 'assistant', 'system', 'us"),
        ({"messages": [USER | {"role": "system"}]}, "`messages[0].role`: What comes before the conversation is the fi"),
        # Claude Code reads these paths, takes what stands there out of the conversation, and sends it again.
        ({"messages": [content({"type": "image", "source": {}})]}, "`messages[0].content[0].image`: Only text content"),
        (
            {"messages": [USER, content({"type": "text", "text": "a"}, {"type": "document"})]},
            "`messages[1].content[1].document`: Only text con",
        ),
        (
            {"messages": [USER, content(USE, role="assistant"), content(RESULT | {"content": [{"type": "image"}]})]},
            "`messages[2].content[0].tool_result.content[0].image`: Only text content is supported.",
        ),
        ({"messages": [content(USE)]}, "`messages[0].content[0]`: a block of the type tool_use is in no message of t"),
        (
            {"messages": [USER, content(RESULT, role="assistant")]},
            "`messages[1].content[0]`: a block of the type tool_",
        ),
        ({"messages": [USER, content(USE, role="assistant")]}, "`messages[1]`: The last message is continued if it is"),
        ({"messages": [USER, content(role="assistant")]}, "`messages[1]`: The last message is continued if it is the"),
        ({"messages": [content({"type": "text"})]}, "Missing field `messages[0].content[0].text`."),
        ({"system": [{"type": "image"}]}, "`system[0].type`: Expected 'text'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`tools[0].type`: no tool 'web_search_20"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "Missing field `tools[0].name`: the tool has the form of /v1/chat",
        ),
        ({"tools": [TOOL, TOOL]}, "`tools` has two functions called f."),
        ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "`tools[0].input_schema` must be of type object"),
        ({"tool_choice": {"type": "any"}}, "`tool_choice` needs a function in `tools`."),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "Missing field `tool_choice.name`."),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "`tools` has no function g."),
        (
            {"messages": [USER, USER | {"role": "assistant"}], "output_format": {"type": "json_schema", "schema": {}}},
            "`output_format`: An answer with a form cannot continue the text of `messages[1]`.",
        ),
        ({"thinking": {"type": "on"}}, "`thinking.type`: Expected one of"),
        ({"thinking": {"type": "enabled", "budget": 5}}, "Unknown field `thinking.budget`."),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "Unknown field `output_config.task_budg"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "parallel": False}}, "Unknown field `tool_choice.parallel`."),
        ({"mcp_servers": [{"url": "x"}]}, "`mcp_servers` is not supported"),
        ({"container": "x"}, "`container` is not supported"),
        ({"temperature": 5}, "`temperature`: Expected"),
        ({"nonsense": 1}, "Unknown field `nonsense`."),
    ],
)
async def test_what_cannot_be_served_is_named(body: dict[str, Any], message: str) -> None:
    assert (await refusal_of(**body)).startswith(message)


async def test_what_asks_for_nothing_is_accepted() -> None:
    answer, _ = await ask(
        says("x"),
        "?beta=true",
        metadata={"user_id": '{"session": 1}'},
        service_tier="standard_only",
        cache_control={"type": "ephemeral"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        billing_policy={"type": "billing_policy", "bill_to": "self"},
        fallback_credit_token="t",  # noqa: S106
        mcp_servers=[],
        container=None,
        system=None,
        tool_choice=None,
    )
    assert answer.status == 200, answer.body


async def test_a_thread_is_refused_so_that_tool_runners_send_all_of_it() -> None:
    answer, _ = await ask(says("x"), thread={"type": "create"})
    assert answer.status == 400
    assert answer.json["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


@pytest.mark.parametrize("num_chars", [5000, 500_000])
async def test_a_prompt_that_is_too_long_is_called_as_claude_code_reads_it(num_chars: int) -> None:
    message = await refusal_of(messages=[USER | {"content": "x" * num_chars}])
    assert message.startswith(f"prompt is too long: {num_chars + 17} tokens > 4095 maximum. ")
    assert "`messages`" in message


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "kind"),
    [
        ("POST", "", {"data": b"{"}, 400, "invalid_request_error"),
        ("POST", "", {}, 415, "invalid_request_error"),
        ("POST", "", {"json": {"model": "other", "max_tokens": 1, "messages": [USER]}}, 404, "not_found_error"),
        ("POST", "/x", {"json": {}}, 404, "not_found_error"),
        ("GET", "", {}, 405, "invalid_request_error"),
        ("POST", "", {"json": {"system": "x" * 3000}}, 413, "request_too_large"),
        ("POST", "", {"json": {}, "headers": {"Authorization": "Bearer wrong"}}, 401, "authentication_error"),
        ("POST", "/count_tokens", {"json": {}}, 400, "invalid_request_error"),
    ],
)
async def test_errors_have_the_form_of_the_api(
    method: str, path: str, options: dict[str, Any], status: int, kind: str
) -> None:
    options = {"headers": {"Authorization": "Bearer key", "Content-Type": "application/json"}} | options
    options["headers"] |= {"x-request-id": "mine"}
    if not options.keys() & {"data", "json"}:
        options["headers"].pop("Content-Type")
    elif "json" in options:
        options["headers"].pop("Content-Type", None)
    async with serving(ScriptedEngine(), keys=["key"], max_body_bytes=2048) as server:
        answer = await server.request(method, f"/v1/messages{path}", **options)
    error = msgspec.json.decode(answer.body, type=MessageErrorReply)
    assert (answer.status, error.type, error.error.type) == (status, "error", kind)
    assert (error.request_id, answer.headers["request-id"]) == ("mine", "mine")


async def test_a_full_server_says_when_to_come_back() -> None:
    async with serving(ScriptedEngine(), is_ready=False) as server:
        answer = await post(server)
    assert (answer.status, answer.json["error"]["type"]) == (503, "overloaded_error")
    assert answer.headers["Retry-After"]


async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server, asyncio.TaskGroup() as group:
        task = group.create_task(post(server, stream=True, max_tokens=20))
        await engine.received()
        engine.say("a")
        engine.fail(EngineFailed("It broke."))
        events = events_of(await task)
    assert [event["type"] for event in events[:3]] == ["message_start", "content_block_start", "content_block_delta"]
    assert events[3:] == [
        {"type": "error", "error": {"type": "api_error", "message": "It broke."}, "request_id": events[3]["request_id"]}
    ]


async def test_ledgers_are_in_the_answer() -> None:
    headers = {"x-roseinfer-ledger": "1"}
    async with serving(ScriptedEngine(says("ab", FinishReason.STOP))) as server:
        whole = await post(server, headers=headers, max_tokens=20)
        streamed = await post(server, headers=headers, stream=True, max_tokens=20)
    assert len(whole.json["roseinfer_ledger"]) == len(events_of(streamed)[-2]["roseinfer_ledger"]) == 1


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({}, 19),
        ({"system": "Be brief."}, 19 + 17),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, 19 + 4),
        ({"messages": [USER | {"content": "x" * 5000}]}, 17 + 5000),
        ({"max_tokens": 5}, 19),
    ],
)
async def test_tokens_are_counted_without_the_engine(body: dict[str, Any], count: int) -> None:
    """Also those of a prompt that the context has no room for."""
    answer, engine = await ask(says("x"), "/count_tokens", **{"max_tokens": ..., **body})
    assert (answer.status, answer.json) == (200, {"input_tokens": count})
    assert not engine.requests
