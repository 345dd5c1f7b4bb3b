"""The front end's side of facts: encodes them and sends them on, and never waits.

When the other side takes no more, facts are dropped and counted until all that waited has been taken; then `resume`
sends what is true at that moment, so that nothing is wrong afterwards and only the loss is missing.
"""

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from roseinfer.messages import EngineInfo
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.hub import MAX_DELAY_S, Hub, WriteObserver, Writes
from roseinfer.observe.logs import StateLog
from roseinfer.observe.metrics.totals import Load, Totals
from roseinfer.observe.telemetry.facts import (
    Batch,
    EngineReady,
    Entered,
    InFlight,
    Message,
    Present,
    Rested,
    Resumed,
    SentWrites,
    Stalled,
    State,
    Stepped,
    encode_stamps,
    encode_state,
)
from roseinfer.records import (
    Advanced,
    LifecycleState,
    QueueReport,
    RequestTimeline,
    StepRecord,
    Violation,
)

MAX_FACTS = 2048  # that wait to be sent: some hundred kilobytes, which the socket takes at once
_MAX_INTERRUPTIONS = 4096  # that wait to be sent; as many as a recording has
# Of W3C Trace Context, https://www.w3.org/TR/trace-context/.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class Forwarder(WriteObserver):
    """The observer that sends facts to another process. `hub` gets the facts, and gives them to it in batches.

    Each message wakes the other process on a core that an engine and this process want too, with none of its code and
    data in the caches: so facts wait here too, for each other, until they are asked for or old enough.
    """

    def __init__(self, num_dropped_log_lines: Callable[[], int] = lambda: 0, *, is_traced: bool = False) -> None:
        self.num_dropped = 0  # facts
        self.num_sent = 0
        self.num_taken = 0  # of those, as far as the other side has shown it
        self.totals = Totals()
        self.hub = Hub([self.totals, StateLog(), self], MAX_DELAY_S)
        self._num_dropped_log_lines = num_dropped_log_lines
        self._is_traced = is_traced
        self._send: Callable[[Message], None] | None = None  # None while facts are dropped
        self._has_begun = False  # before that nothing is lost: what is true is sent first
        self._engine: EngineInfo | None = None
        self._open: dict[int, RequestTimeline] = {}  # by serial
        self._interruptions: deque[tuple[int, int, int]] = deque(maxlen=_MAX_INTERRUPTIONS)
        self._last_tokens_ns = 0  # of the newest step with tokens
        self._spent_ns = 0
        self._timer: asyncio.Handle | None = None  # for the next flush
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._started: list[State] = []
        self._steps: list[Stepped] = []
        self._writes: list[SentWrites] = []
        self._ended: list[State] = []
        self._ended_ids: set[str] = set()
        self._refusals: list[str] = []
        self._num_facts = 0
        self._advanced = Advanced()  # by the newest of the steps

    def set_engine_info(self, info: EngineInfo) -> None:
        """Tells what the engine, which is now ready, turned out to be."""
        self._engine = info
        self._send_now(EngineReady(info, self.hub.entered_ns))

    def note_interruption(self, cause: Cause, start_ns: int, end_ns: int) -> None:
        """Notes that the front end did something else. May be called in any thread, also by the garbage collector."""
        self._interruptions.append((start_ns, end_ns, cause.number))

    # --- facts --------------------------------------------------------------------------------------------------------

    def on_lifecycle(self, state: LifecycleState) -> None:
        self._send_now(Entered(state))

    def on_stall(self, since_ns: int) -> None:
        self._send_now(Stalled(since_ns))

    def on_rest(self, violations: Sequence[Violation]) -> None:
        self._send_now(Rested(list(violations)))

    def on_start(self, timeline: RequestTimeline) -> None:
        if self._is_traced and not timeline.trace_id:
            timeline.trace_id = _trace_id(timeline.traceparent)
        self._open[timeline.serial] = timeline
        if timeline.request_id in self._ended_ids:  # the client uses its id again
            self.flush()
        if self._takes(1):
            self._started.append(encode_state(timeline))

    def on_refusal(self, code: str) -> None:
        if self._takes(1):
            self._refusals.append(code)

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        last_ns = self._last_tokens_ns
        if record.num_generated_tokens:
            self._last_tokens_ns = record.tokens_ns
        if not self._takes(1):
            return
        previous_ns, is_same = advanced.previous_ns, advanced == self._advanced
        serials = None if is_same else [timeline.serial for timeline in advanced]
        self._advanced = advanced
        if last_ns and not record.num_finished and previous_ns.count(last_ns) == len(previous_ns):
            self._steps.append(Stepped(record, serials, last_ns, []))
            return
        usual = {record.tokens_ns, last_ns} - {0}
        changed = [
            encode_state(timeline)
            for timeline, stamp_ns in zip(advanced, previous_ns, strict=True)
            if stamp_ns not in usual or timeline.finish_reason is not None
        ]
        self._steps.append(Stepped(record, serials, previous_ns, changed))

    def on_writes(self, writes: Writes) -> None:
        if not self._takes(len(writes)):
            return
        self._writes.append(SentWrites.of(writes))

    def on_finish(self, timeline: RequestTimeline) -> None:
        del self._open[timeline.serial]
        if self._takes(1):
            self._ended.append(encode_state(timeline))
            self._ended_ids.add(timeline.request_id)

    def _takes(self, num_facts: int) -> bool:
        """Returns whether facts are sent, with others, once the hub has given all that it has; else counts them."""
        if self._send is None:
            self.num_dropped += num_facts * self._has_begun
            return False
        had_room, self._num_facts = self._num_facts < MAX_FACTS, self._num_facts + num_facts
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MAX_DELAY_S, self.flush)
        if had_room and self._num_facts >= MAX_FACTS:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_soon(self.flush)
        return True

    def _send_now(self, message: Message) -> None:
        """Sends all facts so far, and then this one."""
        self.flush()
        if self._send is None:
            self.num_dropped += self._has_begun
        else:
            self._send(message)

    # --- sending ------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Sends what the hub has given so far."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._send is None or not (self._num_facts or self._interruptions):
            return
        began_ns = time.monotonic_ns()
        interruptions = [self._interruptions.popleft() for _ in range(len(self._interruptions))]
        batch = Batch(
            self._started,
            self._steps,
            self._writes,
            self._ended,
            self._refusals,
            interruptions,
            self._all_spent_ns(),
            self._num_dropped_log_lines(),
        )
        self.num_sent += self._num_facts
        self._begin_batch()
        self._send(batch)
        self._spent_ns += time.monotonic_ns() - began_ns

    def _all_spent_ns(self) -> int:
        return self.hub.spent_ns + self._spent_ns

    def catch_up(self) -> None:
        """Sends all facts so far."""
        self.hub.catch_up()
        self.flush()

    def load(self) -> Load:
        """Returns what no fact need travel for."""
        self.hub.catch_up()
        return self.totals.load()

    def cut(self) -> None:
        """Drops facts from now on: the other side takes no more, or has gone."""
        if self._send is not None:
            self.num_dropped += self._num_facts
            self._begin_batch()
            self._send = None

    def lose(self) -> None:
        """Drops facts from now on, and those that the other side had yet to take when it ended."""
        self.cut()
        self.num_dropped += self.num_sent - self.num_taken
        self.num_taken = self.num_sent

    def resume(self, send: Callable[[Message], None], num_restarts: int) -> None:
        """Sends what is true now, and every fact from now on."""
        self.hub.catch_up()  # to where facts are dropped: what they say is in what is sent now
        requests = [
            InFlight(encode_state(timeline), encode_stamps(timeline.token_ns), encode_stamps(timeline.write_ns))
            for timeline in self._open.values()
        ]
        state = self.totals.state.lifecycle
        self._send, self._has_begun = send, True
        running, spent_ns, num_log_lines = self.totals.running(), self._all_spent_ns(), self._num_dropped_log_lines()
        send(Resumed(state, self._engine, running, requests, self.num_dropped, num_restarts, spent_ns, num_log_lines))

    def present(self, queue: QueueReport) -> bytes:
        """Returns a `Present`: what no fact says."""
        states = [encode_state(timeline) for timeline in self._open.values()]
        return msgspec.msgpack.encode(Present(queue, len(asyncio.all_tasks()), states))


def _trace_id(traceparent: str) -> str:
    """Returns the caller's trace id, or a new one where the header is empty or not in the form of the standard."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is not None and not (traceparent.startswith("00") and found[2]):
        return found[1]
    return os.urandom(16).hex()
