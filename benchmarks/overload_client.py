"""Requests of an overload and what their clients see. Knows neither rounds nor rates.

The client shares the machine with the server that it measures, so it knows no more of HTTP than it takes to read these
answers: that is half of what a library takes.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NOTHING = "–"  # in a cell of a table
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
LEDGER_SHARE, LEDGER_HEADER = 0.1, b"x-roseinfer-ledger: 1\r\n"
ANSWER_TIMEOUT_S = 120.0  # many times what a server takes that lets nobody wait for long
PARTS = ("receive", "tokenize", "submit_lag", "queue_wait", "prefill")  # of a ledger, up to the first token


@dataclass
class Seen:
    """What the clients of one run saw. Seconds."""

    first_token_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    retry_after_s: list[int] = field(default_factory=list)
    parts_s: list[dict[str, float]] = field(default_factory=list)  # of first tokens, where a ledger was asked for
    num_failed: int = 0
    num_tokens: int = 0
    duration_s: float = 0.0

    @property
    def goodput(self) -> float:
        return self.num_tokens / self.duration_s

    @property
    def answered_rate(self) -> float:
        """Whole answers a second."""
        return len(self.whole_s) / self.duration_s

    def count_in(self, other: "Seen") -> None:
        """What another run of the same kind saw."""
        for name in ("first_token_s", "whole_s", "refused_s", "retry_after_s", "parts_s"):
            getattr(self, name).extend(getattr(other, name))
        self.num_failed += other.num_failed
        self.num_tokens += other.num_tokens
        self.duration_s += other.duration_s

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

    def note_parts(self, late_s: float, first_s: float, ledger: dict[str, Any]) -> None:
        """Of one answer: how late it was sent, its time to the first token, and what the server says of it."""
        parts_s = {"late": late_s, **{name: ledger["parts_ns"].get(name, 0) / 1e9 for name in PARTS}}
        self.parts_s.append({**parts_s, "way": first_s - sum(parts_s.values())})

    def part_cells(self, part: str) -> list[str]:
        """Of a part of the time to the first token: median, p99 and mean of the slowest twentieth, ms."""
        if not self.parts_s:  # none of few answers was asked for with a ledger
            return [NOTHING] * 3
        values_s = [parts_s[part] for parts_s in self.parts_s]
        return [
            *(f"{np.percentile(values_s, percentile) * 1e3:.1f}" for percentile in (50, 99)),
            f"{np.mean([parts_s[part] for parts_s in self._slowest()]) * 1e3:.1f}",
        ]

    def _slowest(self) -> list[dict[str, float]]:
        """The parts of the twentieth whose first tokens took longest."""
        limit_s = np.percentile([sum(parts_s.values()) for parts_s in self.parts_s], 95)
        return [parts_s for parts_s in self.parts_s if sum(parts_s.values()) >= limit_s]


def milliseconds(values: list[float], percentile: float) -> str:
    return f"{np.percentile(values, percentile) * 1e3:.0f}" if values else NOTHING


class Connection(asyncio.Protocol):
    """One at a time, requests to a server of ours, or to the decoy, and their answers."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self.is_open = False
        self._answer = bytearray()
        self._body_at = 0  # where the body begins; 0 until the head is there
        self.status = 0
        self.first_s = 0.0  # on the clock: when the first event had come
        self._done: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionResetError())

    async def ask(self, request: bytes) -> bytes:
        """The answer, head and body. Raises OSError."""
        self._answer.clear()
        self._body_at, self.status, self.first_s = 0, 0, 0.0
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if not self._body_at:
            if (end := self._answer.find(b"\r\n\r\n")) < 0:
                return
            self._body_at, self.status = end + 4, int(self._answer[9:12])
        if self.status == 200 and not self.first_s and self._answer.find(b"data: ", self._body_at) >= 0:
            self.first_s = time.monotonic()
        if self._is_whole() and self._done is not None and not self._done.done():
            self._done.set_result(bytes(self._answer))

    def _is_whole(self) -> bool:
        if self.status == 200:  # in chunks, of which the last is empty
            return self._answer.endswith(b"\r\n0\r\n\r\n")
        return len(self._answer) >= self._body_at + int(header(self._answer, b"Content-Length"))

    def close(self) -> None:
        """Whatever is still on its way is of no use."""
        self._transport.abort()


def header(answer: bytes | bytearray, name: bytes) -> bytes:
    """Of a header that is there, what it says."""
    at = answer.index(b"\r\n" + name + b": ") + len(name) + 4
    return bytes(answer[at : answer.index(b"\r\n", at)])


class Load:
    """All requests to one server, or to a decoy in its place."""

    def __init__(self, port: int, max_tokens: int) -> None:
        self.decoy = 0.0  # the share of requests that go elsewhere, to `decoy_port`
        self.decoy_port = 0
        self._idle: dict[int, list[Connection]] = {}  # by port
        self._port = port
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

    async def _connection(self, port: int) -> Connection:
        idle = self._idle.setdefault(port, [])
        while idle:
            if (connection := idle.pop()).is_open:  # the server closes what has been idle for long
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
        return connection

    async def ask(self, seen: Seen, due_s: float) -> None:
        body, port = self._body(), self.decoy_port if self._random.random() < self.decoy else self._port
        has_ledger = self._random.random() < LEDGER_SHARE
        content = json.dumps(body).encode()
        head = HEAD + (LEDGER_HEADER if has_ledger else b"") + b"Content-Length: %d\r\n\r\n" % len(content)
        late_s = time.monotonic() - due_s
        connection = None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                connection = await self._connection(port)
                answer = await connection.ask(head + content)
        except OSError:  # TimeoutError is one
            if connection is not None:
                connection.close()
            seen.num_failed += 1
            return
        ended_s = time.monotonic()
        if b"\r\nConnection: close\r\n" in answer:
            connection.close()
        else:
            self._idle[port].append(connection)
        if connection.status == 429:
            seen.refused_s.append(ended_s - due_s)
            seen.retry_after_s.append(int(header(answer, b"Retry-After")))
            return
        if connection.status != 200 or b"data: [DONE]" not in answer:
            seen.num_failed += 1
            return
        first_s = connection.first_s - due_s
        seen.first_token_s.append(first_s)
        seen.whole_s.append(ended_s - due_s)
        seen.num_tokens += body["max_tokens"]
        if has_ledger:
            (line,) = (line for line in answer.splitlines() if b'"roseinfer_ledger"' in line)
            seen.note_parts(late_s, first_s, json.loads(line.removeprefix(b"data: "))["roseinfer_ledger"][0])

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
