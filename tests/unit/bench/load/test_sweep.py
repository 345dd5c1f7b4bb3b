"""A sweep's points from what was seen, and the knee of points whose truth is known."""

import pytest

from roseinfer.bench.definitions import Observed
from roseinfer.bench.load import sweep
from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.report import Objective, ServeRun, Verdict
from roseinfer.bench.load.serve import EXIT_INVALID
from roseinfer.bench.load.sweep import Point, header_line, knee_lines, knee_of, line_of, point_of
from roseinfer.cli import main as cli

MS = 1_000_000


def point(rate: float, good_share: float = 1.0, *, is_valid: bool = True) -> Point:
    return Point(rate, 100, good_share, rate * good_share, rate / 4, 30.0, 5.0, is_valid)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([point(5), point(10), point(20, 0.95), point(40, 0.9)], "Knee: 20 requests/s, 5.0 requests in flight"),
        ([point(5, 0.9), point(10)], "Knee: below 5 requests/s, the lowest rate of the sweep"),
        ([point(5), point(10, 0.8), point(20)], "Knee: 5 requests/s, 1.2 requests in flight"),
        ([point(5), point(10)], "Knee: 10 requests/s, 2.5 requests in flight, or more: the sweep did not reach it"),
        (
            [point(5), point(10, is_valid=False)],
            "Knee: not below 10 requests/s; the load generator was late, so nothing is said of the server there",
        ),
        ([point(5), point(10, 0.5), point(20, is_valid=False)], "Knee: 5 requests/s, 1.2 requests in flight"),
    ],
)
def test_the_knee_is_the_last_rate_before_the_limits_break(points: list[Point], words: str) -> None:
    assert knee_lines(points) == [words]


def test_a_late_generator_is_no_knee() -> None:
    assert knee_of([point(5, is_valid=False)]) is None
    assert "was late" in knee_lines([point(5, is_valid=False)])[0]
    assert line_of(point(5, is_valid=False)).endswith("INVALID: the load generator was late")


def test_a_point_of_a_single_request_that_failed_at_once() -> None:
    """As of a server that has died: nothing was sent, so no time has passed."""
    failed = Observed(request_id="", intended_ns=0, end_ns=5 * MS, error="ConnectionRefusedError")
    counted = point_of(1.0, ServeRun([failed], Verdict(0.0, 1.0, 0.1), Objective(100.0 * MS, None)))
    assert (counted.good_share, counted.goodput, counted.in_flight) == (0.0, 0.0, 0.0)


def test_a_point_counts_what_was_seen() -> None:
    """Three requests over a second: one good, one with a slow first token, one that failed."""

    def seen(first_ms: int, **changes: object) -> Observed:
        fields = {
            "request_id": "",
            "intended_ns": 0,
            "sent_ns": 1,
            "token_ns": [1 + first_ms * MS, 1 + (first_ms + 10) * MS],
            "token_counts": [1, 2],
            "end_ns": 1 + 1000 * MS,
        }
        return Observed(**{**fields, **changes})  # type: ignore[arg-type]

    requests = [seen(20), seen(300), seen(0, error="429", token_ns=[], token_counts=[], end_ns=1 + 500 * MS)]
    made = ServeRun(requests, Verdict(0.0, 1.0, 0.1), Objective(100.0 * MS, 8.0 * MS))
    counted = point_of(3.0, made)
    assert (counted.num_requests, counted.good_share, counted.goodput) == (3, 1 / 3, 1.0)
    assert counted.in_flight == pytest.approx(2.0), "two latencies of a second in a second"
    assert counted.ttft_p99_ms == pytest.approx(20 + 0.99 * 280)
    assert counted.tpot_p99_ms == pytest.approx(5.0)
    assert len(line_of(counted)) == len(header_line())
    nothing = point_of(3.0, made._replace(requests=requests[2:]))
    assert (nothing.good_share, nothing.ttft_p99_ms, nothing.tpot_p99_ms) == (0.0, None, None)
    assert line_of(nothing).split()[-2:] == ["-", "-"]


def test_a_sweep_without_an_answer_says_why_and_has_not_succeeded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Observed(request_id="a", intended_ns=1, sent_ns=1, end_ns=2, error="404: no such path")
    made = ServeRun([refused], Verdict(0, MS, 0.1), Objective(MS, None))
    monkeypatch.setattr(sweep, "endpoint_of", lambda _: Endpoint("http://there"))
    monkeypatch.setattr(sweep, "send", lambda *_: made)
    assert cli.main(["bench", "serve", "--sweep", "5,9", "--slo-ttft-ms", "9"]) == EXIT_INVALID
    assert capsys.readouterr().out.count("Error: 1 x 404: no such path") == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--sweep 5,10", "--sweep: needs --slo-ttft-ms or --slo-tpot-ms"),
        ("--sweep 5,5", "--sweep: expected rates that rise, got '5,5'"),
        ("--sweep 0,5", "--sweep: Expected `number` > 0"),
        ("--sweep 5 --rate 3", "not allowed with"),
        ("--sweep 5 --slo-ttft-ms 9 --recording a.npz", "--recording: has no meaning beside --sweep"),
    ],
)
def test_mistakes_are_one_sentence(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", *flags.split()]) == cli.EXIT_USAGE
    assert words in capsys.readouterr().err
