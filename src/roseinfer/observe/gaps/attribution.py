"""Attributes the gaps between tokens to causes as facts happen: totals, slow gaps, and each request's ledger.

An engine gap is counted when its step ends, split once for all requests that share it. What a token's way to the socket
added to a wire gap is counted when the write returns. So the totals of the engine's causes add up to the sum of
inter-token latencies, and the others to the time in which a token was in delivery with no earlier token still pending.
Slow gaps are those of the wire for streams, and those of the engine for requests that are not streamed.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from roseinfer.observe.gaps.causes import CAUSES, Cause
from roseinfer.observe.gaps.deliveries import delivery_segments
from roseinfer.observe.gaps.interruptions import LiveInterruptions
from roseinfer.observe.gaps.intervals import engine_time_to_first_token_ns, stages, time_per_output_token_ns
from roseinfer.observe.gaps.request_gaps import NUM_USUAL, SLOW_FACTOR, SLOW_MIN_NS, Gap, Usual
from roseinfer.observe.gaps.step_gaps import GapSplitter, Segments, StepGap, StepGaps, segments_since
from roseinfer.observe.hub import Column, Listeners, WriteObserver, Writes
from roseinfer.records import Advanced, Delivery, FinishReason, RequestTimeline, StepRecord

Mask = npt.NDArray[np.bool_]
Totals = tuple[int, ...]
"""Nanoseconds of each of CAUSES."""

_NUM_RECENT = 1024  # steps that a late write, or a sequence that was left out for long, may ask for
_FEW = 16
_LEARN_EVERY = 16  # writes at least between two from which the usual parts of a wire gap are learned
_LESSON_EVERY = 512  # where more come together
_NOTHING: Totals = (0,) * len(CAUSES)


class _Account(msgspec.Struct, gc=False):
    """The account of a request from its first token to its end."""

    base: Totals  # the shared totals from which on its gaps were those of all
    own_ns: dict[Cause, int]  # of its gaps up to there


class Attribution(WriteObserver):
    """The observer that names causes; calls `on_slow_gap` with each slow gap as soon as it has ended."""

    def __init__(self, *, slow_factor: float = SLOW_FACTOR, slow_min_ms: float = SLOW_MIN_NS / 1e6) -> None:
        self.on_slow_gap: Listeners[Gap, RequestTimeline] = Listeners()
        self.interruptions = LiveInterruptions()
        self.total_ns = dict.fromkeys(Cause, 0)
        self.num_slow_gaps = dict.fromkeys(Cause, 0)
        self._splitter = GapSplitter(has_graphs=False)
        self._usual = Usual(slow_factor, int(slow_min_ms * 1e6))
        self._usual_wire = Usual(slow_factor, int(slow_min_ms * 1e6))
        self._num_unlearned = 0  # writes since the last one from which the usual parts were learned
        self._recent = StepGaps()
        self._shared = _NOTHING  # of the gaps of all steps so far
        self._shared_at: dict[int, Totals] = {}  # by when a recent step's tokens were known
        self._accounts: dict[str, _Account] = {}

    def set_graphs(self, *, has_graphs: bool) -> None:
        """Notes whether the engine, which is now ready, runs steps in CUDA graphs."""
        self._splitter = GapSplitter(has_graphs=has_graphs)

    # --- Observer -----------------------------------------------------------------------------------------------------

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        gap = self._splitter.split_step(record)
        if gap is not None:
            self._share(gap)
        if record.num_generated_tokens:
            self._remember(record.tokens_ns)
            self._count_tokens(gap, advanced, record.tokens_ns)
        if record.num_finished:
            self._settle(record.tokens_ns, advanced)

    def on_writes(self, writes: Writes) -> None:
        columns, begin = writes.columns(), 0
        while begin < len(writes) and self._usual_wire.num_seen < NUM_USUAL:
            end = begin + _FEW  # as long as little is known, a few at a time are judged by those before them
            self._judge_writes(writes, {name: column[begin:end] for name, column in columns.items()}, begin)
            begin = end
        if begin < len(writes):
            rest = {name: column[begin:] for name, column in columns.items()} if begin else columns
            self._judge_writes(writes, rest, begin)

    def _judge_writes(self, writes: Writes, columns: dict[str, Column], begin: int) -> None:
        """Judges those from `begin` on, as many as the columns have."""
        usual = self._usual_wire
        is_gap = columns["start_ns"] > 0  # not the first write of a request
        gaps_ns = columns["written_ns"] - columns["start_ns"]
        is_ordinary = is_gap & (gaps_ns <= usual.threshold_ns)
        self._num_unlearned += len(is_gap)
        if self._num_unlearned >= _LEARN_EVERY:
            self._num_unlearned = 0
            is_ordinary[::-_LESSON_EVERY] = False
        is_ordinary = self._count_plain(columns, is_ordinary)
        usual.learn_durations(gaps_ns[is_ordinary])
        for at in (begin + np.flatnonzero(is_gap & ~is_ordinary)).tolist():
            self._attribute_write(writes.timelines[at], writes.delivery(at), int(writes.columns()["start_ns"][at]))

    def _count_plain(self, columns: dict[str, Column], is_candidate: Mask) -> Mask:
        """Counts the deliveries of those candidates that nothing special delayed, and returns which they are.

        They are nearly all. It takes a thirtieth of the time that `delivery_segments` takes, with the same result.
        """
        tokens_ns, resumed_ns = columns["tokens_ns"], columns["resumed_ns"]
        at_ns = np.maximum(columns["start_ns"], tokens_ns)
        sent_ns = np.maximum(at_ns, columns["sent_ns"])
        is_plain: Mask = is_candidate & ((columns["was_delayed"] | columns["was_paused"]) == 0)
        is_plain &= (sent_ns <= resumed_ns) & (sent_ns >= self.interruptions.quiet_since_ns)
        detokenize_ns, totals = columns["encoded_ns"] - resumed_ns, self.total_ns
        whole_ns = columns["written_ns"] - at_ns
        schedule_ns = sent_ns - at_ns
        schedule, detokenize = int(schedule_ns @ is_plain), int(detokenize_ns @ is_plain)
        totals[Cause.SCHEDULE] += schedule
        totals[Cause.DETOKENIZE] += detokenize
        totals[Cause.EVENT_LOOP] += int(whole_ns @ is_plain) - schedule - detokenize
        return is_plain

    def _attribute_write(self, timeline: RequestTimeline, delivery: Delivery, start_ns: int) -> None:
        usual, tokens_ns = self._usual_wire, delivery.arrival.tokens_ns
        on_its_way = delivery_segments(delivery, start_ns, self.interruptions)
        for cause, duration in on_its_way:
            self.total_ns[cause] += duration
        segments = (*self._waited(timeline, start_ns, tokens_ns), *on_its_way)
        gap_ns = delivery.written_ns - start_ns
        if timeline.is_streamed and usual.is_slow(gap_ns):
            step = self._recent.ended_at(tokens_ns)
            step_id = 0 if step is None else step.step_id
            self._report_slow(
                usual.gap(timeline.serial, delivery.index, start_ns, delivery.written_ns, step_id, segments), timeline
            )
        usual.learn_gap(gap_ns, segments)

    def on_finish(self, timeline: RequestTimeline) -> None:
        self._accounts.pop(timeline.request_id, None)

    def on_resume(self, timelines: Sequence[RequestTimeline]) -> None:
        """Of what was lost nothing is known but how long it took."""
        self._splitter.forget_last()
        self._accounts = {each.request_id: _Account(self._shared, {}) for each in timelines if each.token_ns}

    # --- the ledger ---------------------------------------------------------------------------------------------------

    def ledger(self, timeline: RequestTimeline, until_ns: int) -> dict[str, object]:
        """Returns the request's ledger up to a moment. Call it before the end of the request."""
        return ledger_json(timeline, self.decode_ns(timeline), until_ns)

    def decode_ns(self, timeline: RequestTimeline) -> dict[Cause, int]:
        """Returns what the time between its first and its newest token went to; adds up to that time."""
        tokens, account = timeline.token_ns, self._accounts.get(timeline.request_id)
        if len(tokens) < 2:
            return {}
        if account is None:
            return {Cause.UNKNOWN: tokens[-1] - tokens[0]}
        parts = self._account_until(account, tokens[-1])
        if missing := tokens[-1] - tokens[0] - sum(parts.values()):
            parts[Cause.UNKNOWN] = parts.get(Cause.UNKNOWN, 0) + missing
        return parts

    def _account_until(self, account: _Account, tokens_ns: int) -> dict[Cause, int]:
        """Returns the parts of its gaps up to a token, as far as that token's step is remembered."""
        parts = defaultdict(int, account.own_ns)
        for cause, then, now in zip(CAUSES, account.base, self._shared_at.get(tokens_ns, account.base), strict=True):
            if now > then:
                parts[cause] += now - then
        return dict(parts)

    # --- gaps ---------------------------------------------------------------------------------------------------------

    def _share(self, gap: StepGap) -> None:
        self._recent.add(gap, _NUM_RECENT)
        shared = list(self._shared)
        for cause, duration in gap.segments:
            shared[cause.number] += duration
        self._shared = tuple(shared)

    def _remember(self, tokens_ns: int) -> None:
        self._shared_at[tokens_ns] = self._shared
        if len(self._shared_at) > _NUM_RECENT:
            del self._shared_at[next(iter(self._shared_at))]

    def _count_tokens(self, gap: StepGap | None, advanced: Advanced, tokens_ns: int) -> None:
        num_newcomers = advanced.num_newcomers
        if num_newcomers:
            for timeline in advanced.newcomers:
                self._accounts[timeline.request_id] = _Account(self._shared, {})
        if gap is None:  # the first step of all, or of those that are known again
            self.total_ns[Cause.UNKNOWN] += sum(
                tokens_ns - before_ns for before_ns in advanced.previous_ns if before_ns
            )
            return
        start_ns, is_slow = gap.start_ns, self._usual.is_slow(gap.duration_ns)
        num_shared = advanced.previous_ns.count(start_ns)  # nearly always all: their timelines are not looked at
        num_more = advanced.previous_ns.count(gap.end_ns)  # beside another token of this step
        if is_slow or num_shared + num_more + num_newcomers < len(advanced):
            for timeline, previous_ns in zip(advanced, advanced.previous_ns, strict=True):
                if previous_ns == gap.end_ns:
                    continue  # both tokens are of this step: nothing lies between them
                if previous_ns and previous_ns != start_ns:
                    self._attribute_own(timeline, previous_ns, gap)
                elif previous_ns and is_slow and not timeline.is_streamed:
                    self._judge(timeline, previous_ns, gap, gap.segments)
        if num_shared:
            for cause, duration in gap.segments:
                self.total_ns[cause] += duration * num_shared
            self._usual.learn_gap(gap.duration_ns, gap.segments)

    def _settle(self, tokens_ns: int, advanced: Advanced) -> None:
        """Closes the accounts of requests that got their last token, before the steps they shared are forgotten."""
        for timeline in advanced:
            is_over = timeline.finish_reason is not None and timeline.token_ns[-1] == tokens_ns
            if is_over and (account := self._accounts.get(timeline.request_id)):
                account.own_ns, account.base = self._account_until(account, tokens_ns), self._shared

    def _attribute_own(self, timeline: RequestTimeline, start_ns: int, gap: StepGap) -> None:
        """Attributes the gap of a request whose token before did not come in the step before."""
        segments = segments_since(start_ns, gap, timeline)
        account = self._accounts[timeline.request_id]
        own_ns = defaultdict(int, self._account_until(account, start_ns))
        for cause, duration in segments:
            own_ns[cause] += duration
            self.total_ns[cause] += duration
        account.own_ns, account.base = dict(own_ns), self._shared
        if not timeline.is_streamed and self._usual.is_slow(gap.end_ns - start_ns):
            self._judge(timeline, start_ns, gap, segments)

    def _waited(self, timeline: RequestTimeline, start_ns: int, tokens_ns: int) -> Segments:
        """Returns what the engine did from a moment on until it had the token."""
        if start_ns >= tokens_ns:
            return ()
        return self._recent.since(timeline, start_ns, tokens_ns) or ((Cause.UNKNOWN, tokens_ns - start_ns),)

    def _judge(self, timeline: RequestTimeline, start_ns: int, gap: StepGap, segments: Segments) -> None:
        """Reports a request's slow gap that ended with this step."""
        index = bisect_left(timeline.token_ns, gap.end_ns)
        found = self._usual.gap(timeline.serial, index, start_ns, gap.end_ns, gap.step_id, segments)
        self._report_slow(found, timeline)

    def _report_slow(self, gap: Gap, timeline: RequestTimeline) -> None:
        self.num_slow_gaps[gap.cause] += 1
        self.on_slow_gap(gap, timeline)


# --- the parts of a ledger --------------------------------------------------------------------------------------------


_COMPLETE = frozenset({FinishReason.STOP, FinishReason.LENGTH})


def ledger_parts_ns(timeline: RequestTimeline, decode_ns: Mapping[Cause, int], until_ns: int) -> dict[str, int]:
    """Splits the time from the request's head to `until_ns` into parts, in their order, that add up to it.

    `decode_ns` says what the time from its first token to its newest went to, and adds up to it. A request that was
    cut short has the parts it lived through, the last of them up to the end.
    """
    tokens = timeline.token_ns
    parts = {name: end_ns - start_ns for name, start_ns, end_ns in stages(timeline, until_ns) if name != "decode"}
    if not tokens:
        return parts
    parts |= {f"decode.{cause}": duration for cause, duration in decode_ns.items() if duration}
    at_ns = tokens[-1]
    arrival = timeline.arrival
    if timeline.finish_reason is not None and timeline.finish_reason not in _COMPLETE:
        return parts | {"cut_short": until_ns - at_ns}  # waiting for a token that never came, or was not delivered
    if arrival is not None and arrival.tokens_ns == at_ns:
        parts["engine_outbox"] = arrival.sent_ns - at_ns
        at_ns = arrival.sent_ns
    return parts | {"delivery": until_ns - at_ns}


def ledger_json(timeline: RequestTimeline, decode_ns: Mapping[Cause, int], until_ns: int) -> dict[str, object]:
    """Returns the ledger as a client gets it; docs/causes.md says what each part is."""
    return {
        "total_ns": until_ns - timeline.recv_ns,
        "parts_ns": ledger_parts_ns(timeline, decode_ns, until_ns),
        "engine_time_to_first_token_ns": engine_time_to_first_token_ns(timeline),
        "time_per_output_token_ns": time_per_output_token_ns(timeline),
        "num_output_tokens": len(timeline.token_ns),
        "num_cached_tokens": timeline.num_cached_tokens,
        "num_preemptions": timeline.num_preemptions,
        "finish_reason": timeline.finish_reason,
    }
