"""The definitions of all latencies: TTFT, ITL, TPOT, queue wait and the others, as differences of stamps.

receive + tokenize + submit lag + queue wait + prefill + first write = time to first token, to the nanosecond. An
interval is None unless both of its ends were reached, so an aborted request has only the parts it lived through.
Metrics, logs, spans, ledgers, the timeline page and the benchmarks (`bench/definitions.py`) all use these functions.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from roseinfer.observe.recorder.recording import RequestRecord
from roseinfer.records import RequestTimeline, StepRecord

STAGES = ("receive", "tokenize", "submit_lag", "queue_wait", "prefill", "decode")


def _between(start_ns: int, end_ns: int) -> int | None:
    return end_ns - start_ns if start_ns and end_ns else None


def _first(stamps_ns: Sequence[int]) -> int:
    return stamps_ns[0] if stamps_ns else 0


def receive_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.recv_ns, timeline.parsed_ns)


def tokenize_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.parsed_ns, timeline.tokenized_ns)


def submit_lag_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.tokenized_ns, timeline.inbox_ns)


def queue_wait_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.inbox_ns, timeline.scheduled_ns)


def prefill_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.scheduled_ns, _first(timeline.token_ns))


def first_write_ns(timeline: RequestTimeline) -> int | None:
    return _between(_first(timeline.token_ns), _first(timeline.write_ns))


def time_to_first_token_ns(timeline: RequestTimeline) -> int | None:
    """TTFT: from the head of the request to the return of the socket write with its first token."""
    return _between(timeline.recv_ns, _first(timeline.write_ns))


def engine_time_to_first_token_ns(timeline: RequestTimeline) -> int | None:
    """TTFT without HTTP and text: from the tokenized prompt to the first token known on the host."""
    return _between(timeline.tokenized_ns, _first(timeline.token_ns))


def time_per_output_token_ns(timeline: RequestTimeline) -> float | None:
    """Returns the mean gap between tokens; None below two tokens."""
    stamps = timeline.token_ns
    return (stamps[-1] - stamps[0]) / (len(stamps) - 1) if len(stamps) > 1 else None


def stream_gaps_ns(timeline: RequestTimeline) -> list[int]:
    """Returns the gaps between each write and the one before it."""
    return [later - earlier for earlier, later in pairwise(timeline.write_ns)]


def request_duration_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.recv_ns, timeline.end_ns)


def stages(request: RequestTimeline | RequestRecord, until_ns: int) -> Iterator[tuple[str, int, int]]:
    """Yields name, start and end of each stage up to the newest token, without a hole between them.

    The stage in which a request without a token is, or has ended, ends at `until_ns`.
    """
    tokens = request.token_ns
    stamps = (request.recv_ns, request.parsed_ns, request.tokenized_ns, request.inbox_ns, request.scheduled_ns)
    for name, (start_ns, end_ns) in zip(STAGES, pairwise((*stamps, *(tokens[:1] or [0]), *tokens[-1:])), strict=False):
        yield name, start_ns, end_ns or until_ns
        if not end_ns:
            return


def step_phases(step: StepRecord) -> Iterator[tuple[str, int, int]]:
    """Yields name, start and end of each phase of a step, those within `launch` after it, `h2d` after its `stage`.

    Durations are measured. Where a phase began is measured for `schedule`, `wait` and `commit` only; the others are
    laid one after the other in the order in which a runner does them.
    """
    phases = step.phases
    at_ns = step.start_ns + phases.schedule
    yield "schedule", step.start_ns, at_ns
    yield "launch", at_ns, at_ns + phases.launch
    for name in ("capture", "stage", "forward", "sample"):
        end_ns = at_ns + getattr(phases, name)
        yield name, at_ns, end_ns
        if name == "stage":  # the copies are the last that it does
            yield "h2d", end_ns - phases.h2d, end_ns
        at_ns = end_ns
    yield "wait", step.tokens_ns - phases.wait, step.tokens_ns
    yield "commit", step.tokens_ns, step.tokens_ns + phases.commit
