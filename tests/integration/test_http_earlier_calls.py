"""Arguments of earlier tool calls, JSON in a text: counted before they are decoded, which is not done on the loop."""

import io
import json
import threading
from typing import Any

import pytest

from roseinfer.server.connection.body import FEW_VALUES, INLINE_BYTES
from roseinfer.server.openai.chat_schema import ToolCall
from roseinfer.text.tokenizer.tokenizer import INLINE_CHARS
from tests.integration.test_http_tools import HERMES
from tests.unit.server.harness import Answer, ScriptedEngine, engine_info, says, serving, text_model

CONTEXT = 1 << 14
LIMIT = FEW_VALUES + 2 * CONTEXT
PATHS = ["/v1/chat/completions", "/tokenize"]


async def ask(path: str, *arguments: str, brackets: str = "[]") -> Answer:
    """With these arguments of earlier calls, in which empty lists are written so."""
    calls = [{"id": str(at), "function": {"name": "f", "arguments": text}} for at, text in enumerate(arguments)]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}]
    engine = ScriptedEngine(says("a"), engine_info(max_model_len=CONTEXT))
    body = json.dumps({"messages": messages}).replace("[]", brackets).encode()
    async with serving(engine, text=text_model(template=HERMES)) as server:
        return await server.request("POST", path, data=io.BytesIO(body), headers={"Content-Type": "application/json"})


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The thread that decoded, for each call."""
    threads, decode = list[threading.Thread](), ToolCall.for_template

    def note(call: ToolCall) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return decode(call)

    monkeypatch.setattr(ToolCall, "for_template", note)
    return threads


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("num_lists", "brackets"), [(600_000, "[]"), (LIMIT // 2, "\\u005b\\u005d")])
async def test_too_many_values_are_refused_before_they_are_decoded(
    path: str, num_lists: int, brackets: str, decoders: list[threading.Thread]
) -> None:
    many = f'{{"a":[{",".join(["[]"] * num_lists)}]}}'
    answer = await ask(path, "{}", many, brackets=brackets)
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert answer.error["param"] == "messages[1].tool_calls[1].function.arguments"
    assert decoders == []


async def test_as_many_as_a_body_may_hold_are_looked_at(decoders: list[threading.Thread]) -> None:
    half = json.dumps({"a": [1] * (LIMIT // 2 - 10)})
    assert len(half) > INLINE_BYTES
    answer = await ask(PATHS[0], half, half)
    assert answer.error["code"] == "context_length_exceeded"
    assert len(decoders) == 2


@pytest.mark.parametrize("path", PATHS)
async def test_long_arguments_are_decoded_away_from_the_event_loop(path: str, decoders: list[threading.Thread]) -> None:
    assert (await ask(path, "{}", json.dumps({"a": "x" * INLINE_CHARS}))).status == 200
    assert len(decoders) == 2
    assert threading.current_thread() not in decoders


async def test_a_short_conversation_is_rendered_at_once(decoders: list[threading.Thread]) -> None:
    assert (await ask(PATHS[0], '{"a": 1}')).status == 200
    assert decoders == [threading.current_thread()]
