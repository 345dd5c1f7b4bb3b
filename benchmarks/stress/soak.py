"""Soaks a server in every kind of client for some minutes, and fails unless memory, descriptors and blocks stay flat.

    python -m benchmarks.stress.soak [--minutes 10] [--round-s 30] [--seed 0] [--out build/soak.json]

The embedded model is served by processes of their own. In each round come streams, whole answers with every feature,
clients that leave, slow readers, bad input, dribbled heads and probes, all at once; then all stop, and what the server
still holds is read: after the last request has ended nothing may be left of it. The last round is a flood: a hundred
clients a second that send a request and go, for two rounds' time. Memory counts from the end of the warm-up, a fifth of
the rounds; until then what a process remembers may fill up, and the report begins with how much that is. The cache of
compiled grammars is an eighth of its default, so that it is full by then. Exit status 1 says that something grew,
leaked, broke or answered 5xx, and what. `/livez` is asked on both ports by processes that do nothing else.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.servers import resident_mb
from benchmarks.stress.probes_under_load import Probes
from benchmarks.stress.soak_clients import Clients
from benchmarks.tables import print_head, print_row
from roseinfer.bench.definitions import percentile
from roseinfer.bench.load.client import LoadClient
from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.launcher import Server, free_port, serving
from roseinfer.config.options import Config
from roseinfer.observe.metrics.scrape import Page
from roseinfer.observe.recorder.recorder import STEPS_PER_REQUEST, WRITES_PER_STEP
from roseinfer.observe.recorder.recording import STEP_DTYPE, WRITE_DTYPE
from roseinfer.text.grammar.checker import VERDICT_CACHE_BYTES
from roseinfer.text.grammar.compiler import CACHE_BYTES

IDLE_TIMEOUT_S = 15.0  # slow readers may hold theirs until the server notices that they have gone
WARM_UP_SHARE = 0.2
MAX_GROWTH_MIB = 20.0
NUM_MEDIAN = 3  # samples at either end, whose median is compared
MIN_ROUNDS = 2 * NUM_MEDIAN
COUNTS = ("num_descriptors", "num_tasks")
SIZES = ("front_end_mib", "engine_mib")
NUM_LOOKS = 10
FLOOD_ROUNDS = 2
PROBE_INTERVAL_S = 0.05
CONTEXT_TOKENS = 1024  # of the embedded model
OPTIONS = ("--max-num-seqs", "16", "--server.max-inflight", "256", "--log-level", "error")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What an idle server holds."""

    after_s: float
    front_end_mib: float  # resident memory
    engine_mib: float
    num_descriptors: int  # of both processes
    num_tasks: int  # of the front end's event loop
    num_requests: int  # in flight, running or waiting
    num_used_blocks: int
    num_missing_blocks: int  # of all, those that are neither used nor cached nor free
    num_violations: int


HEADINGS = (
    *("after s", "front end MiB", "engine MiB", "descriptors", "tasks", "requests", "used blocks", "missing blocks"),
    "violations",
)


def problems(samples: Sequence[Sample], max_growth_mib: float = MAX_GROWTH_MIB) -> list[str]:
    """What is not flat, in words; the warm-up counts only for what may never be."""
    never = ("num_requests", "num_used_blocks", "num_missing_blocks", "num_violations")
    worst = {name: max(getattr(sample, name) for sample in samples) for name in never}
    found = [f"{name} is {value} at idle" for name, value in worst.items() if value]
    grown = {name: growth(after_warm_up(samples), name) for name in (*COUNTS, *SIZES)}
    found += [f"{name} grew by {grown[name]:.0f}" for name in COUNTS if grown[name] > 0]
    found += [f"{name} grew by {grown[name]:.1f}" for name in SIZES if grown[name] >= max_growth_mib]
    return found


def after_warm_up(samples: Sequence[Sample]) -> Sequence[Sample]:
    """All but the first fifth."""
    return samples[round(len(samples) * WARM_UP_SHARE) :]


def growth(samples: Sequence[Sample], name: str) -> float:
    """From the first few samples to the last few."""
    values = [getattr(sample, name) for sample in samples]
    return float(statistics.median(values[-NUM_MEDIAN:]) - statistics.median(values[:NUM_MEDIAN]))


def memories_mib() -> dict[str, float]:
    """What each process remembers at most, and so may grow by until that is full; nothing else is to grow."""
    observe = Config().observe
    remembered = {
        "front end: recorded steps": observe.recorder_steps * STEP_DTYPE.itemsize,
        "front end: recorded writes": WRITES_PER_STEP * observe.recorder_steps * WRITE_DTYPE.itemsize,
        "front end: recorded requests": observe.recorder_steps // STEPS_PER_REQUEST * CONTEXT_TOKENS * 9,
        "front end: verdicts on grammars": VERDICT_CACHE_BYTES,
        "engine: compiled grammars": CACHE_BYTES,
    }
    return {what: num_bytes / 2**20 for what, num_bytes in remembered.items()}


class Held:
    """Reads what the server's processes hold, from /proc and from what the server itself says."""

    def __init__(self, server: Server) -> None:
        self._endpoints = (Endpoint(server.url), Endpoint(f"http://127.0.0.1:{server.ops_port}"))
        self._pids = (server.pid, server.engine_pid())
        self._began_s = time.monotonic()

    async def sample(self) -> Sample:
        """Waits until no request is left, or as long as one may take to end."""
        api, ops = (LoadClient(endpoint) for endpoint in self._endpoints)
        async with api, ops:
            deadline_s = time.monotonic() + IDLE_TIMEOUT_S
            while num_requests(page := Page.parse((await api.exchange("/metrics")).body.decode())):
                if time.monotonic() > deadline_s:
                    break
                await asyncio.sleep(0.2)
            num_tasks = json.loads((await ops.exchange("/debug/invariants")).body)["num_tasks"]
        blocks = page.by_label("roseinfer_kv_cache_blocks", "state")
        front_end, engine = (resident_mb(pid) * 1e6 / 2**20 for pid in self._pids)
        return Sample(
            after_s=time.monotonic() - self._began_s,
            front_end_mib=front_end,
            engine_mib=engine,
            num_descriptors=await self._num_descriptors(),
            num_tasks=num_tasks,
            num_requests=num_requests(page),
            num_used_blocks=round(blocks["used"]),
            num_missing_blocks=round(blocks["total"] - blocks["used"] - blocks["cached"] - blocks["free"]),
            num_violations=round(sum(page.by_label("roseinfer_invariant_violations_total", "name").values())),
        )

    async def _num_descriptors(self) -> int:
        """The fewest of some looks: the server may not have heard yet that this sample has closed its connections."""
        looks = []
        for _ in range(NUM_LOOKS):
            await asyncio.sleep(0.05)
            looks.append(sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self._pids))
        return min(looks)


def num_requests(page: Page) -> int:
    names = ("http_inflight_streams", "num_requests_running", "num_requests_waiting")
    return round(sum(page.value(f"roseinfer_{name}") for name in names))


async def soak(arguments: argparse.Namespace, server: Server) -> tuple[Clients, list[Sample], list[list[float]]]:
    """Rounds of load, each with a sample after it; and what `/livez` took in each on both ports, in milliseconds."""
    held, clients = Held(server), Clients(server.url, arguments.seed)
    samples: list[Sample] = []
    latencies_ms: list[list[float]] = []

    async def probed(load: Awaitable[None], seconds: float) -> None:
        _, latencies = await asyncio.gather(load, probes.latencies(seconds))
        latencies_ms.append([latency for port in latencies for latency in port])
        samples.append(await held.sample())
        print_row(*asdict(samples[-1]).values())

    print("Remembered at most: " + ", ".join(f"{what} {mib:.1f} MiB" for what, mib in memories_mib().items()))
    print_head(*HEADINGS)
    with closing(Probes((server.port, server.ops_port), PROBE_INTERVAL_S)) as probes:
        end_s = time.monotonic() + arguments.minutes * 60  # a round waits for its last clients, so rounds are no clock
        while len(samples) < MIN_ROUNDS or time.monotonic() < end_s:
            await probed(clients.run(arguments.round_s), arguments.round_s)
        flood_s = FLOOD_ROUNDS * arguments.round_s
        await probed(clients.flood(flood_s), flood_s)
    return clients, samples, latencies_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help=f"at least {MIN_ROUNDS} rounds are run")
    parser.add_argument("--round-s", type=float, default=30.0, help="load between two samples")
    parser.add_argument("--max-growth-mib", type=float, default=MAX_GROWTH_MIB, help="of either process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/soak.json"), metavar="FILE")
    arguments = parser.parse_args()
    with serving(*OPTIONS, ops_port=free_port()) as server:
        clients, samples, latencies_ms = asyncio.run(soak(arguments, server))
    found = problems(samples, arguments.max_growth_mib)
    if clients.num_server_errors:
        found.append(f"{clients.num_server_errors} answers were 5xx")
    if clients.num_faults:
        found.append(f"{clients.num_faults} clients saw a fault, the first ones: " + "; ".join(clients.faults[:5]))
    if server.process.returncode:
        found.append(f"the server's exit status is {server.process.returncode}")
    result = {"answers": dict(sorted(clients.statuses.items())), "faults": clients.faults, "problems": found}
    result |= {"remembered_mib": memories_mib()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**result, "samples": [asdict(sample) for sample in samples]}, indent=1))
    steady = after_warm_up(samples)
    later_ms = [latency for round_ms in latencies_ms[1:] for latency in round_ms]
    all_ms = latencies_ms[0] + later_ms
    print(
        f"{clients.statuses.total()} exchanges, {clients.num_server_errors} answers 5xx, growth after the warm-up: "
        f"front end {growth(steady, 'front_end_mib'):+.1f} MiB, engine {growth(steady, 'engine_mib'):+.1f} MiB; "
        f"/livez p50 {statistics.median(all_ms):.1f}, p99 {percentile(all_ms, 99):.1f} ms of {len(all_ms)}, "
        f"slowest {max(latencies_ms[0]):.1f} in the first round, when processes start, and {max(later_ms):.1f} later"
    )
    print("\n".join(found) or "flat")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
