"""Requests whose time is up: in the queue they never reach the model, in decode they keep what they have."""

import random
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.engine.core.deadlines import MIN_SWEPT, Deadlines
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.prefix_cache import BlockChain
from roseinfer.engine.core.sequence import Sequence, SequenceStatus
from roseinfer.engine.core.stopwatch import Phases
from roseinfer.engine.invariants import assert_invariants
from roseinfer.messages import Request
from roseinfer.records import FinishReason
from tests.unit.engine.harness import RecordBatches, Transcript, make_engine, make_request, run_alone, run_to_end


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1.0

    def __call__(self) -> int:
        return int(self.now_s * 1e9)


def timed(engine: Engine) -> Clock:
    clock = Clock()
    engine.phases = Phases(clock=clock)
    return clock


def until(request_id: str, *, s: float | None = None, queue_s: float | None = None, **options: Any) -> Request:
    made = make_request(request_id, **options)
    return msgspec.structs.replace(
        made,
        deadline_ns=None if s is None else int(s * 1e9),
        queue_deadline_ns=None if queue_s is None else int(queue_s * 1e9),
    )


def at_leisure(request: Request) -> list[int]:
    """Its tokens when nothing hurries."""
    return run_alone(msgspec.structs.replace(request, deadline_ns=None, queue_deadline_ns=None))


@pytest.mark.parametrize("pipeline_depth", [0, 1])
def test_a_deadline_in_decode_keeps_what_there_is_and_frees_the_blocks_at_that_step(pipeline_depth: int) -> None:
    engine = make_engine(pipeline_depth=pipeline_depth)
    clock, request = timed(engine), until("a", s=5.0, max_tokens=100)
    engine.add_request(request)
    transcript = Transcript()
    for _ in range(6):
        transcript.take(engine.step())
    clock.now_s = 5.0
    last = transcript.take(engine.step())
    assert transcript.reasons == {"a": FinishReason.TIMEOUT}
    if pipeline_depth == 0:
        assert last.record.num_used_blocks == 0
    run_to_end(engine, transcript)
    assert engine.scheduler.kv_cache.pool.num_used == 0
    tokens = transcript.tokens["a"]
    assert len(tokens) >= 5
    assert tokens == at_leisure(request)[: len(tokens)]


@pytest.mark.parametrize("limit", ["s", "queue_s"])
def test_what_expires_in_the_queue_never_reaches_the_model(record_batches: RecordBatches, limit: str) -> None:
    engine = make_engine(max_num_seqs=1)
    clock, batches = timed(engine), record_batches(engine)
    engine.add_request(make_request("first", max_tokens=20))
    engine.add_request(until("late", **{limit: 2.0}))
    engine.add_request(make_request("next", [7], max_tokens=2))
    transcript = Transcript()
    transcript.take(engine.step())
    clock.now_s = 2.5
    [ended] = transcript.take(engine.step()).outputs
    assert (ended.request_id, ended.token_ids, ended.finish_reason) == ("late", [], FinishReason.TIMEOUT)
    assert ended.times is not None
    assert ended.times.scheduled_ns == 0
    run_to_end(engine, transcript)
    assert transcript.reasons["next"] is FinishReason.LENGTH
    assert sum(len(batch.bindings) for batch in batches) == 2


def test_a_queue_limit_is_over_with_the_first_batch() -> None:
    engine = make_engine()
    clock = timed(engine)
    engine.add_request(until("a", queue_s=2.0, max_tokens=5))
    transcript = Transcript()
    transcript.take(engine.step())
    clock.now_s = 3.0
    assert run_to_end(engine, transcript).reasons == {"a": FinishReason.LENGTH}


def test_a_preempted_request_may_expire_while_it_waits() -> None:
    engine = make_engine(num_blocks=17, max_model_len=128)
    clock = timed(engine)
    engine.add_request(make_request("old", range(1, 60), max_tokens=60))
    engine.add_request(until("young", s=9.0, prompt=range(1, 40), max_tokens=60))
    transcript = Transcript()
    while not any(step.record.num_preemptions for step in transcript.steps):
        transcript.take(engine.step())
    clock.now_s = 9.5
    assert run_to_end(engine, transcript).reasons == {"young": FinishReason.TIMEOUT, "old": FinishReason.LENGTH}


def test_deadlines_of_the_dead_are_not_kept() -> None:
    engine = make_engine(num_blocks=512, max_num_seqs=8)
    timed(engine)
    for i in range(4 * MIN_SWEPT):
        engine.add_request(until(f"r{i}", s=1e6, queue_s=1e6, max_tokens=1))
        run_to_end(engine)
        assert_invariants(engine.scheduler)
    assert len(engine.scheduler.deadlines) <= MIN_SWEPT + 8


def test_a_sequence_that_has_ended_goes_long_before_its_deadline() -> None:
    """A client's limit may be a day, and its prompt and grammar may be large."""
    engine = make_engine(max_num_seqs=1)
    timed(engine)
    engine.add_request(until("ends", s=1e6, queue_s=1e6, max_tokens=2))
    engine.add_request(until("waits", s=1e6, queue_s=1e6, max_tokens=2))
    sequences = [weakref.ref(sequence) for sequence in engine.scheduler.sequences.values()]
    engine.abort("waits")
    run_to_end(engine)
    assert len(engine.scheduler.deadlines) == 4
    assert [sequence() for sequence in sequences] == [None, None]


def test_each_expires_at_its_own_moment_after_those_that_ended_were_swept_out() -> None:
    deadlines, alive = Deadlines(), []
    for i, at in enumerate(random.Random(0).sample(range(1_000), MIN_SWEPT + 99)):
        sequence = Sequence(until(f"r{i}", s=at), 0, np.zeros(1, np.int32), BlockChain(b"", ""))
        deadlines.add_sequence(sequence, num_unfinished=0)
        if i % 3:
            alive.append(sequence)
        else:
            sequence.status = SequenceStatus.FINISHED
    assert len(deadlines) <= MIN_SWEPT
    for sequence in sorted(alive, key=lambda sequence: sequence.request.deadline_ns or 0):
        assert (moment_ns := sequence.request.deadline_ns) is not None
        assert deadlines.pop_expired(moment_ns - 1) == []
        assert deadlines.pop_expired(moment_ns) == [sequence]
        assert deadlines.next_ns > moment_ns


@settings(max_examples=50, deadline=None)
@given(
    limits=st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(1, 25)), min_size=1, max_size=12),
    depth=st.sampled_from([0, 1]),
)
def test_every_request_ends_once_and_tokens_are_a_beginning_of_its_own(
    limits: list[tuple[int, bool, int]], depth: int
) -> None:
    engine = make_engine(pipeline_depth=depth, num_blocks=20, max_num_seqs=3)
    clock = timed(engine)
    requests = [
        until(f"r{i}", **{"queue_s" if of_queue else "s": 1.0 + at}, prompt=[i + 1] * (i + 1), max_tokens=count)
        for i, (at, of_queue, count) in enumerate(limits)
    ]
    for request in requests:
        engine.add_request(request)
    transcript = Transcript()
    while engine.has_work:
        transcript.take(engine.step())
        assert_invariants(engine.scheduler)
        clock.now_s += 1.0
    assert transcript.reasons.keys() == {request.request_id for request in requests}
    for request in requests:
        tokens, alone = transcript.tokens[request.request_id], at_leisure(request)
        assert tokens == alone[: len(tokens)]
        is_whole = transcript.reasons[request.request_id] is FinishReason.LENGTH
        assert is_whole == (len(tokens) == len(alone))
    assert engine.scheduler.kv_cache.pool.num_used == 0
