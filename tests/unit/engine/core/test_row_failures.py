"""A row without a token: its request ends with an error, its blocks are free, and no other row changes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.steps import MAX_FAILURES_IN_A_ROW, UnattributableFailure
from roseinfer.engine.invariants import assert_invariants
from roseinfer.records import FinishReason
from tests.unit.engine.harness import Transcript, make_engine, make_request, run_alone, run_to_end
from tests.unit.engine.poison import poison

PREFIX = list(range(1, 41))  # five blocks of eight


def num_cached(engine: Engine, request_id: str, prompt: list[int]) -> int:
    engine.add_request(make_request(request_id, prompt))
    times = run_to_end(engine).steps[-1].outputs[0].times
    assert times is not None
    return times.num_cached_tokens


@pytest.mark.parametrize("pipeline_depth", [0, 1])
@pytest.mark.parametrize("at", [41, 44])  # its first token, and one in the middle
def test_a_row_fails_alone(at: int, pipeline_depth: int) -> None:
    engine = poison(make_engine(pipeline_depth=pipeline_depth), lambda name, p: name == "bad" and p == at)
    requests = [make_request(name, [*PREFIX, 50 + i], max_tokens=9) for i, name in enumerate(("a", "bad", "c"))]
    for request in requests:
        engine.add_request(request)
    transcript = run_to_end(engine)
    assert transcript.reasons == {"a": FinishReason.LENGTH, "bad": FinishReason.ERROR, "c": FinishReason.LENGTH}
    for request in requests:
        expected = run_alone(request)
        assert transcript.tokens[request.request_id] == (
            expected[: at - 41] if request.request_id == "bad" else expected
        )
    generated = sum(step.record.num_generated_tokens for step in transcript.steps)
    assert generated == sum(map(len, transcript.tokens.values()))


@pytest.mark.parametrize("max_prefill_tokens", [8, None])
def test_its_blocks_are_never_found_and_the_retry_computes_them_again(max_prefill_tokens: int | None) -> None:
    """Those of its last step, and those of chunks that had been computed, and published, before anybody could know."""
    poisoned = {"bad"}
    engine = poison(make_engine(max_prefill_tokens=max_prefill_tokens), lambda name, _: name in poisoned)
    for request in (make_request("other", [9, 9, 9], max_tokens=30), make_request("bad", [*PREFIX, 50])):
        engine.add_request(request)
    assert run_to_end(engine).reasons["bad"] is FinishReason.ERROR
    assert num_cached(engine, "retry", [*PREFIX, 50]) == 0
    assert num_cached(engine, "again", [*PREFIX, 50]) == 40


def test_what_it_started_from_is_forgotten_and_what_others_computed_after_that() -> None:
    engine = poison(make_engine(), lambda name, _: name == "bad")
    engine.add_request(make_request("other", [9, 9, 9], max_tokens=100))
    engine.step()
    for name in ("a", "b"):  # a leaves blocks behind, and b two more after them
        engine.add_request(make_request(name, [*PREFIX, *([60] * 16 if name == "b" else []), 50]))
        for _ in range(6):
            engine.step()
    assert num_cached_beside(engine, "c", [*PREFIX, *[60] * 16, 50]) == 56
    assert num_cached_beside(engine, "bad", [*PREFIX, 51]) == 40
    assert num_cached_beside(engine, "d", [*PREFIX, *[60] * 16, 50]) == 0


@pytest.mark.parametrize("ended_by", ["a stop token", "an abort"])
def test_a_surplus_row_that_failed_leaves_nothing_behind_either(ended_by: str) -> None:
    """Its sequence ended well, and no error is reported; but what it wrote into the last of its blocks is no number."""
    prompt = PREFIX[:23]  # the first token that is generated fills the third block
    [first] = run_alone(make_request("bad", prompt, max_tokens=1))
    stops = (first,) if ended_by == "a stop token" else ()
    engine = poison(make_engine(pipeline_depth=1), lambda name, p: name == "bad" and p == 24)
    for request in (
        make_request("other", [9, 9, 9], max_tokens=30),
        make_request("bad", prompt, max_tokens=9, stop_token_ids=stops),
    ):
        engine.add_request(request)
    transcript = Transcript()
    transcript.take(engine.step())
    if ended_by == "an abort":
        engine.abort("bad")  # with the row in flight
    reasons = run_to_end(engine, transcript).reasons
    ended = FinishReason.STOP if ended_by == "a stop token" else FinishReason.ABORT
    assert reasons == {"bad": ended, "other": FinishReason.LENGTH}
    assert num_cached(engine, "next", [*prompt, first, 50]) == 0


def num_cached_beside(engine: Engine, request_id: str, prompt: list[int]) -> int:
    """The same beside another request, which goes on."""
    engine.add_request(make_request(request_id, prompt))
    transcript = Transcript(slots={0: "other"})
    while request_id not in transcript.reasons:
        transcript.take(engine.step())
        assert_invariants(engine.scheduler)
    [times] = [o.times for s in transcript.steps for o in s.outputs if o.request_id == request_id and o.finish_reason]
    assert times is not None
    return times.num_cached_tokens


def test_a_step_whose_rows_all_fail_blames_no_row() -> None:
    engine = poison(make_engine(), lambda *_: True)
    for i in range(3):
        engine.add_request(make_request(f"r{i}", [i + 1]))
    with pytest.raises(UnattributableFailure, match="3 rows"):
        engine.step()


@pytest.mark.parametrize("pipeline_depth", [0, 1])
def test_rows_that_failed_by_their_own_fault_are_no_evidence_however_many(pipeline_depth: int) -> None:
    """Together in a step, or one after the other: what a request asks for says nothing of the device."""
    engine = poison(make_engine(pipeline_depth=pipeline_depth), lambda *_: False, lambda name, _: name != "good")
    names = [f"r{i}" for i in range(3)]
    for i, name in enumerate(names):
        engine.add_request(make_request(name, [i + 1]))
    transcript = run_to_end(engine)
    assert transcript.reasons == dict.fromkeys(names, FinishReason.ERROR)
    assert all(o.is_own_fault for step in transcript.steps for o in step.outputs if o.finish_reason)
    for i in range(2 * MAX_FAILURES_IN_A_ROW):
        engine.add_request(make_request(f"s{i}", [i + 1]))
        assert run_to_end(engine).reasons == {f"s{i}": FinishReason.ERROR}
    engine.add_request(make_request("good", [9]))
    assert run_to_end(engine).reasons == {"good": FinishReason.LENGTH}


def test_rows_that_failed_by_their_own_fault_do_not_hide_a_device_that_fails() -> None:
    """They are no sign of life either: the others of the step are judged as if they were alone."""
    engine = poison(make_engine(), lambda name, _: name.startswith("bad"), lambda name, _: name.startswith("own"))
    for i, name in enumerate(("own0", "bad0", "own1", "bad1")):
        engine.add_request(make_request(name, [i + 1]))
    with pytest.raises(UnattributableFailure, match="2 rows"):
        engine.step()


def test_a_request_that_is_alone_fails_alone_but_not_for_ever() -> None:
    """A client with a poisonous prompt cannot stop an idle server; a device that computes no number at all does."""
    engine = poison(make_engine(), lambda name, _: name != "good")
    for i in range(MAX_FAILURES_IN_A_ROW):
        engine.add_request(make_request(f"r{i}", [i + 1]))
        assert run_to_end(engine).reasons == {f"r{i}": FinishReason.ERROR}
    engine.add_request(make_request("good", [9]))
    run_to_end(engine)
    for i in range(MAX_FAILURES_IN_A_ROW):
        engine.add_request(make_request(f"s{i}", [i + 1]))
        run_to_end(engine)
    engine.add_request(make_request("last", [5]))
    with pytest.raises(UnattributableFailure):
        engine.step()


@pytest.mark.parametrize("length", [3, 40])  # the shorter ones share a step, the longer ones wait for one another
@pytest.mark.parametrize("num_choices", [2, 8])
def test_the_choices_of_a_prompt_fail_as_one(num_choices: int, length: int) -> None:
    """However many they are, they are one client's doing."""
    engine = poison(make_engine(), lambda name, _: name.startswith("bad"))
    prompt = PREFIX[:length]
    for i in range(num_choices):
        engine.add_request(replace(make_request(f"bad{i}"), prompt_token_ids=prompt))
    assert run_to_end(engine).reasons == dict.fromkeys([f"bad{i}" for i in range(num_choices)], FinishReason.ERROR)
    engine.add_request(make_request("good", prompt))
    assert run_to_end(engine).reasons == {"good": FinishReason.LENGTH}


def test_steps_that_read_a_part_of_a_prompt_are_no_sign_of_life() -> None:
    """They sample nothing: a device that computes no number at all is found out whatever the lengths of the prompts."""
    engine = poison(make_engine(max_prefill_tokens=8), lambda *_: True)
    for i in range(MAX_FAILURES_IN_A_ROW):
        engine.add_request(make_request(f"r{i}", [i + 1] * 20))
        assert run_to_end(engine).reasons == {f"r{i}": FinishReason.ERROR}
    engine.add_request(make_request("last", [9] * 20))
    with pytest.raises(UnattributableFailure):
        run_to_end(engine)


CONFIGS: list[dict[str, Any]] = [{}, {"num_blocks": 18}, {"max_prefill_tokens": 8, "pipeline_depth": 1}]


@settings(max_examples=60, deadline=None)
@given(
    config=st.sampled_from(CONFIGS),
    prompts=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=2, max_size=8),
    poisoned=st.sets(st.tuples(st.integers(0, 7), st.integers(0, 12)), min_size=1, max_size=6),
)
def test_neighbours_keep_their_tokens_whichever_row_fails(
    config: dict[str, Any], prompts: list[tuple[int, int]], poisoned: set[tuple[int, int]]
) -> None:
    requests = [
        make_request(f"r{i}", [*PREFIX[:shared], 60 + i], max_tokens=max_tokens)
        for i, (shared, max_tokens) in enumerate(prompts)
    ]
    failing = {f"r{i}": len(requests[i].prompt_token_ids) + after for i, after in poisoned if i < len(requests)}
    failing.pop("r0", None)  # one is sound in every step, so that each failure is somebody's own
    engine = poison(make_engine(**config), lambda name, position: failing.get(name) == position)
    engine.add_request(make_request("steady", [3], max_tokens=100))
    for request in requests:
        engine.add_request(request)
    transcript = run_to_end(engine)
    for request in requests:
        expected = run_alone(request)
        at = failing.get(request.request_id, 1 << 30) - len(request.prompt_token_ids)
        assert transcript.tokens[request.request_id] == expected[:at]
        failed = at < len(expected)
        assert transcript.reasons[request.request_id] is (FinishReason.ERROR if failed else FinishReason.LENGTH)
    assert engine.scheduler.kv_cache.pool.num_used == 0


def test_a_failure_beside_surplus_rows_is_its_own() -> None:
    """With a pipeline a row may be left over from a sequence that has ended: it speaks neither for nor against."""
    engine = poison(make_engine(pipeline_depth=1), lambda name, p: name == "bad" and p == 5)
    engine.add_request(make_request("bad", [1, 2, 3], max_tokens=20))
    engine.add_request(make_request("a", [1, 2, 4], max_tokens=20))
    engine.step()
    engine.abort("a")
    assert run_to_end(engine, Transcript(slots={0: "bad", 1: "a"})).reasons["bad"] is FinishReason.ERROR
