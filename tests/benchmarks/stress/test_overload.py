"""The tables of an overload's runs, and a server that never answers."""

import asyncio

import msgspec
import pytest

from benchmarks.stress.overload import AT_CAPACITY, CAPACITY_RUNS, PARTS, Load, Seen, report
from roseinfer.bench.definitions import Observed
from roseinfer.bench.load.client import LoadClient
from roseinfer.bench.load.endpoint import Endpoint

MS = 1_000_000
NAMES = (*CAPACITY_RUNS, AT_CAPACITY, "4 times")


def seen(num_answered: int) -> Seen:
    """Of half a second; each part of the way to the first token takes 10 ms."""
    answered = Observed(
        request_id="a",
        intended_ns=0,
        sent_ns=10 * MS,
        token_ns=[(len(PARTS) + 2) * 10 * MS],
        token_counts=[64],
        end_ns=200 * MS,
        status=200,
        ledger={"parts_ns": dict.fromkeys(PARTS, 10 * MS)},
    )
    return Seen([answered] * num_answered, 0.5)


def test_each_round_prints_its_capacity_before_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """It is what was answered of twice the closed loop's rate."""
    report([{name: seen(num_answered) for name in NAMES} | {CAPACITY_RUNS[0]: seen(9)} for num_answered in (42, 45)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["capacity 84, 90 requests a second", ""]
    assert lines[2].startswith("| run |")
    assert f"| late |{' 10.0 |' * 6}" in lines
    assert "| p99 of the TTFT at capacity | 1.00 | 1.00, 1.00 |" in lines


@pytest.mark.parametrize("num_answered", [3, 0])
def test_runs_without_a_ledger_or_an_answer_are_reported_too(
    num_answered: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ledger is asked for with one request in ten, and all may be refused."""
    overloaded = seen(num_answered)
    overloaded.requests = [msgspec.structs.replace(each, ledger=None) for each in overloaded.requests]
    report([{name: seen(42) for name in NAMES} | {NAMES[-1]: overloaded}])
    lines = capsys.readouterr().out.splitlines()
    assert f"| late |{' 10.0 |' * 3}{' – |' * 3}" in lines
    ratio = "1.00" if num_answered else "–"
    assert f"| p99 of whole answers at capacity | {ratio} | {ratio} |" in lines
    assert f"| peak of goodput | {num_answered / 42:.2f} | {num_answered / 42:.2f} |" in lines


async def test_an_answer_that_never_ends_has_failed() -> None:
    has_left = asyncio.Event()

    async def begin_and_rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await reader.read()  # until the client has gone
        has_left.set()
        writer.close()

    server = await asyncio.start_server(begin_and_rest, "127.0.0.1", 0)
    run = Seen()
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, asyncio.timeout(30), LoadClient(Endpoint(url), timeout_s=0.1) as client:
        await Load(client, 64).ask(run, 0)
        await has_left.wait()
    assert (run.answered, run.refused, len(run.requests)) == ([], [], 1)
    assert run.requests[0].error.startswith("no answer")
