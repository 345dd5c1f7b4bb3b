"""Priorities: who comes first, and how long the last one waits at the most."""

from unittest import mock

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.engine.core import scheduler
from roseinfer.engine.core.batch import ScheduledBatch
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.invariants import assert_invariants
from roseinfer.records import FinishReason
from tests.unit.engine.core.test_deadlines import timed
from tests.unit.engine.harness import Transcript, make_engine, make_request, run_to_end


def add(engine: Engine, request_id: str, priority: int) -> None:
    engine.add_request(msgspec.structs.replace(make_request(request_id, max_tokens=2), priority=priority))


def order_of(engine: Engine) -> list[str]:
    """Request ids in the order of their first scheduling."""
    order: list[str] = []
    while engine.has_work:
        engine.step()
        order += [s.request.request_id for s in engine.scheduler.kv_cache.residents]
    return list(dict.fromkeys(order))


def test_the_lowest_goes_first_and_equals_in_order_of_arrival() -> None:
    engine = make_engine(admission="priority", max_num_seqs=1)
    timed(engine)
    for name, priority in (("a", 0), ("b", 5), ("c", -5), ("d", 0), ("e", -5)):
        add(engine, name, priority)
    assert order_of(engine) == ["c", "e", "a", "d", "b"]


def test_without_the_policy_the_order_stays() -> None:
    engine = make_engine(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", -5)):
        add(engine, name, priority)
    assert order_of(engine) == ["a", "b", "c"]


def test_a_preempted_sequence_is_not_overtaken() -> None:
    engine = make_engine(admission="priority", num_blocks=17, max_model_len=128)
    timed(engine)
    engine.add_request(make_request("old", range(1, 60), max_tokens=60))
    engine.add_request(msgspec.structs.replace(make_request("young", range(1, 40), max_tokens=60), priority=9))
    transcript = Transcript()
    while not any(step.record.num_preemptions for step in transcript.steps):
        transcript.take(engine.step())
    add(engine, "urgent", -100)
    assert [s.request.request_id for s in engine.scheduler.waiting] == ["young", "urgent"]
    run_to_end(engine, transcript)
    assert transcript.reasons == dict.fromkeys(("old", "young", "urgent"), FinishReason.LENGTH)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(-20, 20)), min_size=2, max_size=40),
    wait_s=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_a_request_is_not_overtaken_by_what_comes_later_than_the_bound(
    arrivals: list[tuple[int, int]], wait_s: float
) -> None:
    """One second a step, one sequence at a time: a request of level p is passed only by requests of a level q < p that
    came less than (p - q) * wait_s after it, however many come.
    """
    with mock.patch.object(scheduler, "PRIORITY_WAIT_S", wait_s):
        engine = make_engine(admission="priority", max_num_seqs=1)
    clock = timed(engine)
    came: dict[str, tuple[float, int]] = {}
    started: list[str] = []
    launch = engine.runner.launch

    def note(batch: ScheduledBatch, watch: object) -> object:
        for binding in batch.bindings:
            owner = engine.scheduler.kv_cache.table.owners[binding.slot]
            assert owner is not None
            started.append(owner.request.request_id)
        return launch(batch, watch)  # type: ignore[arg-type]

    engine.runner.launch = note  # type: ignore[method-assign, assignment]
    for i, (pause, priority) in enumerate(arrivals):
        came[f"r{i}"] = clock.now_s, priority
        add(engine, f"r{i}", priority)
        for _ in range(pause):
            if engine.has_work:
                engine.step()
            clock.now_s += 1.0
    while engine.has_work:
        engine.step()
        assert_invariants(engine.scheduler)
        clock.now_s += 1.0
    assert sorted(started) == sorted(came)
    for place, first in enumerate(started):
        for later in started[place + 1 :]:  # `first` went before `later`: if it came after, then within the bound
            (at, level), (waited_since, other) = came[first], came[later]
            assert at <= waited_since or at - waited_since <= (other - level) * wait_s
