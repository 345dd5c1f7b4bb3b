"""Measures how long `/livez` takes on both ports while a server gets its worst bodies: a row for each kind of body.

    python -m benchmarks.stress.probes_under_load [--seconds 10] [--streams 8] [--only NAME]

The embedded model is served by a process of its own. One client for each kind of body sends it again as soon as it has
its answer, beside streams that never end; a probe in a process of its own asks each port a hundred times a second. The
bodies are as long as the default limit allows, two megabytes, or ask for as long an answer as there is. A last row is
for all kinds at once. Two lines more give the time and the memory of one request each: a bomb of 256 MB behind a
`Content-Encoding`, and one without.
"""

import argparse
import asyncio
import contextlib
import gzip
import http.client
import json
import multiprocessing
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import roseinfer
from benchmarks.http_client import prepared
from benchmarks.servers import resident_mb
from benchmarks.tables import print_head, print_row
from roseinfer.bench.definitions import percentile
from roseinfer.bench.load.client import LoadClient
from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.launcher import Server, free_port, serving

PROBE_INTERVAL_S = 0.01
BOMB_MB = 256
HEADERS = {"Content-Type": "application/json"}
DEMO = Path(roseinfer.__file__).parent / "demo"
LONG_TOKEN = "-" * 16  # none of the embedded model's that may stand in a JSON string is longer


def bodies() -> dict[str, tuple[str, bytes]]:
    """By name: where it is sent, and two megabytes of it or nearly, or what has a long answer."""
    text = "hello world " * 150_000
    scattered = "".join(chr(0x4E00 + i % 20_000) for i in range(600_000))
    asked = {
        "text": ("/v1/completions", {"prompt": text}),
        "scattered text": ("/v1/completions", {"prompt": scattered}),
        "token ids": ("/v1/completions", {"prompt": [1] * 650_000}),
        "lists of token ids": ("/v1/completions", {"prompt": [[1] * 10_000] * 64}),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        "many messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 55_000}),
        "earlier tool calls": ("/v1/chat/completions", {"messages": [_call_of(f'{{"a":[{"[]," * 600_000}0]}}')]}),
        "tokenize": ("/tokenize", {"prompt": text}),
        "tokenize, spelled": ("/tokenize", {"prompt": text, "return_token_strs": True}),
        "detokenize": ("/detokenize", {"tokens": [5] * 650_000}),
        "unknown field": ("/v1/completions", {"prompt": "a", "x": [1.5] * 400_000}),
        "scored prompts": (
            "/v1/completions",
            {"prompt": [[1] * 1023] * 64, "echo": True, "max_tokens": 0, "logprobs": 3},
        ),
        "log-probabilities": (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "n": 8,
                "max_tokens": 900,
                "ignore_eos": True,
                "logprobs": True,
                "top_logprobs": 20,
            },
        ),
        "tool calls": ("/v1/chat/completions", _asking_for_long_calls()),
    }
    encoded = {
        name: (path, json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())
        for name, (path, body) in asked.items()
    }
    assert max(len(body) for _, body in encoded.values()) <= 2 << 20
    return encoded | {
        "brackets": ("/v1/completions", b"[" * 2_000_000),
        "a number": ("/v1/completions", b'{"prompt": "a", "seed": ' + b"9" * 2_000_000 + b"}"),
    }


def _call_of(arguments: str) -> dict[str, Any]:
    """A message in which a function was called with these."""
    return {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


def _asking_for_long_calls() -> dict[str, Any]:
    """For eight calls, each with one text as an argument that is as long as some seconds of the embedded model."""
    vocab = json.loads((DEMO / "tokenizer.json").read_bytes())["model"]["vocab"]
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    return {
        "messages": [{"role": "user", "content": "a"}],
        "n": 8,
        "max_tokens": 400,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
        "logit_bias": {str(vocab[LONG_TOKEN]): 100},
    }


def probe(port: int, interval_s: float, seconds: float) -> list[float]:
    """The latencies of `/livez` in milliseconds, asked over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    latencies, end_s = [], time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.perf_counter()
        connection.request("GET", "/livez")
        response = connection.getresponse()
        response.read()
        latencies.append((time.perf_counter() - began_s) * 1e3)
        assert response.status == 200, response.status
        time.sleep(interval_s)
    connection.close()
    return latencies


def probe_when_asked(port: int, interval_s: float, parent: Connection) -> None:
    """Answer each number of seconds with the latencies of that time, until None comes."""
    parent.send(None)  # all is imported
    while (seconds := parent.recv()) is not None:
        parent.send(probe(port, interval_s, seconds))


class Probes:
    """A process for each port, started before there is load: a start takes a good part of a second of a processor."""

    def __init__(self, ports: tuple[int, int], interval_s: float = PROBE_INTERVAL_S) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections = []
        for port in ports:
            ours, theirs = context.Pipe()
            context.Process(target=probe_when_asked, args=(port, interval_s, theirs), daemon=True).start()
            theirs.close()  # so that a probe that dies is an end of file
            self._connections.append(ours)
        for connection in self._connections:
            connection.recv()

    async def latencies(self, seconds: float) -> list[list[float]]:
        """In milliseconds, at each port."""
        for connection in self._connections:
            connection.send(seconds)
        return [await asyncio.to_thread(connection.recv) for connection in self._connections]

    def close(self) -> None:
        """They end by themselves."""
        for connection in self._connections:
            connection.send(None)


class Load:
    """Clients of one server that send without a pause."""

    def __init__(self, client: LoadClient) -> None:
        self._client = client
        self.statuses: Counter[int] = Counter()

    async def hammer(self, path: str, body: bytes) -> None:
        while True:
            answer = await self._client.exchange(path, body, HEADERS)
            self.statuses[answer.status] += 1

    async def stream(self) -> None:
        while True:
            seen = await self._client.send(prepared("The", 200))
            assert seen.status in {200, 429}, seen.error
            if seen.status == 429:  # the prompts that are scored are many, and first
                await asyncio.sleep(0.5)

    async def rest(self) -> None:
        """Return when what was decoded or encoded for clients that have gone is over: this waits behind it."""
        answer = await self._client.exchange("/tokenize", {"prompt": "hello " * 25_000})
        assert answer.status == 200, answer.body


@contextlib.asynccontextmanager
async def running(*work: Any) -> Any:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):  # a load that died would look like a calm server
                raise ended


async def measure(arguments: argparse.Namespace, probes: Probes, server: Server) -> None:
    kinds = {name: body for name, body in bodies().items() if arguments.only in (None, name)}
    print_head("load", "its answers", "API port p50 ms", "p99", "max", "ops port p50 ms", "p99", "max")
    async with LoadClient(Endpoint(server.url), timeout_s=120) as client:
        quiet = Load(client)
        async with running(*(quiet.stream() for _ in range(arguments.streams))):
            runs: dict[str, list[tuple[str, bytes]]] = {"streams alone": []}
            runs |= {name: [body] for name, body in kinds.items()}
            runs |= {"all at once": list(kinds.values())} if arguments.only is None else {}
            for name, sent in runs.items():
                load = Load(client)
                async with running(*(load.hammer(*body) for body in sent)):
                    latencies = await probes.latencies(arguments.seconds)
                answers = ", ".join(f"{count} × {status}" for status, count in sorted(load.statuses.items()))
                cells = (percentile(port, percent) for port in latencies for percent in (50, 99, 100))
                print_row(name, answers or "–", *cells)
                await load.rest()
        if arguments.only is None:
            await drop_bombs(client, server.pid)


async def drop_bombs(client: LoadClient, pid: int) -> None:
    bomb = gzip.compress(b" " * (BOMB_MB << 20), compresslevel=9)
    for name, headers in {"announced": HEADERS | {"Content-Encoding": "gzip"}, "unannounced": HEADERS}.items():
        before_mb, began_s = resident_mb(pid), time.perf_counter()
        answer = await client.exchange("/v1/completions", bomb, headers)
        took_ms = (time.perf_counter() - began_s) * 1e3
        grown_mb = resident_mb(pid) - before_mb
        print(f"bomb of {BOMB_MB} MB in {len(bomb)} bytes, {name}: ", end="")
        print(f"{answer.status} after {took_ms:.1f} ms, {grown_mb:+.1f} MB resident")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--streams", type=int, default=8, help="beside the bodies")
    parser.add_argument("--only", choices=[*bodies()], help="one kind of body")
    arguments = parser.parse_args()
    print(json.dumps(vars(arguments)))
    with (
        serving("--log-level", "error", ops_port=free_port()) as server,
        contextlib.closing(Probes((server.port, server.ops_port))) as probes,
    ):
        asyncio.run(measure(arguments, probes, server))


if __name__ == "__main__":
    main()
