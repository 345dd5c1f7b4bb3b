"""Measures what observing costs: in a served load on against off, and alone the engine's records, ranges and traces.

    python -m benchmarks.observability_cost [--model DIRECTORY] [--streams 64] [--max-tokens 900]
        [--parts alone sides scrapes]

What stands alone comes first: both sides of a comparison take turns in this process, and the figures are medians. What
the engine does for its records has no switch, so it is measured against the same lines with nothing behind them. Ranges
are measured when a tool is attached, for instance with `NVTX_INJECTION64_PATH`.

Then one server, its engine and its telemetry in processes of their own, has a load, a process too, that keeps all its
streams running. While it lasts, the server is observed and not, or a scraper asks for both pages of metrics every 50 ms
and does not, by turns of a third of a second or of 16 steps, there and back: a machine whose speed changes favours
neither. A figure's ratio is of four turns that follow each other; that of the p99 is of all turns of a load.
"""

import argparse
import asyncio
import gc
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from benchmarks.protocol import Worker
from benchmarks.workloads import PlannedRequest
from roseinfer.bench.definitions import Observed as Answer
from roseinfer.config.options import Config, ModelConfig, SchedulerConfig, ServerConfig, TracingConfig
from roseinfer.engine.core.batch import Watch
from roseinfer.engine.core.stopwatch import Phases, Stopwatch, unwatched
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.engine.link.transport import ProcessTransport
from roseinfer.engine.queue_estimate import QueueEstimate
from roseinfer.engine.ranges import make_phases
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
    Observer,
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

IntArray = npt.NDArray[np.int64]
Load = Callable[[], Coroutine[Any, Any, list[Answer]]]

PARTS = ("schedule", "launch", "stage", "forward", "sample", "wait", "commit")  # of a step on a CPU
MS = 1_000_000
NAME = "observed"  # of the model
SCRAPE_INTERVAL_S = 0.05  # as pickers of gateways ask
SETTLE_S = 0.5  # in which what waited is observed, after a load
RAMP_S = 0.5  # until all streams run
OBSERVING_LEAD_S = 0.25  # of a turn, not measured: facts wait for 0.2 s, so observing lags behind
SCRAPING_LEAD_S = 0.05
TURN_S = 0.3
TURN_STEPS = 16  # at least: tokens come by whole steps
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
        off, on = medians_us(repeat, ranged(phases), ranged(make_phases(marker)))
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


class Ends(Observer):
    """The observer that tells a forwarder of requests that begin and end, and of nothing between."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    def on_start(self, timeline: RequestTimeline) -> None:
        self._forwarder.on_start(timeline)

    def on_finish(self, timeline: RequestTimeline) -> None:
        self._forwarder.on_finish(timeline)


class Observed:
    """A server that can be observed and not observed, and its telemetry process."""

    def __init__(self, model: str, num_streams: int) -> None:
        self.config = Config(
            model=ModelConfig(path=model),
            server=ServerConfig(stream_interval=1, served_model_name=NAME),
            scheduler=SchedulerConfig(max_num_seqs=num_streams, speculation="off"),  # drafts pay now and then
        )
        attribution, metrics = Attribution(), Metrics(NAME, "0")
        flight, pauses = Flight(self.config, "0"), GcPauses()
        flight.listen(pauses, LoopWaits(), metrics, attribution.interruptions)
        observers = {"recorder": flight, "causes": attribution, "metrics": metrics, "logs": logs.Logs(10.0)}
        self.single = {name: Hub([observer], MAX_DELAY_S) for name, observer in observers.items()}
        self.forwarder = Forwarder()
        self._unobserved = Hub([Ends(self.forwarder)])
        estimate = QueueEstimate.of(self.config.scheduler)
        self.client = AsyncEngine(ProcessTransport(self.config), self.forwarder.hub, 30.0, estimate)
        self.telemetry = TelemetryProcess(self.config, self.forwarder, self.client.queue_estimate.report)
        self.service = Service(self.config, self.client, self.forwarder.hub, None, self.telemetry.ledgers)

    def observe(self, hub: Hub) -> None:
        self.client.observer = self.service.observer = hub

    def turn_on(self) -> None:
        """The telemetry process gets all facts from now on."""
        if self.client.observer is not self.forwarder.hub:
            self.observe(self.forwarder.hub)
            self.telemetry.resume()

    def turn_off(self) -> None:
        """Nothing is observed from now on."""
        if self.client.observer is self.forwarder.hub:
            self.forwarder.catch_up()
            self.forwarder.cut()
        self.observe(self._unobserved)

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
    requests = planned(arguments.streams, arguments.max_tokens, arguments.turnover)

    async def run_load(requests: Sequence[PlannedRequest] = requests) -> list[Answer]:
        return await asyncio.to_thread(client.drive, requests)

    try:
        turn_s = max(TURN_S, TURN_STEPS * Chunks(await run_load(requests[: arguments.streams])).step_s())
        if "sides" in arguments.parts:
            sides = Ways("off", "on", {"off": server.turn_off, "on": server.turn_on}, OBSERVING_LEAD_S, turn_s)
            await alternate(sides, run_load, server.telemetry.pid, arguments.rounds)
            for name, hub in server.single.items():
                server.observe(hub)
                await run_load(requests[: arguments.streams])
                await asyncio.sleep(SETTLE_S)
                num_tokens = sum(request.new_tokens for request in requests[: arguments.streams])
                print(f"{name} alone, in the front end: {hub.spent_ns / 1e3 / num_tokens:.1f} µs a token")
        server.turn_on()
        if "scrapes" in arguments.parts:
            await measure_rest()
            await measure_scrapes("the API port", port)
            await measure_scrapes("the operations port", ops_port)
            await compare_scraped(ops_port, run_load, server.telemetry.pid, arguments.rounds, turn_s)
    finally:
        await asyncio.to_thread(client.close)
        await runner.cleanup()
        server.service.close()
        await server.client.close()
        await server.telemetry.close()


def planned(num_streams: int, max_tokens: int, turnover: int) -> list[PlannedRequest]:
    """Requests that keep so many streams running: those that do not run wait, and they end one after the other."""
    lengths = [max_tokens * (i + 1) // num_streams for i in range(num_streams)] + [max_tokens] * num_streams * turnover
    return [PlannedRequest(0.0, f"{i} is", [], length) for i, length in enumerate(lengths)]


def processor_us(pid: int | None) -> dict[str, float]:
    """Microseconds of a core that this process has used, and that the main thread of the telemetry process has."""
    telemetry_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    return {"front_end": time.process_time() * 1e6, "telemetry": telemetry_ns / 1e3}


class Ways(NamedTuple):
    """Two ways to run a server, what enters each, and how long after that it is not measured and then is."""

    base: str
    other: str
    enter: Mapping[str, Callable[[], None]]
    lead_s: float
    turn_s: float


class Turn(NamedTuple):
    """A part of a load in which one of two ways was gone: its begin and end, and the processor time meanwhile."""

    name: str
    begin_ns: int
    end_ns: int
    used_us: dict[str, float]


async def take_turns(ways: Ways, load: "asyncio.Task[list[Answer]]", pid: int | None) -> list[Turn]:
    """Goes both ways in turn, there and back, until the load ends."""
    turns: list[Turn] = []
    await asyncio.sleep(RAMP_S)
    while not load.done():
        name = (ways.base, ways.other, ways.other, ways.base)[len(turns) % 4]
        ways.enter[name]()
        await asyncio.sleep(ways.lead_s)
        begin_ns, began_us = time.monotonic_ns(), processor_us(pid)
        await asyncio.sleep(ways.turn_s)
        used_us = {process: us - began_us[process] for process, us in processor_us(pid).items()}
        turns.append(Turn(name, begin_ns, time.monotonic_ns(), used_us))
    return turns


async def alternate(ways: Ways, run_load: Load, pid: int | None, num_loads: int) -> None:
    """Prints how the figures of streams differ between two ways that are gone in turn."""
    base, other = ways.base, ways.other
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(num_loads):
        load = asyncio.create_task(run_load())
        turns = await take_turns(ways, load, pid)
        chunks = Chunks(await load)
        full = [turn for turn in turns if chunks.first_ns <= turn.begin_ns and turn.end_ns <= chunks.last_ns]
        for at in range(0, len(full) - 3, 4):
            note(found, chunks.figures_of(full[at : at + 4], base), chunks.figures_of(full[at : at + 4], other))
        note(found, chunks.percentiles_of(full, base), chunks.percentiles_of(full, other))
    for figure, pairs in found.items():
        report(figure, base, other, pairs)


def note(found: dict[str, list[tuple[float, float]]], before: dict[str, float], after: dict[str, float]) -> None:
    for figure, value in before.items():
        found.setdefault(figure, []).append((value, after[figure]))


class Chunks:
    """What arrived of a load's streams, and when."""

    def __init__(self, streams: Sequence[Answer]) -> None:
        stamps = [np.array(stream.token_ns) for stream in streams]
        counts = [np.array(stream.token_counts) for stream in streams]
        order = np.argsort(np.concatenate([each[1:] for each in stamps]))
        self._end_ns = np.concatenate([each[1:] for each in stamps])[order]
        self._gaps_ns = np.concatenate([np.diff(each) for each in stamps])[order]
        self._counts = np.concatenate([each[1:] for each in counts])[order]
        begins = sorted(stream.token_ns[0] for stream in streams)
        self.last_ns = begins[-1]  # from then on streams end and no others begin
        self.first_ns = min(stream.token_ns[-1] for stream in streams)

    def step_s(self) -> float:
        """The median gap."""
        return float(np.median(self._gaps_ns)) / 1e9

    def _of(self, turns: Sequence[Turn], name: str) -> tuple[Sequence[Turn], IntArray, IntArray]:
        mine = [turn for turn in turns if turn.name == name]
        bounds = [np.searchsorted(self._end_ns, (turn.begin_ns, turn.end_ns)) for turn in mine]
        at = np.concatenate([np.arange(begin, end) for begin, end in bounds])
        return mine, self._gaps_ns[at], self._counts[at]

    def figures_of(self, turns: Sequence[Turn], name: str) -> dict[str, float]:
        """Of those of the turns in which this way was gone."""
        mine, gaps_ns, counts = self._of(turns, name)
        num_tokens, length_s = int(counts.sum()), sum(turn.end_ns - turn.begin_ns for turn in mine) / 1e9
        used = {
            f"{process}_us_per_token": sum(turn.used_us[process] for turn in mine) / num_tokens
            for process in mine[0].used_us
        }
        return {"tpot_ms": gaps_ns.sum() / num_tokens / MS, "tokens_per_s": num_tokens / length_s, **used}

    def percentiles_of(self, turns: Sequence[Turn], name: str) -> dict[str, float]:
        """Likewise: the inter-token latencies."""
        _, gaps_ns, counts = self._of(turns, name)
        gaps_ms = np.repeat(gaps_ns / counts / MS, counts)
        return {f"itl_p{percent}_ms": float(np.percentile(gaps_ms, percent)) for percent in (50, 99)}


async def compare_scraped(ops_port: int, run_load: Load, pid: int | None, num_loads: int, turn_s: float) -> None:
    """Print what it costs streams that both pages are asked for every SCRAPE_INTERVAL_S."""
    scraper = await start_scraper(0, ops_port, "/metrics", "/metrics/load")
    enter = {
        "quiet": partial(scraper.send_signal, signal.SIGSTOP),
        "scraped": partial(scraper.send_signal, signal.SIGCONT),
    }
    await alternate(Ways("quiet", "scraped", enter, SCRAPING_LEAD_S, turn_s), run_load, pid, num_loads)
    enter["scraped"]()
    scraper.terminate()
    await scraper.wait()


def report(figure: str, base: str, other: str, pairs: Sequence[tuple[float, float]]) -> None:
    """Print the medians, and the median of the ratios with its range and a 95 % interval for it."""
    before, after = zip(*pairs, strict=True)
    medians = f"{base} {statistics.median(before):.2f}, {other} {statistics.median(after):.2f}"
    if not all(before):  # the telemetry process may rest for a turn
        print(f"{figure}: {medians}")
        return
    ratios = np.array(after) / np.array(before)
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    spread = f"{low:.3f} to {high:.3f} at 95 %; {len(pairs)} ratios, {min(ratios):.3f} to {max(ratios):.3f}"
    print(f"{figure}: {medians}; {other}/{base} {np.median(ratios):.4f} ({spread})")


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
    parser.add_argument("--max-tokens", type=int, default=900)
    parser.add_argument("--turnover", type=int, default=4, help="streams that follow each other in a load")
    parser.add_argument("--model", default="roseinfer/demo", help="a checkpoint with a tokenizer")
    parser.add_argument("--rounds", type=int, default=6, help="loads of each comparison")
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
