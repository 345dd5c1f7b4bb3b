"""Splits the engine's gaps between tokens into causes, step by step.

All requests that got a token both in a step and in the one before share the gap, so it is split once a step, into
segments in the order of time: the engine's bookkeeping, what preceded the computing, the computing itself, sampling.
Computing is `decode` as far as recent steps of that size took so long (`StepCosts`), and beyond that what made the step
different: prompt tokens of others, more rows, no graph, a profiler.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.recorder.recording import RequestRecord
from roseinfer.records import PhaseTimes, RequestTimeline, StepRecord
from roseinfer.runtime.step_costs import StepCosts, StepSize, size_of

Segments = tuple[tuple[Cause, int], ...]
"""Nanoseconds by cause, in the order of time; a cause may come more than once."""

_NOISE = 1.5  # times what is expected; up to there a decode step is an ordinary one
_DEVICE_BOUND = 0.05  # share of a gap that the host waited, from which on the device was not done earlier


class StepGap(msgspec.Struct, frozen=True, gc=False):
    """The gap of all requests that got a token both in a step and in the one before."""

    start_ns: int
    end_ns: int
    step_id: int
    segments: Segments

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class GapSplitter:
    """Takes steps as they come and splits the gap that each of them ends."""

    def __init__(self, *, has_graphs: bool) -> None:
        self.costs = StepCosts()
        self._costs_of_mixed = StepCosts()  # of steps with prompt tokens, in graphs
        self._has_graphs = has_graphs
        self._last: StepRecord | None = None  # with tokens

    def split_step(self, record: StepRecord) -> StepGap | None:
        """Returns the gap that the step ends; None for a step without tokens, and for the first one."""
        if not record.num_generated_tokens:
            return None
        last, self._last = self._last, record
        gap = None
        if last is not None:
            total_ns = record.tokens_ns - last.tokens_ns
            compute_ns = _compute_ns(record, total_ns)
            segments = self._split(record, last, total_ns, compute_ns)
            gap = StepGap(last.tokens_ns, record.tokens_ns, record.step_id, segments)
            has_captured = _host_phases(record).capture > 0  # on a CPU its computing too
            if not record.is_profiled and not has_captured and not self._is_graph_miss(record):
                self._learn(record, max(0, compute_ns - record.cpu_throttled_ns - record.cpu_wait_ns))
        return gap

    def _learn(self, record: StepRecord, compute_ns: int) -> None:
        if record.kind == "decode":
            self.costs.learn(size_of(record), compute_ns)
        elif record.kind == "mixed" and self._has_graphs:
            self._costs_of_mixed.learn(size_of(record), compute_ns)

    def forget_last(self) -> None:
        """Begins anew: the next step ends no gap that is known."""
        self._last = None

    def _split(self, record: StepRecord, last: StepRecord, total_ns: int, compute_ns: int) -> Segments:
        host, left = _host_phases(record), total_ns
        taken: dict[Cause, int] = {}
        if not _is_device_bound(record, total_ns):
            for cause, duration in (
                (Cause.CPU_THROTTLED, record.cpu_throttled_ns),
                (Cause.CPU_WAIT, record.cpu_wait_ns),
            ):
                taken[cause] = min(duration, left)
                left -= taken[cause]
            stamped = {
                Cause.ENGINE_OUTBOX: record.outbox_wait_ns,
                Cause.GRAPH_CAPTURE: host.capture,
                Cause.H2D_COPY: host.h2d,
                Cause.SAMPLE_SYNC: host.sample,
                Cause.GC: record.gc_ns,
                Cause.DECODE: compute_ns,
            }
            taken |= stamped if sum(stamped.values()) <= left else _fit(stamped, left)
            compute_ns = taken.pop(Cause.DECODE)
            left -= sum(taken[cause] for cause in stamped if cause is not Cause.DECODE)
        computing = self._split_compute(record, last, min(compute_ns, left))
        sampling = taken.pop(Cause.SAMPLE_SYNC, 0)
        bookkeeping = Cause.PROFILER if record.is_profiled else Cause.SCHEDULE  # it starts and ends between steps
        segments = (
            (bookkeeping, left - sum(duration for _, duration in computing)),
            *taken.items(),
            *computing,
            (Cause.SAMPLE_SYNC, sampling),
        )
        return tuple(segment for segment in segments if segment[1] > 0)

    def _split_compute(self, record: StepRecord, last: StepRecord, compute_ns: int) -> list[tuple[Cause, int]]:
        """Splits the computing of a step into what is usual for its decode rows, and what made it different."""
        expected = self.costs.expected_ns(size_of(record))
        if record.kind == "mixed":
            missed = self._missed_of_mixed(record, compute_ns)
            decode = self._decode_of_mixed(record, compute_ns - missed)
            prefill = compute_ns - missed - decode
            return [(Cause.DECODE, decode), (Cause.PREFILL_OF_OTHERS, prefill), (Cause.GRAPH_MISS, missed)]
        if expected is None:
            return [(Cause.DECODE, compute_ns)]
        excess = max(0, compute_ns - expected)
        if record.is_profiled:
            return [(Cause.DECODE, compute_ns - excess), (Cause.PROFILER, excess)]
        if self._is_graph_miss(record):
            return [(Cause.DECODE, compute_ns - excess), (Cause.GRAPH_MISS, excess)]
        growth = self._growth_ns(record, last, compute_ns, expected)
        unknown = max(0, compute_ns - growth - round(_NOISE * expected))
        return [
            (Cause.DECODE, compute_ns - unknown - growth),
            (Cause.BATCH_GROWTH, growth),
            (Cause.UNKNOWN, unknown),
        ]

    def _decode_of_mixed(self, record: StepRecord, compute_ns: int) -> int:
        """Returns what the decode rows of a step with prompt tokens would have taken without them."""
        num_rows = record.num_decode_seqs + record.num_draft_tokens
        context = record.num_context_tokens * num_rows // (num_rows + record.num_prefill_seqs)
        expected = self.costs.expected_ns(StepSize(num_rows, 0, context))
        if expected is None:  # no experience yet: by their share of the tokens
            expected = compute_ns * num_rows // (num_rows + record.num_prefill_tokens)
        return min(expected, compute_ns)

    def _missed_of_mixed(self, record: StepRecord, compute_ns: int) -> int:
        """Returns what a step with prompt tokens would not have taken in a graph, as far as others were in one."""
        if record.is_profiled or not self._is_graph_miss(record):
            return 0
        expected = self._costs_of_mixed.expected_ns(size_of(record))
        return 0 if expected is None else max(0, compute_ns - expected)

    def _growth_ns(self, record: StepRecord, last: StepRecord, compute_ns: int, expected_ns: int) -> int:
        """Returns what the step takes longer because more sequences decode than in the one before.

        With more rows than were ever seen, no expectation says how much longer; it cannot be more than in proportion.
        Rows of drafted tokens are none of that growth: their sequences chose them.
        """
        size = size_of(record)
        num_rows, num_seqs = size.num_rows, size.num_rows - record.num_draft_tokens
        num_seqs_before = size_of(last).num_rows - last.num_draft_tokens
        if not 0 < num_seqs_before < num_seqs:
            return 0
        num_before = num_rows - (num_seqs - num_seqs_before)
        context_before = record.num_context_tokens * num_before // num_rows
        before = self.costs.expected_ns(StepSize(num_before, 0, context_before)) or 0
        growth = expected_ns - before
        if not self.costs.knows(size):
            growth = max(growth, round(_NOISE * before * (num_rows - num_before) / num_before))
        return max(0, min(growth, compute_ns - before))

    def _is_graph_miss(self, record: StepRecord) -> bool:
        return self._has_graphs and record.num_decode_seqs > 0 and not record.graph_rows


def _fit(stamped: Mapping[Cause, int], left_ns: int) -> dict[Cause, int]:
    """Returns the stamped parts as far as they fit into what a wait for a core left of the gap.

    The wait lies within one of the stamps, and most probably in the longest, so that one is cut first.
    """
    fitted = dict(stamped)
    for cause in sorted(stamped, key=stamped.__getitem__):
        fitted[cause] = min(stamped[cause], left_ns)
        left_ns -= fitted[cause]
    return fitted


def _is_device_bound(record: StepRecord, total_ns: int) -> bool:
    """Returns whether a device that works ahead took all of a gap: what the host did meanwhile delayed nothing."""
    return record.pipeline_depth > 0 and record.phases.wait > _DEVICE_BOUND * total_ns


def _host_phases(record: StepRecord) -> PhaseTimes:
    """Returns what the host did in the gap that the step ends: with a pipeline, it launched the next one."""
    return record.ahead if record.pipeline_depth else record.phases


def _compute_ns(record: StepRecord, total_ns: int) -> int:
    """Returns how much of the gap went to computing."""
    if _is_device_bound(record, total_ns):
        return total_ns
    host = _host_phases(record)
    return max(0, record.phases.wait + host.launch - host.h2d - host.capture - host.sample)


class StepGaps:
    """Gaps of steps, found by when their tokens were known."""

    def __init__(self, gaps: Iterable[StepGap] = ()) -> None:
        self._gaps = list(gaps)  # in the order of their ends
        self._ends = [gap.end_ns for gap in self._gaps]

    def add(self, gap: StepGap, max_gaps: int) -> None:
        """Adds the newest gap; keeps at least the newest `max_gaps`, and at most twice as many."""
        self._gaps.append(gap)
        self._ends.append(gap.end_ns)
        if len(self._gaps) >= 2 * max_gaps:
            del self._gaps[:-max_gaps], self._ends[:-max_gaps]

    def ended_at(self, tokens_ns: int) -> StepGap | None:
        at = bisect_left(self._ends, tokens_ns)
        return self._gaps[at] if at < len(self._ends) and self._ends[at] == tokens_ns else None

    def between(self, request: RequestTimeline | RequestRecord, index: int) -> Segments | None:
        """Returns the segments from the token before `index` to that token; None when the steps are not here."""
        start_ns = request.token_ns[index - 1]
        if start_ns == request.token_ns[index]:
            return ()  # both tokens are of one step
        gap = self.ended_at(request.token_ns[index])
        if gap is None or start_ns > gap.start_ns:
            return None
        if start_ns == gap.start_ns:
            return gap.segments
        return segments_since(start_ns, gap, request)

    def since(self, request: RequestTimeline | RequestRecord, start_ns: int, tokens_ns: int) -> Segments | None:
        """Returns the segments from a moment to the token known at `tokens_ns`; None when the steps are not here."""
        segments: list[tuple[Cause, int]] = []
        at = bisect_left(request.token_ns, tokens_ns)
        if at == len(request.token_ns):  # a recording whose writes and tokens do not fit together
            return None
        while at > 0 and request.token_ns[at] > start_ns:
            found = self.between(request, at)
            if found is None:
                return None
            segments[:0] = after(found, max(0, start_ns - request.token_ns[at - 1]))
            at -= 1
        return tuple(segments)


def segments_since(start_ns: int, gap: StepGap, request: RequestTimeline | RequestRecord) -> Segments:
    """Returns the engine gap of a request whose token before came at `start_ns`, earlier than in the step before."""
    for preempted_ns, resumed_ns in (*request.earlier_preemptions, (request.preempted_ns, request.resumed_ns)):
        if start_ns < preempted_ns <= resumed_ns <= gap.end_ns:
            return (
                (Cause.KV_WAIT, resumed_ns - start_ns),  # with others in it that no token came between, if there were
                (Cause.PREEMPTED, gap.end_ns - resumed_ns),
            )
    return ((Cause.NOT_SELECTED, gap.start_ns - start_ns), *gap.segments)


def parts_of(segments: Iterable[tuple[Cause, int]]) -> dict[Cause, int]:
    """Adds segments up by cause, without those that took no time."""
    parts: dict[Cause, int] = defaultdict(int)
    for cause, duration in segments:
        if duration > 0:
            parts[cause] += duration
    return dict(parts)


def after(segments: Segments, skipped_ns: int) -> Segments:
    """Returns the segments without their first nanoseconds."""
    left: list[tuple[Cause, int]] = []
    for cause, duration in segments:
        cut = min(duration, skipped_ns)
        skipped_ns -= cut
        if duration > cut:
            left.append((cause, duration - cut))
    return tuple(left)
