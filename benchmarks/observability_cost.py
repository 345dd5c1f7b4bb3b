"""What observing costs: everything on against everything off in turn, the engine's share of a step, and a scrape.

    python -m benchmarks.observability_cost [--model DIRECTORY] [--streams 64] [--max-tokens 96]

One server, its engine in a process of its own. Rounds alternate between all observers (metrics,
causes, flight recorder, logs) and none, so both meet the same machine; the load is a third process. What the engine
does for its records is on in both, since it has no switch: it is measured by itself, against the same lines with
nothing behind them. The scrape is measured by an event loop that does nothing but look at the clock.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from benchmarks.http_streams import stream
from roseinfer.config.tree import Config, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from roseinfer.engine.core.batch import Watch
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.engine.link.transport import ProcessTransport
from roseinfer.observe import logs
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.hub import MAX_DELAY_S, Hub
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.recorder.flight import Flight
from roseinfer.records import NO_TIMES, BlockedBy, Observer, StepRecord
from roseinfer.runtime.gc_pauses import GcPauses
from roseinfer.runtime.niceness import be_nicer
from roseinfer.runtime.stopwatch import UNWATCHED, Phases, Stopwatch
from roseinfer.server.app import build_app, build_runner
from roseinfer.server.instruments import Instruments
from roseinfer.server.service import Service, TextModel

PARTS = ("schedule", "launch", "stage", "forward", "sample", "wait", "commit")  # of a step on a CPU


async def load(url: str, num_streams: int, max_tokens: int) -> None:
    """The load's process: print what its clients saw."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        bodies: list[dict[str, object]] = [
            {"prompt": f"{i} is", "max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True}
            for i in range(num_streams)
        ]
        began = time.perf_counter()
        seen = await asyncio.gather(*(stream(session, url, body) for body in bodies))
        wall = time.perf_counter() - began
    assert not any(entry.error for entry in seen), next(entry.error for entry in seen if entry.error)
    tpot = statistics.mean((entry.chunks[-1] - entry.chunks[0]) / (max_tokens - 1) for entry in seen)
    print(json.dumps({"tpot_ms": tpot * 1e3, "tokens_per_s": num_streams * max_tokens / wall}))


async def run_load(url: str, num_streams: int, max_tokens: int) -> dict[str, float]:
    arguments = ("-m", "benchmarks.observability_cost", "--load", url)
    options = ("--streams", str(num_streams), "--max-tokens", str(max_tokens))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, *options, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0, "the load failed"
    figures: dict[str, float] = json.loads(output)
    return figures


class Observed:
    """A server whose observers can be exchanged between two rounds."""

    def __init__(self, model: str, num_streams: int) -> None:
        self.config = Config(
            model=ModelConfig(path=model),
            server=ServerConfig(stream_interval=1),
            scheduler=SchedulerConfig(max_num_seqs=num_streams),
            engine=EngineConfig(),
        )
        self.registry = CollectorRegistry()
        self.attribution = Attribution()
        self.metrics = Metrics("demo", "0", self.registry)
        flight, pauses = Flight(self.config, "0"), GcPauses()
        flight.listen(pauses, self.metrics, self.attribution.interruptions)
        observers = {"recorder": flight, "causes": self.attribution, "metrics": self.metrics, "logs": logs.Logs(10.0)}
        self.everything = Hub(observers.values(), MAX_DELAY_S)
        self.single = {name: Hub([observer], MAX_DELAY_S) for name, observer in observers.items()}
        self.metrics.watch(self.attribution, lambda: self.everything.spent_ns)
        self.client = AsyncEngine(ProcessTransport(self.config), self.everything, 30.0)
        self.service = Service(self.config, self.client, self.everything, None, self.attribution.ledger)

    def observe(self, observer: Observer) -> None:
        self.client.observer = self.service.observer = observer

    async def start(self) -> web.AppRunner:
        await self.client.start(lambda _: None)
        self.service.open(TextModel.load(Path(self.client.info.checkpoint_dir), None))
        gc.collect()
        gc.freeze()
        be_nicer(self.config.server.nice)  # as the program does, once its engine is there; the load inherits it

        async def handle_metrics(_: web.Request) -> web.Response:
            page, _content_type = await asyncio.to_thread(self.metrics.render, "")
            return web.Response(body=page)

        instruments = Instruments(metrics=handle_metrics, ledger=self.attribution.ledger)
        runner = build_runner(build_app(self.service, instruments), 0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner


async def compare(arguments: argparse.Namespace) -> None:
    server = Observed(arguments.model, arguments.streams)
    runner = await server.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    nothing = Hub([])
    figures: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    try:
        server.observe(nothing)
        await run_load(url, arguments.streams, arguments.max_tokens)
        for turn in range(2 * arguments.rounds):
            is_on = turn % 4 in {1, 2}  # off on on off …: a drift of the machine favours neither
            server.observe(server.everything if is_on else nothing)
            cpu_s = time.process_time()
            figures_of_load = await run_load(url, arguments.streams, arguments.max_tokens)
            cpu_us = (time.process_time() - cpu_s) * 1e6 / (arguments.streams * arguments.max_tokens)
            figures["on" if is_on else "off"].append(figures_of_load | {"cpu_us_per_token": cpu_us})
        report(figures)
        per_token_us = server.everything.spent_ns / 1e3 / (arguments.rounds * arguments.streams * arguments.max_tokens)
        print(f"all observers: {per_token_us:.1f} µs a token, {per_token_us * arguments.streams:.0f} a step")
        for name, hub in server.single.items():
            server.observe(hub)
            await run_load(url, arguments.streams, arguments.max_tokens)
            spent_us = hub.spent_ns / 1e3 / (arguments.streams * arguments.max_tokens)
            print(f"{name} alone: {spent_us:.1f} µs a token")
        server.observe(server.everything)
        await measure_scrapes(server.metrics)
    finally:
        await runner.cleanup()
        server.service.close()
        await server.client.close()


def report(figures: dict[str, list[dict[str, float]]]) -> None:
    for name in ("tpot_ms", "tokens_per_s", "cpu_us_per_token"):
        off, on = ([run[name] for run in figures[side]] for side in ("off", "on"))
        ratios = sorted(a / b for a, b in zip(on, off, strict=True))
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        medians = f"off {statistics.median(off):.2f}, on {statistics.median(on):.2f}"
        print(f"{name}: {medians}; on/off of neighbouring rounds {statistics.median(ratios):.4f} ({spread})")


async def measure_scrapes(metrics: Metrics, num_scrapes: int = 40) -> None:
    """The longest time between two turns of an event loop, in each scrape and in as long a time without one."""
    page, _ = metrics.render("")
    num_samples = sum(not line.startswith(b"#") for line in page.splitlines())
    quiet, busy, durations = [], [], []
    for _ in range(num_scrapes):
        began = time.perf_counter()
        scrape = asyncio.create_task(asyncio.to_thread(metrics.render, ""))
        busy.append(await longest_turn(scrape))
        durations.append(time.perf_counter() - began)
        quiet.append(await longest_turn(asyncio.create_task(asyncio.sleep(durations[-1]))))
    told = [f"median {statistics.median(v) * 1e3:.2f}, worst {max(v) * 1e3:.2f} ms" for v in (busy, quiet)]
    print(f"/metrics: {num_samples} samples in {statistics.median(durations) * 1e3:.1f} ms")
    print(f"longest turn of the event loop meanwhile: {told[0]}; without a scrape: {told[1]}")


async def longest_turn(task: "asyncio.Task[Any]") -> float:
    longest, last = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


def counts_of_step(count: int) -> tuple[Any, ...]:
    """What a record has between its stamps and its times, in the order of the fields: each is `count`, but for two."""
    names = StepRecord.__struct_fields__
    assert (names[:4], names[-2:]) == (("step_id", "start_ns", "tokens_ns", "end_ns"), ("phases", "ahead"))
    others = {"blocked_by": BlockedBy.NOTHING, "is_profiled": False}
    return tuple(others.get(name, count) for name in names[4:-2])


def step_record(watch: Stopwatch, counts: tuple[Any, ...]) -> StepRecord:
    """Made as the engine makes it, in the order of the fields."""
    end_ns = time.monotonic_ns()
    stamps = watch.step_id, watch.start_ns, watch.start_ns, end_ns
    values: tuple[Any, ...] = (*stamps, *counts, watch.times(), NO_TIMES)
    return StepRecord(*values)


def engine_share(num_steps: int = 20_000) -> None:
    """Microseconds that a step's stamps and record take in the engine, encoding included."""

    def step(watch: Watch) -> None:
        for part in PARTS:
            with watch(part):
                pass

    counts = counts_of_step(1_000_000)
    phases, encode = Phases(), msgspec.msgpack.Encoder().encode
    samples: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(9):
        with timed(samples["without"], num_steps):
            for _ in range(num_steps):
                step(UNWATCHED)
        with timed(samples["with"], num_steps):
            for step_id in range(num_steps):
                watch = phases.begin(step_id)
                step(watch)
                encode(step_record(watch, counts))
    cost = statistics.median(a - b for a, b in zip(samples["with"], samples["without"], strict=True))
    print(f"engine: {cost:.2f} µs a step for {len(PARTS)} stamped parts, the record and its encoding")


@contextmanager
def timed(samples: list[float], num_steps: int) -> Iterator[None]:
    began = time.perf_counter()
    yield
    samples.append((time.perf_counter() - began) / num_steps * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--model", default="roseinfer/demo", help="a checkpoint with a tokenizer")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--load", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        asyncio.run(load(arguments.load, arguments.streams, arguments.max_tokens))
        return
    engine_share()
    with Path(os.devnull).open("w") as nowhere, closing(logs.configure(Config().observe, nowhere)):
        asyncio.run(compare(arguments))


if __name__ == "__main__":
    main()
