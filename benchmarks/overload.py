"""A server at its capacity and at four times that, as tables: what those let in see, and how fast the rest is refused.

    python -m benchmarks.overload [--rounds 3] [--seconds 20] [--factor 4] [--max-queue-wait-s 0.5] [--decoy]

The embedded model is served by a process of its own. A closed loop, twice as many clients as sequences run at once,
each asking again when it has its answer, gives a first idea of the capacity. Its clients take turns with the server
and may be what limits it; so requests that come at random moments (a Poisson process), twice as many a second, follow,
and what is answered of them is the capacity. Then come as many a second as that, and `--factor` times as many. All of
it is done in rounds, whose requests are counted together: at its capacity a queue is as often short as long, and a
machine is not as fast all the time. Clients do not come back when they are refused. Goodput counts the tokens of whole
answers; the peak is the better of the first two runs. Latencies are those of the requests that were let in, from the
moment at which a request was due. A second table splits those of one request in ten: the client's own lateness, the
parts of the server's ledger, and the way between the two. A ledger of each would take a fifth of the front end's time.

Client and server share the machine, so the client knows no more of HTTP than it takes to read these answers, which is
half of what a library takes. What the client takes from the server for requests that are refused shows with
`--decoy`: a third run sends as many requests as the overload, of which the server gets its capacity, and a process that
does nothing else answers the others 429.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.servers import free_port, wait_ready

WARM_S = 3.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
LEDGER_SHARE, LEDGER_HEADER = 0.1, b"x-roseinfer-ledger: 1\r\n"
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\n{}"
CAPACITY_RUNS, AT_CAPACITY = ("closed loop", "twice that"), "at capacity"
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

    def slowest(self) -> list[dict[str, float]]:
        """The parts of the twentieth whose first tokens took longest."""
        limit_s = np.percentile([sum(parts_s.values()) for parts_s in self.parts_s], 95)
        return [parts_s for parts_s in self.parts_s if sum(parts_s.values()) >= limit_s]


HEADINGS = (
    *("run", "answered", "refused", "failed", "tokens/s"),
    *("TTFT p50 ms", "p99", "whole p50 ms", "p99", "refusal p50 ms", "p99", "longest Retry-After s"),
)


def milliseconds(values: list[float], percentile: float) -> str:
    return f"{np.percentile(values, percentile) * 1e3:.0f}" if values else "–"


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
        self._transport.close()


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
        try:
            connection = await self._connection(port)
            answer = await connection.ask(head + content)
        except OSError:
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


async def measure(arguments: argparse.Namespace, port: int) -> None:
    load = Load(port, arguments.max_tokens)
    await load.closed_loop(arguments.max_num_seqs, WARM_S)
    tell([{name: seen async for name, seen in one_round(load, arguments)} for _ in range(arguments.rounds)])


async def one_round(load: Load, arguments: argparse.Namespace) -> AsyncIterator[tuple[str, Seen]]:
    """The runs in order; the capacity is this round's."""
    closed = await load.closed_loop(2 * arguments.max_num_seqs, arguments.seconds / 2)
    yield CAPACITY_RUNS[0], closed
    full = await load.open_loop(2 * closed.answered_rate, arguments.seconds / 2)
    yield CAPACITY_RUNS[1], full
    yield AT_CAPACITY, await load.open_loop(full.answered_rate, arguments.seconds)
    overload = full.answered_rate * arguments.factor
    if arguments.decoy:
        with decoy() as load.decoy_port:
            load.decoy = 1 - 1 / arguments.factor
            yield "the rest refused elsewhere", await load.open_loop(overload, arguments.seconds)
        load.decoy = 0.0
    yield f"{arguments.factor:g} times", await load.open_loop(overload, arguments.seconds)


def tell(rounds: list[dict[str, Seen]]) -> None:
    """All rounds together, and how far they are apart. The overload is the last run of each."""
    runs = {name: Seen() for name in rounds[0]}
    for one in rounds:
        for name, seen in one.items():
            runs[name].count_in(seen)
    print("capacity", ", ".join(f"{one[CAPACITY_RUNS[1]].answered_rate:.0f}" for one in rounds), "requests a second\n")
    print("| " + " | ".join(HEADINGS) + " |")
    print("|---" * len(HEADINGS) + "|")
    for name, seen in runs.items():
        print(seen.row(name))
    compared = {name: seen for name, seen in runs.items() if name not in CAPACITY_RUNS}
    print(
        "\n| part of the TTFT, ms |" + "".join(f" {name}: p50 | p99 | mean of the slowest 5 % |" for name in compared)
    )
    print("|---" * (1 + 3 * len(compared)) + "|")
    for part in ("late", *PARTS, "way"):
        cells = [
            cell
            for seen in compared.values()
            for cell in (
                *(
                    f"{np.percentile([each[part] for each in seen.parts_s], percentile) * 1e3:.1f}"
                    for percentile in (50, 99)
                ),
                f"{np.mean([each[part] for each in seen.slowest()]) * 1e3:.1f}",
            )
        ]
        print(f"| {part} | " + " | ".join(cells) + " |")
    print("\n| against | all rounds | each |\n|---|---|---|")
    for name, of in AGAINST.items():
        print(f"| {name} | {of(runs):.2f} | {', '.join(f'{of(one):.2f}' for one in rounds)} |")


def p99_ratio(runs: dict[str, Seen], latency: str) -> float:
    """Of the overload, against that at capacity."""
    overloaded = list(runs.values())[-1]
    at_capacity = np.percentile(getattr(runs[AT_CAPACITY], latency), 99)
    return float(np.percentile(getattr(overloaded, latency), 99) / at_capacity)


AGAINST: dict[str, Callable[[dict[str, Seen]], float]] = {
    "p99 of the TTFT at capacity": lambda runs: p99_ratio(runs, "first_token_s"),
    "p99 of whole answers at capacity": lambda runs: p99_ratio(runs, "whole_s"),
    "peak of goodput": lambda runs: list(runs.values())[-1].goodput / max(runs[name].goodput for name in CAPACITY_RUNS),
}


async def refuse(port: int) -> None:
    """Answer 429 whatever comes, a request a read."""

    class Refusal(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(REFUSAL * data.count(b"POST /"))

    server = await asyncio.get_running_loop().create_server(Refusal, "127.0.0.1", port)
    await server.serve_forever()


def run_decoy(port: int) -> None:
    asyncio.run(refuse(port))


@contextlib.contextmanager
def decoy() -> Iterator[int]:
    """A process that refuses, and its port."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=run_decoy, args=(port,), daemon=True)
    process.start()
    try:
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.join()


def serve_and(arguments: argparse.Namespace, work: Callable[[argparse.Namespace, int], Awaitable[None]]) -> None:
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
    if arguments.num_threads:
        options["--runner.num-threads"] = arguments.num_threads
    command = [sys.executable, "-m", "roseinfer", "serve", *(str(word) for pair in options.items() for word in pair)]
    process = subprocess.Popen(command)  # noqa: S603 - our own server
    try:

        async def run() -> None:
            async with asyncio.timeout(60):
                await wait_ready(f"http://127.0.0.1:{port}")
            await work(arguments, port)

        asyncio.run(run())
    finally:
        process.terminate()
        process.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run but the first two, which take half")
    parser.add_argument("--factor", type=float, default=4.0, help="arrivals against the capacity")
    parser.add_argument("--max-queue-wait-s", type=float, default=0.5)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer, on the average")
    parser.add_argument("--num-threads", type=int, help="of the engine; default: the server's")
    parser.add_argument("--decoy", action="store_true", help="one run more, in which the rest is refused elsewhere")
    arguments = parser.parse_args()
    print(json.dumps(vars(arguments)))
    serve_and(arguments, measure)


if __name__ == "__main__":
    main()
