"""Bad input and bad moments: a 4xx or 5xx with an OpenAI error body, before the engine hears of anything."""

import asyncio
import gzip
import io
import json
from typing import Any

import pytest

from roseinfer.errors import EngineDead, EngineFailed
from roseinfer.messages import Request, TokenOutput
from roseinfer.records import FinishReason, LifecycleState
from tests.unit.server.harness import ScriptedEngine, says, serving, times

JSON = {"Content-Type": "application/json"}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": [1, -1]}, "prompt[1]"),
    ({"prompt": [1, 300]}, "prompt[1]"),
    ({"prompt": [1, 1.5]}, "prompt[1]"),
    ({"prompt": [1, 2**70]}, "prompt[1]"),
    ({"prompt": [[1], [2, 300]]}, "prompt[1][1]"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 9, "prompt": ["a"] * 64}, "n"),
    ({"n": 2, "best_of": 9, "prompt": [[1]] * 64}, "best_of"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [300]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"a`b": 1}, "a`b"),
    ({"stream": "yes"}, "stream"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation"),
    ({"stream_options": {"include_all": True}}, "stream_options.include_all"),
    ({"prompt_cache_key": 5}, "prompt_cache_key"),
    ({"safety_identifier": []}, "safety_identifier"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"include_usage": False}, "stream": False}, "stream_options"),
    ({"stream_options": {}, "stream": None}, "stream_options"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"echo": 0}, "echo"),
    ({"suffix": "a"}, "suffix"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": False}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-39}, "repetition_penalty"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty"),
    ({"repetition_penalty": 9.99e-6}, "repetition_penalty"),
    ({"repetition_penalty": 2.1}, "repetition_penalty"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"7": 1, "5": None}}, "logit_bias.5"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"user": 5}, "user"),
    ({"messages": []}, "messages"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: str(value)[:40])
async def test_a_field_that_does_not_fit_is_named(body: dict[str, Any], param: str) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.complete(**body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert answer.error["type"] == "invalid_request_error"
    assert server.engine.requests == []
    [timeline] = server.engine.closed
    assert (timeline.finish_reason, timeline.error_code) == (FinishReason.REJECTED, answer.error["code"])


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}], ids=str)
async def test_options_of_a_stream_need_one_in_a_chat_too(stream: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.chat(stream_options={"include_usage": True}, **stream)
        assert (answer.status, answer.error["param"]) == (400, "stream_options")
        assert "`stream`" in answer.error["message"]
        assert server.engine.requests == []
        assert (await server.chat(stream_options=None, **stream)).status == 200


BROKEN: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b"null", None),
    (b'"prompt"', None),
    (b"{} {}", None),
    (b"\xff\xfe", None),
    (b'{"prompt": "\xff"}', None),
    (b'{"prompt": "\\ud800"}', None),
    (b'{"prompt": "a", "temperature": NaN}', None),
    (b'{"prompt": "a", "temperature": Infinity}', None),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    (b'{"prompt": "a", "seed": ' + b"9" * 1_000_000 + b"}", "seed"),
    (b'{"prompt": "a", "n": -' + b"9" * 1_000_000 + b"}", "n"),
    (b'{"seed": 1e999, ', None),
    (b'{"seed": 1e999, "prompt": ' + b"[" * 500_000, None),
    (b"[" * 500_000, None),
    (b'{"prompt": ' + b"[" * 500_000 + b"]" * 500_000 + b"}", None),
    (b'{"a":' * 300_000 + b"1" + b"}" * 300_000, None),
]


@pytest.mark.parametrize(("body", "param"), BROKEN, ids=lambda value: str(value)[:40])
async def test_a_body_that_is_no_json_object(body: bytes, param: str | None) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        for path in ("/v1/completions", "/v1/chat/completions"):
            answer = await server.request("POST", path, data=io.BytesIO(body), headers=JSON)
            assert (answer.status, answer.error["param"]) == (400, param)
            assert len(answer.body) < 2000


async def test_an_error_does_not_send_back_what_it_was_sent() -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        for body in ({"x" * 100_000: 1}, {"model": "x" * 100_000}, {"prompt": {"x" * 100_000: 1}}):
            assert len((await server.complete(**body)).body) < 2000


async def test_a_prompt_and_completion_that_do_not_fit_are_refused_with_the_numbers() -> None:
    """Defect D5 of the ancestor: the prompt was cut, the limit clamped."""
    async with serving(ScriptedEngine(says("a"))) as server:
        fits = await server.complete(prompt=[1] * 100, max_tokens=28)
        too_long = await server.complete(prompt=[1] * 100, max_tokens=29)
        by_default = await server.complete(prompt=[1] * 113)
        prompt_alone = await server.complete(prompt=[1] * 128, max_tokens=1)
    assert [answer.error["param"] for answer in (too_long, by_default, prompt_alone)] == [
        "max_tokens",
        "max_tokens",
        "prompt",
    ]
    assert fits.status == 200
    for answer, numbers in ((too_long, ("128", "100", "29")), (by_default, ("128", "113", "16"))):
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert all(number in answer.error["message"] for number in numbers)


async def test_an_unknown_model() -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.complete(model="gpt-5")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/rerank", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
    ],
)
async def test_unknown_routes(method: str, path: str, status: int) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.request(method, path)
    assert (answer.status, answer.error["code"]) == (status, "method_not_allowed" if status == 405 else "unknown_route")
    assert ("Allow" in answer.headers) == (status == 405)
    if status == 405:
        assert answer.error["message"].endswith(f" It takes {answer.headers['Allow'].replace(',', ', ')}.")
    assert server.engine.opened == []


LISTED = (
    "There are /v1/chat/completions, /v1/chat/completions/render, /v1/completions, /v1/completions/render, "
    "/v1/embeddings, /v1/messages, /v1/messages/count_tokens, /v1/models, /v1/responses, /v1/responses/input_tokens, "
    "/detokenize, /tokenize; a client's base URL has /v1 once at most."
)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "There is /v1/chat/completions. A client's base URL ends in /v1."),
        ("/v1/v1/chat/completions", "There is /v1/chat/completions. A client's base URL ends in /v1."),
        ("/v1/chat", "There is /v1/chat/completions. A client's base URL ends in /v1."),
        ("/v1/chat/completion", "There is /v1/chat/completions. A client's base URL ends in /v1."),
        ("/models", "There is /v1/models. A client's base URL ends in /v1."),
        ("/v1/v1/messages", "There is /v1/messages. A client's base URL is without /v1."),
        ("/v1/completions/", "There is /v1/completions. A client's base URL ends in /v1."),
        ("/v1/tokenize", "There is /tokenize."),
        ("/healthz", "There is /health."),
        ("/api/v1/models", "There is /v1/models. A client's base URL ends in /v1."),
        ("/openai/deployments/gpt/chat/completions", "There is /v1/chat/completions. A client's base URL ends in /v1."),
        ("/v1/message", "There is /v1/messages. A client's base URL is without /v1."),
        ("/v1/complete", LISTED),
        ("/v1/rerank", LISTED),
        ("/v1/moderations", LISTED),
        ("/v1/audio/transcriptions", LISTED),
        ("/v1", LISTED),
        ("/nowhere/like/this", LISTED),
        ("/" + "v1/chat/completionz" * 300, ""),
    ],
)
async def test_a_path_that_does_not_exist_names_the_one_that_was_meant(path: str, hint: str) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.request("POST", path, json={})
    assert answer.status == 404
    assert answer.error["message"].startswith("Not Found: POST /")
    assert hint in answer.error["message"]
    assert ("There is" in answer.error["message"]) == hint.startswith("There is")


PAGE = {"Origin": "https://example.com"}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


@pytest.mark.parametrize("origins", [("*",), ("https://localhost:3000", "https://example.com")])
async def test_pages_of_the_allowed_origins_may_ask_and_read(origins: tuple[str, ...]) -> None:
    key = {"Authorization": "Bearer key"}
    async with serving(ScriptedEngine(says("a")), keys=["key"], allowed_origins=origins) as server:
        preflight = await server.request("OPTIONS", "/v1/chat/completions", headers=PAGE | PREFLIGHT)
        answers = [
            await server.complete(PAGE | key),
            await server.complete(PAGE | key, stream=True),
            await server.complete(PAGE),
            await server.complete(PAGE | key, n=0),
            await server.get("/nowhere", headers=PAGE | key),
        ]
        others = await server.complete({"Origin": "https://example.org"} | key)
    assert (preflight.status, preflight.body) == (204, b"")
    assert preflight.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    assert [answer.status for answer in answers] == [200, 200, 401, 400, 404]
    for answer in (preflight, *answers):
        assert answer.headers["Access-Control-Allow-Origin"] == ("*" if "*" in origins else PAGE["Origin"])
        assert (
            answer.headers["Access-Control-Expose-Headers"]
            == "X-Request-Id, Request-Id, Retry-After, Server-Timing, X-Roseinfer-Ignored"
        )
        assert answer.headers.get("Vary") == (None if "*" in origins else "Origin")
    assert others.status == 200
    assert others.headers.get("Access-Control-Allow-Origin") == ("*" if "*" in origins else None)


@pytest.mark.parametrize(("origins", "status"), [((), 405), (("https://localhost:3000",), 403)])
async def test_pages_of_other_origins_may_not(origins: tuple[str, ...], status: int) -> None:
    async with serving(ScriptedEngine(says("a")), allowed_origins=origins) as server:
        preflight = await server.request("OPTIONS", "/v1/chat/completions", headers=PAGE | PREFLIGHT)
        answer = await server.complete(PAGE)
    assert (preflight.status, answer.status) == (status, 200)
    for each in (preflight, answer):
        assert not [name for name in each.headers if name.startswith("Access-Control-")]


async def test_the_wrong_port_names_the_other() -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.get("/debug/timeline")
    assert (answer.status, answer.error["code"]) == (404, "unknown_route")
    assert "on the operations port" in answer.error["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        JSON | {"Content-Encoding": "gzip"},
        JSON | {"Content-Encoding": "br"},
    ],
    ids=str,
)
async def test_a_body_that_is_not_plain_json_is_refused_unread(headers: dict[str, str]) -> None:
    bomb = gzip.compress(bytes(64 * 1024 * 1024))
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.request("POST", "/v1/completions", data=bomb, headers=headers)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


async def test_a_body_too_large_by_its_own_word() -> None:
    async with serving(ScriptedEngine(says("a")), max_body_bytes=1024) as server:
        answer = await server.complete(prompt="x" * 2000)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


async def test_a_body_that_turns_out_too_large() -> None:
    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    async with serving(ScriptedEngine(says("a")), max_body_bytes=1024) as server:
        answer = await server.request("POST", "/v1/completions", data=pieces(), headers=JSON)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


async def test_a_badly_framed_body() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with serving(ScriptedEngine(says("a"))) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\nnot a length\r\n")
        status_line = await reader.readline()
        writer.close()
    assert b" 400 " in status_line
    assert server.engine.requests == []


async def test_requests_above_the_limit_get_a_retry_after() -> None:
    engine = ScriptedEngine()
    async with serving(engine, max_inflight=2) as server:
        tasks = [asyncio.create_task(server.complete()) for _ in range(2)]
        await engine.received(2)
        refused = await server.complete()
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
        assert refused.headers["Retry-After"] == "1"
        assert (await server.get("/readyz")).status == 200, "load is no reason to leave the balancer"
        engine.say("a", FinishReason.LENGTH, index=0)
        engine.say("a", FinishReason.LENGTH, index=1)
        assert [(await task).status for task in tasks] == [200, 200]
        engine.reply = says("b")
        assert (await server.complete()).status == 200


async def test_before_it_is_ready() -> None:
    async with serving(ScriptedEngine(says("a")), is_ready=False) as server:
        answers = [await server.complete(), await server.chat(), await server.get("/v1/models")]
        assert (await server.get("/livez")).status == 200
        assert [(await server.get(path)).status for path in ("/readyz", "/health", "/startupz")] == [503] * 3
        assert (await server.get("/metrics")).body == b"# the metrics\n"
    for answer in answers:
        assert (answer.status, answer.error["code"]) == (503, "not_ready")
        assert "Retry-After" in answer.headers
    assert [timeline.finish_reason for timeline in server.engine.closed] == [FinishReason.REJECTED] * 2


async def test_while_draining() -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        server.service.enter(LifecycleState.DRAINING)
        answer = await server.complete()
        assert (answer.status, answer.error["code"]) == (503, "not_ready")
        assert answer.headers["Connection"] == "close"
        assert "Retry-After" in answer.headers
        statuses = {path: (await server.get(path)).status for path in ("/livez", "/readyz", "/startupz")}
    assert statuses == {"/livez": 200, "/readyz": 503, "/startupz": 200}


async def test_an_engine_in_trouble() -> None:
    """Defect D4 of the ancestor: health stayed ok after the worker had died."""
    async with serving(ScriptedEngine(says("a"))) as server:
        server.engine.trouble = "no engine step for 30 s"
        answer = await server.complete()
        assert [(await server.get(path)).status for path in ("/livez", "/readyz")] == [503, 503]
    assert (answer.status, answer.error["code"]) == (503, "engine_dead")
    assert server.engine.closed[0].finish_reason is FinishReason.REJECTED


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_error_before_the_first_output_is_a_clean_status(stream: bool) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        task = asyncio.create_task(server.complete(stream=stream))
        await engine.received()
        engine.die(EngineDead("the engine is gone"))
        answer = await task
    assert (answer.status, answer.error["code"]) == (503, "engine_dead")
    assert engine.closed[0].finish_reason is FinishReason.ERROR
    assert engine.closed[0].error_code == "engine_dead"


async def test_an_engine_error_after_it_is_an_event_and_no_done() -> None:
    """Defect D4 again: a crash ended every stream as if it had finished."""
    engine = ScriptedEngine()
    async with serving(engine) as server:
        task = asyncio.create_task(server.open())
        await engine.received()
        engine.say("a")
        async with await task as response:
            engine.die(EngineFailed("a step raised"))
            frames = (await response.read()).decode().removesuffix("\n\n").split("\n\n")
    first, last = (json.loads(frame.removeprefix("data: ")) for frame in frames)
    assert first["choices"][0]["text"] == "a"
    assert last == {
        "error": {"message": "a step raised", "type": "server_error", "param": None, "code": "engine_failed"}
    }


async def test_behind_a_stream_that_failed_the_connection_takes_the_next_request() -> None:
    """Its head said so: a client that sends one must not find the connection closed."""
    engine = ScriptedEngine(says("ab", FinishReason.TIMEOUT))
    body = b'{"prompt": "Hi", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    async with serving(engine) as server, asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(3):
            writer.write(head % len(body) + body)
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b'"code":"timeout"' in answer
        writer.close()


async def test_a_sequence_that_failed_by_its_own_parameters_says_so() -> None:
    def fail(request: Request) -> list[TokenOutput]:
        return [TokenOutput(request.request_id, [], None, FinishReason.ERROR, times=times(), is_own_fault=True)]

    async with serving(ScriptedEngine(fail)) as server:
        answer = await server.complete()
    assert (answer.status, answer.error["code"]) == (500, "sequence_failed")
    assert "parameters" in answer.error["message"]


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (FinishReason.ERROR, 500, "sequence_failed"),
        (FinishReason.TIMEOUT, 504, "timeout"),
        (FinishReason.ABORT, 500, "engine_failed"),
    ],
)
async def test_a_sequence_the_engine_gave_up_is_an_error(reason: FinishReason, status: int, code: str) -> None:
    async with serving(ScriptedEngine(says("a", reason))) as server:
        for stream in (False, True):
            answer = await server.complete(stream=stream)
            assert (answer.status, answer.error["code"]) == (status, code)
    told = FinishReason.TIMEOUT if reason is FinishReason.TIMEOUT else FinishReason.ERROR
    assert [(timeline.finish_reason, timeline.error_code) for timeline in server.engine.closed] == [(told, code)] * 2


async def test_a_mistake_of_ours_is_a_500_that_says_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    def reply(_request: object) -> list[TokenOutput]:
        raise ZeroDivisionError("secret")

    async with serving(ScriptedEngine(reply)) as server:
        answer = await server.complete(headers={"x-request-id": "find-me"})
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "secret" not in answer.body.decode()
    [record] = [record for record in caplog.records if record.exc_info]
    assert vars(record)["request_id"] == "find-me"
