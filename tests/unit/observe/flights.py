"""A flight with a story: streams that decode evenly, one of which waits while the prompt of another is computed."""

import msgspec

from roseinfer.config.options import Config
from roseinfer.observe.recorder.flight import Flight
from roseinfer.records import (
    Advanced,
    Arrival,
    BlockedBy,
    Delivery,
    FinishReason,
    PhaseTimes,
    QueueReport,
    RequestTimeline,
)
from tests.unit.observe.facts import ENGINE, MS, make_step, writes_of

CONFIG = Config()
STEP_NS = 2 * MS
PREFILL_NS = 40 * MS
US = 1000


class Story:
    """Facts as a server would tell them, on a clock that starts ten seconds ago."""

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        flight.engine_info = ENGINE
        self.now_ns = flight.clock_pair.monotonic_ns - 10_000 * MS
        flight._origin_ns = self.now_ns
        self.step_id = 0
        self.num_arrived = 0
        self.running: list[RequestTimeline] = []

    def arrive(self, request_id: str, num_prompt_tokens: int = 8) -> RequestTimeline:
        timeline = RequestTimeline(request_id=request_id, recv_ns=self.now_ns, is_streamed=True, max_tokens=500)
        timeline.serial, self.num_arrived = self.num_arrived, self.num_arrived + 1
        self.flight.on_start(timeline)
        timeline.parsed_ns, timeline.tokenized_ns = self.now_ns + 100 * US, self.now_ns + 200 * US
        timeline.inbox_ns, timeline.num_prompt_tokens = self.now_ns + 300 * US, num_prompt_tokens
        self.now_ns += 400 * US
        return timeline

    def step(self, admitted: list[RequestTimeline] | None = None, duration_ns: int = STEP_NS) -> None:
        """One token for everybody, written 100 µs later."""
        admitted, start_ns, num_decoded = admitted or [], self.now_ns, len(self.running)
        tokens_ns = start_ns + duration_ns
        for timeline in admitted:
            timeline.scheduled_ns = start_ns
        self.running += admitted
        for timeline in self.running:
            timeline.token_ns.append(tokens_ns)
            timeline.arrivals.append(Arrival(tokens_ns, tokens_ns + 20 * US, tokens_ns + 40 * US))
        self.step_id += 1
        phases = PhaseTimes(
            schedule=20 * US, launch=duration_ns - 40 * US, forward=duration_ns - 50 * US, wait=20 * US, commit=15 * US
        )
        record = make_step(
            phases=phases,
            step_id=self.step_id,
            start_ns=start_ns,
            tokens_ns=tokens_ns,
            end_ns=tokens_ns + 20 * US,
            num_running=len(self.running),
            num_decode_seqs=num_decoded,
            num_prefill_seqs=len(admitted),
            num_prefill_tokens=sum(timeline.num_prompt_tokens for timeline in admitted),
            num_generated_tokens=len(self.running),
            num_context_tokens=50 * len(self.running),
        )
        self.flight.on_step(record, Advanced.newest(self.running))
        for timeline in self.running:
            assert timeline.arrival is not None
            stamps = (tokens_ns + 60 * US, tokens_ns + 80 * US, tokens_ns + 100 * US)
            index = len(timeline.write_ns)
            timeline.write_ns.append(stamps[-1])
            delivery = Delivery(timeline.arrival, *stamps, was_paused=False, index=index)
            self.flight.on_writes(writes_of((timeline, delivery)))
        self.now_ns = tokens_ns + 20 * US

    def end(self, timeline: RequestTimeline) -> None:
        self.running.remove(timeline)
        timeline.end_ns, timeline.finish_reason = self.now_ns + 200 * US, FinishReason.LENGTH
        self.flight.on_finish(timeline)


def add_waiting(flight: Flight) -> None:
    """A request that has no place among the active ones."""
    last = flight.last_step
    assert last is not None
    now_ns = flight.clock_pair.monotonic_ns
    timeline = RequestTimeline(request_id="patient", recv_ns=now_ns, parsed_ns=now_ns, is_streamed=True, max_tokens=9)
    flight.on_start(timeline)
    timeline.tokenized_ns, timeline.num_prompt_tokens = now_ns + 1, 5
    stamps = {"start_ns": now_ns + 2, "tokens_ns": now_ns + MS, "end_ns": now_ns + MS}
    step = msgspec.structs.replace(last, step_id=last.step_id + 1, num_waiting=1, blocked_by=BlockedBy.SLOTS, **stamps)
    flight.on_step(step, Advanced())
    flight.queue = lambda: QueueReport({timeline.request_id: None})


def make_flight(
    num_streams: int = 6, num_steps: int = 120, stream_id: str = "stream-{}", config: Config = CONFIG
) -> Flight:
    """Two thirds into it, `long-prompt` stops the streams for 40 ms."""
    flight = Flight(config, "1.2.3")
    story = Story(flight)
    for number in range(num_streams):
        story.step([story.arrive(stream_id.format(number))])
    for number in range(num_steps):
        if number == num_steps * 2 // 3:
            story.step([story.arrive("long-prompt", num_prompt_tokens=500)], PREFILL_NS)
        else:
            story.step()
    story.end(story.running[0])
    return flight
