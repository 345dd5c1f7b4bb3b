"""A prompt's embedding ends its request, and is the same whatever happened to the prompt before."""

from typing import Any

import pytest

from roseinfer.messages import Pooling, Request
from roseinfer.records import FinishReason
from tests.unit.engine.harness import Transcript, make_engine, make_request, run_to_end

PROMPT = [*range(10, 70)]
POOLINGS: list[Pooling] = ["last", "mean"]


def embedding_request(name: str, pooling: Pooling, prompt: list[int] = PROMPT) -> Request:
    return make_request(name, prompt, max_tokens=1, ignore_eos=True, temperature=0.0, pooling=pooling)


def embeddings(transcript: Transcript) -> dict[str, bytes]:
    outputs = [out for step in transcript.steps for out in step.outputs if out.embedding is not None]
    assert all((out.token_ids, out.finish_reason) == ([], FinishReason.STOP) for out in outputs)
    found = {out.request_id: out.embedding for out in outputs if out.embedding is not None}
    assert len(found) == len(outputs), "each once"
    return found


def alone(pooling: Pooling, prompt: list[int] = PROMPT) -> bytes:
    engine = make_engine(prefix_caching=False)
    engine.add_request(embedding_request("a", pooling, prompt))
    return embeddings(run_to_end(engine))["a"]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 7, 8, 59, 60, 64])
def test_the_chunks_and_the_cache_do_not_show(pooling: Pooling, depth: int, chunk: int) -> None:
    engine = make_engine(max_prefill_tokens=chunk, pipeline_depth=depth)
    for name in ("first", "again"):
        engine.add_request(embedding_request(name, pooling))
        transcript = run_to_end(engine)
        assert embeddings(transcript) == {name: alone(pooling)}
    num_hits = sum(step.record.num_prefix_hit_tokens for step in transcript.steps)
    assert (num_hits > 0) == (pooling == "last")


@pytest.mark.parametrize("depth", [0, 1])
def test_many_beside_generations(depth: int) -> None:
    engine = make_engine(max_prefill_tokens=24, pipeline_depth=depth)
    wanted = {}
    for k in range(12):
        pooling, prompt = POOLINGS[k % 2], [*range(10, 12 + 5 * k)]
        engine.add_request(make_request(f"text{k}", [5, k + 1], max_tokens=9))
        engine.add_request(embedding_request(f"vector{k}", pooling, prompt))
        wanted[f"vector{k}"] = alone(pooling, prompt)
    transcript = run_to_end(engine)
    assert embeddings(transcript) == wanted
    assert sum(map(len, transcript.tokens.values())) == sum(
        step.record.num_generated_tokens for step in transcript.steps
    )


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_that_is_preempted_begins_anew(pooling: Pooling, depth: int) -> None:
    pool: dict[str, Any] = {"num_blocks": 13, "max_model_len": 104}
    engine = make_engine(pipeline_depth=depth, max_prefill_tokens=1, **pool)
    transcript = Transcript()
    engine.add_request(make_request("old", range(1, 9), max_tokens=90))
    while not transcript.tokens["old"]:
        transcript.take(engine.step())
    engine.add_request(embedding_request("young", pooling))
    run_to_end(engine, transcript)
    assert sum(step.record.num_preemptions for step in transcript.steps) == 1
    assert embeddings(transcript) == {"young": alone(pooling)}


def test_one_that_is_aborted_has_none() -> None:
    engine = make_engine(max_prefill_tokens=8, pipeline_depth=1)
    engine.add_request(embedding_request("gone", "mean"))
    transcript = Transcript()
    transcript.take(engine.step())
    engine.abort("gone")
    run_to_end(engine, transcript)
    assert embeddings(transcript) == {}
    assert transcript.reasons["gone"] is FinishReason.ABORT
