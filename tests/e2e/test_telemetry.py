"""The telemetry process is killed and stopped under 64 streams: no stream differs or waits, totals are true."""

import asyncio
import http.client
import json
import os
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import aiohttp
import pytest

from roseinfer.bench.load.launcher import free_port
from tests.e2e.conftest import StartServer
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

NUM_STREAMS = 64
MAX_TOKENS = 120
LATE_S = 5.0  # for what has a deadline of a quarter of a second: a bound for a busy machine


async def stream(session: aiohttp.ClientSession, url: str, index: int, started: asyncio.Event) -> str:
    """The text of one stream, and how it ended."""
    body = {"prompt": f"Story {index} begins", "max_tokens": MAX_TOKENS, "stream": True, "temperature": 0}
    text, reason = "", None
    async with session.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"] or [{"text": "", "finish_reason": reason}]
                text, reason = text + choice["text"], choice["finish_reason"] or reason
                started.set()
    return f"{text}|{reason}"


def streams(server: Server, harm: Callable[[], None] = lambda: None) -> list[str]:
    """All texts; `harm` is done once the first has begun."""

    async def run() -> list[str]:
        started = asyncio.Event()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            asked = [asyncio.create_task(stream(session, server.url, i, started)) for i in range(NUM_STREAMS)]
            await started.wait()
            harm()
            return await asyncio.gather(*asked)

    return asyncio.run(run())


def check_totals(server: Server, num_requests: int, num_tokens: int) -> dict[str, float]:
    samples = server.wait_metrics(roseinfer_http_inflight_streams=0)
    assert samples["roseinfer_generation_tokens_total"] == num_tokens
    assert samples["roseinfer_requests_received_total"] == num_requests
    assert samples['roseinfer_requests_total{api="completions",finish_reason="length"}'] == num_requests
    return samples


def resident_mib(pid: int) -> float:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def ops_status(port: int, path: str) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def test_killed_under_64_streams(start_server: StartServer) -> None:
    ops_port = free_port()
    server = start_server("--server.ops-port", str(ops_port), "--max-num-seqs", str(NUM_STREAMS))
    whole = streams(server)
    assert all(text.endswith("|length") for text in whole)
    first = server.telemetry_pid()
    check_totals(server, NUM_STREAMS, NUM_STREAMS * MAX_TOKENS)

    assert streams(server, lambda: os.kill(first, signal.SIGKILL)) == whole
    while server.status("/metrics") != 200:  # it is being started
        assert server.status("/readyz") == 200
    samples = check_totals(server, 2 * NUM_STREAMS, 2 * NUM_STREAMS * MAX_TOKENS)
    assert samples["roseinfer_telemetry_restarts_total"] == 1
    assert samples['roseinfer_telemetry_dropped_total{signal="fact"}'] > 0
    second = server.telemetry_pid()
    assert second != first

    os.kill(second, signal.SIGKILL)
    while server.status("/metrics") != 503:
        pass
    assert streams(server) == whole
    assert server.status("/metrics") == 503, "a second death in ten minutes is not made good"
    paths = ("/livez", "/readyz", "/metrics", "/debug/requests")
    assert [ops_status(ops_port, path) for path in paths] == [200, 200, 503, 404]
    assert server.stop() == 0


def test_stopped_under_64_streams(start_server: StartServer) -> None:
    server = start_server("--max-num-seqs", str(NUM_STREAMS))
    whole = streams(server)
    before_mib, pid = resident_mib(server.pid), server.telemetry_pid()
    assert streams(server, lambda: os.kill(pid, signal.SIGSTOP)) == whole
    status, reply = server.post("/v1/completions", {"prompt": "x", "max_tokens": 4}, **{"x-roseinfer-ledger": "1"})
    assert status == 200
    (ledger,) = reply["roseinfer_ledger"]
    assert sum(ledger["parts_ns"].values()) == ledger["total_ns"] < LATE_S * 1e9
    assert server.status("/livez") == server.status("/readyz") == 200
    assert resident_mib(server.pid) - before_mib < 32
    with suppress(ProcessLookupError):  # on a slow machine it has been ended by now, as one that hangs
        os.kill(pid, signal.SIGCONT)
    while server.status("/metrics") != 200:  # it has a processor last
        pass
    samples = server.wait_metrics(roseinfer_http_inflight_streams=0)
    num_tokens = 2 * NUM_STREAMS * MAX_TOKENS + reply["usage"]["completion_tokens"]
    assert samples["roseinfer_generation_tokens_total"] == num_tokens


def test_what_serves_the_operations_port_is_gone_with_the_server(start_server: StartServer) -> None:
    server = start_server("--server.ops-port", str(free_port()))
    pid = server.telemetry_pid()
    assert b"telemetry" in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, server.pid)
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        pass
