"""A server at its capacity and at four times that, as a table: what those let in see, and how fast the rest is refused.

    python benchmarks/overload.py [--seconds 20] [--factor 4] [--max-queue-wait-s 0.5] [--max-tokens 64]

The embedded model is served by a process of its own. First a closed loop finds the capacity: twice as many clients as
sequences run at once, each asking again when it has its answer. Then requests come at random moments (a Poisson
process), as many a second as the capacity is, and `--factor` times as many. Clients do not come back when they are
refused. Goodput counts the tokens of whole answers. Latencies are those of the requests that were let in, from the
moment at which a request was due.
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

WARM_S = 3.0


@dataclass
class Seen:
    """What the clients of one run saw. Seconds."""

    first_token_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    retry_after_s: list[int] = field(default_factory=list)
    num_failed: int = 0
    num_tokens: int = 0
    duration_s: float = 0.0

    @property
    def goodput(self) -> float:
        return self.num_tokens / self.duration_s

    def row(self, name: str) -> str:
        cells = [
            f"{len(self.whole_s)}",
            f"{len(self.refused_s)}",
            f"{self.num_failed}",
            f"{self.goodput:.0f}",
            *(milliseconds(self.first_token_s, percentile) for percentile in (50, 99)),
            *(milliseconds(self.whole_s, percentile) for percentile in (50, 99)),
            *(milliseconds(self.refused_s, percentile) for percentile in (50, 99)),
            f"{max(self.retry_after_s, default=0)}",
        ]
        return f"| {name} |" + "".join(f" {cell} |" for cell in cells)


HEADINGS = (
    *("run", "answered", "refused", "failed", "tokens/s"),
    *("TTFT p50 ms", "p99", "whole p50 ms", "p99", "refusal p50 ms", "p99", "longest Retry-After s"),
)


def milliseconds(values: list[float], percentile: float) -> str:
    return f"{np.percentile(values, percentile) * 1e3:.0f}" if values else "–"


class Load:
    """One client session against one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, max_tokens: int) -> None:
        self._session = session
        self._url = url
        self._max_tokens = max_tokens
        self._random = random.Random(7)

    def _body(self) -> dict[str, Any]:
        prompt = [self._random.randrange(256) for _ in range(self._random.randint(16, 96))]
        return {
            "prompt": prompt,
            "max_tokens": self._random.randint(self._max_tokens // 2, self._max_tokens * 3 // 2),
            "stream": True,
            "ignore_eos": True,
        }

    async def ask(self, seen: Seen, due_s: float) -> None:
        body = self._body()
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status == 429:
                    await response.read()
                    seen.refused_s.append(time.monotonic() - due_s)
                    seen.retry_after_s.append(int(response.headers["Retry-After"]))
                    return
                first_s, is_whole = 0.0, False
                async for line in response.content:
                    if line.startswith(b"data: ") and not first_s:
                        first_s = time.monotonic() - due_s
                    is_whole = is_whole or line.startswith(b"data: [DONE]")
        except aiohttp.ClientError:
            is_whole, first_s = False, 0.0
        if not is_whole:
            seen.num_failed += 1
            return
        seen.first_token_s.append(first_s)
        seen.whole_s.append(time.monotonic() - due_s)
        seen.num_tokens += body["max_tokens"]

    async def closed_loop(self, num_clients: int, duration_s: float) -> Seen:
        """Every client asks again as soon as it has its answer."""
        seen, began_s = Seen(), time.monotonic()

        async def client() -> None:
            while time.monotonic() - began_s < duration_s:
                await self.ask(seen, time.monotonic())

        await asyncio.gather(*(client() for _ in range(num_clients)))
        seen.duration_s = time.monotonic() - began_s
        return seen

    async def open_loop(self, rate: float, duration_s: float) -> Seen:
        """Requests come when they come."""
        seen, began_s, due_s = Seen(), time.monotonic(), 0.0
        async with asyncio.TaskGroup() as group:
            while (due_s := due_s + self._random.expovariate(rate)) < duration_s:
                await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
                group.create_task(self.ask(seen, began_s + due_s))
        seen.duration_s = time.monotonic() - began_s
        return seen


async def measure(arguments: argparse.Namespace, url: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        load = Load(session, url, arguments.max_tokens)
        await load.closed_loop(arguments.max_num_seqs, WARM_S)
        peak = await load.closed_loop(arguments.max_num_seqs + 8, arguments.seconds)
        capacity = len(peak.whole_s) / peak.duration_s
        at_capacity = await load.open_loop(capacity, arguments.seconds)
        overloaded = await load.open_loop(capacity * arguments.factor, arguments.seconds)
    print(f"capacity {capacity:.1f} requests/s, peak {peak.goodput:.0f} tokens/s")
    print("| " + " | ".join(HEADINGS) + " |")
    print("|---" * len(HEADINGS) + "|")
    print(at_capacity.row("at capacity"))
    print(overloaded.row(f"{arguments.factor:g} times"))
    ratios = [
        np.percentile(getattr(overloaded, name), 99) / np.percentile(getattr(at_capacity, name), 99)
        for name in ("first_token_s", "whole_s")
    ]
    print(f"p99 against that at capacity: TTFT {ratios[0]:.2f}, whole {ratios[1]:.2f}; ", end="")
    print(f"goodput against the peak: {overloaded.goodput / peak.goodput:.2f}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def wait_ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/readyz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.1)


def serve_and(arguments: argparse.Namespace, work: Callable[[argparse.Namespace, str], Awaitable[None]]) -> None:
    """Run the work against a server that is there for it alone."""
    port = free_port()
    options = {
        "--port": port,
        "--ops-port": 0,
        "--max-num-seqs": arguments.max_num_seqs,
        "--server.max-queue-wait-s": arguments.max_queue_wait_s,
        "--server.max-inflight": 4096,
        "--log-level": "error",
    }
    command = [sys.executable, "-m", "roseinfer", "serve", *(str(word) for pair in options.items() for word in pair)]
    process = subprocess.Popen(command)  # noqa: S603 - our own server
    try:

        async def run() -> None:
            async with asyncio.timeout(60):
                await wait_ready(f"http://127.0.0.1:{port}")
            await work(arguments, f"http://127.0.0.1:{port}")

        asyncio.run(run())
    finally:
        process.terminate()
        process.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--factor", type=float, default=4.0, help="arrivals against the capacity")
    parser.add_argument("--max-queue-wait-s", type=float, default=0.5)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer, on the average")
    arguments = parser.parse_args()
    print(json.dumps(vars(arguments)))
    serve_and(arguments, measure)


if __name__ == "__main__":
    main()
