"""Predicted waits against waits, and an overload on a virtual clock: who is let in keeps its latency."""

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from roseinfer.bench.simulate.cost_model import CostModel
from roseinfer.bench.simulate.virtual_runner import VirtualClock, VirtualRunner
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.stopwatch import Phases
from roseinfer.engine.queue_estimate import MAX_RETRY_AFTER_S, MIN_STARTS, QueueEstimate
from roseinfer.messages import Request
from roseinfer.records import BlockedBy, FinishReason, StartEstimate
from tests.unit.engine.harness import VOCAB_SIZE, make_engine, make_request
from tests.unit.observe.facts import make_step

NUM_PLACES = 8
COSTS = CostModel(
    step_ns=2e6, decode_row_ns=1e5, prefill_token_ns=5e4, context_token_ns=0.0, host_ns=0.0
)  # 2.8 ms a step of eight rows
CAPACITY = 66.0  # requests a second that this engine can end: found by the test that follows

MS = 1_000_000


@dataclass
class World:
    """An engine on a virtual clock, clients that come at random, and a door."""

    rate: float
    limit_s: float | None
    num_requests: int = 1500
    first_token_s: list[float] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)
    num_refused: int = 0
    num_tokens: int = 0
    duration_s: float = 0.0

    def run(self) -> "World":
        clock = VirtualClock()
        estimate = QueueEstimate(NUM_PLACES, clock)
        engine = self._engine(clock)
        generator = random.Random(1)
        arrivals = list(np.cumsum([generator.expovariate(self.rate) for _ in range(self.num_requests)]))
        requests: dict[str, Request] = {}
        came: dict[str, float] = {}
        scheduled: dict[str, int] = {}
        slots: dict[int, str] = {}
        heapq.heapify(arrivals)
        start_ns = clock.now_ns
        while arrivals or engine.has_work:
            while arrivals and start_ns + arrivals[0] * 1e9 <= clock.now_ns:
                self._knock(heapq.heappop(arrivals), generator, engine, estimate, requests, came)
            if not engine.has_work:
                clock.advance_to(int(start_ns + arrivals[0] * 1e9) + 1)
                continue
            output = engine.step()
            estimate.measure_step(output.record)
            for told in output.outputs:
                name, request = told.request_id, requests[told.request_id]
                if told.slot is not None:
                    slots[told.slot] = name
                if name not in scheduled and told.times is not None:
                    scheduled[name] = told.times.scheduled_ns
                    estimate.note_first_token(name)
                    self.first_token_s.append((output.record.tokens_ns - start_ns) / 1e9 - came[name])
                if told.finish_reason is FinishReason.LENGTH:
                    estimate.measure_place(output.record.tokens_ns - scheduled[name])
                    estimate.remove_request(name, len(request.prompt_token_ids), request.params.max_tokens)
                    self.num_tokens += request.params.max_tokens
        assert (estimate.num_sequences, estimate.num_tokens, estimate.num_unread_tokens) == (0, 0, 0)
        self.duration_s = (clock.now_ns - start_ns) / 1e9
        return self

    def _engine(self, clock: VirtualClock) -> Engine:
        engine = make_engine(num_blocks=512, max_model_len=256, max_num_seqs=NUM_PLACES, max_num_batched_tokens=128)
        engine.runner = VirtualRunner(clock, COSTS, vocab_size=VOCAB_SIZE, num_slots=NUM_PLACES)
        engine.phases = Phases(clock=clock)
        return engine

    def _knock(
        self,
        at_s: float,
        generator: random.Random,
        engine: Engine,
        estimate: QueueEstimate,
        requests: dict[str, Request],
        came: dict[str, float],
    ) -> None:
        wait_s = estimate.predict_wait_s()
        if self.limit_s is not None and wait_s > self.limit_s:
            self.num_refused += 1
            return
        name = f"r{len(requests)}"
        prompt = [generator.randrange(VOCAB_SIZE - 1) for _ in range(generator.randint(4, 24))]
        request = make_request(name, prompt, max_tokens=generator.randint(20, 60))
        requests[name], came[name] = request, at_s
        self.predicted_s.append(wait_s)
        estimate.add_request(request)
        engine.add_request(request)

    @property
    def p99_s(self) -> float:
        return float(np.percentile(self.first_token_s, 99))

    @property
    def goodput(self) -> float:
        """Tokens of whole answers a second."""
        return self.num_tokens / self.duration_s


def test_the_capacity_of_this_engine() -> None:
    endless = World(rate=1e6, limit_s=None, num_requests=600).run()
    assert 600 / endless.duration_s == pytest.approx(CAPACITY, rel=0.05)


def test_at_four_times_the_capacity_who_is_let_in_keeps_its_latency() -> None:
    limit_s = 0.3
    at_capacity, overloaded = World(CAPACITY, limit_s).run(), World(4 * CAPACITY, limit_s).run()
    assert overloaded.num_refused > 0.6 * overloaded.num_requests
    assert overloaded.p99_s <= 1.3 * at_capacity.p99_s
    peak = World(rate=1e6, limit_s=None, num_requests=600).run().goodput
    assert overloaded.goodput >= 0.95 * peak
    lawless = World(4 * CAPACITY, None).run()
    assert lawless.p99_s > 10 * at_capacity.p99_s, "the door makes no difference here"


def test_below_its_capacity_no_request_is_refused() -> None:
    world = World(0.7 * CAPACITY, 0.3).run()
    assert world.num_refused == 0


def test_predictions_come_true() -> None:
    """With a queue that grows from nothing to a second and more: the error of the median is a fifth, at most."""
    world = World(2 * CAPACITY, limit_s=1.0, num_requests=800).run()
    predicted, actual = np.array(world.predicted_s), np.array(world.first_token_s)
    order = np.argsort(actual)  # first tokens come in the order of arrival, but for ties
    queued = predicted > 0.2
    ratios = predicted[queued] / np.maximum(1e-9, actual[queued])
    assert len(order) == len(predicted)
    assert 0.8 < float(np.median(ratios)) < 1.25


def test_nothing_is_predicted_from_nothing() -> None:
    estimate = QueueEstimate(2)
    for i in range(2):
        estimate.add_request(make_request(f"r{i}", [1] * 1000, max_tokens=1000))
    assert estimate.predict_wait_s() == 0.0
    assert estimate.retry_after_s(priority=0) == 1


def test_retry_after_is_the_excess_in_whole_seconds_and_bounded() -> None:
    clock = VirtualClock()
    estimate = QueueEstimate(2, clock)
    estimate.measure_place(int(4e9))
    for i in range(6):
        estimate.add_request(make_request(f"r{i}", [1], max_tokens=1))
    assert estimate.predict_wait_s() == pytest.approx(5 * 4 / 2)
    assert estimate.retry_after_s(limit_s=3.0, priority=0) == 7
    assert estimate.retry_after_s(limit_s=100.0, priority=0) == 2  # until one place is free
    for i in range(6, 60):
        estimate.add_request(make_request(f"r{i}", [1], max_tokens=1))
    assert estimate.retry_after_s(priority=0) == MAX_RETRY_AFTER_S


def crowded(clock: VirtualClock, *, priority_wait_s: float = 0.0) -> QueueEstimate:
    """Two places, held for a second each, of which both are taken by sequences that have begun."""
    estimate = QueueEstimate(2, clock, priority_wait_s)
    estimate.measure_place(int(1e9))
    for i in range(2):
        estimate.add_request(make_request(f"running-{i}"))
        estimate.note_first_token(f"running-{i}")
    return estimate


def test_an_engine_that_has_become_slow_is_noticed_by_who_waits() -> None:
    estimate = crowded(clock := VirtualClock())
    clock.advance(1)
    estimate.add_request(make_request("waits"))
    clock.advance(int(20e9))
    assert estimate.predict_wait_s() == pytest.approx(20)


def run_steps(
    estimate: QueueEstimate,
    clock: VirtualClock,
    num_steps: int,
    step_ns: int,
    num_running: int = 2,
    num_decode_seqs: int = 2,
) -> None:
    """Steps of one length, one after the other; `num_running` are left to do after each."""
    for _ in range(num_steps):
        start_ns = clock.now_ns
        clock.advance(step_ns)
        estimate.measure_step(
            make_step(start_ns=start_ns, end_ns=clock.now_ns, num_running=num_running, num_decode_seqs=num_decode_seqs)
        )


def measured(clock: VirtualClock) -> QueueEstimate:
    """Of two places; a sequence holds one for 50 ms, and a step takes 1 ms."""
    estimate = QueueEstimate(2, clock)
    run_steps(estimate, clock, 100, MS)
    estimate.measure_place(50 * MS)
    return estimate


def test_an_engine_that_has_become_slow_is_noticed_a_few_steps_later() -> None:
    estimate = measured(clock := VirtualClock())
    for i in range(5):
        estimate.add_request(make_request(f"r{i}"))
    assert estimate.predict_wait_s() == pytest.approx(4 * 0.05 / 2, rel=0.05)
    run_steps(estimate, clock, 40, 4 * MS)
    assert estimate.predict_wait_s() == pytest.approx(4 * 0.2 / 2, rel=0.05), "although no sequence has ended since"
    clock.advance(32 * 12 * MS)  # the step that is under way takes long
    assert estimate.predict_wait_s() == pytest.approx(4 * 0.8 / 2, rel=0.1)
    run_steps(estimate, clock, 40, MS)
    for i in range(5):
        estimate.note_first_token(f"r{i}")
    assert estimate.predict_wait_s() == pytest.approx(4 * 0.05 / 2, rel=0.05), "and that it is as quick as before"


def test_a_rest_is_not_slowness() -> None:
    estimate = measured(clock := VirtualClock())
    for _ in range(20):
        run_steps(estimate, clock, 1, MS, num_running=0)
        clock.advance(10_000 * MS)
    for i in range(5):
        estimate.add_request(make_request(f"r{i}"))
    assert estimate.predict_wait_s() == pytest.approx(4 * 0.05 / 2, rel=0.05)


@pytest.mark.parametrize("num_steps_after", [0, 1, 20])
def test_an_outage_is_not_slowness(num_steps_after: int) -> None:
    estimate = measured(clock := VirtualClock())
    clock.advance(10_000 * MS)  # it died in the middle of its work
    estimate.restart()
    clock.advance(10_000 * MS)  # and no request came for a while
    run_steps(estimate, clock, num_steps_after, MS)
    for i in range(5):
        estimate.add_request(make_request(f"r{i}"))
    assert estimate.predict_wait_s() == pytest.approx(4 * 0.05 / 2, rel=0.05)
    if num_steps_after:
        estimate.measure_place(50 * MS)
        assert estimate.predict_wait_s() == pytest.approx(4 * 0.05 / 2, rel=0.05)


def test_an_engine_that_is_started_again_has_all_its_places() -> None:
    estimate = crowded(VirtualClock())
    assert estimate.predict_wait_s() == pytest.approx(0.5)
    estimate.measure_step(make_step(num_running=1, num_decode_seqs=1, blocked_by=BlockedBy.KV_BLOCKS))
    assert estimate.predict_wait_s() == pytest.approx(2)
    estimate.restart()
    assert estimate.predict_wait_s() == pytest.approx(0.5)


def test_steps_that_wait_for_a_grammar_say_nothing_of_what_a_step_takes() -> None:
    estimate = QueueEstimate(2, clock := VirtualClock())
    run_steps(estimate, clock, 100, 50 * MS)
    estimate.measure_place(2500 * MS)
    run_steps(estimate, clock, 200, 5 * MS, num_decode_seqs=0)
    for i in range(5):
        estimate.add_request(make_request(f"r{i}"))
    assert estimate.predict_wait_s() == pytest.approx(4 * 2.5 / 2, rel=0.05)
    run_steps(estimate, clock, 40, 50 * MS)
    assert estimate.predict_wait_s() == pytest.approx(4 * 2.5 / 2, rel=0.05), "nor is the time they took a step's"
    estimate.measure_place(2000 * MS)
    assert estimate.predict_wait_s() == pytest.approx(4 * 2.25 / 2, rel=0.05)


def test_an_overtaken_request_causes_no_refusal_of_others() -> None:
    """It is less urgent, say, or its grammar is being compiled."""
    estimate = crowded(clock := VirtualClock())
    clock.advance(1)
    estimate.add_request(make_request("compiles"))
    clock.advance(int(20e9))
    estimate.add_request(make_request("overtakes"))
    estimate.note_first_token("overtakes")
    assert estimate.predict_wait_s() == pytest.approx(1.5), "four before it, two at once"
    clock.advance(1)
    estimate.add_request(make_request("waits"))
    clock.advance(int(5e9))
    assert estimate.predict_wait_s() == pytest.approx(5), "no request that came later has begun"


def test_who_has_waited_without_a_place_is_believed_before_anything_was_measured() -> None:
    estimate = QueueEstimate(2, clock := VirtualClock())
    for i in range(3):
        estimate.add_request(make_request(f"r{i}"))
    clock.advance(int(7e9))
    assert estimate.predict_wait_s() == pytest.approx(7)


def test_a_place_that_somebody_less_urgent_has_is_taken_all_the_same() -> None:
    estimate = QueueEstimate(2, VirtualClock(), priority_wait_s=1.0)
    estimate.measure_place(int(1e9))
    for i in range(3):
        estimate.add_request(msgspec.structs.replace(make_request(f"r{i}"), priority=10))
    assert estimate.predict_wait_s(priority=0) == pytest.approx(0.5), "until a place is free"


def test_whom_a_newcomer_goes_before_is_not_in_its_way() -> None:
    estimate = crowded(clock := VirtualClock(), priority_wait_s=1.0)
    clock.advance(1)
    for i in range(40):
        estimate.add_request(msgspec.structs.replace(make_request(f"r{i}"), priority=10))
    clock.advance(int(5e9))
    assert estimate.predict_wait_s(priority=0) == pytest.approx(0.5), "until a place is free"
    assert estimate.predict_wait_s() == estimate.predict_wait_s(priority=0)
    assert estimate.predict_wait_s(priority=10) == pytest.approx(41 / 2)
    assert [estimate.retry_after_s(priority=priority) for priority in (0, 10)] == [1, 21]
    clock.advance(int(25e9))
    assert estimate.predict_wait_s(priority=0) == pytest.approx(41 / 2), (
        "ten levels are worth less than they have waited"
    )


ARRIVALS = {"early": (300, 0), "patient": (200, 5), "urgent": (100, -5)}


def queue_of(arrivals: dict[str, tuple[int, int]], **config: Any) -> QueueEstimate:
    """Requests that arrived so many ms ago and have a priority."""
    clock = VirtualClock()
    estimate, now_ns = QueueEstimate(2, clock, **config), clock.now_ns + 10**9
    for request_id, (before_ms, priority) in arrivals.items():
        clock.advance_to(now_ns - before_ms * 1_000_000)
        estimate.add_request(msgspec.structs.replace(make_request(request_id), priority=priority))
    clock.advance_to(now_ns)
    return estimate


def test_places_are_by_priority_where_the_scheduler_is() -> None:
    assert list(queue_of(ARRIVALS).report().waiting) == ["early", "patient", "urgent"]
    assert list(queue_of(ARRIVALS, priority_wait_s=1.0).report().waiting) == ["urgent", "early", "patient"]
    short = queue_of(ARRIVALS, priority_wait_s=0.001)
    assert list(short.report().waiting) == ["early", "patient", "urgent"], (
        "a level is worth so much waiting and no more"
    )
    assert queue_of(ARRIVALS).report().is_order_exact
    assert not queue_of(ARRIVALS, is_order_exact=False).report().is_order_exact


def test_who_has_started_does_not_wait_however_patient() -> None:
    estimate = queue_of(ARRIVALS, priority_wait_s=1.0)
    estimate.note_started(["patient", "unknown"])
    assert list(estimate.report().waiting) == ["urgent", "early"]
    estimate.note_first_token("patient")
    estimate.remove_request("early", 3, 4)
    assert list(estimate.report().waiting) == ["urgent"]


def queued(*held_ms: int, num_waiting: int) -> list[StartEstimate | None]:
    """The estimates of so many that wait behind two that run, after sequences that held their places for so long."""
    estimate = QueueEstimate(2, VirtualClock())
    for held in held_ms:
        estimate.measure_place(held * 1_000_000)
    for i in range(num_waiting + 2):
        estimate.add_request(make_request(f"r{i}"))
        if i < 2:
            estimate.note_started([f"r{i}"])
            estimate.note_first_token(f"r{i}")
    return list(estimate.report().waiting.values())


def test_even_times_give_an_even_estimate() -> None:
    first, *_, last = queued(*[20] * 20, num_waiting=100)
    for found, seconds in ((first, 0.01), (last, 1.0)):
        assert found is not None
        assert (found.low_seconds, found.seconds, found.high_seconds) == pytest.approx((seconds,) * 3)
        assert found.num_starts == 20


def test_uneven_times_have_a_spread_which_is_less_for_a_sum_of_many() -> None:
    first, *_, last = queued(*[10, 30] * 20, num_waiting=100)
    assert first is not None
    assert last is not None
    assert 0 < first.low_seconds < first.seconds < first.high_seconds
    assert 0.9 < last.low_seconds < last.seconds < last.high_seconds < 1.2
    assert first.seconds == pytest.approx(0.01, rel=0.1)


def test_the_last_in_the_queue_is_predicted_what_a_newcomer_was() -> None:
    """There is one prediction: of /debug, of refusals and of Retry-After."""
    estimate = crowded(clock := VirtualClock())
    for _ in range(MIN_STARTS):
        estimate.measure_place(int(1e9))
    run_steps(estimate, clock, 100, 1_000_000)
    for i in range(5):
        predicted_s = estimate.predict_wait_s()
        estimate.add_request(make_request(f"r{i}"))
        *_, last = estimate.report().waiting.values()
        assert last is not None
        assert last.seconds == pytest.approx(predicted_s)


def test_too_few_starts_tell_nothing() -> None:
    assert queued(*[20] * (MIN_STARTS - 1), num_waiting=1) == [None]
    assert queued(*[20] * MIN_STARTS, num_waiting=1) != [None]
    assert QueueEstimate(2).report().waiting == {}
