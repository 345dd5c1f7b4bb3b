"""Kills or stops the telemetry process in the middle of a load, and compares the streams with those of a load without.

    python -m benchmarks.stress.telemetry_faults [--streams 64] [--max-tokens 384] [--rounds 3]
        [--faults killed stopped] [--out FILE]

The embedded model is served by a process of its own, a new one for each load: without a fault, and with each, in turn.
The fault comes AT_S after the first request, and one that is stopped goes on when the load is over. `p99` is the
client's inter-token latency, `same` says whether each stream has the text that it has without a fault, `exact` whether
the totals of requests and tokens are afterwards those of the clients, `dropped` counts facts, and `grown` is what
the front end's memory grew by during the load. The ratios at the end are of neighbouring loads.
"""

import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import summarise
from benchmarks.http_client import prepared
from benchmarks.machine import Sitting, part_parser
from benchmarks.servers import resident_mb
from benchmarks.tables import print_head, print_row
from roseinfer.bench.definitions import Observed
from roseinfer.bench.load.client import LoadClient
from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.launcher import Server, free_port, serving
from roseinfer.errors import InvalidRequest
from roseinfer.explain.evidence import get
from roseinfer.observe.metrics.scrape import Page

AT_S = 0.3
FAULTS = {"none": 0, "killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
PAGE_WITHIN_S = 60.0  # from a process that is started again


async def load(server: Server, num_streams: int, max_tokens: int, fault: int) -> tuple[list[Observed], list[str]]:
    """The streams, and the text of each; the telemetry process gets the signal while they run."""
    received: list[list[bytes]] = [[] for _ in range(num_streams)]
    async with LoadClient(Endpoint(server.url), timeout_s=120) as client:
        requests = [prepared(f"Stream {index}", max_tokens) for index in range(num_streams)]
        sending = [
            asyncio.create_task(client.send(request, on_read=partial(_keep, parts)))
            for request, parts in zip(requests, received, strict=True)
        ]
        await asyncio.sleep(AT_S)
        if fault:
            os.kill(server.telemetry_pid(), fault)
        return list(await asyncio.gather(*sending)), [text_of(b"".join(parts)) for parts in received]


def _keep(parts: list[bytes], _: int, data: bytes) -> None:
    parts.append(data)


def text_of(content: bytes) -> str:
    events = [line.removeprefix(b"data: ") for line in content.splitlines() if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in msgspec.json.decode(event)["choices"])


def page_of(server: Server) -> Page:
    """The page as soon as there is one: the API port's, which is made behind all facts, however long they take."""
    until_s = time.monotonic() + PAGE_WITHIN_S
    while True:
        try:
            return Page.parse(get(f"{server.url}/metrics", "").decode())
        except InvalidRequest:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)


def measure(log: Path, name: str, num_streams: int, max_tokens: int) -> tuple[dict[str, Any], list[str]]:
    """A row of figures, and the text of each stream."""
    with serving("--runner.num-threads", "1", ops_port=free_port(), log=log) as server:
        asyncio.run(load(server, num_streams, max_tokens, 0))  # what is usual
        before_mb, pid = resident_mb(server.pid), server.telemetry_pid()
        streams, texts = asyncio.run(load(server, num_streams, max_tokens, FAULTS[name]))
        grown_mb = resident_mb(server.pid) - before_mb
        if name == "stopped":
            os.kill(pid, signal.SIGCONT)
        page = page_of(server)
    num_tokens, num_ended = 2 * num_streams * max_tokens, sum(page.samples["roseinfer_requests_total"].values())
    figures = summarise(streams)
    return {
        "name": name,
        "itl_p99_ms": figures["itl_p99_ms"],
        "tokens_per_s": figures["tokens_per_s"],
        "grown_mb": grown_mb,
        "is_exact": (page.value("roseinfer_generation_tokens_total"), num_ended) == (num_tokens, 2 * num_streams),
        "num_dropped": page.value("roseinfer_telemetry_dropped_total", signal="fact"),
        "num_restarts": page.value("roseinfer_telemetry_restarts_total"),
    }, texts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = part_parser(__doc__, "bench/telemetry_faults.json")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", nargs="+", choices=["killed", "stopped"], default=["killed", "stopped"])
    args = parser.parse_args(arguments)
    sitting, rows = Sitting("telemetry_faults"), list[dict[str, Any]]()
    log = args.out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    print_head("fault", "p99 ms", "tokens/s", "grown MB", "same", "exact", "dropped", "restarts")
    expected: list[str] = []
    for turn in range(args.rounds):
        for name in ["none", *args.faults][:: 1 if turn % 2 else -1]:  # there and back: a drift favours none
            row, texts = measure(log, name, args.streams, args.max_tokens)
            expected = expected or texts
            row["is_same"] = texts == expected
            rows.append(row)
            figures = (row["itl_p99_ms"], row["tokens_per_s"], row["grown_mb"])
            counts = (int(row["num_dropped"]), int(row["num_restarts"]))
            print_row(name, f"{figures[0]:.2f}", *figures[1:], row["is_same"], row["is_exact"], *counts)
    quiet = [row["itl_p99_ms"] for row in rows if row["name"] == "none"]
    for name in args.faults:
        faulty = [row["itl_p99_ms"] for row in rows if row["name"] == name]
        ratios = sorted(a / b for a, b in zip(faulty, quiet, strict=True))
        print(f"{name}: p99 {statistics.median(ratios):.3f} times ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    sitting.write(args.out, {"rows": rows})
    return 0 if all(row["is_same"] and row["is_exact"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
