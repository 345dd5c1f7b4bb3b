"""What the runs of an overload are printed as, and what its client does with a server that never answers."""

import asyncio

import pytest

from benchmarks import overload_client
from benchmarks.overload import AT_CAPACITY, CAPACITY_RUNS, tell
from benchmarks.overload_client import PARTS, Load, Seen

NAMES = (*CAPACITY_RUNS, AT_CAPACITY, "4 times")


def seen(num_answered: int) -> Seen:
    """Of half a second."""
    made = Seen(num_tokens=64 * num_answered, duration_s=0.5)
    made.first_token_s, made.whole_s = [0.1] * num_answered, [0.2] * num_answered
    made.parts_s = [dict.fromkeys(("late", *PARTS, "way"), 0.01)] * num_answered
    return made


def test_the_capacity_of_each_round_is_told_before_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """It is what was answered of twice the closed loop's rate."""
    tell([{name: seen(num_answered) for name in NAMES} | {CAPACITY_RUNS[0]: seen(9)} for num_answered in (42, 45)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["capacity 84, 90 requests a second", ""]
    assert lines[2].startswith("| run |")
    assert f"| late |{' 10.0 |' * 6}" in lines
    assert "| p99 of the TTFT at capacity | 1.00 | 1.00, 1.00 |" in lines


@pytest.mark.parametrize("num_answered", [3, 0])
def test_runs_without_a_ledger_or_an_answer_are_told_too(num_answered: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A ledger is asked for with one request in ten, and all may be refused."""
    overloaded = seen(num_answered)
    overloaded.parts_s = []
    tell([{name: seen(42) for name in NAMES} | {NAMES[-1]: overloaded}])
    lines = capsys.readouterr().out.splitlines()
    assert f"| late |{' 10.0 |' * 3}{' – |' * 3}" in lines
    ratio = "1.00" if num_answered else "–"
    assert f"| p99 of whole answers at capacity | {ratio} | {ratio} |" in lines
    assert f"| peak of goodput | {num_answered / 42:.2f} | {num_answered / 42:.2f} |" in lines


async def test_an_answer_that_never_ends_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload_client, "ANSWER_TIMEOUT_S", 0.1)
    has_left = asyncio.Event()

    async def begin_and_rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await reader.read()  # until the client has gone
        has_left.set()
        writer.close()

    server = await asyncio.start_server(begin_and_rest, "127.0.0.1", 0)
    run = Seen()
    async with server, asyncio.timeout(30):
        await Load(server.sockets[0].getsockname()[1], 64).ask(run, 0.0)
        await has_left.wait()
    assert (run.num_failed, run.whole_s) == (1, [])
