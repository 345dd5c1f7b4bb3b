"""Token ids of texts, one model by name, the end of a request by its id, comments while a stream waits, deadlines."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from roseinfer.engine.queue_estimate import QueueEstimate
from roseinfer.messages import Request, SamplingParams, TokenOutput
from roseinfer.records import EngineTimes, FinishReason
from roseinfer.server.connection.body import INLINE_BYTES
from roseinfer.server.openai import replies
from roseinfer.server.openapi import OPERATIONS
from roseinfer.text.tokenizer.tokenizer import INLINE_CHARS
from tests.unit.server.harness import BOS, ScriptedEngine, Server, ids, logprobs_of, says, serving, text_model

MESSAGES = [{"role": "user", "content": "Hi"}]


async def post(server: Server, path: str, **body: Any) -> Any:
    answer = await server.request("POST", path, json=body)
    assert answer.status == 200, answer.body
    return answer.json


async def test_a_text_becomes_the_tokens_that_a_completion_would_see() -> None:
    engine = ScriptedEngine(says("a"))
    async with serving(engine, text=text_model(with_bos=True)) as server:
        tokens = await post(server, "/tokenize", prompt="Hé")
        bare = await post(server, "/tokenize", prompt="Hé", add_special_tokens=False, return_token_strs=True)
        await server.complete(prompt="Hé")
    assert tokens == {"count": 4, "max_model_len": 128, "tokens": [BOS, *ids("Hé")], "token_strs": None}
    assert tokens["tokens"] == engine.requests[0].prompt_token_ids
    assert bare["tokens"] == ids("Hé")
    assert bare["token_strs"] == ["H", "\ufffd", "\ufffd"], "half a character has no spelling"


async def test_a_conversation_becomes_the_tokens_that_a_chat_would_see() -> None:
    engine = ScriptedEngine(says("a"))
    async with serving(engine) as server:
        tokens = await post(server, "/tokenize", messages=MESSAGES, model="scripted")
        closed = await post(server, "/tokenize", messages=MESSAGES, add_generation_prompt=False)
        await server.chat(messages=MESSAGES)
    assert tokens["tokens"] == engine.requests[0].prompt_token_ids == ids("<user>Hi\n<assistant>")
    assert closed["tokens"] == ids("<user>Hi\n")


@pytest.mark.parametrize("prompt", ["Hé", ["a", "Hé"], [5, 6], [[5], [6, 7]]])
async def test_a_completion_is_rendered_into_the_tokens_that_it_would_see(prompt: Any) -> None:
    engine = ScriptedEngine(says("a"))
    async with serving(engine, text=text_model(with_bos=True)) as server:
        rendered = await post(server, "/v1/completions/render", prompt=prompt, max_tokens=5, cache_salt="s")
        num_before = len(engine.requests)
        await server.complete(prompt=prompt)
    assert num_before == 0, "nothing is generated"
    assert rendered == [{"token_ids": request.prompt_token_ids} for request in engine.requests]


async def test_a_chat_is_rendered_into_the_tokens_that_it_would_see() -> None:
    engine = ScriptedEngine(says("a"))
    async with serving(engine) as server:
        rendered = await post(server, "/v1/chat/completions/render", messages=MESSAGES, max_tokens=5, stream=True)
        await server.chat(messages=MESSAGES)
        refused = await server.request("POST", "/v1/chat/completions/render", json={"messages": []})
    assert rendered == {"token_ids": engine.requests[0].prompt_token_ids}
    assert (refused.status, refused.error["param"]) == (400, "messages")


async def test_there_and_back() -> None:
    async with serving(ScriptedEngine()) as server:
        for text in ("", "Hé ☃", "x" * (INLINE_CHARS + 1)):
            tokens = await post(server, "/tokenize", prompt=text, return_token_strs=True)
            assert tokens["count"] == len(tokens["tokens"]) == len(text.encode())
            assert [piece.encode() for piece in tokens["token_strs"] if piece != "\ufffd"] == [
                bytes([byte]) for byte in text.encode() if byte < 128
            ]
            assert await post(server, "/detokenize", tokens=tokens["tokens"]) == {"prompt": text}
        assert await post(server, "/detokenize", tokens=[BOS, 72, 299]) == {"prompt": "<|bos|>H"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 300]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
    ],
)
async def test_a_field_that_does_not_fit_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async with serving(ScriptedEngine()) as server:
        answer = await server.request("POST", path, json=body)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_one_model_by_name() -> None:
    async with serving(ScriptedEngine()) as server:
        [listed] = (await server.get("/v1/models")).json["data"]
        assert listed["lifecycle"] == "active"  # without a default in Anthropic's SDK
        assert (await server.get("/v1/models/scripted")).json == listed
        assert (await server.get("/v1/models/")).json["data"] == [listed]
        unknown = await server.get("/v1/models/some/other")
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")


async def test_one_model_by_several_names() -> None:
    async with serving(ScriptedEngine(says("a")), served_model_name=("org/first", "second")) as server:
        page = (await server.get("/v1/models")).json
        listed = page["data"]
        assert [model["id"] for model in listed] == ["org/first", "second"]
        assert [model["display_name"] for model in listed] == ["org/first", "second"]
        assert (page["first_id"], page["last_id"], page["has_more"]) == ("org/first", "second", False)
        assert [(await server.get(f"/v1/models/{model['id']}")).json for model in listed] == listed
        for given, told in (("org/first", "org/first"), ("second", "second"), (None, "org/first")):
            assert (await server.complete(model=given)).json["model"] == told
            first = (await server.chat(model=given, stream=True)).events[0]
            assert first["model"] == told
        unknown = await server.complete(model="first")
        fields = (await server.get("/openapi.json")).json["components"]["schemas"]["CompletionBody"]["properties"]
    assert (unknown.status, unknown.error["message"].count("org/first or second")) == (404, 1)
    assert fields["model"]["enum"] == ["org/first", "second", None]


@pytest.mark.parametrize("by", ["header", "answer"])
async def test_a_request_is_ended_by_its_id(by: str) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        opening = asyncio.create_task(
            server.session.post(
                server.url + "/v1/completions", json={"prompt": "Hi", "stream": True}, headers={"x-request-id": "mine"}
            )
        )
        await engine.received()
        engine.say("a")
        async with await opening as response:
            first = await response.content.readuntil(b"\n\n")
            found = re.search(rb'"id":"(.*?)"', first)
            assert found is not None
            request_id = "mine" if by == "header" else found[1].decode()
            answer = await server.request("POST", f"/v1/requests/{request_id}/abort")
            rest = await response.read()
        again = await server.request("POST", f"/v1/requests/{request_id}/abort")
    assert answer.json == {"id": request_id, "object": "request", "aborted": True}
    assert b'"code":"aborted"' in rest
    assert b"[DONE]" not in rest
    assert engine.aborted == ["mine"]
    assert (again.status, again.error["code"]) == (404, "request_not_found")
    assert engine.closed[0].finish_reason is FinishReason.ABORT


async def test_a_waiting_request_hears_that_it_was_ended() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        waiting = asyncio.create_task(server.complete({"x-request-id": "mine"}))
        await engine.received()
        unread = await server.request("POST", "/v1/requests/mine/abort", json={"reason": "late"})
        assert (unread.status, unread.error["param"], engine.aborted) == (400, "body", [])
        assert (await server.request("POST", "/v1/requests/mine/abort")).status == 200
        answer = await waiting
    assert (answer.status, answer.error["code"]) == (499, "aborted")
    assert answer.reason == "Client Closed Request"


async def test_another_key_ends_nothing() -> None:
    engine = ScriptedEngine()
    own, foreign = ({"Authorization": f"Bearer {key}", "x-request-id": "mine"} for key in ("one", "two"))
    async with serving(engine, keys=["one", "two"]) as server:
        waiting = asyncio.create_task(server.complete(own))
        await engine.received()
        assert (await server.request("POST", "/v1/requests/mine/abort", headers=foreign)).status == 404
        assert engine.aborted == []
        assert (await server.request("POST", "/v1/requests/mine/abort", headers=own)).status == 200
        await waiting


async def test_a_stream_that_waits_says_that_it_is_alive() -> None:
    engine = ScriptedEngine()
    async with serving(engine, keepalive_interval_s=0.05) as server, await server.open() as response:
        for _ in range(2):  # before the first token
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        engine.say("a")
        text = b""
        while b'"text":"a"' not in text:
            text = await response.content.readuntil(b"\n\n")
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        engine.say("b", FinishReason.LENGTH)
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert engine.aborted == []


async def test_an_error_after_a_comment_is_an_event() -> None:
    engine = ScriptedEngine()
    async with serving(engine, keepalive_interval_s=0.05) as server, await server.open(prompt="Hi") as response:
        engine.tell(TokenOutput(engine.requests[0].request_id, [], None, FinishReason.TIMEOUT, None, times(5)))
        content = await response.read()
    assert b'"code":"timeout"' in content
    assert b"[DONE]" not in content


async def test_without_an_interval_nothing_is_said() -> None:
    engine = ScriptedEngine(says("abc"))
    async with serving(engine, keepalive_interval_s=0) as server:
        answer = await server.complete(stream=True)
    assert len(answer.events) == 4


def times(scheduled_ns: int) -> EngineTimes:
    return EngineTimes(inbox_ns=1, scheduled_ns=scheduled_ns, num_cached_tokens=0, num_preemptions=0)


def ends_late(scheduled_ns: int) -> Any:
    def reply(request: Request) -> list[TokenOutput]:
        return [TokenOutput(request.request_id, [], None, FinishReason.TIMEOUT, None, times(scheduled_ns))]

    return reply


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engines_word_on_a_deadline(stream: bool) -> None:
    async with serving(ScriptedEngine(ends_late(0))) as server:
        queued = await server.complete(stream=stream, queue_timeout_s=1)
        server.engine.reply = ends_late(7)
        late = await server.complete(stream=stream, timeout_s=1)
        server.engine.reply = ends_late(0)
        hurried = [await server.complete(timeout_s=1), await server.complete(timeout_s=1, queue_timeout_s=2)]
    for answer in hurried:
        assert (answer.status, answer.error["code"], answer.error["param"]) == (503, "queue_timeout", "timeout_s")
    assert (queued.status, queued.error["code"], queued.error["param"]) == (503, "queue_timeout", "queue_timeout_s")
    assert int(queued.headers["Retry-After"]) >= 1
    assert (late.status, late.error["code"], late.error["param"]) == (504, "timeout", "timeout_s")
    assert [timeline.finish_reason for timeline in server.engine.closed] == [FinishReason.TIMEOUT] * 4


@pytest.mark.parametrize("priority_wait_s", [0.0, 1.0])
async def test_who_waited_too_long_comes_back_when_the_backlog_has_gone(priority_wait_s: float) -> None:
    engine = ScriptedEngine(ends_late(0))
    engine.queue_estimate = QueueEstimate(1, priority_wait_s=priority_wait_s)
    engine.queue_estimate.measure_place(3_500_000_000)
    for index in range(4):
        engine.queue_estimate.add_request(
            Request(request_id=f"before-{index}", prompt_token_ids=[1], params=SamplingParams())
        )
    async with serving(engine, max_queue_wait_s=1000) as server:
        queued = await server.complete(queue_timeout_s=1)
    assert (queued.status, queued.headers["Retry-After"]) == (503, str(4 * 3.5)[:2])


async def test_a_long_body_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.server.api.parsing.parse_body", None)
    async with serving(ScriptedEngine()) as server:
        refused = await server.complete(prompt=[1] * 100_000)
        spelled = await server.request("POST", "/detokenize", json={"tokens": [1] * 100_000})
    assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "context_length_exceeded", "prompt")
    assert (spelled.status, spelled.error["code"], spelled.error["param"]) == (400, "invalid_value", "tokens")


async def test_long_bodies_are_decoded_where_they_wait_for_each_other_and_short_ones_at_once() -> None:
    done: list[int] = []
    async with serving(ScriptedEngine(says("a"))) as server:
        do = server.service.long_bodies.do

        async def note(work: Callable[..., object], raw: bytes, *more: object) -> object:
            done.append(len(raw))
            return await do(work, raw, *more)

        server.service.long_bodies.do = note  # type: ignore[method-assign, assignment]
        short, long = [await server.complete(metadata={"a": "x" * length}) for length in (1000, INLINE_BYTES)]
    assert (short.status, long.status) == (200, 200)
    assert len(done) == 1
    assert done[0] > INLINE_BYTES


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1] * 100_000}),
        ("/v1/completions", {"prompt": [1] * 1000}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1000}),
        ("/v1/completions", {"prompt": "x" * 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}),
        ("/v1/responses", {"input": "x" * 5000}),
    ],
)
async def test_agents_know_a_prompt_that_is_too_long_by_the_words(path: str, body: dict[str, Any]) -> None:
    """LiteLLM and what is built on it, opencode, and others search the message for OpenAI's words, and not the code."""
    async with serving(ScriptedEngine()) as server:
        refused = await server.request("POST", path, json=body)
    assert refused.status == 400
    assert "This model's maximum context length is 128 tokens" in refused.error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(path: str) -> None:
    text = text_model()
    text.tokenizer._most_chars_per_token = 4
    text.tokenizer._encode = None  # type: ignore[method-assign, assignment]
    body = (
        {"prompt": "x" * 513} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x" * 513}]}
    )
    async with serving(ScriptedEngine(), text=text) as server:
        refused = await server.request("POST", path, json=body)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert refused.error["param"] in body


async def test_a_deadline_holds_even_if_the_engine_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.server.exchange.ENGINE_GRACE_S", 0.05)
    engine = ScriptedEngine()
    async with serving(engine) as server:
        answer = await server.complete(timeout_s=0.1)
    assert (answer.status, answer.error["code"]) == (504, "timeout")
    assert engine.aborted == [engine.requests[0].request_id]


async def test_what_a_body_asks_reaches_the_engine() -> None:
    engine = ScriptedEngine(says("a"))
    async with serving(engine, request_timeout_s=100.0) as server:
        await server.complete(timeout_s=5, queue_timeout_s=2, priority=-3, n=2)
        await server.complete()
    first, second, plain = engine.requests
    recv_ns = engine.opened[0].recv_ns
    for request in (first, second):
        assert (request.deadline_ns, request.queue_deadline_ns) == (recv_ns + 5 * 10**9, recv_ns + 2 * 10**9)
        assert request.priority == -3
    assert plain.deadline_ns is not None
    assert (plain.queue_deadline_ns, plain.priority, plain.cache_salt) == (None, 0, "")


async def test_a_salt_narrows_and_never_widens() -> None:
    engine = ScriptedEngine(says("a"))
    async with serving(engine, keys=["one", "two"]) as server:
        for key, salt in (("one", ""), ("one", "s"), ("two", "s"), ("one", "s"), ("one", "t")):
            await server.complete({"Authorization": f"Bearer {key}"}, cache_salt=salt)
    salts = [request.cache_salt for request in engine.requests]
    assert salts[1] == salts[3]
    assert len(set(salts)) == 4
    assert all(salt != "s" for salt in salts)
    assert [request.client_salt for request in engine.requests] == ["", "s", "s", "s", "t"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("timeout_s", 0), ("timeout_s", -1), ("timeout_s", 90_000), ("timeout_s", "1"), ("queue_timeout_s", 0),
     ("priority", 101), ("priority", 0.5), ("cache_salt", "x" * 129), ("cache_salt", 5)],
)  # fmt: skip
async def test_limits_out_of_range(field: str, value: Any) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.complete(**{field: value})
    assert (answer.status, answer.error["param"]) == (400, field)


async def test_every_route_is_in_the_document_and_the_other_way_round() -> None:
    async with serving(ScriptedEngine()) as server:
        document = (await server.get("/openapi.json")).json
        app = server.runner.app
        served = {
            (route.method.lower(), route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
    told = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert told == served == {(operation.method, operation.path) for operation in OPERATIONS}
    for schema in document["components"]["schemas"].values():
        assert schema.get("additionalProperties", True) in {True, False} or isinstance(
            schema["additionalProperties"], dict
        )
    assert document["components"]["schemas"]["CompletionBody"]["properties"]["model"]["enum"] == ["scripted", None]


async def test_answers_have_the_shape_that_the_document_says() -> None:
    def reply(request: Request) -> list[TokenOutput]:
        logprobs = [logprobs_of(token_id, 2) for token_id in b"ab"]
        return [TokenOutput(request.request_id, list(b"ab"), logprobs, FinishReason.LENGTH, None, times(3))]

    async with serving(ScriptedEngine(reply)) as server:
        completion = await server.complete(logprobs=2, n=2)
        chat = await server.chat(logprobs=True, top_logprobs=2)
        models = await server.get("/v1/models")
        probe = await server.get("/livez")
    assert len(msgspec.json.decode(completion.body, type=replies.CompletionReply).choices) == 2
    [choice] = msgspec.json.decode(chat.body, type=replies.ChatReply).choices
    assert choice.message.content == "ab"
    assert msgspec.json.decode(models.body, type=replies.ModelList).data[0].id == "scripted"
    told = msgspec.json.decode(probe.body, type=replies.ProbeReply)
    assert (told.status, told.engine.activity) == ("ok", "idle")
    for body, told_type in ((probe, replies.ProbeReply), (models, replies.ModelList)):
        assert set(body.json) == set(told_type.__struct_fields__), "nothing is told that is not described"
