"""The engine's client: sends requests, routes token outputs to their streams, and reports facts to observers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from roseinfer.engine.link.heartbeat import Account, Activity
from roseinfer.engine.link.transport import Transport
from roseinfer.engine.prefix_digests import PrefixDigests
from roseinfer.engine.queue_estimate import QueueEstimate
from roseinfer.errors import (
    ConfigError,
    Conflict,
    EngineDead,
    EngineError,
    EngineFailed,
    NotReady,
    QueueTimeout,
    RequestTimeout,
    RoseinferError,
    SequenceFailed,
    SlowReader,
)
from roseinfer.messages import (
    Abort,
    EngineFailure,
    EngineInfo,
    Event,
    IdleReport,
    Profile,
    ProfileEnded,
    Request,
    StartupProgress,
    StepOutput,
    TokenOutput,
)
from roseinfer.records import Advanced, Arrival, FinishReason, Invariant, Observer, RequestTimeline, Violation

_PAUSES = frozenset({Activity.GC, Activity.CAPTURING, Activity.PROFILING})
PAUSE_FACTOR = 10  # a collection, a graph's capture or a profile may take this many step timeouts
_CODES = {FinishReason.ERROR: SequenceFailed.code or "", FinishReason.TIMEOUT: RequestTimeout.code or ""}
MAX_TAKEN = 256  # outputs: with twenty log-probabilities each, some milliseconds of the event loop
MAX_WAITING = 1 << 20  # tokens and log-probabilities that were not taken: a hundred megabytes


class Mailbox:
    """Outputs for one `generate` call: a list to take, and one wake-up for all in it.

    Without `is_streamed` the wake-up waits for the end of a sequence, or until there are MAX_TAKEN outputs. The engine
    waits for no reader. What a reader does not take is kept up to a bound; then all of it is dropped.
    """

    __slots__ = ("_arrived", "_error", "_has_more", "_is_streamed", "_num_waiting", "_outputs")

    def __init__(self, *, is_streamed: bool = True) -> None:
        self._is_streamed = is_streamed
        self._outputs: list[TokenOutput] = []
        self._has_more = False  # than the last list had
        self._num_waiting = 0
        self._error: RoseinferError | None = None
        self._arrived = asyncio.Event()

    def put_output(self, output: TokenOutput) -> None:
        if isinstance(self._error, SlowReader):
            return
        self._outputs.append(output)
        self._num_waiting += _size(output)
        if self._num_waiting > MAX_WAITING:
            self._outputs.clear()
            self._error = SlowReader("The answer was read so slowly that what waited for it became too much to keep.")
            self._arrived.set()
        elif self._is_streamed or output.finish_reason is not None or len(self._outputs) >= MAX_TAKEN:
            self._arrived.set()

    def fail(self, error: RoseinferError) -> None:
        self._error = error
        self._arrived.set()

    async def take_outputs(self) -> list[TokenOutput]:
        """Take what is due, at least one output and at most MAX_TAKEN. Raises the error once all before it was taken.

        Other tasks have their turn before the rest of what was too much for one list is taken.
        """
        if self._has_more:
            await asyncio.sleep(0)
        await self._arrived.wait()
        if not self._outputs and self._error is not None:
            raise self._error
        taken, self._outputs = self._outputs[:MAX_TAKEN], self._outputs[MAX_TAKEN:]
        self._has_more = bool(self._outputs)
        self._num_waiting = self._num_waiting - sum(map(_size, taken)) if self._has_more else 0
        if not self._has_more and self._error is None:
            self._arrived.clear()
        return taken


def _size(output: TokenOutput) -> int:
    """Tokens and log-probabilities; those of a prompt are bounded by its request."""
    if output.logprobs is None:
        return len(output.token_ids)
    return sum(2 + len(scores.top_logprobs) for scores in output.logprobs)


@dataclass(slots=True)
class _Entry:
    """An open timeline, and which of its two sides have ended."""

    timeline: RequestTimeline
    mailbox: Mailbox = field(init=False)  # of the `generate` that runs it
    is_in_engine: bool = False
    slot: int | None = None  # that stands for it in `StepOutput.tokens`
    is_closed: bool = False


class AsyncEngine:
    """`EngineClient` over a transport, and the one place where a step's output is taken apart.

    Everything runs on one event loop, so there is no lock; a step costs one wake-up for each stream it advanced.
    """

    def __init__(
        self, transport: Transport, observer: Observer, step_timeout_s: float, queue_estimate: QueueEstimate
    ) -> None:
        self.observer = observer
        self.queue_estimate = queue_estimate
        self._transport = transport
        self._step_timeout_ns = int(step_timeout_s * 1e9)
        self._entries: dict[str, _Entry] = {}
        self._by_slot: dict[int, _Entry] = {}
        self._num_opened = 0
        self._num_submitted = 0  # since the engine's start
        self._last_step_id = self._step_offset = 0  # an engine that is started again counts on from there
        self._last_progress_ns = 0
        self._info: EngineInfo | None = None
        self._prefix_digests: PrefixDigests  # from when the engine is ready
        self._on_progress: Callable[[StartupProgress], None]  # from `start` on
        self._started: asyncio.Future[EngineInfo] | None = None
        self._dead: asyncio.Future[EngineError] | None = None
        self._profile: asyncio.Future[ProfileEnded] | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise NotReady("The engine is starting.")
        return self._info

    @property
    def num_unfinished(self) -> int:
        """Requests whose end the engine has not reported."""
        return self.queue_estimate.num_sequences

    @property
    def trouble(self) -> str | None:
        if self._dead is not None and self._dead.done():
            return self._dead.result().message
        if self.account.activity is Activity.STUCK:
            return f"no engine step for {self._step_timeout_ns / 1e9:g} s with work in flight"
        return None

    @property
    def account(self) -> Account:
        account = self._transport.heartbeat.read()
        if not self.num_unfinished:  # no request waits for it, so it may stand still
            return account
        limit_ns = self._step_timeout_ns * (PAUSE_FACTOR if account.activity in _PAUSES else 1)
        is_stuck = time.monotonic_ns() - self._stalled_since_ns(account) > limit_ns
        return Account(Activity.STUCK, account.since_ns) if is_stuck else account

    @property
    def stalled_since_ns(self) -> int:
        account = self._transport.heartbeat.read()
        return 0 if not self.num_unfinished or account.activity in _PAUSES else self._stalled_since_ns(account)

    def _stalled_since_ns(self, account: Account) -> int:
        """Returns since when an engine with work has made no progress; an idle one, at most since the work came."""
        is_idle = account.activity is Activity.IDLE
        return max(account.since_ns, self._last_progress_ns) if is_idle else account.since_ns

    async def start(self, on_progress: Callable[[StartupProgress], None]) -> EngineInfo:
        loop = asyncio.get_running_loop()
        if self._dead is not None:
            await self._transport.close()
            self._by_slot.clear()
            self.queue_estimate.restart()
            self._info, self._num_submitted, self._step_offset = None, 0, self._last_step_id
        self._on_progress = on_progress
        self._started, self._dead = loop.create_future(), loop.create_future()
        await self._transport.start(self._on_event, lambda reason: self._go_down(EngineDead(reason)))
        self._info = await self._started
        self._prefix_digests = PrefixDigests(self._info.block_size)
        return self._info

    async def wait_dead(self) -> EngineError:
        assert self._dead is not None, "wait_dead before start"
        return await asyncio.shield(self._dead)

    def give_up(self, reason: str) -> None:
        self._go_down(EngineDead(reason))
        self._transport.kill()

    async def close(self) -> None:
        await self._transport.close()
        if self._dead is not None and not self._dead.done():
            self._go_down(EngineDead("The engine was stopped."))

    # --- timelines --------------------------------------------------------------------------------------------------

    def open_timeline(self, timeline: RequestTimeline) -> None:
        assert timeline.request_id not in self._entries, f"request id {timeline.request_id} is in use"
        self._entries[timeline.request_id] = _Entry(timeline)
        timeline.serial = self._num_opened
        self._num_opened += 1
        self.observer.on_start(timeline)

    def close_timeline(self, timeline: RequestTimeline) -> None:
        entry = self._entries[timeline.request_id]
        entry.is_closed = True
        self._conclude(entry)

    def _conclude(self, entry: _Entry) -> None:
        if entry.is_closed and not entry.is_in_engine:
            del self._entries[entry.timeline.request_id]
            self.observer.on_finish(entry.timeline)

    # --- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self, requests: Sequence[Request], timelines: Sequence[RequestTimeline], *, is_streamed: bool = True
    ) -> AsyncGenerator[list[TokenOutput], None]:
        mailbox = Mailbox(is_streamed=is_streamed)
        unfinished: set[str] = set()
        try:
            for request, timeline in zip(requests, timelines, strict=True):
                self._submit(request, timeline, mailbox)
                unfinished.add(request.request_id)
            while unfinished:
                outputs = await mailbox.take_outputs()
                unfinished.difference_update(out.request_id for out in outputs if out.finish_reason is not None)
                yield outputs
        finally:
            for request_id in unfinished:
                self.abort(request_id)

    def _submit(self, request: Request, timeline: RequestTimeline, mailbox: Mailbox) -> None:
        self._check_running()
        entry = self._entries[request.request_id]
        assert entry.timeline is timeline
        self._transport.send(request)
        if not self.num_unfinished:
            self._last_progress_ns = time.monotonic_ns()
        self._num_submitted += 1
        entry.mailbox, entry.is_in_engine = mailbox, True
        timeline.num_prompt_tokens = len(request.prompt_token_ids)
        timeline.max_tokens, timeline.priority = request.params.max_tokens, request.priority
        self.queue_estimate.add_request(request)
        timeline.prefix_digests = self._prefix_digests.digests_of(request.prompt_token_ids, request.cache_salt)
        timeline.temperature, timeline.top_p = request.params.temperature, request.params.top_p

    def _check_running(self) -> None:
        if self._info is None or self._dead is None or self._dead.done():
            raise EngineDead("The engine is not running.")

    def holds(self, request_id: str) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and entry.is_in_engine

    def abort(self, request_id: str) -> None:
        if self.holds(request_id):
            self._transport.send(Abort(request_id))

    def profile(self, num_steps: int, directory: str) -> Awaitable[ProfileEnded]:
        self._check_running()
        if self._profile is not None and not self._profile.done():
            raise Conflict("A profile is being recorded already; it ends after as many steps as were asked for.")
        self._profile = asyncio.get_running_loop().create_future()
        self._transport.send(Profile(num_steps, directory))
        return asyncio.shield(self._profile)

    # --- events -----------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if self._dead is not None and self._dead.done():  # it was given up, and its requests have ended
            return
        try:
            self._handle(event)
        except BaseException:  # a mistake of ours: no request must wait for ever
            self._go_down(EngineFailed("The engine's output could not be handled."))
            raise

    def _handle(self, event: Event) -> None:
        match event:
            case StepOutput():
                self._route(event)
            case StartupProgress():
                self._on_progress(event)
            case EngineInfo():
                assert self._started is not None
                if not self._started.done():  # the start may have been cancelled by a signal
                    self._started.set_result(event)
            case ProfileEnded():
                self._end_profile(event)
            case IdleReport():
                self.observer.on_rest([*event.violations, *self._disagreements(event)])
            case EngineFailure():
                self._go_down(event.as_error())

    def _disagreements(self, engine: IdleReport) -> Iterator[Violation]:
        """Find requests that wait here for an idle engine, unless a command to it is under way."""
        if engine.num_added != self._num_submitted:
            return
        if self.num_unfinished:
            yield Violation(Invariant.REQUESTS, f"{self.num_unfinished} requests wait for an engine without work")
        if len(self._by_slot) > self.num_unfinished:
            yield Violation(Invariant.REQUESTS, f"{len(self._by_slot)} slots are remembered of requests that ended")

    def _route(self, step: StepOutput) -> None:
        """Route a step's outputs. This is the only loop over them: what must touch each of them does it here."""
        record = step.record
        if self._step_offset:
            record = msgspec.structs.replace(record, step_id=record.step_id + self._step_offset)
        tokens_ns, self._last_step_id = record.tokens_ns, record.step_id
        self._last_progress_ns = time.monotonic_ns()
        arrival = Arrival(
            tokens_ns,
            record.end_ns,
            self._last_progress_ns,
            record.late_gc_ns,
            record.outbox_depth > 0,
            record.late_throttled_ns,
            record.late_wait_ns,
        )
        advanced = Advanced()
        note_previous = advanced.previous_ns.append
        concluded: list[_Entry] = []
        self.queue_estimate.note_started(step.started)
        for slot, token_id in step.tokens():
            entry = self._by_slot[slot]
            timeline = entry.timeline
            note_previous(timeline.token_ns[-1] if timeline.token_ns else 0)
            timeline.token_ns.append(tokens_ns)
            timeline.arrivals.append(arrival)
            advanced.append(timeline)
            entry.mailbox.put_output(TokenOutput(timeline.request_id, [token_id]))
        for output in step.outputs:
            entry = self._entries[output.request_id]
            if output.slot is not None:
                self._drop_slot(entry)  # it was preempted, and came back in another
                entry.slot = output.slot
                self._by_slot[output.slot] = entry
            if output.embedding is not None:
                self.queue_estimate.note_first_token(output.request_id)
            if output.token_ids:
                if not entry.timeline.token_ns:
                    self.queue_estimate.note_first_token(output.request_id)
                note_previous(entry.timeline.token_ns[-1] if entry.timeline.token_ns else 0)
                entry.timeline.token_ns.extend([tokens_ns] * len(output.token_ids))
                entry.timeline.arrivals.extend([arrival] * len(output.token_ids))
                advanced.append(entry.timeline)
                for _ in output.token_ids[1:]:  # known at the same moment: a gap of nothing
                    note_previous(tokens_ns)
                    advanced.append(entry.timeline)
            if output.times is not None:
                entry.timeline.stamp(output.times)
            entry.mailbox.put_output(output)
            if output.finish_reason is not None:
                self._leave_engine(entry, output.finish_reason, tokens_ns)
                concluded.append(entry)
        self.queue_estimate.measure_step(record)
        self.observer.on_step(record, advanced)
        for entry in concluded:
            self._conclude(entry)

    def _leave_engine(self, entry: _Entry, finish_reason: FinishReason, tokens_ns: int) -> None:
        assert entry.timeline.inbox_ns, "a last output carries the engine's times"
        if entry.timeline.finish_reason is None:
            entry.timeline.finish_reason = finish_reason
            never_ran = finish_reason is FinishReason.TIMEOUT and not entry.timeline.scheduled_ns
            entry.timeline.error_code = (QueueTimeout.code or "") if never_ran else _CODES.get(finish_reason, "")
        if {finish_reason, entry.timeline.finish_reason} & {FinishReason.STOP, FinishReason.LENGTH}:  # or a stop string
            self.queue_estimate.measure_place(tokens_ns - entry.timeline.scheduled_ns)
        self._forget(entry)
        self._drop_slot(entry)

    def _drop_slot(self, entry: _Entry) -> None:
        """Forget the entry's slot, unless it was preempted and another has or had the slot since."""
        if entry.slot is not None and self._by_slot.get(entry.slot) is entry:
            del self._by_slot[entry.slot]

    def _forget(self, entry: _Entry) -> None:
        """Note that the engine no longer has the request."""
        entry.is_in_engine = False
        timeline = entry.timeline
        self.queue_estimate.remove_request(timeline.request_id, timeline.num_prompt_tokens, timeline.max_tokens)

    def _end_profile(self, ended: ProfileEnded) -> None:
        if self._profile is not None and not self._profile.done():
            self._profile.set_result(ended)

    def _go_down(self, error: EngineError | ConfigError) -> None:
        """Fail everything that waits for the start, for an output or for the end."""
        assert self._started is not None
        assert self._dead is not None
        if self._dead.done():
            return
        if not self._started.done():
            self._started.set_exception(error)
        dead = error if isinstance(error, EngineError) else EngineFailed(error.message)
        self._dead.set_result(dead)
        self._end_profile(ProfileEnded(0, dead.message))
        for entry in list(self._entries.values()):
            if entry.is_in_engine:
                self._forget(entry)
                if entry.timeline.finish_reason is None:
                    entry.timeline.finish_reason = FinishReason.ERROR
                    entry.timeline.error_code = dead.code or ""
                entry.mailbox.fail(dead)
                self._conclude(entry)
