"""The reports of `bench streaming` and `bench scheduler`, as lines of text and as JSON.

A line is the seeds' own, letter for letter, so that their reports and ours can be laid side by side. What a mode does
not measure has no line, and no zero stands for "unknown".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roseinfer.bench import definitions as d
from roseinfer.bench.definitions import RequestTimes
from roseinfer.bench.report import NS_PER_MS, Pool, header_lines, step_kinds
from roseinfer.bench.report import write_json as write
from roseinfer.bench.seeds.runs import Run

SPREAD_NAMES = ("TTFT", "TPOT", "ITL", "Latency")


def _pool(name: str, values: Iterable[float | None], unit: str = "ms") -> Pool:
    return Pool(name, [value for value in values if value is not None], unit)


def _each(run: Run, name: str, metric: Callable[[RequestTimes], float | None], unit: str = "ms") -> Pool:
    """The pool of a figure of each request."""
    return _pool(name, map(metric, run.requests), unit)


def _all(run: Run, name: str, metric: Callable[[RequestTimes], Sequence[float]]) -> Pool:
    """The pool of all figures of all requests."""
    return _pool(name, [value for times in run.requests for value in metric(times)])


def streaming_pools(run: Run) -> list[Pool]:
    """The seeds' distributions, in their order; those without a value are left out."""
    pools = [
        _pool("Submit lag", [times.seen.submit_lag_ns for times in run.requests if times.target is not None]),
        _each(run, "add_request latency", d.add_request_latency),
        _each(run, "Tokenize", d.tokenize),
        _each(run, "Queue wait (post-tok)", d.queue_wait),
        _each(run, "Prefill->first token", d.prefill_to_first_token),
        _each(run, "TTFT", lambda times: times.seen.ttft_ns),
        _each(run, "TPOT", lambda times: times.seen.tpot_ns, "ms/token"),
        _all(run, "ITL", lambda times: times.seen.inter_token_latencies_ns()),
        _each(run, "Latency", lambda times: times.seen.latency_ns),
    ]
    return [pool for pool in pools if pool.values]


def own_pools(run: Run) -> list[Pool]:
    """What the seeds do not have: the parts of queue wait, what a consumer sees, the engine's steps, refusals."""
    pools = [
        _each(run, "Engine submit lag (tokenized->inbox)", d.engine_submit_lag),
        _each(run, "Engine queue wait (inbox->batch)", d.engine_queue_wait),
        _all(run, "Flush gap (piece to piece)", d.flush_gaps),
        _pool("Engine step", [record.end_ns - record.start_ns for record in run.steps]),
        _pool("Reject latency", run.rejected),
    ]
    return [pool for pool in pools if pool.values]


def scheduler_pools(run: Run) -> list[Pool]:
    """The online mode's distributions, as the scheduler benchmark of the seeds defines them."""
    return [
        _each(run, "TTFT", lambda times: times.seen.ttft_ns),
        _each(run, "TPOT", d.tpot_to_end, "ms/token"),
        _each(run, "Latency", lambda times: times.seen.latency_ns),
    ]


def _token_lines(run: Run) -> list[str]:
    return [
        f"Prompt tokens (total): {run.num_prompt_tokens}",
        f"Completion tokens (total): {run.num_completion_tokens}",
    ]


def streaming_lines(run: Run, header: Mapping[str, Any], submission: str) -> list[str]:
    """One run of `bench streaming`. `submission` names interval and schedule."""
    lines = [
        "=== streaming benchmark ===",
        *header_lines(header),
        *_token_lines(run),
        f"Submit wall: {run.submit_wall / 1e9:.6f} s",
        f"Submit interval/schedule: {submission}",
        *(pool.percentiles_line() for pool in streaming_pools(run)),
    ]
    if run.requests:
        lines.append(f"Throughput (completion,total): {d.throughput(run.requests):.2f} tokens/s")
    return lines


def own_lines(run: Run, setting: Mapping[str, Any]) -> list[str]:
    """What follows the seeds' lines, under its own heading."""
    timelines = [times.timeline for times in run.requests]
    queried = sum(record.num_prefix_queried_tokens for record in run.steps)
    return [
        "--- beyond the seeds' report ---",
        *header_lines(setting),
        *(pool.percentiles_line() for pool in own_pools(run)),
        f"Engine steps: {step_kinds([record.kind for record in run.steps])}",
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
        *_token_lines(run),
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
    """Write all runs with all settings, so that two files can be compared. Raises ConfigError."""
    results = [
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
    ]
    write(file, {"settings": settings, "runs": results})
