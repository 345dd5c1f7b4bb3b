"""POST /v1/chat/completions over a scripted engine: what is its own; the rest is the path both endpoints share."""

from collections.abc import Iterable
from typing import Any

import pytest

from roseinfer.messages import Request, TokenOutput
from roseinfer.records import FinishReason
from tests.unit.server.harness import BOS, ScriptedEngine, ids, logprobs_of, says, serving, text_model, times


def content_of(events: list[Any]) -> str:
    deltas = [choice["delta"] for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)


async def test_a_whole_reply() -> None:
    async with serving(ScriptedEngine(says("Hello", FinishReason.STOP))) as server:
        answer = await server.chat()
    assert answer.status == 200
    assert answer.json["object"] == "chat.completion"
    assert answer.json["id"].startswith("chatcmpl-")
    assert answer.json["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = ids("<user>Hi\n<assistant>")
    assert server.engine.requests[0].prompt_token_ids == prompt
    assert answer.json["usage"]["prompt_tokens"] == len(prompt)


async def test_a_streamed_reply_names_the_role_in_the_first_delta_only() -> None:
    async with serving(ScriptedEngine(says("Hey"))) as server:
        answer = await server.chat(stream=True, n=2)
    *chunks, done = answer.events
    assert done == "[DONE]"
    for index in range(2):
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert deltas == [{"role": "assistant", "content": "H"}, {"content": "e"}, {"content": "y"}]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_the_whole_context_is_the_default_limit() -> None:
    async with serving(ScriptedEngine(says("x"))) as server:
        await server.chat()
        await server.chat(max_tokens=7)
        await server.chat(max_completion_tokens=8)
        await server.chat(max_tokens=9, max_completion_tokens=9)
    left = server.engine.info.max_model_len - len(server.engine.requests[0].prompt_token_ids)
    assert [request.params.max_tokens for request in server.engine.requests] == [left, 7, 8, 9]


async def test_content_in_parts_a_developer_and_an_assistant() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": "Yes?", "refusal": None, "tool_calls": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
    ]
    async with serving(ScriptedEngine(says("x"))) as server:
        assert (await server.chat(messages=messages)).status == 200
    expected = "<system>Be brief.\n<assistant>Yes?\n<user>a\nb\n<assistant>"
    assert bytes(server.engine.requests[0].prompt_token_ids).decode() == expected


async def test_what_openai_answered_can_be_sent_back() -> None:
    """As its SDK writes a message: with all fields that it knows."""
    nothing: dict[str, Any] = {
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    citation = {"type": "url_citation", "url_citation": {"url": "http://a", "title": "A", "start_index": 0}}
    messages = [
        {"role": "user", "content": "a"},
        nothing | {"role": "assistant", "content": "b", "annotations": [citation]},
        {"role": "user", "content": "c"},
        nothing | {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e", "refusal": "not told beside content"},
    ]
    async with serving(ScriptedEngine(says("x"))) as server:
        assert (await server.chat(messages=messages)).status == 200
    expected = "<user>a\n<assistant>b\n<user>c\n<assistant>No.\n<user>d\n<assistant>e\n<assistant>"
    assert bytes(server.engine.requests[0].prompt_token_ids).decode() == expected


@pytest.mark.parametrize("empty", [{"content": None, "refusal": None}, {"content": None, "tool_calls": []}, {}])
async def test_an_answer_that_said_nothing_can_be_sent_back(empty: dict[str, object]) -> None:
    """So an answer is that `max_tokens` ended within a forced call."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant"} | empty, {"role": "user", "content": "b"}]
    async with serving(ScriptedEngine(says("x"))) as server:
        assert (await server.chat(messages=messages)).status == 200
    assert bytes(server.engine.requests[0].prompt_token_ids).decode() == "<user>a\n<assistant>\n<user>b\n<assistant>"


async def test_what_openais_sdk_parsed_can_be_sent_back() -> None:
    """As it writes what `parse` and `stream` gave."""
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": '{"x": 1}', "parsed_arguments": {"x": 1}},
        "index": 0,
    }
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": '{"x": 1}', "parsed": {"x": 1}, "function_call": None},
        {"role": "assistant", "content": None, "refusal": "No.", "parsed": None},
        {"role": "assistant", "content": "b", "tool_calls": [call], "parsed": None},
    ]
    async with serving(ScriptedEngine(says("x"))) as server:
        assert (await server.chat(messages=messages)).status == 200
    expected = '<user>a\n<assistant>{"x": 1}\n<assistant>No.\n<assistant>b\n<assistant>'
    assert bytes(server.engine.requests[0].prompt_token_ids).decode() == expected


async def test_a_refusal_in_the_content_is_what_the_assistant_said() -> None:
    messages = [
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}], "refusal": None},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
        {"role": "assistant", "content": "", "refusal": "No."},
        {"role": "assistant", "content": [], "refusal": "Nor."},
    ]
    async with serving(ScriptedEngine(says("x"))) as server:
        assert (await server.chat(messages=messages)).status == 200
    expected = "<assistant>Never.\n<assistant>a\nb\n<assistant>No.\n<assistant>Nor.\n<assistant>"
    assert bytes(server.engine.requests[0].prompt_token_ids).decode() == expected


async def test_special_tokens_are_the_templates_affair() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    async with serving(ScriptedEngine(says("x")), text=text_model(template=template, with_bos=True)) as server:
        await server.chat()
    assert server.engine.requests[0].prompt_token_ids == [BOS, *ids("Hi")]


async def test_a_model_without_a_template_cannot_chat() -> None:
    async with serving(ScriptedEngine(says("x")), text=text_model(template=None)) as server:
        answer = await server.chat()
    assert answer.status == 400
    assert answer.error["param"] == "messages"
    assert "no chat template" in answer.error["message"]


async def test_a_template_that_refuses_is_the_callers_mistake() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    async with serving(ScriptedEngine(says("x"))) as server:
        answer = await server.chat(messages=messages)
    assert answer.status == 400
    assert "system comes first" in answer.error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_that_does_not_fit_is_named_as_it_was_given(name: str) -> None:
    async with serving(ScriptedEngine(says("x"))) as server:
        answer = await server.chat(None, **{name: 1000})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "context_length_exceeded", name)


async def test_a_long_conversation_is_refused_with_the_numbers() -> None:
    async with serving(ScriptedEngine(says("x"))) as server:
        answer = await server.chat(messages=[{"role": "user", "content": "x" * 5000}])
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert "128" in answer.error["message"]
    assert str(5000 + len("<user>\n<assistant>")) in answer.error["message"]


NOTHING: list[dict[str, Any]] = [
    {"tools": []},
    {"tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"modalities": ["text"]},
    {"parallel_tool_calls": True},
    {"functions": None},
    {"logprobs": False},
    {"top_logprobs": None},
    {"reasoning_effort": None},
]


@pytest.mark.parametrize("nothing", NOTHING, ids=str)
async def test_fields_that_ask_for_nothing_are_accepted(nothing: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        assert (await server.chat(**nothing)).status == 200


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"logit_bias": {"1000": 5}}, "logit_bias"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_tokens": -1, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": -2}, "max_completion_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "critic", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "refusal": "No."}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "refusal": "No."}]}, "messages[0]"),
    (
        {"messages": [{"role": "tool", "tool_call_id": "a", "content": [{"type": "refusal", "refusal": "No."}]}]},
        "messages[0]",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "messages[0].content[0].refusal"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}]},
        "messages[0].content[0].refusal",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "text": "No."}]}]},
        "messages[0].content[0].refusal",
    ),
    ({"messages": [{"role": "assistant", "content": None, "audio": {"id": "b"}}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"prompt": "a"}, "prompt"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=str)
async def test_what_is_refused_is_named(body: dict[str, Any], param: str) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.chat(**body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert server.engine.requests == []


async def test_logprobs_are_the_same_streamed_or_not() -> None:
    def reply(request: Request) -> Iterable[TokenOutput]:
        top = request.params.num_logprobs or 0
        yield TokenOutput(request.request_id, ids("é"), [logprobs_of(token_id, top) for token_id in ids("é")])
        yield TokenOutput(request.request_id, [97], [logprobs_of(97, top)], FinishReason.LENGTH, None, times())

    async with serving(ScriptedEngine(reply)) as server:
        whole = await server.chat(logprobs=True, top_logprobs=2)
        streamed = await server.chat(logprobs=True, top_logprobs=2, stream=True)
        bare = await server.chat(logprobs=True)
    content = whole.json["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [97]]
    assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd", "a"]
    assert content[2]["top_logprobs"] == [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "b", "logprob": -1.5, "bytes": [98]},
    ]
    pieces = [chunk["choices"][0]["logprobs"]["content"] for chunk in streamed.events[:-1]]
    assert [entry for piece in pieces for entry in piece] == content
    assert [entry["top_logprobs"] for entry in bare.json["choices"][0]["logprobs"]["content"]] == [[]] * 3


async def test_streaming_and_not_streaming_say_the_same() -> None:
    text = "Grüße, 世界 👋🏽 – done"
    async with serving(ScriptedEngine(says(text, FinishReason.STOP))) as server:
        whole = await server.chat()
        for interval in (1, 2, 5, 64):
            streamed = await server.chat(stream=True, stream_interval=interval)
            assert content_of(streamed.events) == whole.json["choices"][0]["message"]["content"] == text
