"""What clients saw, as a report and a result file, and the verdict on the generator itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.definitions import Observed
from roseinfer.bench.load.report import (
    RESIDUAL,
    Objective,
    ServeRun,
    Verdict,
    lag_p99_ns,
    latency_pools,
    ledger_parts_ns,
    lines_of,
    mean_interval_ns,
    write_result,
)
from roseinfer.bench.report import say
from roseinfer.errors import ConfigError

MS = 1_000_000
FIRST = "the first request of each moment was"


def seen(chunks_ms: list[int], counts: list[int] | None = None, **changes: Any) -> Observed:
    """Due at 100 ms, sent at 102 ms."""
    fields: dict[str, Any] = {
        "request_id": "a",
        "intended_ns": 100 * MS,
        "sent_ns": 102 * MS,
        "token_ns": [chunk * MS for chunk in chunks_ms],
        "token_counts": counts or [1] * len(chunks_ms),
        "end_ns": chunks_ms[-1] * MS if chunks_ms else 110 * MS,
        "num_prompt_tokens": 4,
        "finish_reason": "length",
    }
    return Observed(**(fields | changes))


def test_latencies_are_counted_by_tokens() -> None:
    request = seen([110, 114, 122], [1, 1, 4])
    assert request.submit_lag_ns == 2 * MS
    assert request.ttft_ns == 8 * MS
    assert request.tpot_ns == 12 * MS / 5
    assert request.inter_token_latencies_ns() == [4 * MS, *[2 * MS] * 4]
    assert request.chunk_gaps_ns() == [4 * MS, 8 * MS]
    assert request.latency_ns == 20 * MS


def test_one_chunk_has_no_tpot() -> None:
    assert seen([110]).tpot_ns is None
    assert seen([110], [3]).tpot_ns is None
    assert [pool.name for pool in latency_pools([seen([110])])] == ["TTFT", "Latency"]


def test_only_complete_requests_are_in_the_pools() -> None:
    broken = [seen([110, 120], error="429: full"), seen([110, 120], was_aborted=True), seen([])]
    assert latency_pools(broken) == []
    assert [len(pool.values) for pool in latency_pools([*broken, seen([110, 112])])] == [1, 1, 1, 1]


def test_a_good_request_keeps_both_limits() -> None:
    request = seen([110, 114])
    assert Objective(8 * MS, 4 * MS).is_met(request)
    assert not Objective(7 * MS, None).is_met(request)
    assert not Objective(None, 3 * MS).is_met(request)
    assert Objective(8 * MS, 0).is_met(seen([110])), "one token has no time per token to miss"


@pytest.mark.parametrize(
    ("lag_ms", "interval_ms", "is_valid", "words"),
    [
        (2, 20, True, "valid, {} 2.00 ms late at p99, 10.0% of the interval of 20.000 ms; 10.0% is allowed"),
        (3, 20, False, "INVALID, {} 3.00 ms late at p99, 15.0% of the interval of 20.000 ms; 10.0% is allowed"),
        (50, 0, True, "{} 50.00 ms late at p99; a burst has no interval to hold it against"),
    ],
)
def test_the_verdict_holds_the_lag_against_the_interval(
    lag_ms: float, interval_ms: float, is_valid: bool, words: str
) -> None:
    verdict = Verdict(lag_ms * MS, interval_ms * MS, 0.1)
    assert verdict.is_valid is is_valid
    assert verdict.line() == f"Load generator: {words.format(FIRST)}"


def test_what_is_due_together_goes_out_one_after_the_other_and_that_is_not_late() -> None:
    """Forty at one moment, a millisecond each, between two that are a little late."""

    def sent(intended_ms: int, lag_ms: int) -> Observed:
        return Observed(request_id="a", intended_ns=intended_ms * MS, sent_ns=(intended_ms + lag_ms) * MS)

    seen = [sent(0, 2), *(sent(100, 1 + index) for index in range(40)), sent(200, 2)]
    assert lag_p99_ns(seen) == 2 * MS
    assert lag_p99_ns([sent(0, 2), *(sent(100, 50 + index) for index in range(40))]) > 49 * MS
    assert lag_p99_ns([Observed(request_id="a", intended_ns=5)]) == 0


def test_the_interval_of_a_trace_is_its_mean() -> None:
    assert mean_interval_ns([0, 10, 80]) == mean_interval_ns([0, 10, 10, 10, 80]) == 40
    assert mean_interval_ns([0, 0]) == mean_interval_ns([7]) == 0


LEDGER = {"parts_ns": {"submit_lag": 3 * MS, "decode": 12 * MS}, "total_ns": 15 * MS}


def make_run(*requests: Observed, interval_ms: float = 100, objective: Objective | None = None) -> ServeRun:
    return ServeRun(list(requests), Verdict(2.0 * MS, interval_ms * MS, 0.1), objective)


def test_a_report_line_by_line() -> None:
    run = make_run(
        seen([110, 114, 122], [1, 1, 4], ledger=LEDGER, num_cached_tokens=3),
        seen([], error="429: full", sent_ns=104 * MS),
        seen([110], was_aborted=True),
        objective=Objective(10 * MS, None),
    )
    assert lines_of(run, {"URL": "u"}) == [
        "=== serve benchmark ===",
        "URL: u",
        "Requests: 3 (1 complete, 1 aborted as planned, 1 failed)",
        "Prompt tokens (total): 4",
        "Cached prompt tokens (total): 3 (75.0%)",
        "Completion tokens (total): 6",
        "Error: 1 x 429: full",
        "Client submit lag p50/p95/p99: 2.00/3.80/3.96 ms",
        f"Load generator: valid, {FIRST} 2.00 ms late at p99, 2.0% of the interval of 100.000 ms; 10.0% is allowed",
        "TTFT p50/p95/p99: 8.00/8.00/8.00 ms",
        "TPOT p50/p95/p99: 2.40/2.40/2.40 ms/token",
        "ITL p50/p95/p99: 2.00/3.60/3.92 ms",
        "Latency p50/p95/p99: 20.00/20.00/20.00 ms",
        "Duration: 0.020 s",
        "Throughput (completion,total): 300.00 tokens/s",
        "Throughput (requests): 50.00 requests/s",
        "Goodput (TTFT <= 10 ms): 50.00 requests/s, 1 of 3 (33.3%)",
        "--- where the time of 1 requests went: the server's ledger, and what it does not name ---",
        "(shares are of these requests' whole time, from sending them to the end of their answers)",
        "submit_lag p50/p95/p99: 3.00/3.00/3.00 ms, 15.0% of the time",
        "decode p50/p95/p99: 12.00/12.00/12.00 ms, 60.0% of the time",
        "network and client p50/p95/p99: 5.00/5.00/5.00 ms, 25.0% of the time",
    ]


def test_what_a_server_said_forges_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    say(*lines_of(make_run(seen([], error="\x1b[31mred\nRequests: 9")), {}))
    assert "Error: 1 x \\x1b[31mred\\nRequests: 9\n" in capsys.readouterr().out


def test_cached_tokens_are_of_the_requests_that_tell_of_them(tmp_path: Path) -> None:
    def cached_line(*numbers: int | None) -> list[str]:
        run = make_run(*(seen([110], num_cached_tokens=number) for number in numbers))
        write_result(tmp_path / "r.json", run, {}, None)
        requests = json.loads((tmp_path / "r.json").read_text())["requests"]
        assert [request["num_cached_tokens"] for request in requests] == [*numbers]
        return [line for line in lines_of(run, {}) if line.startswith("Cached")]

    assert cached_line(4, 0, None) == ["Cached prompt tokens (total): 4 (50.0%)"]
    assert cached_line(0) == ["Cached prompt tokens (total): 0 (0.0%)"]
    assert cached_line(None, None) == []


def test_an_invalid_run_has_no_percentiles_of_the_server(tmp_path: Path) -> None:
    run = make_run(seen([110, 114]), interval_ms=10)
    lines = lines_of(run, {})
    assert lines[-1] == "The figures would be the generator's, not the server's, so none are printed (--max-lag-share)."
    assert not [line for line in lines if line.startswith(("TTFT", "ITL", "Throughput"))]
    write_result(tmp_path / "r.json", run, {}, None)
    assert json.loads((tmp_path / "r.json").read_text())["distributions"] == {}


@pytest.mark.parametrize(
    ("ledger", "queue_ms"),
    [
        ({"parts_ns": {"queue": 4 * MS}}, 4.0),
        ({"parts_ns": [1]}, None),
        ({"parts_ns": {"queue": "x"}}, None),
        ({"other": 1}, None),
        (None, None),
    ],
)
def test_parts_and_residual_add_up_to_what_the_client_saw(ledger: Any, queue_ms: float | None) -> None:
    request = seen([110, 114], ledger=ledger)
    parts = ledger_parts_ns(request)
    if queue_ms is None:
        assert parts is None
    else:
        assert parts == {"queue": queue_ms * MS, RESIDUAL: 12 * MS - queue_ms * MS}


def test_the_result_names_every_request_and_the_recording_beside_it(tmp_path: Path) -> None:
    run = make_run(seen([110, 114], [1, 2], ledger=LEDGER), seen([], error="gone", request_id="b"))
    write_result(tmp_path / "r.json", run, {"url": "u"}, tmp_path / "r.npz")
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["recording"] == "r.npz"
    assert content["verdict"]["is_valid"] is True
    first, second = content["requests"]
    assert first["token_times_s"] == [0.11, 0.114]
    assert (first["intended_s"], first["sent_s"], first["first_token_s"]) == (0.1, 0.102, 0.11)
    assert (first["token_counts"], first["num_tokens"], first["ledger"]) == ([1, 2], 3, LEDGER)
    assert first["residual_s"] == pytest.approx(-0.003), "a ledger that says more than its client saw is not hidden"
    assert (second["request_id"], second["error"], second["first_token_s"]) == ("b", "gone", None)


def test_a_result_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        write_result(tmp_path / "no" / "r.json", make_run(seen([110])), {}, None)
    assert refusal.value.param == "--json"
