"""Measures a server at its capacity and at four times that: latencies of accepted requests, and of refusals.

    python -m benchmarks.stress.overload [--rounds 3] [--seconds 20] [--factor 4] [--max-queue-wait-s 0.5]

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
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.http_client import prepared
from benchmarks.tables import print_head, print_row
from roseinfer.bench.definitions import Observed, percentile
from roseinfer.bench.load.client import LoadClient, PreparedRequest
from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.launcher import serving

NOTHING = "–"  # in a cell of a table
LEDGER_SHARE = 0.1
ANSWER_TIMEOUT_S = 120.0  # many times what a server takes that refuses in time
PARTS = ("receive", "tokenize", "submit_lag", "queue_wait", "prefill")  # of a ledger, up to the first token
ALL_PARTS = ("late", *PARTS, "way")
WARM_S = 3.0
CAPACITY_RUNS, AT_CAPACITY = ("closed loop", "twice that"), "at capacity"


HEADINGS = (
    *("run", "answered", "refused", "failed", "tokens/s"),
    *("TTFT p50 ms", "p99", "whole p50 ms", "p99", "refusal p50 ms", "p99", "longest Retry-After s"),
)


@dataclass
class Seen:
    """What the clients of one run saw. Latencies are seconds from the moment at which a request was due."""

    requests: list[Observed] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def answered(self) -> list[Observed]:
        return [seen for seen in self.requests if seen.is_complete]

    @property
    def refused(self) -> list[Observed]:
        return [seen for seen in self.requests if seen.status == 429]

    @property
    def first_token_s(self) -> list[float]:
        return [(seen.token_ns[0] - seen.intended_ns) / 1e9 for seen in self.answered]

    @property
    def whole_s(self) -> list[float]:
        return [whole_s(seen) for seen in self.answered]

    @property
    def goodput(self) -> float:
        """Tokens of whole answers, a second."""
        return sum(seen.num_tokens for seen in self.answered) / self.duration_s

    @property
    def answered_rate(self) -> float:
        """Whole answers a second."""
        return len(self.answered) / self.duration_s

    def add_run(self, other: "Seen") -> None:
        """Count in another run of the same kind."""
        self.requests += other.requests
        self.duration_s += other.duration_s

    def cells(self) -> list[object]:
        """A row under HEADINGS, but for the name."""
        refused = self.refused
        latencies = (self.first_token_s, self.whole_s, [whole_s(seen) for seen in refused])
        return [
            *(len(self.answered), len(refused), len(self.requests) - len(self.answered) - len(refused)),
            round(self.goodput),
            *(milliseconds(values, percent) for values in latencies for percent in (50, 99)),
            max((seen.retry_after_s or 0 for seen in refused), default=0),
        ]

    def part_cells(self) -> dict[str, list[str]]:
        """Of each part of the time to the first token: median, p99 and mean of the slowest twentieth, ms."""
        parts = [parts_s(seen) for seen in self.answered if seen.ledger is not None]
        if not parts:  # none of few answers was asked for with a ledger
            return dict.fromkeys(ALL_PARTS, [NOTHING] * 3)
        limit_s = percentile([sum(each.values()) for each in parts], 95)
        slowest = [each for each in parts if sum(each.values()) >= limit_s]
        return {
            part: [
                *(f"{percentile([each[part] for each in parts], percent) * 1e3:.1f}" for percent in (50, 99)),
                f"{np.mean([each[part] for each in slowest]) * 1e3:.1f}",
            ]
            for part in ALL_PARTS
        }


def whole_s(seen: Observed) -> float:
    """From the moment at which a request was due to the end of its answer."""
    return (seen.end_ns - seen.intended_ns) / 1e9


def parts_s(seen: Observed) -> dict[str, float]:
    """The parts of an answer's time to its first token: the client's lateness, the ledger's parts, and the rest."""
    ledger = (seen.ledger or {})["parts_ns"]
    parts = {"late": seen.submit_lag_ns / 1e9, **{name: ledger.get(name, 0) / 1e9 for name in PARTS}}
    return {**parts, "way": (seen.token_ns[0] - seen.intended_ns) / 1e9 - sum(parts.values())}


def milliseconds(values: Sequence[float], percent: float) -> str:
    return f"{percentile(values, percent) * 1e3:.0f}" if values else NOTHING


class Load:
    """All requests to one server."""

    def __init__(self, client: LoadClient, max_tokens: int) -> None:
        self._client = client
        self._max_tokens = max_tokens
        self._random = random.Random(7)

    def _request(self) -> PreparedRequest:
        prompt = [self._random.randrange(256) for _ in range(self._random.randint(16, 96))]
        max_tokens = self._random.randint(self._max_tokens // 2, self._max_tokens * 3 // 2)
        asks_ledger = self._random.random() < LEDGER_SHARE
        return prepared(prompt, max_tokens, asks_ledger=asks_ledger, temperature=1)

    async def ask(self, seen: Seen, due_ns: int) -> None:
        seen.requests.append(await self._client.send(self._request(), due_ns))

    async def closed_loop(self, num_clients: int, duration_s: float) -> Seen:
        """Every client asks again as soon as it has its answer."""
        seen, began_s = Seen(), time.monotonic()

        async def client() -> None:
            while time.monotonic() - began_s < duration_s:
                await self.ask(seen, time.monotonic_ns())

        await asyncio.gather(*(client() for _ in range(num_clients)))
        seen.duration_s = time.monotonic() - began_s
        return seen

    async def open_loop(self, rate: float, duration_s: float) -> Seen:
        """Requests come at random moments, whether or not earlier ones have been answered."""
        seen, began_s, due_s = Seen(), time.monotonic(), 0.0
        async with asyncio.TaskGroup() as group:
            while (due_s := due_s + self._random.expovariate(rate)) < duration_s:
                await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
                group.create_task(self.ask(seen, round((began_s + due_s) * 1e9)))
        seen.duration_s = time.monotonic() - began_s
        return seen


async def measure(arguments: argparse.Namespace, url: str) -> None:
    async with LoadClient(Endpoint(url), timeout_s=ANSWER_TIMEOUT_S) as client:
        load = Load(client, arguments.max_tokens)
        await load.closed_loop(arguments.max_num_seqs, WARM_S)
        report([{name: seen async for name, seen in one_round(load, arguments)} for _ in range(arguments.rounds)])


async def one_round(load: Load, arguments: argparse.Namespace) -> AsyncIterator[tuple[str, Seen]]:
    """The runs in order; the capacity is this round's."""
    closed = await load.closed_loop(2 * arguments.max_num_seqs, arguments.seconds / 2)
    yield CAPACITY_RUNS[0], closed
    full = await load.open_loop(2 * closed.answered_rate, arguments.seconds / 2)
    yield CAPACITY_RUNS[1], full
    yield AT_CAPACITY, await load.open_loop(full.answered_rate, arguments.seconds)
    overload = full.answered_rate * arguments.factor
    yield f"{arguments.factor:g} times", await load.open_loop(overload, arguments.seconds)


def report(rounds: list[dict[str, Seen]]) -> None:
    """Print all rounds together, and how far they are apart. The overload is the last run of each."""
    runs = {name: Seen() for name in rounds[0]}
    for one in rounds:
        for name, seen in one.items():
            runs[name].add_run(seen)
    print("capacity", ", ".join(f"{one[CAPACITY_RUNS[1]].answered_rate:.0f}" for one in rounds), "requests a second\n")
    print_head(*HEADINGS)
    for name, seen in runs.items():
        print_row(name, *seen.cells())
    compared = {name: seen.part_cells() for name, seen in runs.items() if name not in CAPACITY_RUNS}
    print()
    headings = (f"{name}: p50 | p99 | mean of the slowest 5 %" for name in compared)
    print_head("part of the TTFT, ms", *" | ".join(headings).split(" | "))
    for part in ALL_PARTS:
        print_row(part, *(cell for cells in compared.values() for cell in cells[part]))
    print()
    print_head("against", "all rounds", "each")
    for name, of in AGAINST.items():
        print_row(name, of(runs), ", ".join(of(one) for one in rounds))


def p99_ratio(runs: dict[str, Seen], latency: str) -> str:
    """Of the overload, against that at capacity; of a run without answers there is none."""
    at_capacity, overloaded = getattr(runs[AT_CAPACITY], latency), getattr(list(runs.values())[-1], latency)
    if not at_capacity or not overloaded:
        return NOTHING
    return f"{percentile(overloaded, 99) / percentile(at_capacity, 99):.2f}"


def goodput_ratio(runs: dict[str, Seen]) -> str:
    """Of the overload, against the peak, for which there was an answer: the rates follow from it."""
    return f"{list(runs.values())[-1].goodput / max(runs[name].goodput for name in CAPACITY_RUNS):.2f}"


AGAINST: dict[str, Callable[[dict[str, Seen]], str]] = {
    "p99 of the TTFT at capacity": lambda runs: p99_ratio(runs, "first_token_s"),
    "p99 of whole answers at capacity": lambda runs: p99_ratio(runs, "whole_s"),
    "peak of goodput": goodput_ratio,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run but the first two, which take half")
    parser.add_argument("--factor", type=float, default=4.0, help="arrivals against the capacity")
    parser.add_argument("--max-queue-wait-s", type=float, default=0.5)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer, on the average")
    parser.add_argument("--num-threads", type=int, help="of the engine; default: the server's")
    arguments = parser.parse_args()
    print(json.dumps(vars(arguments)))
    flags = [
        *("--max-num-seqs", str(arguments.max_num_seqs), "--server.max-queue-wait-s", str(arguments.max_queue_wait_s)),
        *("--server.max-inflight", "4096", "--log-level", "error"),
        *(("--runner.num-threads", str(arguments.num_threads)) if arguments.num_threads else ()),
    ]
    with serving(*flags) as server:
        asyncio.run(measure(arguments, server.url))


if __name__ == "__main__":
    main()
