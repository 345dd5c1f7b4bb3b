"""The telemetry process's side of facts: decodes them, and gives them to a hub as if they had happened here."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from roseinfer.errors import ConfigError
from roseinfer.observe.gaps.causes import CAUSES, Cause
from roseinfer.observe.observation import Observation
from roseinfer.observe.telemetry.facts import (
    Batch,
    EngineReady,
    Entered,
    Fact,
    InFlight,
    LedgerQuery,
    PageQuery,
    Present,
    Rested,
    Resumed,
    Stalled,
    State,
    Stepped,
    decode_stamps,
    decode_state,
    taken_writes,
)
from roseinfer.records import Advanced, LifecycleState, QueueReport, RequestTimeline


class Receiver:
    """Keeps a copy of the timeline of each request in flight, and gives facts about them to an observation's hub."""

    def __init__(self) -> None:
        self.spent_ns = 0  # by the front end on facts
        self.num_dropped_log_lines = 0  # by the front end
        self.queue = QueueReport()
        self.num_tasks = 0  # of the front end
        self.is_informed = asyncio.Event()  # of what was true before it began, too
        self._state: LifecycleState | None = None
        self._refusal: ConfigError | None = None
        self._observation: Observation  # from `open` on
        self._open: dict[int, RequestTimeline] = {}  # by serial
        self._gc_pauses_ns: list[int] = []
        self.on_state: Callable[[LifecycleState], None] = lambda _: None

    @property
    def state(self) -> LifecycleState:
        """The server's."""
        return self._state or LifecycleState.STARTING

    def open(self, observation: Observation) -> None:
        """Gives the facts to this observation from now on."""
        self._observation = observation

    def refuse(self, refusal: ConfigError) -> None:
        """Takes no facts, since there is nothing to observe them; the front end hears why."""
        self._refusal = refusal

    def replies(self) -> dict[str, Callable[[bytes], Awaitable[bytes]]]:
        """Returns the answers to the front end's questions, by name."""

        async def ready(_: bytes) -> bytes:
            if self._refusal is not None:
                raise self._refusal
            return b""

        async def page(payload: bytes) -> bytes:
            query = msgspec.msgpack.decode(payload, type=PageQuery)
            return msgspec.msgpack.encode(self._observation.render_page(**msgspec.structs.asdict(query)))

        async def ledger(payload: bytes) -> bytes:
            query = msgspec.msgpack.decode(payload, type=LedgerQuery)
            return msgspec.msgpack.encode(self._observation.causes(map(self._open.get, query.serials)))

        return {"ready": ready, "page": page, "ledger": ledger}

    def take_gc_pauses_ns(self) -> list[int]:
        """Returns the front end's garbage collections since the last call."""
        taken, self._gc_pauses_ns = self._gc_pauses_ns, []
        return taken

    def take(self, fact: Fact) -> None:
        """Takes a message in its turn."""
        if self._refusal is not None:
            return
        hub = self._observation.hub
        match fact:
            case Batch():
                self._take_batch(fact)
            case Entered(state):
                self._enter(state)
            case EngineReady(info, entered_ns):
                self._observation.set_engine_info(info, entered_ns)
            case Stalled(since_ns):
                hub.on_stall(since_ns)
            case Rested(violations):
                hub.on_rest(violations)
            case Resumed():
                self._resume(fact)

    def _enter(self, state: LifecycleState) -> None:
        self._state = state
        self.on_state(state)
        self._observation.hub.on_lifecycle(state)

    # --- a batch ------------------------------------------------------------------------------------------------------

    def _take_batch(self, batch: Batch) -> None:
        observation, hub = self._observation, self._observation.hub
        self.spent_ns, self.num_dropped_log_lines = batch.spent_ns, batch.num_dropped_log_lines
        for start_ns, end_ns, number in batch.interruptions:
            cause = CAUSES[number]
            observation.note_interruption(cause, start_ns, end_ns)
            if cause is Cause.GC:
                self._gc_pauses_ns.append(end_ns - start_ns)
        for code in batch.refusals:
            hub.on_refusal(code)
        for state in batch.started:
            timeline = RequestTimeline(**decode_state(state))
            self._open[timeline.serial] = timeline
            hub.on_start(timeline)
        self._take_steps(batch.steps)
        if batch.writes:
            hub.on_writes(taken_writes(batch.writes, self._open))
        for state in batch.ended:
            timeline = self._update(state)
            del self._open[timeline.serial]
            hub.on_finish(timeline)
        hub.catch_up()  # they have waited long enough, and will not be cheaper together with others

    def _take_steps(self, steps: Sequence[Stepped]) -> None:
        """Gives each step a list of its requests, and these the stamps of their tokens, of many steps at a time."""
        on_step, advanced, stamps_ns = self._observation.hub.on_step, Advanced(), list[int]()
        for step in steps:
            record, previous_ns = step.record, step.previous_ns
            if step.serials is not None or not isinstance(previous_ns, int):
                _stamp(advanced, stamps_ns)
                stamps_ns = []
            if step.serials is not None:
                advanced = Advanced(map(self._open.__getitem__, step.serials))
            if isinstance(previous_ns, int):
                stamps_ns.append(record.tokens_ns)
                previous_ns = [previous_ns] * len(advanced)
            else:  # some have several tokens
                _stamp(advanced, [record.tokens_ns])
            for state in step.changed:
                self._update(state)
            on_step(record, Advanced(advanced, previous_ns))
        _stamp(advanced, stamps_ns)

    def _update(self, state: State) -> RequestTimeline:
        fields = decode_state(state)
        timeline = self._open[fields["serial"]]
        for name, value in fields.items():
            setattr(timeline, name, value)
        return timeline

    # --- the present --------------------------------------------------------------------------------------------------

    def set_present(self, payload: bytes) -> None:
        """Takes a `Present`."""
        present = msgspec.msgpack.decode(payload, type=Present)
        self.queue, self.num_tasks = present.queue, present.num_tasks
        for state in present.requests:
            if decode_state(state)["serial"] in self._open:  # else its start was lost
                self._update(state)

    def _resume(self, resumed: Resumed) -> None:
        observation, hub = self._observation, self._observation.hub
        self._open = {timeline.serial: timeline for timeline in map(self._in_flight, resumed.requests)}
        if resumed.state is not self._state:
            self._enter(resumed.state)
        hub.on_resume(list(self._open.values()))
        self.spent_ns, self.num_dropped_log_lines = resumed.spent_ns, resumed.num_dropped_log_lines
        observation.metrics.resume(resumed.running, resumed.num_dropped, resumed.num_restarts)
        if resumed.engine is not None and resumed.engine != observation.flight.engine_info:
            observation.set_engine_info(resumed.engine)
        self.is_informed.set()

    def _in_flight(self, request: InFlight) -> RequestTimeline:
        """Returns the copy that there is, brought up to date, or a new one."""
        fields = decode_state(request.state)
        timeline = self._open.get(fields["serial"]) or RequestTimeline(**fields)
        for name, value in fields.items():
            setattr(timeline, name, value)
        timeline.token_ns, timeline.write_ns = decode_stamps(request.token_ns), decode_stamps(request.write_ns)
        return timeline


def _stamp(timelines: Iterable[RequestTimeline], stamps_ns: Sequence[int]) -> None:
    for timeline in timelines if stamps_ns else ():
        timeline.token_ns.extend(stamps_ns)
