"""What ranges and traces cost, in microseconds, off and on: of a step, of a request, of a span on its way.

    python benchmarks/telemetry_costs.py [--rows 64] [--tokens 128] [--repeat 2000]

Both sides of a comparison take turns, and the figures are medians. Ranges are measured when a tool is attached, for
instance with `NVTX_INJECTION64_PATH`; without one there is nothing to turn on. The last table is about the thread that
encodes spans: how late a thread that sleeps for half a millisecond wakes up while that one works, which is what an
event loop would feel.
"""

import argparse
import platform
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from prometheus_client import CollectorRegistry

from roseinfer.config.tree import TracingConfig
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.recorder.recording import ClockPair
from roseinfer.observe.tracing import semconv
from roseinfer.observe.tracing.nvtx import make_marker
from roseinfer.observe.tracing.otlp import Encoder
from roseinfer.observe.tracing.spans import Span
from roseinfer.observe.tracing.tracing import Tracing
from roseinfer.records import Advanced, BlockedBy, FinishReason, PhaseTimes, RequestTimeline, StepRecord
from roseinfer.runtime.stopwatch import Phases

MS = 1_000_000
PARTS = ("schedule", "launch", "stage", "forward", "wait", "commit")


class Sink:
    """Takes spans and keeps the last."""

    def __init__(self) -> None:
        self.last: Sequence[Span] = ()

    def put(self, spans: Sequence[Span]) -> bool:
        self.last = spans
        return True

    def close(self, timeout_s: float) -> None: ...


def medians_us(repeat: int, *sides: Callable[[], object]) -> list[float]:
    """Each side's median, both measured in turn."""
    times: list[list[int]] = [[] for _ in sides]
    for _ in range(repeat):
        for side, taken in zip(sides, times, strict=True):
            begin_ns = time.perf_counter_ns()
            side()
            taken.append(time.perf_counter_ns() - begin_ns)
    return [statistics.median(taken) / 1e3 for taken in times]


def watched(phases: Phases, *, is_whole: bool) -> Callable[[], None]:
    """The stopwatch of one step, with or without the range around it."""

    def inner() -> None:
        watch = phases.begin(7)
        for name in PARTS:
            with watch(name):
                pass

    def outer() -> None:
        with phases.whole(7):
            inner()

    return outer if is_whole else inner


def make_step(step_id: int) -> StepRecord:
    facts = dict.fromkeys(StepRecord.__struct_fields__, 0)
    facts |= {"step_id": step_id, "start_ns": step_id * MS, "tokens_ns": step_id * MS + 1, "end_ns": step_id * MS + 2}
    phases = PhaseTimes(schedule=1, launch=8, wait=2, commit=1, stage=2, h2d=1, forward=5)
    return StepRecord(**(facts | {"phases": phases, "blocked_by": BlockedBy.NOTHING, "is_profiled": False}))  # type: ignore[arg-type]


def make_tracing(**options: float) -> tuple[Tracing, Sink]:
    sink, metrics = Sink(), Metrics("m", "0", CollectorRegistry())
    shared = {semconv.GEN_AI_REQUEST_MODEL: "m"}
    return Tracing(TracingConfig(**options), shared, sink, metrics, random.Random(1)), sink  # type: ignore[arg-type]


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
    """From begin to end: not kept, kept."""
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


def step_costs(repeat: int, num_rows: int) -> list[float]:
    """Of one step: nothing told, a span told."""
    quiet, _ = make_tracing(step_interval=0)
    loud, _ = make_tracing(step_interval=1)
    advanced = Advanced.newest(make_timeline(index, 2) for index in range(num_rows))
    for tracing in (quiet, loud):
        for timeline in advanced:
            tracing.on_start(timeline)
    record = make_step(7)
    return medians_us(repeat, lambda: quiet.on_step(record, advanced), lambda: loud.on_step(record, advanced))


def lateness_us(duration_s: float) -> tuple[float, float]:
    """Median and 99th percentile of how late a short sleep ends."""
    late, end = [], time.monotonic() + duration_s
    while time.monotonic() < end:
        begin_ns = time.perf_counter_ns()
        time.sleep(0.0005)
        late.append((time.perf_counter_ns() - begin_ns) / 1e3 - 500)
    return statistics.median(late), sorted(late)[int(len(late) * 0.99)]


@contextmanager
def encoding(trace: Sequence[Span], at_once: int) -> Iterator[None]:
    """A thread that encodes all the time, so many spans before it offers the interpreter."""
    spans = [trace[i % len(trace)] for i in range(at_once)]
    encoder, stop = Encoder({}, "0", ClockPair(0, 0)), threading.Event()

    def work() -> None:
        while not stop.is_set():
            encoder.encode(spans)
            time.sleep(0)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64, help="sequences in a step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a request")
    parser.add_argument("--repeat", type=int, default=2000)
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, medians in µs\n")
    bare, off = medians_us(args.repeat, watched(Phases(), is_whole=False), watched(Phases(), is_whole=True))
    print(
        f"ranges, a step with {len(PARTS)} parts: {bare:.2f} with a stopwatch alone, {off:.2f} with ranges off", end=""
    )
    marker = make_marker(enabled=True)
    if marker is not None:
        off, on = medians_us(args.repeat, watched(Phases(), is_whole=True), watched(Phases(marker), is_whole=True))
        print(f"; {off:.2f} off and {on:.2f} on, with the tool", end="")
    quiet, told = step_costs(args.repeat, args.rows)
    print(f"\ntracing, a step of {args.rows} rows: {quiet:.2f}; told as a span with its parts and links: {told:.1f}")
    none, dropped, kept = request_costs(args.repeat, args.tokens)
    print(f"tracing, a request of {args.tokens} tokens: {dropped - none:.1f} not kept, {kept - none:.1f} kept")
    tracing, sink = make_tracing(ratio=1.0)
    tracing.on_start(timeline := make_timeline(1, args.tokens))
    tracing.on_finish(timeline)
    encoder = Encoder({}, "0", ClockPair(0, 0))
    (encoded,) = medians_us(args.repeat, lambda: encoder.encode(sink.last))
    print(f"export, {len(sink.last)} spans of a request into bytes: {encoded:.0f}\n")
    print("late by, median and p99")
    print("  nothing else runs        {:.0f} {:.0f}".format(*lateness_us(2)))
    for at_once in (16, 256):
        with encoding(sink.last, at_once):
            print("  spans, {:3d} at once       {:.0f} {:.0f}".format(at_once, *lateness_us(2)))


if __name__ == "__main__":
    main()
