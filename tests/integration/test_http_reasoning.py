"""Chats with a model that reasons, over a scripted engine: thoughts are beside the content, streamed and whole."""

from typing import Any

import pytest

from roseinfer.messages import Grammar, Request, Thought
from roseinfer.records import FinishReason
from tests.integration.test_http_tools import Checks
from tests.unit.server.harness import Answer, ScriptedEngine, says, serving, text_model

TEMPLATE = (
    "{{ tools or '' }}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
    "<assistant>{% if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>' }}"
    "{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


BUDGETED = Thought("<think>", "</think>", False, 7)


async def ask(text: str, **body: Any) -> Answer:
    answer, _ = await ask_engine(text, **body)
    return answer


async def ask_engine(text: str, template: str = TEMPLATE, **body: Any) -> tuple[Answer, list[Request]]:
    """The answer, and what the engine got."""
    engine = ScriptedEngine(says(text, FinishReason.STOP))
    async with serving(engine, text=text_model(template=template)) as server:
        server.service.grammar_checker = Checks()
        return await server.chat(**body), engine.requests


def joined(events: list[Any], index: int = 0) -> tuple[dict[str, str], list[Any], str | None]:
    """The texts of a stream's choice by their fields, its calls and its finish reason, as clients join them."""
    texts: dict[str, str] = {}
    calls: list[Any] = []
    reason = None
    for choice in (choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index):
        delta, reason = choice["delta"], choice["finish_reason"]
        assert delta or reason, "no chunk is empty"
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                texts[name] = texts.get(name, "") + delta[name]
        calls += delta.get("tool_calls", [])
    return texts, calls, reason


@pytest.mark.parametrize(
    ("is_thinking", "text", "thoughts", "content"),
    [
        (None, "<think>\nSum.\n</think>\n\nFour.", "Sum.", "Four."),
        (True, "Sum.\n</think>\n\nFour.", "Sum.", "Four."),
        (True, "Sum", "Sum", None),
        (False, "<think>Four.", None, "<think>Four."),
        (None, "Four.", None, "Four."),
    ],
)
async def test_thoughts_are_beside_the_content(
    is_thinking: bool | None, text: str, thoughts: str | None, content: str | None
) -> None:
    variables = {} if is_thinking is None else {"enable_thinking": is_thinking}
    answer = await ask(text, chat_template_kwargs=variables)
    [choice] = answer.json["choices"]
    assert choice["finish_reason"] == "stop"
    assert [choice["message"].get(name) for name in ("reasoning", "reasoning_content", "content")] == [
        thoughts,
        thoughts,
        content,
    ]
    num_thought = text.find("</think>") + len("</think>") if "</think>" in text else len(text) if thoughts else 0
    assert answer.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = await ask(text, chat_template_kwargs=variables, **options)
    texts, calls, reason = joined(stream.events)
    assert (texts.get("reasoning_content"), texts.get("content"), calls, reason) == (thoughts, content, [], "stop")
    assert stream.events[-2]["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_call_is_made_behind_the_thoughts_alone(is_streamed: bool) -> None:
    """Each choice is read by itself."""
    text = f"<think>\nMaybe {CALL}?\n</think>\n{CALL}"
    answer = await ask(text, tools=[TOOL], n=2, stream=is_streamed)
    for index in (0, 1):
        if is_streamed:
            texts, calls, reason = joined(answer.events, index)
            assert [call["function"].get("name") for call in calls if "id" in call] == ["f"]
        else:
            choice = answer.json["choices"][index]
            texts, reason = choice["message"], choice["finish_reason"]
            [call] = texts["tool_calls"]
            assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
        assert (texts.get("content"), texts["reasoning_content"], reason) == (None, f"Maybe {CALL}?", "tool_calls")


@pytest.mark.parametrize(("is_thinking", "is_open"), [(None, False), (True, True), (False, None)])
@pytest.mark.parametrize(
    "form", [{"response_format": {"type": "json_object"}}, {"tools": [TOOL], "tool_choice": "required"}]
)
async def test_a_form_applies_behind_the_thoughts(
    is_thinking: bool | None, is_open: bool | None, form: dict[str, Any]
) -> None:
    variables = {} if is_thinking is None else {"enable_thinking": is_thinking}
    _, [request] = await ask_engine("x", chat_template_kwargs=variables, **form)
    grammar = request.params.grammar
    assert grammar is not None
    assert grammar.kind == ("calls" if "tools" in form else "json_schema")
    assert grammar.thought == (None if is_open is None else Thought("<think>", "</think>", is_open))


@pytest.mark.parametrize(
    ("wanted", "is_on"),
    [
        ({"reasoning_effort": "none"}, False),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
        *(({"reasoning_effort": effort}, True) for effort in ("minimal", "low", "medium", "high", "xhigh", "max")),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"reasoning_effort": None, "thinking": None, "thinking_token_budget": None}, None),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": None, "reasoning": None}, None),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "high", "exclude": True, "summary": "auto", "max_tokens": None}}, True),
        ({"reasoning": {"enabled": True}}, True),
        ({"reasoning": {"enabled": False}, "enable_thinking": False}, False),
        ({"reasoning": {}}, None),
    ],
)
async def test_the_effort_turns_the_templates_switch(wanted: dict[str, Any], is_on: bool | None) -> None:
    _, [request] = await ask_engine("x", **wanted)
    end = "<assistant>" + {None: "", True: "<think>\n", False: "<think>\n\n</think>"}[is_on]
    assert bytes(request.prompt_token_ids).decode().endswith(end)
    assert request.params.grammar is None
    answer, _ = await ask_engine("x", "{{ messages[0].content }}", **wanted | {"chat_template_kwargs": {}})
    assert answer.status == 200, "no effect where the template has no switch"


@pytest.mark.parametrize(
    ("wanted", "thought"),
    [
        ({"thinking_token_budget": 7}, BUDGETED),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, Thought("<think>", "</think>", True, 7)),
        ({"thinking": {"type": "adaptive", "budget_tokens": 7}, "thinking_token_budget": 7}, BUDGETED),
        ({"reasoning": {"max_tokens": 7}}, BUDGETED),
        ({"thinking_token_budget": -1}, None),
        ({"thinking_token_budget": 7, "chat_template_kwargs": {"enable_thinking": False}}, None),
    ],
)
async def test_thoughts_may_have_a_limit(wanted: dict[str, Any], thought: Thought | None) -> None:
    """Alone, or before a form; a prompt that has closed the thoughts needs none."""
    _, [request] = await ask_engine("x", **wanted)
    assert request.params.grammar == (None if thought is None else Grammar("text", "", thought))
    _, [request] = await ask_engine("x", response_format={"type": "json_object"}, **wanted)
    assert request.params.grammar is not None
    found = request.params.grammar.thought
    assert (found and found.max_tokens) == (thought and thought.max_tokens)


@pytest.mark.parametrize("wanted", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
async def test_thoughts_can_be_left_out(wanted: dict[str, Any]) -> None:
    for is_streamed in (False, True):
        answer = await ask("<think>Sum.</think>Four.", stream=is_streamed, **wanted)
        assert b"reasoning_content" not in answer.body
        assert b"Sum" not in answer.body
    answer = await ask("<think>Sum.</think>Four.", **wanted)
    assert answer.json["choices"][0]["message"]["content"] == "Four."
    assert answer.json["usage"]["completion_tokens_details"]["reasoning_tokens"] == 19


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("said", [{"content": "Four."}, {"content": None}, {}])
async def test_earlier_thoughts_are_given_to_the_template(field: str, said: dict[str, Any]) -> None:
    asked, more = {"role": "user", "content": "Hi"}, {"role": "user", "content": "So?"}
    _, [request] = await ask_engine("x", messages=[asked, {"role": "assistant", field: "Sum.", **said}, more])
    expected = f"<user>Hi<assistant><think>Sum.</think>{said.get('content') or ''}<user>So?<assistant>"
    assert bytes(request.prompt_token_ids).decode() == expected


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_token_budget": 6}, "thinking_token_budget"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning": {"enabled": True}, "thinking": {"type": "disabled"}}, "thinking.type"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ({"reasoning": {"budget_tokens": 5}}, "reasoning.budget_tokens"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages[0]"),
    ],
)
async def test_what_is_wrong_is_named(wrong: dict[str, Any], param: str) -> None:
    answer = await ask("x", **wrong)
    assert (answer.status, answer.error["param"]) == (400, param)
