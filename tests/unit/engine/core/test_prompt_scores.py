"""A prompt's tokens are scored once each, and told with the first token: whatever happened to the prompt before."""

from typing import Any

import pytest

from tests.unit.engine.harness import Transcript, make_engine, make_request, run_to_end, tell_alone

PROMPT = [*range(10, 70)]


def test_each_token_but_the_first_has_its_entry() -> None:
    _, scores = tell_alone(make_request("a", PROMPT, num_prompt_logprobs=2))
    assert scores is not None
    entries = list(scores.entries())
    assert len(entries) == len(PROMPT) - 1
    assert all(ids == [0, 1] and len(logprobs) == 2 for _, ids, logprobs in entries)
    _, alone = tell_alone(make_request("a", [5], num_prompt_logprobs=2))
    assert alone is not None
    assert list(alone.entries()) == []
    assert tell_alone(make_request("a", PROMPT))[1] is None


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 7, 8, 59, 60, 64])
def test_the_chunks_do_not_show(depth: int, chunk: int) -> None:
    request = make_request("a", PROMPT, num_prompt_logprobs=1)
    engine = make_engine(max_prefill_tokens=chunk, pipeline_depth=depth)
    for name in ("first", "a"):  # the second finds its blocks in the cache, and does not ask
        engine.add_request(make_request(name, PROMPT, num_prompt_logprobs=1))
        transcript = run_to_end(engine)
        assert (transcript.tokens[name], transcript.scores[name]) == tell_alone(request)
    assert sum(step.record.num_prefix_queried_tokens for step in transcript.steps) == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [1, 20])
def test_a_prompt_that_is_preempted_is_scored_from_its_beginning_and_sent_once(
    depth: int, caching: bool, chunk: int
) -> None:
    """The old sequence grows into the young one's blocks: while its prompt is read, or when it decodes already."""
    pool: dict[str, Any] = {"num_blocks": 13, "max_model_len": 104}
    request = make_request("young", PROMPT, num_prompt_logprobs=2, max_tokens=30)
    engine = make_engine(prefix_caching=caching, pipeline_depth=depth, max_prefill_tokens=chunk, **pool)
    transcript = Transcript()
    engine.add_request(make_request("old", range(1, 9), max_tokens=90))
    while not transcript.tokens["old"]:
        transcript.take(engine.step())
    engine.add_request(request)
    run_to_end(engine, transcript)
    preempted = [step.record.step_id for step in transcript.steps if step.record.num_preemptions]
    [first] = [step.record.step_id for step in transcript.steps for out in step.outputs if out.prompt_logprobs]
    assert len(preempted) == 1
    assert (preempted[0] < first) == (chunk == 1)
    assert (transcript.tokens["young"], transcript.scores["young"]) == tell_alone(request, **pool)


def test_one_that_is_aborted_takes_its_scores_along() -> None:
    engine = make_engine(max_prefill_tokens=8, pipeline_depth=1)
    engine.add_request(make_request("gone", PROMPT, num_prompt_logprobs=0))
    transcript = Transcript()
    for _ in range(3):
        transcript.take(engine.step())
    engine.abort("gone")
    run_to_end(engine, transcript)
    assert not transcript.scores
    request = make_request("next", PROMPT, num_prompt_logprobs=0)
    engine.add_request(request)
    assert run_to_end(engine).scores["next"] == tell_alone(request)[1]
