"""The wall clock is set while requests run: nothing that has a limit looks at it."""

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roseinfer.engine.link.heartbeat import Activity
from roseinfer.records import FinishReason
from tests.integration.faults import TroubledEngine
from tests.integration.live_server import live

SOURCE = Path(__file__).parents[2] / "src" / "roseinfer"
MAY_ASK_FOR_THE_DATE = {
    *("bench", "observe"),
    "batch/lines.py",  # `created` of an answer
    "engine/kv_events.py",  # the date of a message
    "server/ops/probes.py",  # `created` of a model
    "text/templates.py",  # templates may write it into a prompt
    "server/exchange.py",  # how late a load generator was against its own schedule
    "server/api/respond.py",  # `created` of an answer
    "server/openai/responses.py",  # and when it was complete
}
WALL_CLOCKS = {
    *("time", "time_ns", "clock_gettime", "clock_gettime_ns", "CLOCK_REALTIME"),
    *("ctime", "asctime", "gmtime", "localtime", "strftime"),  # of now, unless they are told another moment
}


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
async def test_a_clock_that_jumps_ends_nothing(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """One request is being answered and one waits for its place, each with every deadline that there is."""
    now, now_ns, jumped_s = time.time, time.time_ns, 0.0
    monkeypatch.setattr(time, "time", lambda: now() + jumped_s)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(jumped_s * 1e9))
    limits = {"timeout_s": 600, "queue_timeout_s": 600, "max_tokens": 300}
    async with live(TroubledEngine(max_num_seqs=1, max_active_seqs=1).build) as server:
        server.start(2, **limits)
        await server.until(lambda: len(server.tape.timelines) == 2)
        await server.until(lambda: any(len(timeline.token_ns) > 9 for timeline in server.tape.timelines))
        assert not server.tape.finished
        jumped_s = jump_s
        assert server.client.account.activity is not Activity.STUCK
        await server.until(lambda: len(server.tape.finished) == 2)
    assert [timeline.finish_reason for timeline in server.tape.finished] == [FinishReason.LENGTH] * 2
    for timeline in server.tape.finished:
        stamps = [timeline.recv_ns, timeline.inbox_ns, timeline.scheduled_ns, *timeline.token_ns, timeline.end_ns]
        assert len(timeline.token_ns) == 300
        assert stamps == sorted(stamps)


def asks_for_the_date(source: str) -> bool:
    """Whether the source of a module names a wall clock, by whatever name it has it."""
    return any(_dates(ast.parse(source)))


def _dates(tree: ast.Module) -> Iterator[bool]:
    names_of_time = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "time"
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield any(alias.name == "datetime" for alias in names)
            case ast.ImportFrom(module="datetime"):
                yield True
            case ast.ImportFrom(module="time", names=names):
                yield any(alias.name in WALL_CLOCKS for alias in names)
            case ast.Attribute(value=ast.Name(id=module), attr=attribute):
                yield module in names_of_time and attribute in WALL_CLOCKS


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ("import time; time.time()", True),
        ("import time as t; t.time_ns()", True),
        ("import time; clock = time.time", True),
        ("from time import monotonic, time", True),
        ("from time import time_ns as monotonic_ns", True),
        ("import time; time.clock_gettime(time.CLOCK_REALTIME)", True),
        ("import time; time.strftime('%H')", True),
        ("from datetime import UTC, datetime; datetime.now(UTC)", True),
        ("def late():\n    import datetime\n    return datetime.datetime.now()", True),
        ("import time; time.monotonic_ns(); time.perf_counter(); time.sleep(1)", False),
        ("from time import monotonic, sleep", False),
        ("import asyncio; asyncio.get_running_loop().time()", False),
        ("from timelines import time", False),
    ],
)
def test_a_wall_clock_is_known_by_any_name(source: str, asks: bool) -> None:
    assert asks_for_the_date(source) is asks


def test_decisions_use_only_the_monotonic_clock() -> None:
    """The engine, the model and what the server decides ask no wall clock; dates are for people and for telemetry."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        if asks_for_the_date(path.read_text(encoding="utf-8")):
            name = str(path.relative_to(SOURCE))
            found.add(name if name in MAY_ASK_FOR_THE_DATE else name.split("/", maxsplit=1)[0])
    assert found == MAY_ASK_FOR_THE_DATE
