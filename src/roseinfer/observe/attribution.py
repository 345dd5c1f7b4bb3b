"""Facts as they happen in, the cause of every gap between tokens out: totals, slow gaps, and each request's ledger.

An engine gap is counted when its step is told, split once for all requests that share it. What a token's way to the
socket added to a wire gap is counted when the write returns. So the totals of the engine's causes add up to the sum of
inter-token latencies, and the others to the time in which a known token was on its way and none before it was. Slow
gaps are those of the wire for streams, and those of the engine for requests that are not streamed.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from roseinfer.observe import ledger
from roseinfer.observe.causes import SLOW_FACTOR, SLOW_MIN_NS, Gap, Usual
from roseinfer.observe.deliveries import LiveInterruptions, delivery_segments
from roseinfer.observe.recording import CAUSES
from roseinfer.observe.step_gaps import GapSplitter, Segments, StepGap, StepGaps, segments_since
from roseinfer.records import Cause, Delivery, Observer, RequestTimeline, StepRecord

OnSlowGap = Callable[[Gap, RequestTimeline], None]
Totals = tuple[int, ...]
"""Nanoseconds of each of CAUSES."""

_NUM_RECENT = 1024  # steps that a late write, or a sequence that was left out for long, may ask for
_LEARN_EVERY = 16  # writes between those from which the usual parts of a wire gap are learned
_NOTHING: Totals = (0,) * len(CAUSES)
_INDEX = {cause: index for index, cause in enumerate(CAUSES)}


class _Account(msgspec.Struct, gc=False):
    """What is kept of a request from its first token to its end."""

    base: Totals  # the shared totals from which on its gaps were those of all
    own_ns: dict[Cause, int]  # of its gaps up to there


class Attribution(Observer):
    """The observer that names causes. `on_slow_gap` are told of each slow gap as soon as it has ended."""

    def __init__(self, *, slow_factor: float = SLOW_FACTOR, slow_min_ms: float = SLOW_MIN_NS / 1e6) -> None:
        self.on_slow_gap: list[OnSlowGap] = []
        self.interruptions = LiveInterruptions()
        self.total_ns = dict.fromkeys(Cause, 0)
        self.num_slow_gaps = dict.fromkeys(Cause, 0)
        self._splitter = GapSplitter(has_graphs=False)
        self._usual = Usual(slow_factor, int(slow_min_ms * 1e6))
        self._usual_wire = Usual(slow_factor, int(slow_min_ms * 1e6))
        self._num_writes = 0
        self._writes: list[tuple[RequestTimeline, Delivery, int, int]] = []  # not judged: and the write before, index
        self._recent = StepGaps()
        self._shared = _NOTHING  # of the gaps of all steps so far
        self._shared_at: dict[int, Totals] = {}  # by when a recent step's tokens were known
        self._accounts: dict[str, _Account] = {}
        self._num_started = 0
        self._serials: dict[str, int] = {}

    def set_graphs(self, *, has_graphs: bool) -> None:
        """The engine is ready: whether its decode steps run in CUDA graphs."""
        self._splitter = GapSplitter(has_graphs=has_graphs)

    # --- Observer -----------------------------------------------------------------------------------------------------

    def on_start(self, timeline: RequestTimeline) -> None:
        """See Observer."""
        self._serials[timeline.request_id] = self._num_started
        self._num_started += 1

    def on_step(self, record: StepRecord, advanced: Sequence[RequestTimeline]) -> None:
        """See Observer."""
        self.take_writes()
        gap = self._splitter.take(record)
        if gap is not None:
            self._share(gap)
        if record.num_generated_tokens:
            self._remember(record.tokens_ns)
            self._take_tokens(gap, advanced)
        if record.num_finished:
            self._settle(advanced)

    def on_write(self, timeline: RequestTimeline, delivery: Delivery) -> None:
        """See Observer. Judged by `take_writes`: one after the other they would each find cold caches."""
        index = len(timeline.write_ns) - 1
        if index:
            self._writes.append((timeline, delivery, timeline.write_ns[-2], index))

    def take_writes(self) -> None:
        """Judge the writes since the last step: when the next one is told, and before a request's end is."""
        writes, self._writes = self._writes, []
        for timeline, delivery, start_ns, index in writes:
            self._take_write(timeline, delivery, start_ns, index)

    def _take_write(self, timeline: RequestTimeline, delivery: Delivery, start_ns: int, index: int) -> None:
        gap_ns, usual = delivery.written_ns - start_ns, self._usual_wire
        self._num_writes += 1
        if self._num_writes % _LEARN_EVERY and not usual.is_slow(gap_ns) and self._take_plain(delivery, start_ns):
            usual.take(gap_ns)
            return
        on_its_way = delivery_segments(delivery, start_ns, self.interruptions)
        for cause, duration in on_its_way:
            self.total_ns[cause] += duration
        tokens_ns = delivery.arrival.tokens_ns
        segments = (*self._waited(timeline, start_ns, tokens_ns), *on_its_way)
        if timeline.is_streamed and usual.is_slow(gap_ns):
            step, serial = self._recent.ended_at(tokens_ns), self._serial(timeline)
            step_id = 0 if step is None else step.step_id
            self._tell(usual.gap(serial, index, start_ns, delivery.written_ns, step_id, segments), timeline)
        usual.take(gap_ns, segments)

    def _take_plain(self, delivery: Delivery, start_ns: int) -> bool:
        """Count a token's way to the socket if nothing special happened on it, as is so for nearly all: in a fifth of
        the time that `delivery_segments` takes, with the same result.
        """
        arrival, totals = delivery.arrival, self.total_ns
        at_ns, resumed_ns = max(start_ns, arrival.tokens_ns), delivery.resumed_ns
        told_ns = max(at_ns, arrival.sent_ns)
        is_plain = told_ns <= resumed_ns and not (arrival.gc_ns or arrival.was_held or delivery.was_paused)
        if not is_plain or not self.interruptions.is_quiet_since(told_ns):
            return False
        totals[Cause.SCHEDULE] += told_ns - at_ns
        totals[Cause.DETOKENIZE] += delivery.encoded_ns - resumed_ns
        totals[Cause.EVENT_LOOP] += resumed_ns - told_ns + delivery.written_ns - delivery.encoded_ns
        return True

    def on_finish(self, timeline: RequestTimeline) -> None:
        """See Observer."""
        self.take_writes()
        self._accounts.pop(timeline.request_id, None)
        self._serials.pop(timeline.request_id, None)

    # --- the ledger ---------------------------------------------------------------------------------------------------

    def ledger(self, timeline: RequestTimeline, until_ns: int) -> dict[str, object]:
        """The request's time up to a moment, in parts that add up to it. Only until its end has been told."""
        return ledger.as_json(timeline, self.decode_ns(timeline), until_ns)

    def decode_ns(self, timeline: RequestTimeline) -> dict[Cause, int]:
        """What the time between its first and its newest token went to; adds up to that time."""
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
        """Its gaps up to a token, as far as that token's step is remembered."""
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
            shared[_INDEX[cause]] += duration
        self._shared = tuple(shared)

    def _remember(self, tokens_ns: int) -> None:
        self._shared_at[tokens_ns] = self._shared
        if len(self._shared_at) > _NUM_RECENT:
            del self._shared_at[next(iter(self._shared_at))]

    def _take_tokens(self, gap: StepGap | None, advanced: Sequence[RequestTimeline]) -> None:
        num_shared, is_slow = 0, gap is not None and self._usual.is_slow(gap.duration_ns)
        for timeline in advanced:
            stamps = timeline.token_ns
            if len(stamps) == 1:
                self._accounts[timeline.request_id] = _Account(self._shared, {})
            elif gap is not None and stamps[-2] == gap.start_ns:
                num_shared += 1
                if is_slow and not timeline.is_streamed:
                    self._judge(timeline, gap.step_id, gap.segments)
            elif gap is not None:
                self._take_own(timeline, gap)
        if gap is not None and num_shared:
            for cause, duration in gap.segments:
                self.total_ns[cause] += duration * num_shared
            self._usual.take(gap.duration_ns, gap.segments)

    def _settle(self, advanced: Sequence[RequestTimeline]) -> None:
        """Some got their last token: a slow client may ask for its ledger when their steps are long forgotten."""
        for timeline in advanced:
            if timeline.finish_reason is not None and (account := self._accounts.get(timeline.request_id)):
                account.own_ns, account.base = self._account_until(account, timeline.token_ns[-1]), self._shared

    def _take_own(self, timeline: RequestTimeline, gap: StepGap) -> None:
        """A request that got no token in the step before."""
        start_ns, end_ns = timeline.token_ns[-2:]
        segments = segments_since(start_ns, gap, timeline.preempted_ns, timeline.resumed_ns)
        account = self._accounts[timeline.request_id]
        own_ns = defaultdict(int, self._account_until(account, start_ns))
        for cause, duration in segments:
            own_ns[cause] += duration
            self.total_ns[cause] += duration
        account.own_ns, account.base = dict(own_ns), self._shared
        if not timeline.is_streamed and self._usual.is_slow(end_ns - start_ns):
            self._judge(timeline, gap.step_id, segments)

    def _waited(self, timeline: RequestTimeline, start_ns: int, tokens_ns: int) -> Segments:
        """What the engine did from a moment on until it had the token."""
        if start_ns >= tokens_ns:
            return ()
        return self._recent.since(timeline, start_ns, tokens_ns) or ((Cause.UNKNOWN, tokens_ns - start_ns),)

    def _judge(self, timeline: RequestTimeline, step_id: int, segments: Segments) -> None:
        """The request's newest gap between tokens was slow."""
        serial, index = self._serial(timeline), len(timeline.token_ns) - 1
        start_ns, end_ns = timeline.token_ns[-2:]
        self._tell(self._usual.gap(serial, index, start_ns, end_ns, step_id, segments), timeline)

    def _serial(self, timeline: RequestTimeline) -> int:
        return self._serials.get(timeline.request_id, -1)

    def _tell(self, gap: Gap, timeline: RequestTimeline) -> None:
        self.num_slow_gaps[gap.cause] += 1
        for listener in self.on_slow_gap:
            listener(gap, timeline)
