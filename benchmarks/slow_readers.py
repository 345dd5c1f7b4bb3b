"""Streams beside readers that stop reading, into what the others' token gaps lose and what each stalled one costs.

    python -m benchmarks.slow_readers [--seconds 20] [--rounds 3] [--streams 24] [--stalled 8] [--num-threads 1]

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
import socket
import time
from dataclasses import dataclass, field
from statistics import mean, median

import aiohttp
import numpy as np

from benchmarks.probes_under_load import resident_mb, running, served
from benchmarks.servers import wait_ready

LOOK_S = 0.5  # between two looks at how many sequences the engine runs
WARM_S = 3.0
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

    def percentile(self, percentile: float) -> float:
        return float(np.percentile(self.gaps, percentile))


def body(**more: object) -> dict[str, object]:
    return {"prompt": "The", "max_tokens": 900, "stream": True, "ignore_eos": True, **more}


async def read(session: aiohttp.ClientSession, url: str, gaps: list[float], **more: object) -> None:
    """Streams one after the other, with the time between their events."""
    while True:
        async with session.post(f"{url}/v1/completions", json=body(**more)) as response:
            last_s = 0.0
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now_s = time.perf_counter()
                    if last_s:
                        gaps.append((now_s - last_s) * 1e3)
                    last_s = now_s


async def look(session: aiohttp.ClientSession, port: int, half: Half) -> int:
    """The sequences that the engine runs, which are noted."""
    async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
        page = await response.text()
    [gauge] = [line for line in page.splitlines() if line.startswith("roseinfer_num_requests_running{")]
    half.num_running.append(int(float(gauge.split()[-1])))
    return half.num_running[-1]


async def watch(session: aiohttp.ClientSession, port: int, half: Half) -> None:
    """Only look, as `stall` does."""
    while True:
        await look(session, port, half)
        await asyncio.sleep(LOOK_S)


async def stall(session: aiohttp.ClientSession, ports: tuple[int, int], half: Half, num_running: int) -> None:
    """Streams that begin to be read, so many that the engine runs `num_running`, all held until this is cancelled."""
    with contextlib.ExitStack() as held:
        while True:
            for _ in range(num_running - await look(session, ports[1], half)):
                held.enter_context(await begin_to_read(ports[0]))
                half.num_stalled += 1
            await asyncio.sleep(LOOK_S)


async def begin_to_read(port: int) -> socket.socket:
    """A stream of which the first bytes have been read."""
    content = json.dumps(body(logprobs=5)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    loop, connection = asyncio.get_running_loop(), socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await loop.sock_connect(connection, ("127.0.0.1", port))
    await loop.sock_sendall(connection, head.encode() + b"\r\n\r\n" + content)
    assert b" 200 " in await loop.sock_recv(connection, 64)
    return connection


async def run_half(arguments: argparse.Namespace, ports: tuple[int, int], pid: int, *, is_stalled: bool) -> Half:
    half, url = Half(), f"http://127.0.0.1:{ports[0]}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        work = [read(session, url, half.gaps) for _ in range(arguments.streams)]
        async with running(*work):
            await asyncio.sleep(1)
            before_mb = resident_mb(pid)
            if is_stalled:
                others = [stall(session, ports, half, arguments.streams + arguments.stalled)]
            else:
                others = [read(session, url, [], logprobs=5) for _ in range(arguments.stalled)]
                others.append(watch(session, ports[1], half))
            async with running(*others):
                await asyncio.sleep(1)  # until all of them have begun
                half.gaps.clear()
                half.num_running.clear()
                await asyncio.sleep(arguments.seconds)
                half.grown_mb = resident_mb(pid) - before_mb
    return half


async def measure(arguments: argparse.Namespace) -> None:
    with served("--runner.num-threads", str(arguments.num_threads)) as (ports, pid):
        async with asyncio.timeout(60):
            await wait_ready(f"http://127.0.0.1:{ports[0]}")
        warm = argparse.Namespace(**{**vars(arguments), "seconds": WARM_S})
        await run_half(warm, ports, pid, is_stalled=False)
        ratios, costs = [], []
        print("| round | " + " | ".join(HEADINGS) + " |")
        print("|---" * (1 + len(HEADINGS)) + "|", flush=True)
        for number in range(arguments.rounds):
            baseline = await run_half(arguments, ports, pid, is_stalled=False)
            stalled = await run_half(arguments, ports, pid, is_stalled=True)
            ratios.append(stalled.percentile(99) / baseline.percentile(99))
            costs.append(stalled.grown_mb / stalled.num_stalled)
            cells = [
                cell
                for half in (baseline, stalled)
                for cell in (mean(half.num_running), half.percentile(50), half.percentile(99))
            ]
            told = " | ".join(f"{cell:.1f}" for cell in cells)
            print(f"| {number + 1} | {told} | {ratios[-1]:.2f} | {costs[-1]:.2f} |", flush=True)
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
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
