"""A step is launched before the one in front of it is read, and the tokens are the same.

The fake runner computes nothing before somebody waits, so at depth 1 every step but the first is scheduled blind.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from roseinfer.engine.core.batch import Launched, SampledTokens, ScheduledBatch, Watch
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.invariants import assert_invariants
from roseinfer.messages import Request
from roseinfer.records import FinishReason, StepRecord
from tests.unit.engine.harness import Transcript, make_engine, make_request, run_alone, run_to_end

CONFIGS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 128},
    "preempting": {"num_blocks": 17, "max_model_len": 128},
    "preempting without cache": {"num_blocks": 16, "prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 17, "max_prefill_tokens": 5},
    "taking turns": {"max_num_seqs": 3, "max_prefill_seqs": 7, "num_blocks": 40},
    "one slot": {"max_num_seqs": 1, "max_active_seqs": 1},
    "packed": {"admission": "pack", "fifo_every": 2, "num_blocks": 24},
}


def random_requests(random: np.random.Generator, count: int) -> list[Request]:
    """Some with a common prefix; greedy and seeded, ended by their length, by eos and by stop tokens."""
    requests = []
    for i in range(count):
        prompt = [*range(10, 10 + int(random.integers(0, 40))), *random.integers(1, 9, int(random.integers(1, 20)))]
        max_tokens = int(random.integers(1, 50))
        requests.append(
            make_request(
                f"r{i}",
                map(int, prompt),
                max_tokens=max_tokens,
                min_tokens=int(random.integers(0, max_tokens + 1)) if i % 3 else 0,
                temperature=float(i % 2),
                seed=i,
                ignore_eos=i % 4 == 0,
                stop_token_ids=tuple(range(5)) if i % 2 else (),
                num_logprobs=2 if i % 5 == 0 else None,
            )
        )
    return requests


def run_arrivals(engine: Engine, requests: list[Request], random: np.random.Generator) -> Transcript:
    """Each comes after a random number of steps."""
    transcript = Transcript()
    for request in requests:
        engine.add_request(request)
        for _ in range(int(random.integers(0, 4))):
            if engine.has_work:
                transcript.take(engine.step())
                assert_invariants(engine.scheduler)
    return run_to_end(engine, transcript)


@lru_cache
def traffic(seed: int) -> tuple[list[Request], dict[str, list[int]]]:
    """Requests, and the tokens of each alone."""
    requests = random_requests(np.random.default_rng(seed), 16)
    return requests, {request.request_id: run_alone(request) for request in requests}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_ends_are_those_of_depth_0(name: str, seed: int) -> None:
    requests, alone = traffic(seed)
    plain, deep = (
        run_arrivals(make_engine(pipeline_depth=depth, **CONFIGS[name]), requests, np.random.default_rng(seed))
        for depth in (0, 1)
    )
    assert deep.tokens == plain.tokens == alone
    assert deep.reasons == plain.reasons
    assert set(plain.reasons.values()) == {FinishReason.STOP, FinishReason.LENGTH}
    for transcript in (plain, deep):
        records = [step.record for step in transcript.steps]
        assert [record.step_id for record in records] == list(range(1, len(records) + 1))
        assert sum(record.num_generated_tokens for record in records) == sum(map(len, plain.tokens.values()))
        assert sum(record.num_finished for record in records) == len(requests)
        if name.startswith("preempting"):
            assert sum(record.num_preemptions for record in records) > 1, "the trace no longer preempts"


def test_the_next_step_is_launched_before_the_one_before_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(pipeline_depth=1)
    events = watch_runner(engine, monkeypatch)
    engine.add_request(make_request("a", max_tokens=4))
    run_to_end(engine)
    assert events == ["launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "launch 4", "wait 3", "wait 4"]


def test_depth_0_reads_each_step_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    events = watch_runner(engine, monkeypatch)
    engine.add_request(make_request("a", max_tokens=2))
    run_to_end(engine)
    assert events == ["launch 1", "wait 1", "launch 2", "wait 2"]


def test_a_length_limit_is_seen_in_time_and_a_stop_token_one_step_late() -> None:
    alone = run_alone(make_request("a", max_tokens=30))
    stop = next(token for token in alone[3:] if token not in alone[:3])
    num_tokens = alone.index(stop) + 1
    for params, num_surplus in (({"max_tokens": num_tokens}, 0), ({"max_tokens": 30, "stop_token_ids": (stop,)}, 1)):
        engine = make_engine(pipeline_depth=1)
        engine.add_request(make_request("a", **params))
        transcript = run_to_end(engine)
        assert transcript.tokens["a"] == alone[:num_tokens]
        assert len(transcript.steps) == num_tokens + num_surplus


def test_what_ended_keeps_its_blocks_until_its_surplus_row_is_read() -> None:
    engine, end = stopped_engine()
    assert (end.num_finished, end.num_running, end.num_used_blocks) == (1, 0, 1)
    surplus = engine.step().record
    assert (surplus.num_decode_seqs, surplus.num_generated_tokens, surplus.num_used_blocks) == (1, 0, 0)
    assert not engine.has_work


def test_the_slot_of_what_ended_is_not_given_away_before_that() -> None:
    engine, _ = stopped_engine(max_num_seqs=1, max_active_seqs=1)
    follower = make_request("next", [5, 6], max_tokens=3)
    engine.add_request(follower)
    transcript = Transcript()
    records = [transcript.take(engine.step()).record for _ in range(2)]
    assert [(record.num_decode_seqs, record.num_prefill_seqs) for record in records] == [(1, 0), (0, 1)]
    assert run_to_end(engine, transcript).tokens["next"] == run_alone(follower)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_an_abort_is_reported_at_once_and_the_token_in_flight_never(num_steps: int) -> None:
    engine = make_engine(pipeline_depth=1, max_prefill_tokens=16, prefix_caching=False)
    engine.add_request(make_request("a", range(1, 40), max_tokens=50))
    transcript = Transcript()
    for _ in range(num_steps):
        transcript.take(engine.step())
    num_told = len(transcript.tokens["a"])
    engine.abort("a")
    assert_invariants(engine.scheduler)
    last = transcript.take(engine.step())
    assert [output.finish_reason for output in last.outputs] == [FinishReason.ABORT]
    assert len(transcript.tokens["a"]) == num_told
    assert (last.record.num_running, last.record.num_used_blocks) == (0, 0)
    assert not engine.has_work


def test_no_sequence_is_preempted_while_a_step_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(pipeline_depth=1, num_blocks=16, prefix_caching=False)
    events = watch_runner(engine, monkeypatch)
    for i in range(4):
        engine.add_request(make_request(f"r{i}", range(1 + i, 18 + i), max_tokens=60))
    preempting = [step.record.step_id for step in run_to_end(engine).steps if step.record.num_preemptions]
    assert len(preempting) > 1
    for step_id in preempting:
        launched = events.index(f"launch {step_id}")
        assert events[launched - 1] == f"wait {step_id - 1}"


def test_a_launched_batch_is_not_changed_by_the_next_schedule() -> None:
    engine = make_engine(pipeline_depth=1, max_prefill_tokens=16)
    for i in range(6):
        engine.add_request(make_request(f"r{i}", range(1 + i, 30), max_tokens=20 + i))
    launch, seen = engine.runner.launch, list[tuple[ScheduledBatch, dict[str, bytes]]]()

    def contents(batch: ScheduledBatch) -> dict[str, bytes]:
        names = ("slots", "starts", "num_new_tokens", "samples", "token_ids")
        return {name: getattr(batch, name).tobytes() for name in names}

    def remembering(batch: ScheduledBatch, watch: Watch) -> Launched:
        seen.append((batch, contents(batch)))
        return launch(batch, watch)

    engine.runner.launch = remembering  # type: ignore[method-assign]
    run_to_end(engine)
    assert len(seen) > 20
    assert all(contents(batch) == then for batch, then in seen)


def stopped_engine(**config: Any) -> tuple[Engine, StepRecord]:
    """An engine whose only request has just met its stop token, its surplus row in flight, and the step's record."""
    alone = run_alone(make_request("a", max_tokens=6))
    stop = next(token for token in alone[1:] if token != alone[0])
    engine = make_engine(pipeline_depth=1, prefix_caching=False, **config)
    engine.add_request(make_request("a", max_tokens=6, stop_token_ids=(stop,)))
    record = engine.step().record
    while not record.num_finished:
        record = engine.step().record
    return engine, record


def watch_runner(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`launch 1`, `wait 1` and so on, as they happen."""
    events: list[str] = []
    launch = engine.runner.launch

    class Watched:
        def __init__(self, launched: Launched, step_id: int) -> None:
            self.graph_rows, self.h2d_bytes = launched.graph_rows, launched.h2d_bytes
            self._launched, self._step_id = launched, step_id

        def wait(self) -> SampledTokens:
            events.append(f"wait {self._step_id}")
            return self._launched.wait()

    def watched(batch: ScheduledBatch, watch: Watch) -> Watched:
        events.append(f"launch {batch.step_id}")
        return Watched(launch(batch, watch), batch.step_id)

    monkeypatch.setattr(engine.runner, "launch", watched)
    return events
