"""The report of a load and its result file: latencies, goodput, where time went, and whether the generator was late."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from roseinfer.bench import definitions as d
from roseinfer.bench.definitions import Observed
from roseinfer.bench.report import NS_PER_MS, Pool, header_lines, write_json

RESULT_FORMAT = "roseinfer bench serve 1"
RESIDUAL = "network and client"  # of a request's time at the client, what the server's ledger does not name
_MAX_ERRORS_SHOWN = 5


class Objective(NamedTuple):
    """What a request must keep to count as good. None asks for nothing."""

    ttft_ns: float | None
    tpot_ns: float | None

    def is_met(self, request: Observed) -> bool:
        """A request of one token has no TPOT to miss."""
        tpot_ns = request.tpot_ns
        return (self.ttft_ns is None or request.ttft_ns <= self.ttft_ns) and (
            self.tpot_ns is None or tpot_ns is None or tpot_ns <= self.tpot_ns
        )


def objective_of(ttft_ms: float | None, tpot_ms: float | None) -> Objective | None:
    """Of two limits in milliseconds; None without any."""
    if ttft_ms is None and tpot_ms is None:
        return None
    return Objective(*(None if limit is None else limit * NS_PER_MS for limit in (ttft_ms, tpot_ms)))


class Verdict(NamedTuple):
    """Whether the generator kept its own schedule well enough for its figures to be the server's."""

    lag_p99_ns: float
    interval_ns: float  # 0: a burst, in which nothing can be late against an interval
    max_share: float

    @property
    def is_valid(self) -> bool:
        return not self.interval_ns or self.lag_p99_ns <= self.max_share * self.interval_ns

    def line(self) -> str:
        late = f"the first request of each moment was {self.lag_p99_ns / 1e6:.2f} ms late at p99"
        if not self.interval_ns:
            return f"Load generator: {late}; a burst has no interval to hold it against"
        share = f"{self.lag_p99_ns / self.interval_ns:.1%} of the interval of {self.interval_ns / 1e6:.3f} ms"
        valid = "valid" if self.is_valid else "INVALID"
        return f"Load generator: {valid}, {late}, {share}; {self.max_share:.1%} is allowed"


def mean_interval_ns(offsets_ns: Iterable[int]) -> float:
    """Between neighbouring moments at which something is due; 0 for a burst, which is one moment."""
    moments = set(offsets_ns)
    return (max(moments) - min(moments)) / (len(moments) - 1) if len(moments) > 1 else 0.0


def latency_pools(requests: Iterable[Observed]) -> list[Pool]:
    """The distributions of those that completed; one without a value is left out."""
    complete = [request for request in requests if request.is_complete]
    tpots = [request.tpot_ns for request in complete]
    pools = [
        Pool("TTFT", [request.ttft_ns for request in complete]),
        Pool("TPOT", [tpot for tpot in tpots if tpot is not None], "ms/token"),
        Pool("ITL", [gap for request in complete for gap in request.inter_token_latencies_ns()]),
        Pool("Latency", [request.latency_ns for request in complete]),
    ]
    return [pool for pool in pools if pool.values]


def lag_p99_ns(requests: Iterable[Observed]) -> float:
    """The 99th percentile of the submit lag over all moments at which something was due; 0 when nothing was sent.

    A moment's lag is that of the first request that went out: of those that are due together, the others have to wait
    for it, and how long that takes is the burst's size and not a generator that is late.
    """
    lags: dict[int, int] = {}
    for request in requests:
        if request.sent_ns:
            lags[request.intended_ns] = min(request.submit_lag_ns, lags.get(request.intended_ns, request.submit_lag_ns))
    return d.percentile(list(lags.values()), 99) if lags else 0.0


def duration_s(requests: Sequence[Observed]) -> float:
    """From the first request that was sent to the end of the last."""
    return (
        max(request.end_ns for request in requests) - min(request.sent_ns or request.end_ns for request in requests)
    ) / 1e9


class ServeRun(NamedTuple):
    """One measured load."""

    requests: list[Observed]
    verdict: Verdict | None  # None: simulated, so nothing was sent and no server could return a ledger
    objective: Objective | None

    @property
    def is_valid(self) -> bool:
        return self.verdict is None or self.verdict.is_valid

    @property
    def complete(self) -> list[Observed]:
        return [request for request in self.requests if request.is_complete]


def ledger_parts_ns(request: Observed) -> dict[str, float] | None:
    """The named parts of the request's time in the server, and what its client saw beyond them. None without a ledger.

    The parts and the residual add up to the time from sending the request to the end of its answer.
    """
    parts = (request.ledger or {}).get("parts_ns")
    if not isinstance(parts, dict) or not all(isinstance(duration, int | float) for duration in parts.values()):
        return None
    named = {str(name): float(duration) for name, duration in parts.items()}
    return {**named, RESIDUAL: request.latency_ns - sum(named.values())}


def lines_of(run: ServeRun, header: Mapping[str, Any], title: str = "serve") -> list[str]:
    """The report. The server's percentiles are left out when the generator did not keep its schedule."""
    requests, complete = run.requests, run.complete
    num_aborted = sum(request.was_aborted for request in requests)
    num_failed = sum(bool(request.error) for request in requests)
    lines = [
        f"=== {title} benchmark ===",
        *header_lines(header),
        f"Requests: {len(requests)} ({len(complete)} complete, {num_aborted} aborted as planned, {num_failed} failed)",
        f"Prompt tokens (total): {sum(request.num_prompt_tokens for request in complete)}",
        *_cached_lines(complete),
        f"Completion tokens (total): {sum(request.num_tokens for request in complete)}",
        *error_lines(requests),
    ]
    if run.verdict is not None:
        # The server's own `submit_lag`, in the ledger below, is another time: its two series are named as these are.
        lags = Pool("Client submit lag", [request.submit_lag_ns for request in requests if request.sent_ns])
        lines += [lags.percentiles_line()] * bool(lags.values) + [run.verdict.line()]
    if not run.is_valid:
        lines.append("The figures would be the generator's, not the server's, so none are printed (--max-lag-share).")
    elif complete:
        lines += [pool.percentiles_line() for pool in latency_pools(complete)]
        lines += _rate_lines(run) + ([] if run.verdict is None else _ledger_lines(complete))
    return lines


def _cached_lines(complete: Sequence[Observed]) -> list[str]:
    """What the server found in its prefix cache; no line where it does not report that."""
    counted = [seen for seen in complete if seen.num_cached_tokens is not None]
    num_cached = sum(seen.num_cached_tokens or 0 for seen in counted)
    num_prompt = sum(seen.num_prompt_tokens for seen in counted)
    return [f"Cached prompt tokens (total): {num_cached} ({num_cached / max(1, num_prompt):.1%})"] * bool(counted)


def error_lines(requests: Sequence[Observed]) -> list[str]:
    """What went wrong, most frequent first."""
    counted = Counter(request.error for request in requests if request.error).most_common()
    lines = [f"Error: {number} x {error}" for error, number in counted[:_MAX_ERRORS_SHOWN]]
    return lines + [f"Error: {len(counted) - _MAX_ERRORS_SHOWN} other kinds"] * (len(counted) > _MAX_ERRORS_SHOWN)


def _rate_lines(run: ServeRun) -> list[str]:
    seconds = duration_s(run.requests)
    lines = [
        f"Duration: {seconds:.3f} s",
        f"Throughput (completion,total): {sum(request.num_tokens for request in run.complete) / seconds:.2f} tokens/s",
        f"Throughput (requests): {len(run.complete) / seconds:.2f} requests/s",
    ]
    if run.objective is not None:
        good = sum(run.objective.is_met(request) for request in run.complete)
        limits = [
            f"{name} <= {limit / NS_PER_MS:g} ms"
            for name, limit in zip(("TTFT", "TPOT"), run.objective, strict=True)
            if limit is not None
        ]
        lines.append(
            f"Goodput ({', '.join(limits)}): {good / seconds:.2f} requests/s, "
            f"{good} of {len(run.requests)} ({good / len(run.requests):.1%})"
        )
    return lines


def _ledger_lines(complete: Sequence[Observed]) -> list[str]:
    """A row for each part that the server names, and one for what it does not; shares are of all requests' time."""
    ledgers = [parts for request in complete if (parts := ledger_parts_ns(request)) is not None]
    if not ledgers:
        return ["The server returned no ledger, so its part of the latency is not divided further."]
    in_order = dict.fromkeys(name for parts in ledgers for name in parts)  # the server's own order
    names = sorted(in_order, key=lambda name: name == RESIDUAL)
    total = sum(value for parts in ledgers for value in parts.values())
    lines = [
        f"--- where the time of {len(ledgers)} requests went: the server's ledger, and what it does not name ---",
        "(shares are of these requests' whole time, from sending them to the end of their answers)",
    ]
    for name in names:
        values = [parts.get(name, 0.0) for parts in ledgers]
        lines.append(f"{Pool(name, values).percentiles_line()}, {sum(values) / total:.1%} of the time")
    return lines


def write_result(file: Path, run: ServeRun, settings: Mapping[str, Any], recording: Path | None) -> None:
    """Write all that was seen, for `roseinfer explain` and for comparisons. Raises ConfigError."""
    beside = None if recording is None else _relative(recording, file.parent)
    write_json(file, result_of(run, settings, beside))


def result_of(run: ServeRun, settings: Mapping[str, Any], recording: str | None) -> dict[str, Any]:
    """The content of a result file, whose directory the path of the recording is relative to.

    Stamps are seconds of this host's monotonic clock, as in the server's recording.
    """
    return {
        "format": RESULT_FORMAT,
        "settings": settings,
        "verdict": None if run.verdict is None else _verdict(run.verdict),
        "distributions": {pool.name: pool.summary() for pool in latency_pools(run.requests)} if run.is_valid else {},
        "recording": recording,
        "requests": [_result_row(request) for request in run.requests],
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "is_valid": verdict.is_valid,
        "submit_lag_p99_ms": verdict.lag_p99_ns / NS_PER_MS,
        "interval_ms": verdict.interval_ns / NS_PER_MS,
        "max_lag_share": verdict.max_share,
    }


def _relative(path: Path, directory: Path) -> str:
    path, directory = path.resolve(), directory.resolve()
    return str(path.relative_to(directory)) if path.is_relative_to(directory) else str(path)


def _result_row(request: Observed) -> dict[str, Any]:
    parts = ledger_parts_ns(request)
    return {
        "request_id": request.request_id,
        "intended_s": request.intended_ns / 1e9,
        "sent_s": request.sent_ns / 1e9,
        "first_token_s": request.token_ns[0] / 1e9 if request.token_ns else None,
        "token_times_s": [stamp / 1e9 for stamp in request.token_ns],
        "token_counts": request.token_counts,
        "end_s": request.end_ns / 1e9,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_tokens": request.num_tokens,
        "finish_reason": request.finish_reason,
        "error": request.error,
        "was_aborted": request.was_aborted,
        "ledger": request.ledger,
        "residual_s": None if parts is None else parts[RESIDUAL] / 1e9,
    }
