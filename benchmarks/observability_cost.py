"""Measures what observing costs: in a served load on against off, and alone the engine's records, ranges and traces.

    python -m benchmarks.observability_cost [--model DIRECTORY] [--streams 64] [--max-tokens 96]
        [--parts alone sides scrapes]

What stands alone comes first: both sides of a comparison take turns in this process, and the figures are medians. What
the engine does for its records has no switch, so it is measured against the same lines with nothing behind them. Ranges
are measured when a tool is attached, for instance with `NVTX_INJECTION64_PATH`.

Then one server, its engine and its telemetry in processes of their own, is observed by everything there, by everything
in the front end as without a telemetry process, and by nothing, in rounds that alternate, so all meet the same machine;
the load is a process too. At last a scraper asks for both pages of metrics every 50 ms, in every other round.
"""

import argparse
import asyncio
import gc
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

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
from roseinfer.observe.observation import Observation
from roseinfer.observe.recorder.flight import Flight
from roseinfer.observe.telemetry.forwarder import Forwarder
from roseinfer.observe.telemetry.link import Link
from roseinfer.observe.telemetry.process import TelemetryProcess
from roseinfer.observe.telemetry.receiver import Receiver
from roseinfer.observe.tracing import semconv
from roseinfer.observe.tracing.head_sampling import HeadSampler, make_propagator, make_sampler
from roseinfer.observe.tracing.nvtx import make_marker
from roseinfer.observe.tracing.spans import PlannedIds, Spans
from roseinfer.observe.tracing.tracing import Tracing
from roseinfer.records import (
    NO_TIMES,
    Advanced,
    Arrival,
    BlockedBy,
    Delivery,
    FinishReason,
    RequestTimeline,
    StepRecord,
)
from roseinfer.runtime.cpu_waits import LoopWaits
from roseinfer.runtime.frames import encode_frame
from roseinfer.runtime.gc_pauses import GcPauses
from roseinfer.runtime.niceness import FRONT_END_NICENESS, be_nicer
from roseinfer.server.app import Instruments, build_app, build_runner
from roseinfer.server.connection.listener import Listener, bind
from roseinfer.server.ops.front_end import replies
from roseinfer.server.service import Service
from roseinfer.text.text_model import TextModel

PARTS = ("schedule", "launch", "stage", "forward", "sample", "wait", "commit")  # of a step on a CPU
MS = 1_000_000
NAME = "observed"  # of the model
SCRAPE_INTERVAL_S = 0.05  # as pickers of gateways ask
SETTLE_S = 0.5  # in which what waited is observed, after a load
CHOICES = ("alone", "sides", "scrapes")


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
    forwarded, observed = asyncio.run(fact_costs(num_rows, 4 * num_tokens))
    print(f"facts, a token of {num_rows} streams: {forwarded:.2f} µs to send, {observed:.2f} to take and to observe")


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
    return Tracing(config, head_sampler, spans, sink, Metrics("m", "0")), sink


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


async def fact_costs(num_streams: int, num_steps: int) -> tuple[float, float]:
    """Microseconds a token of the front end, and of the telemetry process, with nothing else on their cores."""
    frames: list[bytes] = []
    forwarder, config = Forwarder(), Config(model=ModelConfig(path="m"))
    forwarder.resume(lambda message: frames.append(encode_frame(message)), 0)
    timelines = [make_timeline(index, 1) for index in range(num_streams)]
    for serial, timeline in enumerate(timelines):
        timeline.serial, timeline.is_streamed, timeline.finish_reason = serial, True, None
        timeline.token_ns, timeline.write_ns = [], []
        forwarder.hub.on_start(timeline)
    began_s = time.thread_time()
    for number in range(num_steps):
        observe_step(forwarder.hub, timelines, number)
        await asyncio.sleep(0)
    forwarder.catch_up()
    sent_s = time.thread_time()
    receiver = Receiver()
    receiver.open(Observation(config, "0", lambda: 0, tuple, lambda: 0))
    link = Link({}, receiver.take, lambda: None)
    opened_s = time.thread_time()
    for frame in frames:
        link.data_received(frame)
    us = 1e6 / (num_streams * num_steps)
    return (sent_s - began_s) * us, (time.thread_time() - opened_s) * us


def observe_step(hub: Hub, timelines: list[RequestTimeline], number: int) -> None:
    """A step of 2 ms and a write for each of its tokens."""
    tokens_ns = (10 + 2 * number) * MS
    values = dict.fromkeys(StepRecord.__struct_fields__, 1) | {"step_id": number, "num_prefill_seqs": 0}
    values |= {"start_ns": tokens_ns - MS, "tokens_ns": tokens_ns, "end_ns": tokens_ns + 1000, "num_finished": 0}
    others: dict[str, Any] = {"phases": NO_TIMES, "ahead": NO_TIMES, "blocked_by": BlockedBy.NOTHING}
    others["is_profiled"] = False
    for timeline in timelines:
        timeline.token_ns.append(tokens_ns)
    hub.on_step(StepRecord(**(values | others)), Advanced.newest(timelines))
    arrival = Arrival(tokens_ns, tokens_ns + 1000, tokens_ns + 20_000)
    for index, timeline in enumerate(timelines):
        written_ns = tokens_ns + (100 + 10 * index) * 1000
        delivery = Delivery(arrival, written_ns - 9000, written_ns - 3000, written_ns, False, len(timeline.write_ns))
        timeline.write_ns.append(written_ns)
        hub.on_write(timeline, delivery)


# --- a served load --------------------------------------------------------------------------------------------------


class Observed:
    """A server whose observers can be exchanged between two rounds, and its telemetry process."""

    def __init__(self, model: str, num_streams: int) -> None:
        self.config = Config(
            model=ModelConfig(path=model),
            server=ServerConfig(stream_interval=1, served_model_name=NAME),
            scheduler=SchedulerConfig(max_num_seqs=num_streams),
        )
        attribution, metrics = Attribution(), Metrics(NAME, "0")
        flight, pauses = Flight(self.config, "0"), GcPauses()
        flight.listen(pauses, LoopWaits(), metrics, attribution.interruptions)
        observers = {"recorder": flight, "causes": attribution, "metrics": metrics, "logs": logs.Logs(10.0)}
        forwarder = Forwarder()
        self.sides = {"off": Hub([]), "on": forwarder.hub, "here": Hub(observers.values(), MAX_DELAY_S)}
        self.single = {name: Hub([observer], MAX_DELAY_S) for name, observer in observers.items()}
        self.client = AsyncEngine(ProcessTransport(self.config), forwarder.hub, 30.0)
        self.telemetry = TelemetryProcess(self.config, forwarder, self.client.queue_estimate.report)
        self.service = Service(self.config, self.client, forwarder.hub, None, self.telemetry.ledgers)

    def observe(self, hub: Hub) -> None:
        self.client.observer = self.service.observer = hub

    async def start(self) -> tuple[Listener, int, int]:
        """Returns what listens, and the numbers of the API port and of the operations port."""
        await self.client.start(lambda _: None)
        self.service.open(TextModel.load(Path(self.client.info.checkpoint_dir), None, "auto"))
        sockets = await bind("127.0.0.1", 0)
        ops_port = sockets[0].getsockname()[1]
        await self.telemetry.start(replies(self.service), sockets, _take_over)
        await self.telemetry.ready()
        gc.collect()
        gc.freeze()
        be_nicer(FRONT_END_NICENESS)  # as the program does, once its engine is there; the load inherits it

        instruments = Instruments(self.telemetry.page, self.telemetry.ledgers, telemetry=self.telemetry)
        runner = build_runner(build_app(self.service, instruments), 0.5)
        await runner.setup()
        listening = await runner.listen("127.0.0.1", 0, None)
        return runner, listening.sockets[0].getsockname()[1], ops_port


async def _take_over() -> None:
    raise AssertionError("the telemetry process has died twice")


async def compare(arguments: argparse.Namespace) -> None:
    server = Observed(arguments.model, arguments.streams)
    runner, port, ops_port = await server.start()
    url = f"http://127.0.0.1:{port}"
    client = Worker("load", [sys.executable, "-m", "benchmarks.http_client", url, NAME], Path("build/bench/load.log"))

    async def run_load(max_tokens: int = arguments.max_tokens) -> dict[str, float]:
        requests = [PlannedRequest(0.0, f"{i} is", [], max_tokens) for i in range(arguments.streams)]
        begin_us = processor_us(server.telemetry.pid)
        figures = summarise(await asyncio.to_thread(client.drive, requests))
        await asyncio.sleep(SETTLE_S)
        end_us, num_tokens = processor_us(server.telemetry.pid), arguments.streams * max_tokens
        return figures | {f"{name}_us_per_token": (end_us[name] - begin_us[name]) / num_tokens for name in end_us}

    try:
        server.observe(server.sides["off"])
        await run_load()
        if "sides" in arguments.parts:
            await compare_sides(server, run_load, arguments.rounds)
            for name, hub in server.single.items():
                server.observe(hub)
                await run_load()
                spent_us = hub.spent_ns / 1e3 / (arguments.streams * arguments.max_tokens)
                print(f"{name} alone, in the front end: {spent_us:.1f} µs a token")
        server.observe(server.sides["on"])
        if "scrapes" in arguments.parts:
            await measure_rest()
            await measure_scrapes("the API port", port)
            await measure_scrapes("the operations port", ops_port)
            await compare_scraped(ops_port, run_load, arguments.rounds)
    finally:
        await asyncio.to_thread(client.close)
        await runner.cleanup()
        server.service.close()
        await server.client.close()
        await server.telemetry.close()


def processor_us(pid: int | None) -> dict[str, float]:
    """Microseconds of a core that this process has used, and that the main thread of the telemetry process has."""
    telemetry_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    return {"front_end": time.process_time() * 1e6, "telemetry": telemetry_ns / 1e3}


Load = Callable[[], Awaitable[dict[str, float]]]


async def compare_sides(server: Observed, run_load: Load, num_rounds: int) -> None:
    """Print what observing costs: in the telemetry process (on), and in the front end (here)."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in server.sides}
    for turn in range(num_rounds):
        for name in list(server.sides)[:: 1 if turn % 2 else -1]:  # there and back: a drift favours none
            server.observe(server.sides[name])
            figures[name].append(await run_load())
    for name in ("on", "here"):
        for figure in ("tpot_p50_ms", "tokens_per_s", "front_end_us_per_token"):
            report(figure, figures, "off", name)
    telemetry_us = statistics.median(run["telemetry_us_per_token"] for run in figures["on"])
    print(f"telemetry process: {telemetry_us:.2f} µs a token")


async def compare_scraped(ops_port: int, run_load: Load, num_rounds: int) -> None:
    """Print what it costs streams that both pages are asked for every SCRAPE_INTERVAL_S."""
    figures: dict[str, list[dict[str, float]]] = {"quiet": [], "scraped": []}
    for turn in range(2 * num_rounds):
        is_scraped = turn % 4 in {1, 2}
        scraper = await start_scraper(0, ops_port, "/metrics", "/metrics/load") if is_scraped else None
        figures["scraped" if is_scraped else "quiet"].append(await run_load())
        if scraper is not None:
            scraper.terminate()
            await scraper.wait()
    for figure in ("itl_p99_ms", "itl_p50_ms", "tokens_per_s"):
        report(figure, figures, "quiet", "scraped")


def report(figure: str, figures: Mapping[str, list[dict[str, float]]], base: str, other: str) -> None:
    before, after = ([run[figure] for run in figures[side]] for side in (base, other))
    ratios = sorted(a / b for a, b in zip(after, before, strict=True))
    medians = f"{base} {statistics.median(before):.2f}, {other} {statistics.median(after):.2f}"
    spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
    print(f"{figure}: {medians}; {other}/{base} of neighbouring rounds {statistics.median(ratios):.4f} ({spread})")


async def measure_rest(num_intervals: int = 60) -> None:
    """Print what the front end spends in the time between two scrapes when there are none."""
    cpu_s = time.process_time()
    await asyncio.sleep(num_intervals * SCRAPE_INTERVAL_S)
    rest_ms = (time.process_time() - cpu_s) * 1e3 / num_intervals
    print(f"at rest: {rest_ms:.3f} ms of the front end's processor in {SCRAPE_INTERVAL_S:g} s")


async def measure_scrapes(place: str, port: int, num_runs: int = 5, times: int = 60) -> None:
    """Print what a scrape costs the front end, and how long it takes, in a server at rest."""
    cpus_ms, durations_ms = [], []
    for _ in range(num_runs):
        scraper = await start_scraper(times, port, "/metrics")
        assert scraper.stdout is not None
        cpu_s = time.process_time()
        durations_ms.append(float(await scraper.stdout.readline()))
        cpus_ms.append((time.process_time() - cpu_s) * 1e3 / (times - 1))
        await scraper.wait()
    spread = f"median {statistics.median(cpus_ms):.3f}, {min(cpus_ms):.3f} to {max(cpus_ms):.3f} ms"
    print(
        f"/metrics on {place}: {spread} of the front end's processor; {statistics.median(durations_ms):.1f} ms in all"
    )


async def start_scraper(times: int, port: int, *paths: str) -> "asyncio.subprocess.Process":
    """A process that has asked once, and asks every SCRAPE_INTERVAL_S."""
    command = ["-m", "benchmarks.scraper", str(SCRAPE_INTERVAL_S), str(times), str(port), *paths]
    scraper = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert scraper.stdout is not None
    await scraper.stdout.readline()
    return scraper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--model", default="roseinfer/demo", help="a checkpoint with a tokenizer")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rows", type=int, default=64, help="of a step that is traced")
    parser.add_argument("--tokens", type=int, default=128, help="of a request that is traced")
    parser.add_argument("--repeat", type=int, default=2000, help="of each part")
    parser.add_argument("--parts", nargs="+", choices=CHOICES, default=CHOICES, help="`alone` is without a server")
    arguments = parser.parse_args()
    if "alone" in arguments.parts:
        measure_parts(arguments.rows, arguments.tokens, arguments.repeat)
    if arguments.parts == ["alone"]:
        return
    with Path(os.devnull).open("w") as nowhere, closing(logs.configure(Config().observe, nowhere)):
        asyncio.run(compare(arguments))


if __name__ == "__main__":
    main()
