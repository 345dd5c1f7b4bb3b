"""An answer that is not streamed has its calls read in pieces, between which others have their turn."""

import asyncio
import json
from typing import Any

import pytest

from roseinfer.records import FinishReason
from roseinfer.text.answers.parts import Parts
from roseinfer.text.answers.tool_calls import PIECE, ToolCallParser
from tests.integration.test_http_tools import HERMES, TOOL
from tests.unit.server.harness import ScriptedEngine, serving, text_model

NUM_PIECES = 20
ARGUMENTS = json.dumps({"a": "x" * NUM_PIECES * PIECE})
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How often the event loop had gone round when a text was read, and the length of that."""
    read, push = list[tuple[int, int]](), ToolCallParser.push
    num_turns = 0

    def turn() -> None:
        nonlocal num_turns
        num_turns += 1
        asyncio.get_running_loop().call_soon(turn)

    def note(parser: ToolCallParser, text: str) -> Parts:
        if not num_turns:
            turn()
        read.append((num_turns, len(text)))
        return push(parser, text)

    monkeypatch.setattr(ToolCallParser, "push", note)
    return read


async def test_others_have_their_turn_while_a_long_call_is_read(reads: list[tuple[int, int]]) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
    engine = ScriptedEngine()
    async with serving(engine, text=text_model(template=HERMES)) as server:
        answer = asyncio.create_task(server.chat(**body))
        await engine.received()
        engine.say(CALL, FinishReason.STOP)
        [call] = (await answer).json["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": ARGUMENTS}
    turns = [turn for turn, _ in reads]
    assert len(turns) == len(set(turns)) > NUM_PIECES
    assert max(length for _, length in reads) <= PIECE
