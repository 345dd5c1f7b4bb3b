"""Turns measured runs into the lines of a report, and into the same as JSON. Knows no engine and measures nothing.

A line is the seeds' own, letter for letter, so that their reports and ours can be laid side by side. What a mode does
not measure has no line: there is no zero that stands for "unknown".
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roseinfer.bench import definitions as d
from roseinfer.bench.definitions import RequestTimes
from roseinfer.bench.seeds.runs import Run

PERCENTS = (50, 95, 99)
NS_PER_MS = 1e6
SPREAD_NAMES = ("TTFT", "TPOT", "ITL", "Latency")


@dataclass(frozen=True, slots=True)
class Pool:
    """One distribution: its name on the line, its unit, and nanoseconds that are pooled over requests."""

    name: str
    values: Sequence[float]
    unit: str = "ms"

    def percentiles_line(self) -> str:
        shown = "/".join(f"{d.percentile(self.values, percent) / NS_PER_MS:.2f}" for percent in PERCENTS)
        return f"{self.name} p50/p95/p99: {shown} {self.unit}"

    def mean_line(self) -> str:
        shown = f"{d.percentile(self.values, 50) / NS_PER_MS:.2f}/{d.mean(self.values) / NS_PER_MS:.2f}"
        return f"{self.name} p50/mean: {shown} {self.unit}"

    def summary(self) -> dict[str, float | str]:
        """For JSON."""
        figures = {f"p{percent}": d.percentile(self.values, percent) / NS_PER_MS for percent in PERCENTS}
        return {"unit": self.unit, "count": len(self.values), "mean": d.mean(self.values) / NS_PER_MS, **figures}


def _pool(name: str, values: Iterable[float | None], unit: str = "ms") -> Pool:
    return Pool(name, [value for value in values if value is not None], unit)


def _each(requests: Sequence[RequestTimes], metric: Callable[[RequestTimes], float | None]) -> list[float | None]:
    return [metric(times) for times in requests]


def _all(requests: Sequence[RequestTimes], metric: Callable[[RequestTimes], Sequence[float]]) -> list[float]:
    return [value for times in requests for value in metric(times)]


def streaming_pools(run: Run) -> list[Pool]:
    """The seeds' distributions, in their order; those without a value are left out."""
    requests = run.requests
    pools = [
        _pool("Submit lag", _each(requests, d.submit_lag)),
        _pool("add_request latency", _each(requests, d.add_request_latency)),
        _pool("Tokenize", _each(requests, d.tokenize)),
        _pool("Queue wait (post-tok)", _each(requests, d.queue_wait)),
        _pool("Prefill->first token", _each(requests, d.prefill_to_first_token)),
        _pool("TTFT", _each(requests, d.ttft)),
        _pool("TPOT", _each(requests, d.tpot), "ms/token"),
        _pool("ITL", _all(requests, d.inter_token_latencies)),
        _pool("Latency", _each(requests, d.latency)),
    ]
    return [pool for pool in pools if pool.values]


def own_pools(run: Run) -> list[Pool]:
    """What the seeds do not have: the parts of queue wait, what a consumer sees, the engine's steps, refusals."""
    requests = run.requests
    pools = [
        _pool("Engine submit lag (tokenized->inbox)", _each(requests, d.engine_submit_lag)),
        _pool("Engine queue wait (inbox->batch)", _each(requests, d.engine_queue_wait)),
        _pool("Flush gap (piece to piece)", _all(requests, d.flush_gaps)),
        _pool("Engine step", [record.end_ns - record.start_ns for record in run.steps]),
        _pool("Reject latency", run.rejected),
    ]
    return [pool for pool in pools if pool.values]


def scheduler_pools(run: Run) -> list[Pool]:
    """The online mode's distributions, as the scheduler benchmark of the seeds defines them."""
    requests = run.requests
    return [
        _pool("TTFT", _each(requests, d.ttft)),
        _pool("TPOT", _each(requests, d.tpot_to_end), "ms/token"),
        _pool("Latency", _each(requests, d.latency)),
    ]


def header_lines(header: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {value}" for name, value in header.items()]


def streaming_lines(run: Run, header: Mapping[str, Any], submission: str) -> list[str]:
    """One run of `bench streaming`. `submission` says interval and schedule."""
    lines = [
        "=== streaming benchmark ===",
        *header_lines(header),
        f"Prompt tokens (total): {run.num_prompt_tokens}",
        f"Completion tokens (total): {run.num_completion_tokens}",
        f"Submit wall: {run.submit_wall / 1e9:.6f} s",
        f"Submit interval/schedule: {submission}",
        *(pool.percentiles_line() for pool in streaming_pools(run)),
    ]
    if run.requests:
        lines.append(f"Throughput (completion,total): {d.throughput(run.requests):.2f} tokens/s")
    return lines


def own_lines(run: Run, setting: Mapping[str, Any]) -> list[str]:
    """What follows the seeds' lines, under its own heading."""
    kinds = [record.kind for record in run.steps]
    timelines = [times.timeline for times in run.requests]
    queried = sum(record.num_prefix_queried_tokens for record in run.steps)
    return [
        "--- beyond the seeds' report ---",
        *header_lines(setting),
        *(pool.percentiles_line() for pool in own_pools(run)),
        f"Engine steps: {len(kinds)} ({', '.join(f'{kinds.count(k)} {k}' for k in ('prefill', 'mixed', 'decode'))})",
        f"Prefix cache: {sum(timeline.num_cached_tokens for timeline in timelines)} of {queried} prompt tokens hit",
        f"Preemptions: {sum(timeline.num_preemptions for timeline in timelines)}",
        f"Rejected requests: {len(run.rejected)}",
    ]


def scheduler_lines(run: Run, header: Mapping[str, Any], *, is_online: bool) -> list[str]:
    """One run of `bench scheduler`."""
    prefill, decode = d.split_elapsed(run.requests)
    num_decoded = d.num_decode_tokens(run.requests)
    lines = [
        "=== scheduler benchmark ===",
        *header_lines(header),
        f"Prompt tokens (total): {run.num_prompt_tokens}",
        f"Completion tokens (total): {run.num_completion_tokens}",
        f"Prefill elapsed: {prefill / 1e9:.6f} s",
        f"Decode elapsed: {decode / 1e9:.6f} s",
    ]
    if num_decoded:
        lines.append(f"Throughput (decode): {num_decoded / (decode / 1e9):.2f} tokens/s")
    lines.append(f"Throughput (total): {d.throughput(run.requests):.2f} tokens/s")
    return lines + [pool.mean_line() for pool in scheduler_pools(run)] if is_online else lines


def spread_lines(runs: Sequence[Run], pools_of: Callable[[Run], Sequence[Pool]]) -> list[str]:
    """The same figure of each repeat, and how far they lie apart: differences below that are noise."""
    measured = [run for run in runs if run.requests]
    figures = {"Throughput": ([d.throughput(run.requests) for run in measured], "tokens/s")}
    by_name = [{pool.name: pool for pool in pools_of(run)} for run in measured]
    for name in SPREAD_NAMES:
        pools = [run_pools[name] for run_pools in by_name if name in run_pools]
        for percent in (50, 99) if pools else ():
            values = [d.percentile(pool.values, percent) / NS_PER_MS for pool in pools]
            figures[f"{name} p{percent}"] = (values, pools[0].unit)
    return [
        f"=== {len(runs)} runs; a difference within the spread is noise ===",
        *(_spread_line(name, values, unit) for name, (values, unit) in figures.items() if values),
    ]


def _spread_line(name: str, values: Sequence[float], unit: str) -> str:
    average = d.mean(values)
    spread = (max(values) - min(values)) / average * 100 if average else 0.0
    return f"{name}: {' / '.join(f'{v:.2f}' for v in values)} {unit} (avg {average:.2f}, spread {spread:.1f} %)"


def write_json(
    file: Path, settings: Mapping[str, Any], runs: Sequence[Run], pools_of: Callable[[Run], Sequence[Pool]]
) -> None:
    """All settings are there, so two files can be compared."""
    content = {
        "settings": settings,
        "runs": [
            {
                "num_requests": len(run.requests),
                "num_prompt_tokens": run.num_prompt_tokens,
                "num_completion_tokens": run.num_completion_tokens,
                "num_rejected": len(run.rejected),
                "throughput_tokens_per_s": d.throughput(run.requests) if run.requests else None,
                "submit_wall_s": run.submit_wall / 1e9,
                "distributions": {pool.name: pool.summary() for pool in pools_of(run)},
            }
            for run in runs
        ],
    }
    file.write_text(json.dumps(content, indent=2) + "\n")
