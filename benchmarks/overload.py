"""A server at its capacity and at four times that, as tables: what those let in see, and how fast the rest is refused.

    python -m benchmarks.overload [--rounds 3] [--seconds 20] [--factor 4] [--max-queue-wait-s 0.5] [--decoy]

The embedded model is served by a process of its own. A closed loop, twice as many clients as sequences run at once,
each asking again when it has its answer, gives a first idea of the capacity. Its clients take turns with the server
and may be what limits it; so requests that come at random moments (a Poisson process), twice as many a second, follow,
and what is answered of them is the capacity. Then come as many a second as that, and `--factor` times as many. All of
it is done in rounds, whose requests are counted together: at its capacity a queue is as often short as long, and a
machine is not as fast all the time. Clients do not come back when they are refused, and an answer that takes two
minutes has failed. Goodput counts the tokens of whole answers; the peak is the better of the first two runs. Latencies
are those of the requests that were let in, from the moment at which a request was due. A second table splits those of
one request in ten: the client's own lateness, the parts of the server's ledger, and the way between the two. A ledger
of each would take a fifth of the front end's time.

Client and server share the machine. What the client takes from the server for requests that are refused shows with
`--decoy`: a third run sends as many requests as the overload, of which the server gets its capacity, and a process that
does nothing else answers the others 429.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import numpy as np

from benchmarks.overload_client import NOTHING, PARTS, Load, Seen
from benchmarks.servers import free_port, wait_ready

WARM_S = 3.0
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\n{}"
CAPACITY_RUNS, AT_CAPACITY = ("closed loop", "twice that"), "at capacity"


HEADINGS = (
    *("run", "answered", "refused", "failed", "tokens/s"),
    *("TTFT p50 ms", "p99", "whole p50 ms", "p99", "refusal p50 ms", "p99", "longest Retry-After s"),
)


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
        cells = [cell for seen in compared.values() for cell in seen.part_cells(part)]
        print(f"| {part} | " + " | ".join(cells) + " |")
    print("\n| against | all rounds | each |\n|---|---|---|")
    for name, of in AGAINST.items():
        print(f"| {name} | {of(runs)} | {', '.join(of(one) for one in rounds)} |")


def p99_ratio(runs: dict[str, Seen], latency: str) -> str:
    """Of the overload, against that at capacity; of a run without answers there is none."""
    at_capacity, overloaded = getattr(runs[AT_CAPACITY], latency), getattr(list(runs.values())[-1], latency)
    if not at_capacity or not overloaded:
        return NOTHING
    return f"{np.percentile(overloaded, 99) / np.percentile(at_capacity, 99):.2f}"


def goodput_ratio(runs: dict[str, Seen]) -> str:
    """Of the overload, against the peak, for which there was an answer: the rates follow from it."""
    return f"{list(runs.values())[-1].goodput / max(runs[name].goodput for name in CAPACITY_RUNS):.2f}"


AGAINST: dict[str, Callable[[dict[str, Seen]], str]] = {
    "p99 of the TTFT at capacity": lambda runs: p99_ratio(runs, "first_token_s"),
    "p99 of whole answers at capacity": lambda runs: p99_ratio(runs, "whole_s"),
    "peak of goodput": goodput_ratio,
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
