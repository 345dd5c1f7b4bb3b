"""`roseinfer bench serve --sweep`: finds the rate at which a server is as busy as it should be, from rising rates.

The knee is the highest rate at which at least KNEE_SHARE of the requests kept the objective, at it and at every lower
rate of the sweep. The requests in flight there are the sum of all latencies over the duration, which by Little's law is
their mean number; a fleet is sized by them, since they do not depend on how rates are spread over replicas.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from roseinfer.bench import definitions as d
from roseinfer.bench.load.plan import describe, echo_of, interval_ns_of, planner_of
from roseinfer.bench.load.report import Objective, ServeRun, duration_s, error_lines
from roseinfer.bench.load.serve import EXIT_INVALID, endpoint_of, send, settle_seed
from roseinfer.bench.report import NS_PER_MS, say, write_json
from roseinfer.cli.output_files import check_outputs
from roseinfer.errors import ConfigError

KNEE_SHARE = 0.95
SWEEP_FORMAT = "roseinfer bench sweep 1"
DEFAULT_DURATION_S = 10.0


class Point(NamedTuple):
    """The figures of one rate. Latencies are None when nothing completed, TPOT when all answers were one piece."""

    rate: float  # asked for, in requests a second
    num_requests: int
    good_share: float  # of all requests, those that kept the objective
    goodput: float  # of these, a second
    in_flight: float  # requests, on average
    ttft_p99_ms: float | None
    tpot_p99_ms: float | None
    is_valid: bool  # the generator kept its schedule

    @property
    def is_good(self) -> bool:
        return self.is_valid and self.good_share >= KNEE_SHARE


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each rate, and the knee.

    Returns the exit code: 1 when the generator was late at the first, or nothing completed.
    """
    if arguments.slo_ttft_ms is None and arguments.slo_tpot_ms is None:
        raise ConfigError("needs --slo-ttft-ms or --slo-tpot-ms: the knee is where they break", param="--sweep")
    if arguments.recording is not None:
        raise ConfigError("has no meaning beside --sweep", param="--recording")
    if arguments.num_requests is None and arguments.duration is None:
        arguments.duration = DEFAULT_DURATION_S
    turns = [argparse.Namespace(**{**vars(arguments), "rate": rate}) for rate in arguments.sweep]
    plans = [planner_of(turn) for turn in turns]
    check_outputs(json=arguments.json)
    endpoint = endpoint_of(arguments)
    settle_seed(arguments, endpoint)
    say("=== rate sweep ===", f"URL: {endpoint.url}", f"Model: {endpoint.model}")
    points: list[Point] = []
    has_answers = False
    for index, (turn, plan) in enumerate(zip(turns, plans, strict=True)):
        # Each rate has prompts of its own: without a salt it would find those of another rate in the cache.
        turn.seed = arguments.seed + index
        planned = plan(turn.seed)
        if not points:
            say(f"Load: {describe(turn, planned)}, then more a second", header_line())
        interval_ns = interval_ns_of(turn, planned)
        made = send(turn, planned, interval_ns, endpoint, f"rate {turn.rate:g}")
        points.append(point_of(turn.rate, made))
        say(line_of(points[-1]), *error_lines(made.requests))
        has_answers = has_answers or bool(made.complete)
        if not points[-1].is_valid:
            break
    say(*knee_lines(points))
    if arguments.json is not None:
        knee = knee_of(points)
        content = {
            "format": SWEEP_FORMAT,
            "settings": echo_of(arguments),
            "points": [point._asdict() for point in points],
            "knee": None if knee is None else knee._asdict(),
        }
        write_json(arguments.json, content)
    return 0 if points[0].is_valid and has_answers else EXIT_INVALID


def point_of(rate: float, made: ServeRun) -> Point:
    """The figures of one run with an objective."""
    objective = made.objective or Objective(None, None)
    seconds, complete = duration_s(made.requests), made.complete
    num_good = sum(objective.is_met(request) for request in complete)
    tpots = [tpot for request in complete if (tpot := request.tpot_ns) is not None]
    return Point(
        rate=rate,
        num_requests=len(made.requests),
        good_share=num_good / len(made.requests),
        goodput=num_good / seconds if complete else 0.0,  # a single one that failed at once took no time
        in_flight=sum(request.latency_ns for request in complete) / 1e9 / seconds if complete else 0.0,
        ttft_p99_ms=d.percentile([request.ttft_ns for request in complete], 99) / NS_PER_MS if complete else None,
        tpot_p99_ms=d.percentile(tpots, 99) / NS_PER_MS if tpots else None,
        is_valid=made.is_valid,
    )


def knee_of(points: Sequence[Point]) -> Point | None:
    """The last good point before the first that is not; None when the first is not."""
    knee = None
    for point in points:
        if not point.is_good:
            break
        knee = point
    return knee


def knee_lines(points: Sequence[Point]) -> list[str]:
    """The knee in words; points are in the order of their rates."""
    knee, last = knee_of(points), points[-1]
    if not last.is_valid and (knee is None or knee is points[-2]):
        why = "the load generator was late, so nothing is said of the server there"
        return [f"Knee: not below {last.rate:g} requests/s; {why}"]
    if knee is None:
        return [f"Knee: below {points[0].rate:g} requests/s, the lowest rate of the sweep"]
    reached = "" if knee is not last else ", or more: the sweep did not reach it"
    return [f"Knee: {knee.rate:g} requests/s, {knee.in_flight:.1f} requests in flight{reached}"]


_COLUMNS = ("rate", "requests", "good", "goodput/s", "in flight", "TTFT p99 ms", "TPOT p99 ms")


def header_line() -> str:
    return "  ".join(name.rjust(max(9, len(name))) for name in _COLUMNS)


def line_of(point: Point) -> str:
    """A row under the header."""
    latencies = ["-" if value is None else f"{value:.2f}" for value in (point.ttft_p99_ms, point.tpot_p99_ms)]
    cells = [f"{point.rate:g}", str(point.num_requests), f"{point.good_share:.1%}", f"{point.goodput:.2f}"]
    cells += [f"{point.in_flight:.1f}", *latencies]
    shown = "  ".join(cell.rjust(max(9, len(name))) for cell, name in zip(cells, _COLUMNS, strict=True))
    return shown if point.is_valid else f"{shown}  INVALID: the load generator was late"
