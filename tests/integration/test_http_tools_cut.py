"""Calls that a stop string, a length or the model itself cuts short: told for what they are, and never as text."""

from collections.abc import Iterable
from typing import Any

import pytest

from roseinfer.messages import Request, TokenOutput
from roseinfer.records import FinishReason
from tests.integration.test_http_tools import CALL, HERMES, LLAMA, NAMED, TOOL, Checks, ask, told
from tests.unit.server.harness import ScriptedEngine, says, serving, text_model


async def test_a_call_that_was_cut_short_says_so() -> None:
    text = CALL[: CALL.index("1}}")]
    answer = await ask(ScriptedEngine(says(text, FinishReason.LENGTH)), tools=[TOOL])
    [choice] = answer.json["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
@pytest.mark.parametrize(
    ("stop", "arguments", "reason"),
    [("}", '{"a": 1', "stop"), ("1}", '{"a": ', "stop"), ("}\n", '{"a": 1}', "tool_calls")],
)
async def test_a_call_that_a_stop_string_cut_is_not_sent_as_whole(
    choice: object, stop: str, arguments: str, reason: str
) -> None:
    """Clients decode the arguments where the reason is `tool_calls`."""
    body: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "stop": [stop]}
    [whole] = (await ask(ScriptedEngine(says(CALL)), **body)).json["choices"]
    [call] = whole["message"]["tool_calls"]
    assert (call["function"]["arguments"], whole["finish_reason"]) == (arguments, reason)
    streamed = await ask(ScriptedEngine(says(CALL)), **body, stream=True)
    assert told(streamed.events) == ("", [{"name": "f", "arguments": arguments}], reason)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize(("choice", "template"), [("required", HERMES), (NAMED, HERMES), (NAMED, LLAMA)])
async def test_forced_calls_are_never_text_wherever_they_are_cut(
    choice: object, template: str, reason: FinishReason
) -> None:
    text = CALL if template == HERMES else '{"name": "f", "parameters": {"a": 1}}'
    text += f"\n{CALL}" * (choice == "required")

    def reply(request: Request) -> Iterable[TokenOutput]:
        return says(text[: request.params.seed], reason)(request)

    async with serving(ScriptedEngine(reply), text=text_model(template=template)) as server:
        server.service.grammar_checker = Checks()
        for cut in range(1, len(text) + 1):
            body: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "seed": cut}
            [whole] = (await server.chat(**body)).json["choices"]
            assert whole["message"]["content"] is None, text[:cut]
            calls = [call["function"] for call in whole["message"].get("tool_calls", [])]
            are_whole = bool(calls) and calls[-1]["arguments"] == '{"a": 1}'
            assert whole["finish_reason"] == ("tool_calls" if are_whole and reason == "stop" else reason), text[:cut]
            streamed = await server.chat(**body, stream=True)
            assert told(streamed.events) == ("", calls, whole["finish_reason"]), text[:cut]
