"""Facts that went through bytes say the same on the other side, and after a loss what is true is true there again."""

import random
import time
from collections.abc import Callable, Mapping

import msgspec
import pytest

from roseinfer.config.options import Config, ModelConfig, ServerConfig
from roseinfer.errors import ConfigError
from roseinfer.messages import EngineInfo
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.metrics.totals import Load
from roseinfer.observe.observation import Observation
from roseinfer.observe.telemetry.facts import Batch, Message, Resumed, decode_state
from roseinfer.observe.telemetry.forwarder import Forwarder
from roseinfer.observe.telemetry.receiver import Receiver
from roseinfer.records import (
    Advanced,
    Arrival,
    Delivery,
    FinishReason,
    Invariant,
    LifecycleState,
    Observer,
    QueueReport,
    RequestTimeline,
    Violation,
)
from tests.unit.observe.facts import ENGINE, MS, Page, Traffic, make_step

CONFIG = Config(model=ModelConfig(path="m"), server=ServerConfig(served_model_name="tiny"))
COUNTED = (
    *("roseinfer_requests_received_total", "roseinfer_requests_total", "roseinfer_request_errors_total"),
    *("roseinfer_generation_tokens_total", "roseinfer_prompt_tokens_total", "roseinfer_requests_rejected_total"),
    *("roseinfer_reasoning_tokens_total", "roseinfer_client_disconnects_total", "roseinfer_invariant_violations_total"),
)
OF_THE_PROCESS = (
    *("roseinfer_observability", "roseinfer_scrape_duration", "roseinfer_gc_pause", "roseinfer_telemetry"),
    *("roseinfer_engine_last_step_timestamp", "roseinfer_host_steal"),
    "roseinfer_slow_gaps",  # by what came just before
)


class Ends:
    """A front end's forwarder, what it sends, and a receiver that gets it unless it is held."""

    def __init__(self) -> None:
        self.forwarder = Forwarder()
        self.sent: list[Message] = []
        self.receiver, self.observation = Receiver(), observation()
        self.receiver.open(self.observation)
        self.num_restarts = 0

    def begin(self) -> None:
        self.forwarder.resume(self._send, self.num_restarts)

    def restart(self) -> None:
        """Another process takes over."""
        self.forwarder.cut()
        self.num_restarts += 1
        self.receiver, self.observation = Receiver(), observation()
        self.receiver.open(self.observation)
        self.begin()

    def _send(self, message: Message) -> None:
        self.sent.append(message)
        self.receiver.take(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message))

    def page(self) -> Page:
        self.forwarder.catch_up()
        self.observation.hub.catch_up()
        return Page(self.observation.metrics)


def observation() -> Observation:
    return Observation(CONFIG, "1", lambda: 0, tuple, lambda: 0)


class Both(Observer):
    """Tells two observers the same."""

    def __init__(self, *observers: Observer) -> None:
        for name in ("on_lifecycle", "on_start", "on_refusal", "on_step", "on_write", "on_finish", "on_rest"):
            setattr(self, name, self._all(name, observers))

    def _all(self, name: str, observers: tuple[Observer, ...]) -> Callable[..., None]:
        def tell(*arguments: object) -> None:
            for observer in observers:
                getattr(observer, name)(*arguments)

        return tell


class Serving(Traffic):
    """Traffic whose writes are facts too."""

    def write(self) -> None:
        for timeline in self.running:
            if timeline.token_ns and (not timeline.write_ns or timeline.write_ns[-1] < timeline.token_ns[-1]):
                timeline.is_streamed = True
                token_ns = timeline.token_ns[-1]
                arrival = Arrival(token_ns, token_ns + 10, token_ns + 20, 3, True, 2, 1)
                delivery = Delivery(arrival, self._tick(), self._tick(), self._tick(), False, len(timeline.write_ns))
                timeline.write_ns.append(delivery.written_ns)
                self.observer.on_write(timeline, delivery)


def run_some(traffic: Traffic, seed: int, num_acts: int = 120) -> None:
    """Anything that may happen to a server, in some order."""
    chance = random.Random(seed)
    acts: list[Callable[[], None]] = [
        lambda: traffic.arrive(chance.randrange(1, 50)),
        lambda: traffic.step(chance.randrange(1, 9) * MS, chance.randrange(3)),
        lambda: traffic.step(chance.randrange(1, 9) * MS, chance.randrange(3)),
        traffic.write,
        traffic.write,
        traffic.reject,
        lambda: traffic.end(chance.randrange(9), chance.choice(list(FinishReason))),
    ]
    for _ in range(num_acts):
        chance.choice(acts)()


def told(page: Page) -> dict[object, float]:
    return {key: value for key, value in page.samples.items() if not key[0].startswith(OF_THE_PROCESS)}


@pytest.mark.parametrize("seed", range(4))
async def test_the_other_side_has_the_same_page_and_the_same_recording(seed: int) -> None:
    ends, here = Ends(), observation()
    both = Both(here.hub, ends.forwarder.hub)
    both.on_lifecycle(LifecycleState.STARTING)
    ends.begin()
    both.on_lifecycle(LifecycleState.READY)
    ends.forwarder.set_engine_info(ENGINE)
    here.set_engine_info(ENGINE)
    traffic = Serving(both)
    run_some(traffic, seed)
    both.on_rest([Violation(Invariant.SLOTS, "x")])
    page = ends.page()
    here.hub.catch_up()
    assert told(page) == pytest.approx(told(Page(here.metrics)))
    ends.receiver.set_present(ends.forwarder.present(QueueReport()))
    ours, theirs = (flight.snapshot().recording() for flight in (here.flight, ends.observation.flight))
    assert theirs.requests == ours.requests
    assert (theirs.steps == ours.steps).all()
    assert (theirs.writes == ours.writes).all()
    assert len(theirs.writes) > 0


async def test_the_start_is_traced_from_when_it_was_though_the_other_side_began_later() -> None:
    class Told:
        def note_startup(self, _: EngineInfo, entered_ns: Mapping[LifecycleState, int]) -> None:
            self.entered_ns = entered_ns

    ends, told_of = Ends(), Told()
    ends.observation._tracing = [told_of]  # type: ignore[list-item]
    hub = ends.forwarder.hub
    for state in (LifecycleState.STARTING, LifecycleState.LOADING, LifecycleState.FAILED, LifecycleState.STARTING):
        hub.on_lifecycle(state)
    first_ns = time.monotonic_ns()
    hub.on_lifecycle(LifecycleState.READY)
    ends.begin()
    begun_ns = time.monotonic_ns()
    ends.forwarder.set_engine_info(ENGINE)
    ends.page()
    assert list(told_of.entered_ns) == [LifecycleState.STARTING, LifecycleState.READY], "those of the newest start"
    starting_ns, ready_ns = told_of.entered_ns.values()
    assert starting_ns <= first_ns <= ready_ns <= begun_ns


async def test_the_page_of_the_load_is_of_this_moment_though_no_fact_has_travelled() -> None:
    ends = Ends()
    ends.begin()
    ends.forwarder.hub.on_lifecycle(LifecycleState.READY)
    ends.forwarder.set_engine_info(ENGINE)
    traffic = Serving(ends.forwarder.hub)
    for seed in range(5):
        run_some(traffic, seed, num_acts=20)
        num_sent = len(ends.sent)
        load = msgspec.msgpack.decode(msgspec.msgpack.encode(ends.forwarder.load()), type=Load)
        assert len(ends.sent) == num_sent
        page = ends.observation.metrics.render_load("", load)
        ends.page()
        assert page == ends.observation.metrics.render_load("")


@pytest.mark.parametrize("is_new_process", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_after_a_loss_all_totals_are_exact_and_the_laws_hold(seed: int, is_new_process: bool) -> None:
    ends, here = Ends(), observation()
    both = Both(here.hub, ends.forwarder.hub)
    ends.begin()
    both.on_lifecycle(LifecycleState.READY)
    traffic = Serving(both)
    run_some(traffic, seed)
    ends.page()
    ends.forwarder.cut()
    run_some(traffic, seed + 100)
    both.on_rest([Violation(Invariant.SLOTS, "x")])
    ends.restart() if is_new_process else ends.begin()
    run_some(traffic, seed + 200)
    page = ends.page()
    here.hub.catch_up()
    true = Page(here.metrics)
    for key in true.samples:
        if key[0] in COUNTED:
            assert page.samples[key] == true.samples[key], key
    assert page.value("roseinfer_http_inflight_streams") == len(traffic.running + traffic.waiting)
    assert page.value("roseinfer_telemetry_dropped_total", signal="fact") == ends.forwarder.num_dropped > 100
    assert page.value("roseinfer_telemetry_restarts_total") == is_new_process
    assert page.value("roseinfer_start_time_seconds") == ends.forwarder.totals.state.start_unix_s, "of the server"
    engine_s = sum(
        page.value("roseinfer_gap_seconds_total", cause=cause) for cause in Cause if cause is not Cause.EVENT_LOOP
    )
    assert engine_s >= page.total("roseinfer_inter_token_latency_seconds_sum") - 1e-9
    ends.receiver.set_present(ends.forwarder.present(QueueReport()))
    for timeline, copy in zip(traffic_in_flight(traffic), ends.observation.flight.in_flight, strict=True):
        assert (copy.request_id, copy.token_ns, copy.write_ns) == (
            timeline.request_id,
            timeline.token_ns,
            timeline.write_ns,
        )
    traffic.drain()
    assert ends.page().value("roseinfer_http_inflight_streams") == 0
    assert ends.observation.flight.in_flight == []


async def test_a_new_process_shows_at_once_what_was_true_before_the_next_step() -> None:
    """A counter that began at 0 and then jumped would be a burst to a rate."""
    ends = Ends()
    ends.forwarder = Forwarder(lambda: 7)
    ends.begin()
    ends.forwarder.hub.on_lifecycle(LifecycleState.READY)
    ends.forwarder.set_engine_info(ENGINE)
    traffic = Serving(ends.forwarder.hub)
    traffic.arrive(3)
    traffic.step(5 * MS, 1)
    before, spent_ns = ends.page(), ends.receiver.spent_ns
    ends.restart()
    after = ends.page()
    for name in (
        *("roseinfer_num_requests_running", "roseinfer_kv_cache_usage_ratio"),
        "roseinfer_engine_last_step_timestamp_seconds",
    ):
        assert after.value(name) == pytest.approx(before.value(name)) != 0, name
    for state in ("used", "cached", "free", "total"):
        blocks = [page.value("roseinfer_kv_cache_blocks", state=state) for page in (before, after)]
        assert blocks[0] == blocks[1], state
    assert ends.receiver.num_dropped_log_lines == 7
    assert ends.receiver.spent_ns >= spent_ns > 0


def traffic_in_flight(traffic: Traffic) -> list[RequestTimeline]:
    return sorted(traffic.running + traffic.waiting, key=lambda timeline: timeline.serial)


async def test_causes_of_a_request_add_up_after_a_loss() -> None:
    ends = Ends()
    ends.begin()
    traffic = Serving(ends.forwarder.hub)
    traffic.arrive(3)
    for duration_ms in (5, 5, 5):
        traffic.step(duration_ms * MS, 1)
    ends.forwarder.cut()
    traffic.step(70 * MS, 0)
    ends.forwarder.hub.catch_up()
    ends.begin()
    for duration_ms in (5, 5):
        traffic.step(duration_ms * MS, 0)
    ends.forwarder.catch_up()
    (request,) = traffic.running
    (causes,) = ends.observation.causes(ends.observation.flight.in_flight)
    assert sum(causes.values()) == request.token_ns[-1] - request.token_ns[0]
    assert causes[Cause.UNKNOWN] >= 70 * MS


async def test_facts_go_in_batches_and_a_request_id_may_come_again_at_once() -> None:
    ends = Ends()
    ends.begin()
    for serial in range(2):
        timeline = RequestTimeline(request_id="again", recv_ns=1, serial=serial)
        ends.forwarder.hub.on_start(timeline)
        timeline.token_ns.append(5 + serial)
        ends.forwarder.hub.on_step(make_step(num_generated_tokens=1), Advanced.newest([timeline]))
        timeline.end_ns, timeline.finish_reason = 9, FinishReason.STOP
        ends.forwarder.hub.on_finish(timeline)
    assert ends.page().total("roseinfer_requests_total") == 2
    assert sum(isinstance(message, Batch) for message in ends.sent) <= 3


async def test_a_request_travels_when_it_changed_and_not_when_a_drafted_token_was_right() -> None:
    ends = Ends()
    ends.begin()
    timelines = [RequestTimeline(request_id=f"r-{serial}", recv_ns=1, serial=serial) for serial in range(3)]
    for timeline in timelines:
        ends.forwarder.hub.on_start(timeline)
    drafted, others = [timelines[0], *timelines], timelines[1:]
    steps = (timelines, timelines, drafted, drafted, others, timelines, timelines)
    for number, advanced in enumerate(steps):
        tokens_ns, previous_ns = (number + 1) * MS, []
        for timeline in advanced:
            previous_ns.append(timeline.token_ns[-1] if timeline.token_ns else 0)
            timeline.token_ns.append(tokens_ns)
        record = make_step(num_generated_tokens=len(advanced), tokens_ns=tokens_ns)
        ends.forwarder.hub.on_step(record, Advanced(advanced, previous_ns))
    ends.forwarder.catch_up()
    (batch,) = (message for message in ends.sent if isinstance(message, Batch))
    changed = [[decode_state(state)["serial"] for state in step.changed] for step in batch.steps]
    assert changed == [[0, 1, 2], [], [], [], [], [0], []], "at the first token, and when it was left out"
    assert [step.serials for step in batch.steps] == [[0, 1, 2], None, [0, 0, 1, 2], None, [1, 2], [0, 1, 2], None]
    assert [each.token_ns for each in ends.observation.flight.in_flight] == [each.token_ns for each in timelines]


async def test_requests_that_come_back_together_waited_for_blocks_on_the_other_side_too() -> None:
    ends = Ends()
    ends.begin()
    timelines = [RequestTimeline(request_id=f"r-{serial}", recv_ns=1, serial=serial) for serial in range(3)]
    for timeline in timelines:
        ends.forwarder.hub.on_start(timeline)
    for tokens_ns, advanced in ((1 * MS, timelines), (2 * MS, timelines[:1]), (9 * MS, timelines[1:])):
        for timeline in timelines[1:] if tokens_ns == 9 * MS else ():
            timeline.preempted_ns, timeline.resumed_ns = MS + 1, 8 * MS
        for timeline in advanced:
            timeline.token_ns.append(tokens_ns)
        record = make_step(num_generated_tokens=len(advanced), tokens_ns=tokens_ns)
        ends.forwarder.hub.on_step(record, Advanced.newest(advanced))
        ends.forwarder.catch_up()
    _, *causes = ends.observation.causes(ends.observation.flight.in_flight)
    assert causes == [{Cause.KV_WAIT: 7 * MS, Cause.PREEMPTED: 1 * MS}] * 2


async def test_before_the_first_process_nothing_counts_as_lost() -> None:
    ends = Ends()
    ends.forwarder.hub.on_lifecycle(LifecycleState.STARTING)
    Serving(ends.forwarder.hub).reject()
    ends.begin()
    (first,) = ends.sent
    assert isinstance(first, Resumed)
    assert first.num_dropped == 0
    assert ends.page().total("roseinfer_requests_total") == 1


async def test_interruptions_of_the_front_end_are_known_on_the_other_side() -> None:
    ends = Ends()
    ends.begin()
    ends.forwarder.note_interruption(Cause.GC, 5, 25)
    ends.forwarder.note_interruption(Cause.CPU_WAIT, 30, 35)
    ends.forwarder.catch_up()
    assert ends.receiver.take_gc_pauses_ns() == [20]
    assert ends.receiver.take_gc_pauses_ns() == []
    rows = ends.observation.flight.snapshot().rows.interruptions
    assert [(int(row["start_ns"]), int(row["end_ns"])) for row in rows] == [(5, 25), (30, 35)]


async def test_a_trace_has_the_caller_s_id_in_both_processes() -> None:
    forwarder, sent = Forwarder(is_traced=True), list[Message]()
    forwarder.resume(sent.append, 0)
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    named, unnamed = (
        RequestTimeline(request_id="a", recv_ns=1, traceparent=caller),
        RequestTimeline(request_id="b", recv_ns=1, serial=1, traceparent="00-nonsense"),
    )
    for timeline in (named, unnamed):
        forwarder.hub.on_start(timeline)
    assert named.trace_id == caller[3:35]
    assert len(bytes.fromhex(unnamed.trace_id)) == 16


async def test_who_cannot_observe_says_why() -> None:
    receiver = Receiver()
    receiver.refuse(ConfigError("No such rule.", param="observe.capture_rules"))
    receiver.take(Resumed(LifecycleState.STARTING, None, Forwarder().totals.running(), [], 0, 0, 0, 0))
    with pytest.raises(ConfigError, match="No such rule"):
        await receiver.replies()["ready"](b"")
