"""Measures what readers that stop reading cost: the token gaps of the streams beside them, and memory for each.

    python -m benchmarks.stress.slow_readers [--seconds 20] [--rounds 3] [--streams 24] [--stalled 8] [--num-threads 1]

The embedded model is served by a process of its own. A round is a baseline, in which all streams are read, and the same
with `--stalled` of them not read after their first bytes, in turn. Those ask for five log-probabilities a token, so
that kernel buffers do not hide them, on both sides. As soon as the engine is through with one of them the next one
comes, so that it has as much to do on both sides, and the old one stays as it is until the round ends. Gaps are those
between the events of the streams that are read on both sides. The memory is the front end's, at the end of a stalled
half against its beginning.
"""

import argparse
import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from benchmarks.http_client import prepared
from benchmarks.servers import resident_mb
from benchmarks.stress.probes_under_load import running
from benchmarks.stress.soak_clients import open_socket
from benchmarks.tables import print_head, print_row
from roseinfer.bench.definitions import percentile
from roseinfer.bench.load.client import LoadClient
from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.event_stream import DATA
from roseinfer.bench.load.launcher import Server, serving
from roseinfer.observe.metrics.scrape import Page

LOOK_S = 0.5  # between two looks at how many sequences the engine runs
WARM_S = 3.0
MAX_TOKENS = 900
HEADINGS = (
    *("all read: sequences", "gap p50 ms", "p99", "some stalled: sequences", "gap p50 ms", "p99"),
    *("p99 ratio", "MB a stalled one"),
)


@dataclass
class Half:
    """What was seen of one half of a round: gaps in milliseconds."""

    gaps: list[float] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)  # sequences in the engine, at each look
    num_stalled: int = 0
    grown_mb: float = 0.0

    def cells(self) -> list[float]:
        return [mean(self.num_running), percentile(self.gaps, 50), percentile(self.gaps, 99)]


async def read(client: LoadClient, gaps: list[float], **more: Any) -> None:
    """Streams one after the other, with the time between their events."""
    request = prepared("The", MAX_TOKENS, temperature=1, **more)
    while True:
        last_ns: list[int] = []

        def note(now_ns: int, data: bytes, last_ns: list[int] = last_ns) -> None:
            for _ in range(data.count(DATA)):
                gaps.extend((now_ns - before_ns) / 1e6 for before_ns in last_ns)
                last_ns[:] = [now_ns]

        await client.send(request, on_read=note)


async def look(client: LoadClient, half: Half) -> int:
    """Note and return the sequences that the engine runs."""
    page = (await client.exchange("/metrics")).body.decode()
    half.num_running.append(round(Page.parse(page).value("roseinfer_num_requests_running")))
    return half.num_running[-1]


async def watch(client: LoadClient, half: Half) -> None:
    """Only look, as `stall` does."""
    while True:
        await look(client, half)
        await asyncio.sleep(LOOK_S)


async def stall(client: LoadClient, half: Half, num_running: int, server: Server) -> None:
    """Streams that begin to be read, so many that the engine runs `num_running`, all held until this is cancelled."""
    stalled = prepared("The", MAX_TOKENS, temperature=1, logprobs=5).body
    with contextlib.ExitStack() as held:
        while True:
            for _ in range(num_running - await look(client, half)):
                connection = await open_socket(server.url, stalled, receive_bytes=4096)
                held.enter_context(connection)
                assert b" 200 " in await asyncio.get_running_loop().sock_recv(connection, 64)
                half.num_stalled += 1
            await asyncio.sleep(LOOK_S)


async def run_half(arguments: argparse.Namespace, server: Server, seconds: float, *, is_stalled: bool) -> Half:
    half = Half()
    async with (
        LoadClient(Endpoint(server.url)) as client,
        running(*(read(client, half.gaps) for _ in range(arguments.streams))),
    ):
        await asyncio.sleep(1)
        before_mb = resident_mb(server.pid)
        if is_stalled:
            others = [stall(client, half, arguments.streams + arguments.stalled, server)]
        else:
            others = [read(client, [], logprobs=5) for _ in range(arguments.stalled)]
            others.append(watch(client, half))
        async with running(*others):
            await asyncio.sleep(1)  # until all of them have begun
            half.gaps.clear()
            half.num_running.clear()
            await asyncio.sleep(seconds)
            half.grown_mb = resident_mb(server.pid) - before_mb
    return half


async def measure(arguments: argparse.Namespace, server: Server) -> None:
    await run_half(arguments, server, WARM_S, is_stalled=False)
    ratios, costs = [], []
    print_head("round", *HEADINGS)
    for number in range(arguments.rounds):
        baseline = await run_half(arguments, server, arguments.seconds, is_stalled=False)
        stalled = await run_half(arguments, server, arguments.seconds, is_stalled=True)
        ratios.append(percentile(stalled.gaps, 99) / percentile(baseline.gaps, 99))
        costs.append(stalled.grown_mb / stalled.num_stalled)
        print_row(number + 1, *baseline.cells(), *stalled.cells(), f"{ratios[-1]:.2f}", f"{costs[-1]:.2f}")
    print(f"median ratio of the p99 gaps {median(ratios):.2f}, most memory of a stalled stream {max(costs):.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each half of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=24, help="that are read on both sides")
    parser.add_argument("--stalled", type=int, default=8, help="that are not read on one of them")
    parser.add_argument(
        "--num-threads",
        type=int,
        default=1,
        help="of the engine; two wait for each other while the readers have one of two cores",
    )
    arguments = parser.parse_args()
    print(json.dumps(vars(arguments)))
    with serving("--log-level", "error", "--runner.num-threads", str(arguments.num_threads)) as server:
        asyncio.run(measure(arguments, server))


if __name__ == "__main__":
    main()
