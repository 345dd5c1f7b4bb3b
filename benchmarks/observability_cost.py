"""Measures what observing costs: in a served load on against off, and alone the engine's records, ranges and traces.

    python -m benchmarks.observability_cost [--model DIRECTORY] [--streams 64] [--max-tokens 96] [--only-parts]

The parts come first: both sides of a comparison take turns in this process, and the figures are medians. What the
engine does for its records has no switch, so it is measured against the same lines with nothing behind them. Ranges are
measured when a tool is attached, for instance with `NVTX_INJECTION64_PATH`.

Then one server, its engine in a process of its own, is observed by everything (metrics, causes, flight recorder, logs)
and by nothing, in rounds that alternate, so both meet the same machine; the load is a third process. A scrape is
measured by an event loop that does nothing but look at the clock.
"""

import argparse
import asyncio
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from prometheus_client import CollectorRegistry

from benchmarks.figures import summarise
from benchmarks.protocol import Worker
from benchmarks.workloads import PlannedRequest
from roseinfer.config.options import Config, ModelConfig, SchedulerConfig, ServerConfig, TracingConfig
from roseinfer.engine.core.batch import Watch
from roseinfer.engine.core.stopwatch import Phases, Stopwatch, unwatched
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.engine.link.transport import ProcessTransport
from roseinfer.observe import logs
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.hub import MAX_DELAY_S, Hub
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.recorder.flight import Flight
from roseinfer.observe.tracing import semconv
from roseinfer.observe.tracing.head_sampling import HeadSampler, make_propagator, make_sampler
from roseinfer.observe.tracing.nvtx import make_marker
from roseinfer.observe.tracing.spans import PlannedIds, Spans
from roseinfer.observe.tracing.tracing import Tracing
from roseinfer.records import NO_TIMES, Advanced, BlockedBy, FinishReason, Observer, RequestTimeline, StepRecord
from roseinfer.runtime.cpu_waits import LoopWaits
from roseinfer.runtime.gc_pauses import GcPauses
from roseinfer.runtime.niceness import FRONT_END_NICENESS, be_nicer
from roseinfer.server.app import Instruments, build_app, build_runner
from roseinfer.server.service import Service
from roseinfer.text.text_model import TextModel

PARTS = ("schedule", "launch", "stage", "forward", "sample", "wait", "commit")  # of a step on a CPU
MS = 1_000_000
NAME = "observed"  # of the model


# --- the parts, each alone ------------------------------------------------------------------------------------------


def measure_parts(num_rows: int, num_tokens: int, repeat: int) -> None:
    """Print what records, ranges and traces cost in microseconds."""
    counts, phases, encode = counts_of_step(1_000_000), Phases(), msgspec.msgpack.Encoder().encode

    def record() -> None:
        encode(step_record(run_parts(phases.begin(7)), counts))

    plain, watched, off, recorded = medians_us(
        repeat, lambda: run_parts(unwatched), lambda: run_parts(phases.begin(7)), ranged(phases), record
    )
    print(f"engine: {recorded - plain:.2f} µs a step for {len(PARTS)} stamped parts, the record and its encoding")
    print(f"ranges: {watched:.2f} µs a step with a stopwatch alone, {off:.2f} with ranges off", end="")
    marker = make_marker(enabled=True)
    if marker is not None:
        off, on = medians_us(repeat, ranged(phases), ranged(Phases(marker)))
        print(f"; {off:.2f} off and {on:.2f} on, with the tool", end="")
    quiet, as_span = step_costs(repeat, num_rows, step_record(run_parts(phases.begin(7)), counts))
    print(f"\ntracing, a step of {num_rows} rows: {quiet:.2f} µs; as a span with its parts and links: {as_span:.1f}")
    none, dropped, kept = request_costs(repeat, num_tokens)
    print(f"tracing, a request of {num_tokens} tokens: {dropped - none:.1f} µs not kept, {kept - none:.1f} kept")
    tracing, sink = make_tracing(ratio=1.0)
    tracing.on_start(timeline := make_timeline(1, num_tokens))
    tracing.on_finish(timeline)
    request = sink.spans.copy()
    (encoded,) = medians_us(repeat, lambda: encode_spans(request).SerializeToString())
    print(f"export, {len(request)} spans of a request into bytes: {encoded:.0f} µs")


def medians_us(repeat: int, *sides: Callable[[], object]) -> list[float]:
    """Each side's median, all measured in turn."""
    times: list[list[int]] = [[] for _ in sides]
    for _ in range(repeat):
        for side, taken in zip(sides, times, strict=True):
            begin_ns = time.perf_counter_ns()
            side()
            taken.append(time.perf_counter_ns() - begin_ns)
    return [statistics.median(taken) / 1e3 for taken in times]


WatchT = TypeVar("WatchT", bound=Watch)


def run_parts(watch: WatchT) -> WatchT:
    """The stamps of one step."""
    for part in PARTS:
        with watch(part):
            pass
    return watch


def ranged(phases: Phases) -> Callable[[], None]:
    """The stamps of one step inside its range."""

    def step() -> None:
        with phases.whole(7):
            run_parts(phases.begin(7))

    return step


def counts_of_step(count: int) -> tuple[Any, ...]:
    """What a record has between its stamps and its times, in the order of the fields: each is `count`, but for two."""
    names = StepRecord.__struct_fields__
    times = names.index("phases")
    assert (names[:4], names[times + 1]) == (("step_id", "start_ns", "tokens_ns", "end_ns"), "ahead")
    others = {"blocked_by": BlockedBy.NOTHING, "is_profiled": False}
    return tuple(others.get(name, count) for name in names[4:times])


def step_record(watch: Stopwatch, counts: tuple[Any, ...]) -> StepRecord:
    """Made as the engine makes it, in the order of the fields."""
    end_ns = time.monotonic_ns()
    stamps = watch.step_id, watch.start_ns, watch.start_ns, end_ns
    values: tuple[Any, ...] = (*stamps, *counts, watch.times(), NO_TIMES)
    return StepRecord(*values)


class Sink(SpanProcessor):
    """Takes spans and keeps those of the newest trace."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def admit(self) -> bool:
        self.spans.clear()
        return True

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def close(self, timeout_s: float) -> None: ...


def make_tracing(**options: float) -> tuple[Tracing, Sink]:
    config, ids, sink = TracingConfig(**options), PlannedIds(), Sink()  # type: ignore[arg-type]
    shared = {semconv.GEN_AI_REQUEST_MODEL: "m"}
    provider = TracerProvider(ALWAYS_ON, shutdown_on_exit=False, id_generator=ids)
    provider.add_span_processor(sink)
    spans = Spans(provider.get_tracer("m"), ids, 0, shared)
    head_sampler = HeadSampler(make_sampler({}, config.ratio), make_propagator({}), ids, shared)
    return Tracing(config, head_sampler, spans, sink, Metrics("m", "0", CollectorRegistry())), sink


def make_timeline(index: int, num_tokens: int) -> RequestTimeline:
    stamps = [(5 + i) * MS + i % 7 * 1000 for i in range(num_tokens)]
    return RequestTimeline(
        request_id=f"r-{index}",
        recv_ns=MS,
        parsed_ns=MS + 1,
        tokenized_ns=MS + 2,
        inbox_ns=MS + 3,
        scheduled_ns=MS + 4,
        token_ns=stamps,
        write_ns=[stamps[0] + 1, stamps[-1] + 1],
        end_ns=stamps[-1] + 2,
        finish_reason=FinishReason.LENGTH,
    )


def request_costs(repeat: int, num_tokens: int) -> list[float]:
    """Of a request from begin to end: no tracing, not kept, kept."""
    numbers = count()

    def whole(tracing: Tracing) -> Callable[[], None]:
        def run() -> None:
            timeline = make_timeline(0, 2)
            timeline.request_id, timeline.token_ns = f"r-{next(numbers)}", stamps
            tracing.on_start(timeline)
            tracing.on_finish(timeline)

        return run

    stamps = make_timeline(0, num_tokens).token_ns
    sides = [make_tracing(ratio=ratio)[0] for ratio in (0.0, 1.0)]
    return medians_us(repeat, lambda: make_timeline(0, 2), *map(whole, sides))


def step_costs(repeat: int, num_rows: int, record: StepRecord) -> list[float]:
    """Of one step: not kept, and kept as a span."""
    quiet, kept = (make_tracing(step_interval=interval)[0] for interval in (0, 1))
    advanced = Advanced.newest(make_timeline(index, 2) for index in range(num_rows))
    for tracing in (quiet, kept):
        for timeline in advanced:
            tracing.on_start(timeline)
    return medians_us(repeat, lambda: quiet.on_step(record, advanced), lambda: kept.on_step(record, advanced))


# --- a served load --------------------------------------------------------------------------------------------------


class Observed:
    """A server whose observers can be exchanged between two rounds."""

    def __init__(self, model: str, num_streams: int) -> None:
        self.config = Config(
            model=ModelConfig(path=model),
            server=ServerConfig(stream_interval=1, served_model_name=NAME),
            scheduler=SchedulerConfig(max_num_seqs=num_streams),
        )
        self.registry = CollectorRegistry()
        self.attribution = Attribution()
        self.metrics = Metrics(NAME, "0", self.registry)
        flight, pauses = Flight(self.config, "0"), GcPauses()
        flight.listen(pauses, LoopWaits(), self.metrics, self.attribution.interruptions)
        observers = {"recorder": flight, "causes": self.attribution, "metrics": self.metrics, "logs": logs.Logs(10.0)}
        self.everything = Hub(observers.values(), MAX_DELAY_S)
        self.single = {name: Hub([observer], MAX_DELAY_S) for name, observer in observers.items()}
        self.metrics.watch(self.attribution, lambda: self.everything.spent_ns)
        self.client = AsyncEngine(ProcessTransport(self.config), self.everything, 30.0)
        self.service = Service(self.config, self.client, self.everything, None, self.ledgers)

    async def ledgers(self, timelines: Sequence[RequestTimeline], until_ns: int) -> list[dict[str, object]]:
        return [self.attribution.ledger(timeline, until_ns) for timeline in timelines]

    def observe(self, observer: Observer) -> None:
        self.client.observer = self.service.observer = observer

    async def start(self) -> web.AppRunner:
        await self.client.start(lambda _: None)
        self.service.open(TextModel.load(Path(self.client.info.checkpoint_dir), None, "auto"))
        gc.collect()
        gc.freeze()
        be_nicer(FRONT_END_NICENESS)  # as the program does, once its engine is there; the load inherits it

        async def handle_metrics(_: web.Request) -> web.Response:
            page, _content_type = await asyncio.to_thread(self.metrics.render, "")
            return web.Response(body=page)

        instruments = Instruments(metrics=handle_metrics, ledgers=self.ledgers)
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
    client = Worker("load", [sys.executable, "-m", "benchmarks.http_client", url, NAME], Path("build/bench/load.log"))
    requests = [PlannedRequest(0.0, f"{i} is", [], arguments.max_tokens) for i in range(arguments.streams)]

    async def run_load() -> dict[str, float]:
        return summarise(await asyncio.to_thread(client.drive, requests))

    try:
        server.observe(nothing)
        await run_load()
        for turn in range(2 * arguments.rounds):
            is_on = turn % 4 in {1, 2}  # off on on off …: a drift of the machine favours neither
            server.observe(server.everything if is_on else nothing)
            cpu_s = time.process_time()
            figures_of_load = await run_load()
            cpu_us = (time.process_time() - cpu_s) * 1e6 / (arguments.streams * arguments.max_tokens)
            figures["on" if is_on else "off"].append(figures_of_load | {"cpu_us_per_token": cpu_us})
        report(figures)
        per_token_us = server.everything.spent_ns / 1e3 / (arguments.rounds * arguments.streams * arguments.max_tokens)
        print(f"all observers: {per_token_us:.1f} µs a token, {per_token_us * arguments.streams:.0f} a step")
        for name, hub in server.single.items():
            server.observe(hub)
            await run_load()
            spent_us = hub.spent_ns / 1e3 / (arguments.streams * arguments.max_tokens)
            print(f"{name} alone: {spent_us:.1f} µs a token")
        server.observe(server.everything)
        await measure_scrapes(server.metrics)
    finally:
        await asyncio.to_thread(client.close)
        await runner.cleanup()
        server.service.close()
        await server.client.close()


def report(figures: dict[str, list[dict[str, float]]]) -> None:
    for name in ("tpot_p50_ms", "tokens_per_s", "cpu_us_per_token"):
        off, on = ([run[name] for run in figures[side]] for side in ("off", "on"))
        ratios = sorted(a / b for a, b in zip(on, off, strict=True))
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        medians = f"off {statistics.median(off):.2f}, on {statistics.median(on):.2f}"
        print(f"{name}: {medians}; on/off of neighbouring rounds {statistics.median(ratios):.4f} ({spread})")


async def measure_scrapes(metrics: Metrics, num_scrapes: int = 40) -> None:
    """Print the longest time between two turns of an event loop, during scrapes and in as long a time without one."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--model", default="roseinfer/demo", help="a checkpoint with a tokenizer")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rows", type=int, default=64, help="of a step that is traced")
    parser.add_argument("--tokens", type=int, default=128, help="of a request that is traced")
    parser.add_argument("--repeat", type=int, default=2000, help="of each part")
    parser.add_argument("--only-parts", action="store_true", help="without a served load")
    arguments = parser.parse_args()
    measure_parts(arguments.rows, arguments.tokens, arguments.repeat)
    if arguments.only_parts:
        return
    with Path(os.devnull).open("w") as nowhere, closing(logs.configure(Config().observe, nowhere)):
        asyncio.run(compare(arguments))


if __name__ == "__main__":
    main()
