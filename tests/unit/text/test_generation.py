"""A request is built once for each sequence, and what the engine says of them becomes the choices of one answer."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from roseinfer.errors import InvalidRequest, PromptName, PromptTooLong, SequenceFailed
from roseinfer.messages import Request, SamplingParams, TokenOutput
from roseinfer.records import Arrival, FinishReason, RequestTimeline
from roseinfer.text.choice import EncodedPrompt, OutputOptions
from roseinfer.text.generation import NUM_SEEDS, Generation, GenerationRequest
from tests.unit.server.harness import ScriptedEngine, engine_info, ids, text_model, times


def wanted(*prompts: str, params: SamplingParams | None = None, **fields: object) -> GenerationRequest:
    encoded = [EncodedPrompt(ids(prompt), PromptName(f"prompts[{i}]")) for i, prompt in enumerate(prompts)]
    return GenerationRequest(prompts=encoded, params=params or SamplingParams(seed=7), **fields)  # type: ignore[arg-type]


def build(request: GenerationRequest) -> list[Request]:
    return request.build_requests(engine_info(), "id/{}".format)


def test_the_sequences_of_a_prompt_lie_side_by_side_and_differ_in_their_seed() -> None:
    requests = build(
        wanted("a", "bc", best_of=2, n=2, cache_salt="salt", priority=-3, deadline_ns=5, queue_deadline_ns=4)
    )
    assert [request.request_id for request in requests] == ["id/0", "id/1", "id/2", "id/3"]
    assert [request.prompt_token_ids for request in requests] == [ids("a"), ids("a"), ids("bc"), ids("bc")]
    assert [request.params.seed for request in requests] == [7, 8, 7, 8]
    assert {(request.cache_salt, request.priority) for request in requests} == {("salt", -3)}
    assert {(request.deadline_ns, request.queue_deadline_ns) for request in requests} == {(5, 4)}
    assert requests[0].prompt_token_ids is requests[1].prompt_token_ids  # so it goes to the engine once
    last = build(wanted("a", best_of=2, params=SamplingParams(seed=NUM_SEEDS - 1)))
    assert [request.params.seed for request in last] == [NUM_SEEDS - 1, 0]


def test_without_a_seed_each_prompt_draws_one() -> None:
    first, second = build(wanted("a", "a", params=SamplingParams()))
    assert None not in {first.params.seed, second.params.seed}
    assert first.params.seed != second.params.seed


def test_what_the_context_leaves_is_generated() -> None:
    params = SamplingParams(max_tokens=100)
    requests = build(wanted("a" * 100, "b" * 27, "c" * 127, params=params, fits_context=True))
    assert [request.params.max_tokens for request in requests] == [28, 100, 1]
    with pytest.raises(PromptTooLong) as caught:
        build(wanted("a", "b" * 128, fits_context=True))
    assert caught.value.param == "prompts[1]"


def test_more_logprobs_than_an_answer_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.text.logprobs.MAX_KEPT_LOGPROBS", 2 * 10 * 3)
    monkeypatch.setattr("roseinfer.text.logprobs.MAX_PROMPT_LOGPROBS", 11)
    kept = OutputOptions(columns=lambda _: {})
    params = SamplingParams(num_logprobs=2, max_tokens=11)
    with pytest.raises(InvalidRequest, match="at most 10 tokens of each of 2 sequences"):
        build(wanted("a", "b", params=params, output=kept))
    assert len(build(wanted("a", "b", params=params, output=kept, stream_interval=1))) == 2
    assert build(wanted("a", "b", params=params, output=kept, fits_context=True))[0].params.max_tokens == 10
    with pytest.raises(InvalidRequest, match="the prompts would have 12 log-probabilities"):
        build(wanted("abc", params=SamplingParams(num_prompt_logprobs=1), best_of=2))


async def running(request: GenerationRequest) -> tuple[ScriptedEngine, Generation]:
    engine = ScriptedEngine()
    requests = build(request)
    timelines = [RequestTimeline(request_id=each.request_id, recv_ns=1) for each in requests]
    for timeline in timelines:
        engine.open_timeline(timeline)
    return engine, Generation(request, requests, timelines, engine, text_model().tokenizer)


def step(
    text: str, *indexes: int, reason: FinishReason | None = None, logprob_of: int | None = None
) -> list[TokenOutput]:
    """The same text for each of some sequences."""
    end = times(num_cached_tokens=3) if reason is not None else None
    return [TokenOutput(f"id/{index}", ids(text), None, reason, None, end) for index in indexes]


async def deltas_of(generation: Generation) -> list[list[tuple[int, str, FinishReason | None]]]:
    told: list[list[tuple[int, str, FinishReason | None]]] = []
    async with aclosing(generation.outputs) as batches:
        async for batch in batches:
            deltas = generation.pop_deltas(batch)
            told.append([(delta.choice.index, delta.text, delta.finish_reason) for delta in deltas])
            if generation.is_over:
                break
    return told


async def play(engine: ScriptedEngine, steps: Sequence[list[TokenOutput]], num_requests: int) -> None:
    await engine.received(num_requests)
    for outputs in steps:
        engine.tell(*outputs)


async def test_a_step_makes_one_delta_for_each_choice_and_a_stop_string_ends_its_own() -> None:
    engine, generation = await running(
        wanted("x", best_of=2, n=2, stream_interval=2, output=OutputOptions(stop=("cd",)))
    )
    length = FinishReason.LENGTH
    steps = [step("a", 0, 1), step("b", 0, 1), step("cd", 0), step("e", 1), step("f", 1, reason=length)]
    told, _ = await asyncio.gather(deltas_of(generation), play(engine, steps, 2))
    stop = FinishReason.STOP
    assert told == [[(0, "a", None), (1, "a", None)], [], [(0, "b", stop)], [(1, "be", None)], [(1, "f", length)]]
    assert engine.aborted[0] == "id/0"
    assert generation.counts.prompt == 1
    assert generation.counts.generated == 4 + 4
    assert [choice.finish_reason for choice in generation.best_choices()] == [stop, length]


@pytest.mark.parametrize(
    ("fields", "is_streamed"),
    [({}, False), ({"stream_interval": 1}, True), ({"output": OutputOptions(stop=("x",))}, True)],
)
async def test_only_a_stream_and_a_stop_string_need_each_token_as_it_comes(
    fields: dict[str, Any], is_streamed: bool
) -> None:
    engine, generation = await running(wanted("x", **fields))
    await asyncio.gather(generation.run(), play(engine, [step("a", 0, reason=FinishReason.LENGTH)], 1))
    assert engine.are_streamed == [is_streamed]


async def test_a_stop_string_aborts_its_sequence_at_once_and_what_was_on_its_way_ends_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, generation = await running(
        wanted("x", best_of=2, n=2, stream_interval=1, output=OutputOptions(stop=("cd",)))
    )
    monkeypatch.setattr(engine, "abort", engine.aborted.append)
    generation.pop_deltas([*step("cd", 0), *step("a", 1)])
    assert engine.aborted == ["id/0"]
    generation.pop_deltas([*step("e", 0), *step("b", 1)])
    generation.pop_deltas(step("", 0, reason=FinishReason.ABORT))
    assert (engine.aborted, generation.is_over) == (["id/0"], False)
    [delta] = generation.pop_deltas(step("f", 1, reason=FinishReason.LENGTH))
    assert (delta.text, generation.is_over) == ("f", True)


async def test_a_delta_has_the_arrival_of_the_token_that_made_it_due() -> None:
    """Tokens that came before it was written came along."""
    _, generation = await running(wanted("x", stream_interval=2))
    at: list[int] = []
    for text in ("a", "bcd", "ef"):
        arrivals = generation.choices[0].timeline.arrivals
        arrivals += [Arrival(i, i, i) for i in range(len(arrivals), len(arrivals) + len(text))]
        for delta in generation.pop_deltas([output for token in text for output in step(token, 0)]):
            assert delta.arrival is not None
            at.append(delta.arrival.tokens_ns)
    assert at == [0, 2, 5]


async def test_a_reader_that_leaves_ends_what_is_left() -> None:
    engine, generation = await running(wanted("x", "y", stream_interval=1))
    async with aclosing(generation.outputs) as batches:
        player = asyncio.create_task(play(engine, [step("a", 0)], 2))
        async for batch in batches:
            generation.pop_deltas(batch)
            break
    await player
    assert sorted(engine.aborted) == ["id/0", "id/1"]


async def test_a_failed_sequence_raises_and_the_others_can_go_on() -> None:
    _, generation = await running(wanted("x", best_of=2, n=2))
    [failed, sound] = step("a", 0, 1)
    generation.add_output(sound)
    with pytest.raises(SequenceFailed):
        generation.add_output(TokenOutput(failed.request_id, [], None, FinishReason.ERROR, None, times()))
    [end] = step("b", 1, reason=FinishReason.LENGTH)
    assert generation.add_output(end).pop_delta().text == "ab"


async def test_the_best_are_those_with_the_highest_mean() -> None:
    _, generation = await running(wanted("x", "y", best_of=2, n=1))
    for index, logprob in enumerate((-2.0, -1.0, -1.0, -3.0)):
        [output] = step("a", index, reason=FinishReason.LENGTH)
        generation.add_output(output)
        generation.choices[index].sum_logprobs = logprob
    assert generation.is_over
    best = generation.best_choices()
    assert [choice.timeline.request_id for choice in best] == ["id/1", "id/2"]
    assert [choice.index for choice in best] == [0, 1]
    assert generation.counts.cached == 6  # each prompt once
