"""The lines of a report, letter for letter, and the same figures as JSON."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from roseinfer.bench.definitions import RequestTimes
from roseinfer.bench.seeds import report
from roseinfer.bench.seeds.runs import Run
from roseinfer.records import BlockedBy, PhaseTimes, RequestTimeline, StepRecord

MS = 1_000_000
HEADER = {"Model": "gpt2", "Device": "cuda", "Requests": 2}


def times(start_ms: int, tokens_ms: Sequence[int], target_ms: int | None = None) -> RequestTimes:
    """Submitted at `start_ms`, scheduled 5 ms later, ended with the last token; flushed twice."""
    timeline = RequestTimeline(
        request_id="a",
        recv_ns=start_ms * MS,
        tokenized_ns=(start_ms + 1) * MS,
        inbox_ns=(start_ms + 2) * MS,
        scheduled_ns=(start_ms + 5) * MS,
        token_ns=[token * MS for token in tokens_ms],
        write_ns=[tokens_ms[0] * MS, tokens_ms[-1] * MS],
        end_ns=tokens_ms[-1] * MS,
        num_prompt_tokens=3,
        num_cached_tokens=2,
    )
    target = None if target_ms is None else target_ms * MS
    return RequestTimes(timeline, start_ms * MS, (start_ms + 1) * MS, target)


def step(num_prefill: int, num_decode: int) -> StepRecord:
    counts = dict.fromkeys(StepRecord.__struct_fields__, 0) | {"phases": PhaseTimes()}
    counts |= {"num_prefill_seqs": num_prefill, "num_decode_seqs": num_decode, "end_ns": 3 * MS}
    counts |= {"num_prefix_queried_tokens": 3 * num_prefill}
    return StepRecord(**(counts | {"blocked_by": BlockedBy.NOTHING, "is_profiled": False}))  # type: ignore[arg-type]


RUN = Run(requests=[times(0, [10, 12, 16], 0), times(20, [30, 40], 20)], submit_wall=21_000_000)


def test_the_streaming_report_is_the_seeds() -> None:
    assert report.streaming_lines(RUN, HEADER, "20.000 ms / absolute") == [
        "=== streaming benchmark ===",
        "Model: gpt2",
        "Device: cuda",
        "Requests: 2",
        "Prompt tokens (total): 6",
        "Completion tokens (total): 5",
        "Submit wall: 0.021000 s",
        "Submit interval/schedule: 20.000 ms / absolute",
        "Submit lag p50/p95/p99: 0.00/0.00/0.00 ms",
        "add_request latency p50/p95/p99: 1.00/1.00/1.00 ms",
        "Tokenize p50/p95/p99: 0.00/0.00/0.00 ms",
        "Queue wait (post-tok) p50/p95/p99: 4.00/4.00/4.00 ms",
        "Prefill->first token p50/p95/p99: 5.00/5.00/5.00 ms",
        "TTFT p50/p95/p99: 10.00/10.00/10.00 ms",
        "TPOT p50/p95/p99: 6.50/9.65/9.93 ms/token",
        "ITL p50/p95/p99: 4.00/9.40/9.88 ms",
        "Latency p50/p95/p99: 18.00/19.80/19.96 ms",
        "Throughput (completion,total): 125.00 tokens/s",
    ]


def test_what_was_not_measured_has_no_line() -> None:
    burst_of_single_tokens = Run(requests=[times(0, [10])], submit_wall=0)
    names = [line.split(" p50")[0] for line in report.streaming_lines(burst_of_single_tokens, {}, "-")]
    assert not {"Submit lag", "TPOT", "ITL"} & set(names)
    nobody = Run(requests=[], submit_wall=0, rejected=[MS])
    assert not [line for line in report.streaming_lines(nobody, {}, "-") if "p50" in line or "Throughput" in line]
    assert "Reject latency p50/p95/p99: 1.00/1.00/1.00 ms" in report.own_lines(nobody, {})
    assert "Rejected requests: 1" in report.own_lines(nobody, {})


def test_our_own_lines_stand_under_their_own_heading() -> None:
    run = Run(requests=RUN.requests, submit_wall=0, steps=[step(2, 0), step(1, 1), step(0, 2), step(0, 2)])
    assert report.own_lines(run, {"Host": "h"}) == [
        "--- beyond the seeds' report ---",
        "Host: h",
        "Engine submit lag (tokenized->inbox) p50/p95/p99: 1.00/1.00/1.00 ms",
        "Engine queue wait (inbox->batch) p50/p95/p99: 3.00/3.00/3.00 ms",
        "Flush gap (piece to piece) p50/p95/p99: 8.00/9.80/9.96 ms",
        "Engine step p50/p95/p99: 3.00/3.00/3.00 ms",
        "Engine steps: 4 (1 prefill, 1 mixed, 2 decode)",
        "Prefix cache: 4 of 9 prompt tokens hit",
        "Preemptions: 0",
        "Rejected requests: 0",
    ]


def test_the_online_scheduler_report_has_latency_and_the_offline_one_has_none() -> None:
    run = Run(requests=[times(0, [10, 12, 16]), times(0, [10, 20])], submit_wall=0)
    shared = [
        "=== scheduler benchmark ===",
        "Prompt tokens (total): 6",
        "Completion tokens (total): 5",
        "Prefill elapsed: 0.010000 s",
        "Decode elapsed: 0.010000 s",
        "Throughput (decode): 300.00 tokens/s",
        "Throughput (total): 250.00 tokens/s",
    ]
    assert report.scheduler_lines(run, {}, is_online=False) == shared
    assert report.scheduler_lines(run, {}, is_online=True) == [
        *shared,
        "TTFT p50/mean: 10.00/10.00 ms",
        "TPOT p50/mean: 6.50/6.50 ms/token",
        "Latency p50/mean: 18.00/18.00 ms",
    ]


def test_a_run_of_single_tokens_has_no_decode_rate() -> None:
    lines = report.scheduler_lines(Run(requests=[times(0, [10])], submit_wall=0), {}, is_online=False)
    assert "Decode elapsed: 0.000000 s" in lines
    assert not [line for line in lines if "(decode)" in line]


def test_the_spread_shows_each_run_and_how_far_they_lie_apart() -> None:
    other = Run(requests=[times(0, [20, 24, 32], 0), times(20, [40, 50], 20)], submit_wall=0)
    lines = report.spread_lines([RUN, other], report.streaming_pools)
    assert lines[0] == "=== 2 runs; a difference within the spread is noise ==="
    assert lines[1] == "Throughput: 125.00 / 100.00 tokens/s (avg 112.50, spread 22.2 %)"
    assert "TTFT p50: 10.00 / 20.00 ms (avg 15.00, spread 66.7 %)" in lines
    assert "TPOT p99: 9.93 / 9.96 ms/token (avg 9.95, spread 0.3 %)" in lines
    assert [line for line in report.spread_lines([RUN, other], lambda _: []) if "p50" in line] == []


def test_spread_leaves_out_what_only_some_runs_measured() -> None:
    rejected = Run(requests=[], submit_wall=0, rejected=[MS])
    lines = report.spread_lines([RUN, rejected], report.streaming_pools)
    assert lines[1] == "Throughput: 125.00 tokens/s (avg 125.00, spread 0.0 %)"


def test_json_has_the_figures_of_the_lines(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report.write_json(file, {"Model": "gpt2"}, [RUN], report.streaming_pools)
    content = json.loads(file.read_text())
    assert content["settings"] == {"Model": "gpt2"}
    [run] = content["runs"]
    assert (run["num_completion_tokens"], run["throughput_tokens_per_s"]) == (5, pytest.approx(125))
    for line in report.streaming_lines(RUN, {}, "-"):
        if found := re.fullmatch(r"(.+) p50/p95/p99: (\S+)/(\S+)/(\S+) (\S+)", line):
            name, *shown, unit = found.groups()
            figures = run["distributions"][name]
            assert [f"{figures[key]:.2f}" for key in ("p50", "p95", "p99")] == shown
            assert figures["unit"] == unit
