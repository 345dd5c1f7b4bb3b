"""POST /v1/completions over a scripted engine: what goes in reaches the engine, what the engine says comes out."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import aiohttp
import pytest

from roseinfer.messages import Request, SamplingDefaults, SamplingParams, TokenLogprobs, TokenOutput
from roseinfer.records import FinishReason
from tests.unit.server.harness import (
    BOS,
    EOS,
    TOOL,
    ScriptedEngine,
    engine_info,
    ids,
    logprobs_of,
    says,
    serving,
    text_model,
    times,
)


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


async def next_events(response: aiohttp.ClientResponse) -> list[Any]:
    """The events of one write: the client sees each as one chunk of the transfer encoding."""
    data = bytearray()
    is_end_of_write = False
    while not is_end_of_write:
        piece, is_end_of_write = await response.content.readchunk()
        data += piece
    return [json.loads(frame.removeprefix("data: ")) for frame in data.decode().removesuffix("\n\n").split("\n\n")]


async def test_a_whole_reply() -> None:
    async with serving(ScriptedEngine(says("Hello", num_cached_tokens=1))) as server:
        answer = await server.complete(prompt="Say", model="scripted")
    assert answer.status == 200
    assert answer.json == {
        "id": answer.json["id"],
        "object": "text_completion",
        "created": answer.json["created"],
        "model": "scripted",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert answer.json["id"].startswith("cmpl-")


async def test_a_streamed_reply() -> None:
    async with serving(ScriptedEngine(says("Hé!"))) as server:
        answer = await server.complete(stream=True)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert text_of(chunks) == "Hé!"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_usage_is_counted_streamed_or_not() -> None:
    """Defect D2 of the ancestor: usage was guessed from the text, and absent from streams."""
    async with serving(ScriptedEngine(says("Hello", num_cached_tokens=2))) as server:
        whole = await server.complete()
        streamed = await server.complete(stream=True, stream_options={"include_usage": True})
    *chunks, last, done = streamed.events
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]) == ([], whole.json["usage"])
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)


@pytest.mark.parametrize("path", ["completions", "chat"])
@pytest.mark.parametrize("include_usage", [False, True])
async def test_each_chunk_can_have_the_usage_of_its_choice_so_far(path: str, *, include_usage: bool) -> None:
    """What it adds is what the chunk holds, also where one write holds the tokens of several steps."""
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    async with serving(ScriptedEngine(says("Hé!a"))) as server:
        ask = server.complete if path == "completions" else server.chat
        whole = (await ask(n=2)).json["usage"]
        answer = await ask(n=2, stream=True, stream_interval=3, stream_options=options)
    *chunks, done = answer.events
    assert done == "[DONE]"
    if include_usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], whole)
    for index in range(2):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in usages] == [1, 4, 5]
        assert {usage["prompt_tokens"] for usage in usages} == {whole["prompt_tokens"]}
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    assert 2 * usages[-1]["completion_tokens"] == whole["completion_tokens"]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_the_finish_reason_is_the_engines(reason: FinishReason) -> None:
    """Defect D1 of the ancestor: it always said stop."""
    async with serving(ScriptedEngine(says("abc", reason))) as server:
        whole = await server.complete()
        streamed = await server.complete(stream=True)
    assert whole.json["choices"][0]["finish_reason"] == reason
    assert streamed.events[-2]["choices"][0]["finish_reason"] == reason


async def test_every_parameter_reaches_the_engine() -> None:
    """Defects D9 and D10: parameters were read in one mode and not in the other, or nowhere."""
    shared: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 11}
    shared |= {"max_tokens": 9, "min_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": -1}
    shared |= {"repetition_penalty": 1.1}
    expected = SamplingParams(
        **shared, stop_token_ids=(7, 8), ignore_eos=True, num_logprobs=3, logit_bias={7: 1.5, 299: -100}
    )
    async with serving(ScriptedEngine(says("a"))) as server:
        for stream in (False, True):
            body = shared | {"stop_token_ids": [7, 8], "ignore_eos": True, "logprobs": 3, "stream": stream}
            body["logit_bias"] = {"7": 1.5, "299": -100}
            assert (await server.complete(**body)).status == 200
    assert [request.params for request in server.engine.requests] == [expected, expected]


async def test_defaults() -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        assert (await server.complete()).status == 200
        assert (await server.complete()).status == 200
    first, second = (request.params for request in server.engine.requests)
    assert first == SamplingParams(max_tokens=16, seed=first.seed)
    assert first.seed is not None
    assert 0 <= first.seed < 2**63
    assert first.seed != second.seed, "without a seed, each request has its own"


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_may_be_ignored_and_are_listed(*, stream: bool) -> None:
    async with serving(ScriptedEngine(says("a")), unknown_fields="ignore") as server:
        fields: dict[str, Any] = {"temprature": 1, "a, b\n": 2, "store": True, "mood": None}
        answer = await server.complete(**fields, stream=stream)
        assert (answer.status, answer.headers["x-roseinfer-ignored"]) == (200, "a%2C%20b%0A, temprature")
        plain = await server.complete(stream=stream, store=True)
        assert "x-roseinfer-ignored" not in plain.headers
        refused = await server.complete(temprature=1, top_p=5, stream=stream)
        assert (refused.status, refused.error["param"]) == (400, "top_p")
        assert refused.headers["x-roseinfer-ignored"] == "temprature"
        fields = {f"{'x' * 100}{i}": 1 for i in range(500)}
        many = await server.complete(**fields, stream=stream)
        assert (many.status, len(many.headers["x-roseinfer-ignored"])) == (200, 2048)
    async with serving(ScriptedEngine(says("a"))) as server:
        assert (await server.complete(temprature=1)).error["param"] == "temprature"


NOTHING: list[dict[str, Any]] = [
    {"echo": False},
    {"presence_penalty": 0},
    {"frequency_penalty": 0.0},
    {"logit_bias": {}},
    {"suffix": None},
    {"best_of": 1},
    {"stop": None},
    {"stop": []},
    {"user": "me"},
    {"metadata": {"a": "b"}},
    {"store": False},
    {"service_tier": "flex"},
    {"prompt_cache_key": "a"},
    {"safety_identifier": "a"},
    {"n": None},
    {"stream_options": None},
    {"stream_options": None, "stream": False},
    {"stream_options": {"include_obfuscation": True}, "stream": True},
    {"stream_options": {"include_usage": None}, "stream": True},
]


@pytest.mark.parametrize("nothing", NOTHING, ids=str)
async def test_fields_that_ask_for_nothing_are_accepted(nothing: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        assert (await server.complete(**nothing)).status == 200
    assert server.engine.requests[0].params == SamplingParams(seed=server.engine.requests[0].params.seed)


async def test_what_a_request_leaves_out_is_the_models_and_what_it_says_wins() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.05)
    async with serving(ScriptedEngine(says("x"), engine_info(sampling_defaults=defaults))) as server:
        await server.complete()
        await server.chat(temperature=0, top_k=0)
        await server.complete(temperature=1.5, top_k=3, top_p=1, min_p=0, repetition_penalty=1)
    chosen = [
        (p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty)
        for p in (r.params for r in server.engine.requests)
    ]
    assert chosen == [(0.6, 20, 0.95, 0.05, 1.05), (0, 0, 0.95, 0.05, 1.05), (1.5, 3, 1, 0, 1)]


async def test_a_tiny_temperature_is_greedy_and_a_large_top_k_keeps_all() -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        await server.complete(temperature=1e-30, top_k=2**31 - 1)
        await server.complete(top_k=-1)
    tiny, all_tokens = (request.params for request in server.engine.requests)
    assert tiny.is_greedy
    assert tiny.top_k == 2**31 - 1, "the sampler knows how many tokens there are"
    assert all_tokens.top_k == 0


async def test_minus_one_token_is_what_the_context_leaves() -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        await server.complete(prompt=[1] * 100, max_tokens=-1)
        await server.chat(max_tokens=-1)
        await server.chat(max_completion_tokens=-1)
        await server.chat()
    first, *chats = (request.params.max_tokens for request in server.engine.requests)
    assert first == 28
    assert len(set(chats)) == 1


@pytest.mark.parametrize("num_prompts", [1, 4])
async def test_as_many_choices_as_openai_allows(num_prompts: int) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.complete(prompt=["a"] * num_prompts, n=128)
    assert [choice["index"] for choice in answer.json["choices"]] == list(range(num_prompts * 128))


async def test_as_many_choices_in_a_stream() -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.complete(n=128, stream=True)
    assert {event["choices"][0]["index"] for event in answer.events[:-1]} == set(range(128))


async def test_prompts_too_long_for_their_number_of_choices_are_refused() -> None:
    long = engine_info(max_model_len=200_000)
    async with serving(ScriptedEngine(says("a"), long)) as server:
        fits = await server.complete(prompt=[1] * 131_072, n=128)
        refused = await server.complete(prompt=[1] * 131_073, n=128)
        best = await server.complete(prompt=[1] * 131_073, best_of=128)
    assert (fits.status, len(server.engine.requests)) == (200, 128)
    assert [(answer.status, answer.error["param"]) for answer in (refused, best)] == [(400, "n"), (400, "best_of")]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hé", [ids("Hé")]),
        ([1, 2, 3], [[1, 2, 3]]),
        (["a", "bc"], [ids("a"), ids("bc")]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["one"], [ids("one")]),
    ],
    ids=str,
)
async def test_prompts_of_every_shape(prompt: Any, expected: list[list[int]]) -> None:
    async with serving(ScriptedEngine(says("x"))) as server:
        answer = await server.complete(prompt=prompt)
    assert [request.prompt_token_ids for request in server.engine.requests] == expected
    assert [choice["index"] for choice in answer.json["choices"]] == list(range(len(expected)))
    assert answer.json["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_the_start_token_is_the_post_processors_affair() -> None:
    async with serving(ScriptedEngine(says("x")), text=text_model(with_bos=True)) as server:
        await server.complete(prompt="a")
        await server.complete(prompt=[97])
    assert [request.prompt_token_ids for request in server.engine.requests] == [[BOS, 97], [97]]


async def test_choices_are_numbered_prompt_by_prompt_and_have_their_own_seeds() -> None:
    def reply(request: Request) -> Iterable[TokenOutput]:
        return says(f"{request.prompt_token_ids[0]}:{request.params.seed}", num_cached_tokens=2)(request)

    async with serving(ScriptedEngine(reply)) as server:
        whole = await server.complete(prompt=[[1, 1], [2, 2, 2]], n=2, seed=2**63 - 1)
        streamed = await server.complete(prompt=[[1, 1], [2, 2, 2]], n=2, seed=2**63 - 1, stream=True)
    texts = [f"1:{2**63 - 1}", "1:0", f"2:{2**63 - 1}", "2:0"]
    assert [choice["text"] for choice in whole.json["choices"]] == texts
    assert [text_of(streamed.events, index) for index in range(4)] == texts
    usage = whole.json["usage"]
    assert usage["prompt_tokens"] == 5, "a prompt counts once, however many choices it has"
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    assert usage["completion_tokens"] == sum(map(len, texts))
    first, second = (request.prompt_token_ids for request in server.engine.requests[:2])
    assert first is second, "they go to the engine once, and fail as one"


async def test_what_one_step_made_due_is_one_write() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        task = asyncio.create_task(server.open(n=3))
        await engine.received()
        engine.tell(*(TokenOutput(request.request_id, ids("a")) for request in engine.requests))
        async with await task as response:
            assert [event["choices"][0]["index"] for event in await next_events(response)] == [0, 1, 2]


@pytest.mark.parametrize("interval", [1, 2, 3, 7, 100])
async def test_the_first_token_goes_at_once_and_then_every_interval(interval: int) -> None:
    text = "0123456789"
    async with serving(ScriptedEngine(says(text)), stream_interval=5) as server:
        answer = await server.complete(stream=True, stream_interval=interval)
        by_default = await server.complete(stream=True)
    pieces = [event["choices"][0]["text"] for event in answer.events[:-1]]
    assert pieces == [text[0], *(text[i : i + interval] for i in range(1, len(text), interval))]
    assert [event["choices"][0]["text"] for event in by_default.events[:-1]] == ["0", "12345", "6789"]


async def test_a_stop_string_across_tokens_ends_the_text_and_the_sequence() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        task = asyncio.create_task(server.complete(stop=["END"], stream=True))
        await engine.received()
        for character in "one ENDtwo":
            engine.say(character)
        answer = await task
    assert text_of(answer.events) == "one "
    assert answer.events[-2]["choices"][0]["finish_reason"] == "stop"
    assert set(engine.aborted) == {engine.requests[0].request_id}, "at once; the end may say it again"
    assert engine.closed[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_although_the_engine_has_not_heard_of_it(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    engine = ScriptedEngine()
    monkeypatch.setattr(engine, "abort", engine.aborted.append)  # the abort's echo never comes
    async with serving(engine) as server:
        task = asyncio.create_task(server.complete(stop="END", stream=stream))
        await engine.received()
        engine.say("so END")
        async with asyncio.timeout(10):
            answer = await task
    assert answer.status == 200
    assert (b"[DONE]" in answer.body) is stream
    (timeline,) = engine.closed
    assert timeline.finish_reason is FinishReason.STOP


async def test_text_that_might_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    async with serving(ScriptedEngine(says("aENbENDc"))) as server:
        streamed = await server.complete(stop="END", stream=True)
        whole = await server.complete(stop="END")
    pieces = [event["choices"][0]["text"] for event in streamed.events[:-1]]
    assert pieces == ["a", "ENb", ""]
    choice = whole.json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("aENb", "stop")
    assert whole.json["usage"]["completion_tokens"] == 7, "delivered up to and including the one that completed it"


async def test_the_end_brings_what_was_held_back() -> None:
    async with serving(ScriptedEngine(says("aEN"))) as server:
        streamed = await server.complete(stop="END", stream=True)
    assert text_of(streamed.events) == "aEN"
    assert streamed.events[-2]["choices"][0]["finish_reason"] == "length"


async def test_end_and_special_tokens_are_not_text_and_others_are() -> None:
    def reply(request: Request) -> Iterable[TokenOutput]:
        yield TokenOutput(request.request_id, [*ids("a"), BOS, TOOL])
        yield TokenOutput(request.request_id, [*ids("b"), EOS], None, FinishReason.STOP, EOS, times())

    async with serving(ScriptedEngine(reply)) as server:
        whole = await server.complete()
        streamed = await server.complete(stream=True)
    assert whole.json["choices"][0]["text"] == text_of(streamed.events) == "a<tool call>b"
    assert whole.json["usage"]["completion_tokens"] == 5


async def test_the_text_of_a_stop_token_is_left_out() -> None:
    def reply(request: Request) -> Iterable[TokenOutput]:
        yield TokenOutput(request.request_id, ids("ab."), None, FinishReason.STOP, ord("."), times())

    async with serving(ScriptedEngine(reply)) as server:
        answer = await server.complete(stop_token_ids=[ord(".")])
    assert answer.json["choices"][0]["text"] == "ab"
    assert answer.json["usage"]["completion_tokens"] == 3


async def test_logprobs_in_the_legacy_shape_are_the_same_streamed_or_not() -> None:
    def reply(request: Request) -> Iterable[TokenOutput]:
        top = request.params.num_logprobs or 0
        for token_id in ids("aé"):
            yield TokenOutput(request.request_id, [token_id], [logprobs_of(token_id, top)])
        last = [logprobs_of(ord("b"), top)]
        yield TokenOutput(request.request_id, ids("b"), last, FinishReason.LENGTH, None, times())

    async with serving(ScriptedEngine(reply)) as server:
        whole = await server.complete(logprobs=2)
        streamed = await server.complete(logprobs=2, stream=True)
        none = await server.complete(logprobs=0)
    logprobs = whole.json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    pieces = [event["choices"][0]["logprobs"] for event in streamed.events[:-1]]
    assert {name: [x for piece in pieces for x in piece[name]] for name in logprobs} == logprobs
    assert none.json["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.5}


async def test_minus_infinity_is_a_number_in_json() -> None:
    def reply(request: Request) -> Iterable[TokenOutput]:
        impossible = TokenLogprobs(-float("inf"), 300, [98], [-float("inf")])
        yield TokenOutput(request.request_id, [97], [impossible], FinishReason.LENGTH, None, times())

    async with serving(ScriptedEngine(reply)) as server:
        answer = await server.complete(logprobs=1)
    assert answer.json["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_a_long_prompt_takes_the_long_way_to_the_same_place() -> None:
    """More than 64 KiB of JSON and 4,096 characters of prompt: parsed and encoded off the event loop."""
    info = engine_info(max_model_len=200_000, num_blocks=20_000)
    async with serving(ScriptedEngine(says("ok"), info)) as server:
        answer = await server.complete(prompt="x" * 100_000)
    assert answer.json["usage"]["prompt_tokens"] == 100_000
    assert server.engine.requests[0].prompt_token_ids == [ord("x")] * 100_000
