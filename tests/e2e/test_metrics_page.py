"""What `/metrics` says after known traffic: each series once for each request, and the laws of conservation."""

import asyncio
import gzip
import re
import subprocess
import urllib.request

import aiohttp
import pytest

from tests.conftest import require_tool
from tests.e2e.conftest import StartServer
from tests.e2e.server import PATIENCE_S, Server

pytestmark = pytest.mark.e2e

ONCE = [
    "receive", "tokenize", "submit_lag", "queue_wait", "prefill", "engine_time_to_first_token",
    "time_per_output_token",
]  # fmt: skip


def test_one_streamed_request_is_counted_once_everywhere(start_server: StartServer) -> None:
    server = start_server()
    status, _ = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "bogus": 1})
    assert status == 400
    asyncio.run(stream_all(server, count=1, max_tokens=12))
    samples = server.wait_metrics(roseinfer_http_inflight_streams=0)
    parts = {name: samples[f"roseinfer_{name}_seconds_count"] for name in ONCE}
    assert samples['roseinfer_request_duration_seconds_count{api="completions"}'] == 2  # the refused one ended too
    assert set(parts.values()) == {1}  # a body that does not fit counts as refused, not as received
    assert samples["roseinfer_inter_token_latency_seconds_count"] == 11
    assert samples["roseinfer_stream_gap_seconds_count"] <= 11  # tokens that are due together share a write
    assert samples["roseinfer_generation_tokens_total"] == 12
    assert samples['roseinfer_requests_total{api="completions",finish_reason="length"}'] == 1
    assert samples['roseinfer_requests_total{api="completions",finish_reason="rejected"}'] == 1
    assert samples['roseinfer_requests_rejected_total{code="invalid_value"}'] == 1
    assert samples["roseinfer_gc_pause_seconds_count"] >= 1  # the one that ends the start-up
    assert samples['roseinfer_time_to_first_token_seconds_count{streamed="true"}'] == 1
    assert samples['roseinfer_time_to_first_token_seconds_count{streamed="false"}'] == 0
    first_token = samples['roseinfer_time_to_first_token_seconds_sum{streamed="true"}']
    named = ["receive", "tokenize", "submit_lag", "queue_wait", "prefill"]
    assert 0 < sum(samples[f"roseinfer_{name}_seconds_sum"] for name in named) < first_token


def test_sixty_four_streams_without_an_error_and_every_law_holds(start_server: StartServer) -> None:
    server = start_server()
    results = asyncio.run(stream_all(server, count=64, max_tokens=24))
    assert [text.count('"finish_reason":"length"') for text in results] == [1] * 64
    assert all(text.endswith("data: [DONE]\n\n") for text in results)
    samples = server.wait_metrics(roseinfer_http_inflight_streams=0)
    assert samples["roseinfer_requests_received_total"] == 64
    assert samples['roseinfer_requests_total{api="completions",finish_reason="length"}'] == 64
    assert samples["roseinfer_generation_tokens_total"] == 64 * 24
    assert samples["roseinfer_inter_token_latency_seconds_count"] == 64 * 23
    assert samples["roseinfer_stream_gap_seconds_count"] <= 64 * 23
    assert samples["roseinfer_num_requests_running"] == samples["roseinfer_num_requests_waiting"] == 0
    assert samples['roseinfer_kv_cache_blocks{state="used"}'] == 0


def test_a_large_page_is_sent_compressed_to_who_takes_it(server: Server) -> None:
    def fetch(path: str, encoding: str) -> tuple[str | None, bytes]:
        request = urllib.request.Request(server.url + path, headers={"Accept-Encoding": encoding})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.headers["Content-Encoding"], response.read()

    (plain, page), (coding, packed) = fetch("/metrics", "identity"), fetch("/metrics", "gzip")
    assert (plain, coding) == (None, "gzip")
    assert len(packed) < len(page) / 6
    assert gzip.decompress(packed).startswith(page[:200])
    assert fetch("/metrics/load", "gzip")[0] is None, "it is small, and asked for often"


def test_the_page_is_clean(server: Server) -> None:
    page = re.sub(r"(?m)^.*vllm:.*\n", "", server.page())  # whose colons promtool refuses
    result = subprocess.run(
        [require_tool("promtool"), "check", "metrics"], input=page, text=True, capture_output=True, check=False
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


async def stream_all(server: Server, count: int, max_tokens: int) -> list[str]:
    """`count` streams at once; each one's whole body."""

    async def one(session: aiohttp.ClientSession, index: int) -> str:
        body = {"prompt": f"Request {index}", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return await response.text()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(one(session, index) for index in range(count)))
