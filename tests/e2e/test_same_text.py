"""The same request says the same, to the token: alone, among 32, streamed, cached, cut into chunks, preempted.

`pytest -s` prints how many of the 32 do. That it holds under every combination, also in bfloat16, is tested below the
HTTP door: `tests/integration/test_pipeline.py`.
"""

import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import StartServer
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

NUM_REQUESTS = 32
SHARED = "The scheduler decides which sequences advance in a step. " * 3
PREEMPTIONS = "roseinfer_preemptions_total"
Ask = Callable[[Server, dict[str, Any]], str]


def bodies() -> list[dict[str, Any]]:
    """Half greedy and half with a seed; every second one begins as others do."""
    return [
        {
            "prompt": f"{SHARED if index % 2 else ''}Request {index} asks: ",
            "max_tokens": 40,
            "ignore_eos": True,
            "temperature": 0.0 if index % 4 < 2 else 0.9,
            "seed": index,
        }
        for index in range(NUM_REQUESTS)
    ]


def whole(server: Server, body: dict[str, Any]) -> str:
    status, reply = server.post("/v1/completions", body)
    assert status == 200, reply
    assert reply["usage"]["completion_tokens"] == body["max_tokens"]
    text: str = reply["choices"][0]["text"]
    return text


def streamed(server: Server, body: dict[str, Any]) -> str:
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        events = [line.removeprefix(b"data: ").strip() for line in response if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def at_once(server: Server, ask: Ask) -> list[str]:
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        return list(threads.map(lambda body: ask(server, body), bodies()))


def test_the_same_text_alone_and_in_any_company(start_server: StartServer) -> None:
    uncached = start_server("--dtype", "float32", "--no-cache.prefix-caching", "--max-num-seqs", "32")
    alone = [whole(uncached, body) for body in bodies()]
    assert len(set(alone)) > NUM_REQUESTS / 2, "else much the same would be compared with itself"
    told = {"among 32": at_once(uncached, whole), "streamed": at_once(uncached, streamed)}
    assert uncached.metrics()[PREEMPTIONS] == 0
    assert uncached.stop() == 0
    crowded = start_server(
        *("--dtype", "float32", "--max-num-seqs", "32", "--scheduler.max-num-batched-tokens", "48"),
        *("--max-model-len", "256", "--cache.num-blocks", "24"),
    )
    told["cut into chunks, preempted"] = at_once(crowded, whole)
    after = crowded.metrics()
    assert after[PREEMPTIONS] > 0
    told["cached"] = at_once(crowded, whole)
    assert crowded.metrics()["roseinfer_prefix_cache_hits_total"] > after["roseinfer_prefix_cache_hits_total"]
    for how, texts in told.items():
        num_same = sum(text == expected for text, expected in zip(texts, alone, strict=True))
        print(f"{how}: {num_same} of {NUM_REQUESTS} texts are those of the requests alone")
        assert num_same == NUM_REQUESTS, how
