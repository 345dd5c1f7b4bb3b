"""The wall clock is set while requests run: nothing that has a limit looks at it."""

import ast
import time
from pathlib import Path

import pytest

from roseinfer.records import FinishReason
from tests.unit.server.harness import ScriptedEngine, says, serving

SOURCE = Path(__file__).parents[2] / "src" / "roseinfer"
MAY_ASK_FOR_THE_DATE = {"bench", "observe", "explain", "server/admin.py"} | {
    "server/exchange.py",  # how late a load generator was against its own schedule
    "server/generation.py",  # `created`
}


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
async def test_a_clock_that_jumps_ends_nothing(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    engine = ScriptedEngine()
    async with serving(engine, request_timeout_s=60.0, queue_timeout_s=60.0) as server:
        engine.reply = says("abc")
        before = await server.complete(stream=True, max_tokens=3)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + jump_s)
        after = await server.complete(stream=True, max_tokens=3)
        assert before.status == after.status == 200
        assert [timeline.finish_reason for timeline in engine.closed] == [FinishReason.LENGTH] * 2
        assert all(timeline.recv_ns <= timeline.end_ns for timeline in engine.closed)


def test_what_decides_knows_only_the_monotonic_clock() -> None:
    """The engine, the model and what the server decides ask no wall clock; dates are for people and for telemetry."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id="time"), attr="time" | "time_ns"):
                    found.add(name if name in MAY_ASK_FOR_THE_DATE else name.split("/", maxsplit=1)[0])
    assert found <= MAY_ASK_FOR_THE_DATE
