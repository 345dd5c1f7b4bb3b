"""The facts of each exchange: one timeline for each sequence, stamped in order, closed once, with the true reason."""

import asyncio
import logging
import time
from typing import Any

import pytest

from roseinfer.observe.telemetry.facts import decode_state, encode_state
from roseinfer.records import FinishReason, RequestTimeline
from roseinfer.server.connection.connection import Connection
from tests.unit.server.harness import ScriptedEngine, says, serving


def assert_in_order(timeline: RequestTimeline) -> None:
    stamps = [timeline.recv_ns, timeline.parsed_ns, timeline.tokenized_ns, *timeline.write_ns, timeline.end_ns]
    assert all(stamps)
    assert stamps == sorted(stamps)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_for_each_sequence(stream: bool) -> None:
    async with serving(ScriptedEngine(says("abc"))) as server:
        await server.complete(prompt=["a", "bc"], n=2, stream=stream)
    closed = server.engine.closed
    assert [timeline.request_id for timeline in closed] == [request.request_id for request in server.engine.requests]
    for timeline, num_prompt_tokens in zip(closed, [1, 1, 2, 2], strict=True):
        assert_in_order(timeline)
        assert timeline.num_prompt_tokens == num_prompt_tokens
        assert timeline.is_streamed == stream
        assert (timeline.finish_reason, timeline.error_code) == (FinishReason.LENGTH, "")


async def test_a_request_begins_with_its_head_and_not_when_the_event_loop_comes_to_its_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receive, received_ns = Connection.data_received, list[int]()

    def receive_and_stamp(connection: Connection, data: bytes) -> None:
        receive(connection, data)
        received_ns.append(time.monotonic_ns())  # the handlers of all that came before are still to begin

    monkeypatch.setattr(Connection, "data_received", receive_and_stamp)
    async with serving(ScriptedEngine(says("abc"))) as server:
        await server.complete()
    (timeline,) = server.engine.closed
    assert timeline.recv_ns <= received_ns[0]


async def test_a_request_behind_another_on_its_connection_begins_when_that_has_ended() -> None:
    body = b'{"prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n" % len(body)
    async with serving(ScriptedEngine(says("abc"))) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request + b"\r\n" + body + request + b"Connection: close\r\n\r\n" + body)
        assert (await reader.read()).count(b"HTTP/1.1 200") == 2
        writer.close()
    first, second = server.engine.closed
    assert first.end_ns <= second.recv_ns


async def test_a_write_is_stamped_when_it_carried_tokens() -> None:
    async with serving(ScriptedEngine(says("abcdefg"))) as server:
        await server.complete()
        await server.complete(stream=True)
        await server.complete(stream=True, stream_interval=3)
    assert [len(timeline.write_ns) for timeline in server.engine.closed] == [1, 7, 3]


async def test_the_traceparent_is_copied_to_each() -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serving(ScriptedEngine(says("a"))) as server:
        await server.complete(headers={"traceparent": traceparent}, n=2)
        await server.complete()
    assert [timeline.traceparent for timeline in server.engine.closed] == [traceparent, traceparent, ""]


async def test_a_trace_header_is_copied_if_the_standard_allows_it() -> None:
    """Bytes that are no UTF-8 would end the telemetry of all requests: no message to its process can carry them."""
    fields = [b"traceparent: 00-a", b"traceparent: 00-b", b"tracestate: a=1", b"tracestate: b=2", b"baggage: a=\xff"]
    body = b'{"prompt": "a"}'
    head = [b"POST /v1/completions HTTP/1.1", b"Host: a", b"Content-Type: application/json", b"Connection: close"]
    async with serving(ScriptedEngine(says("a"))) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"\r\n".join([*head, *fields, b"Content-Length: %d" % len(body), b"", body]))
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
    (timeline,) = server.engine.closed
    assert (timeline.traceparent, timeline.tracestate, timeline.baggage) == ("00-a,00-b", "a=1,b=2", "")
    assert decode_state(encode_state(timeline))["tracestate"] == "a=1,b=2"


async def test_how_late_the_client_was() -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        for intended in (time.time() - 100, time.time() + 100):
            await server.complete(headers={"x-roseinfer-intended-time": f"{intended:.6f}"})
        await server.complete()
    late, early, unknown = (timeline.client_submit_lag_s for timeline in server.engine.closed)
    assert late is not None
    assert early is not None
    assert 100 <= late < 160
    assert -100 <= early < -40  # told as it is: two hosts' clocks differ
    assert unknown is None


@pytest.mark.parametrize("value", ["", "soon", "-1", "1e9", "nan", "1.", "1,5", "9" * 40])
async def test_a_malformed_intended_time_is_refused(value: str) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.complete(headers={"x-roseinfer-intended-time": value})
    assert (answer.status, answer.error["param"]) == (400, "x-roseinfer-intended-time")
    assert server.engine.closed[0].finish_reason is FinishReason.REJECTED


@pytest.mark.parametrize("given", ["abc", "A-b_c.9", "x" * 128])
async def test_a_request_id_is_kept(given: str) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.complete(headers={"x-request-id": given})
        refused = await server.complete(headers={"x-request-id": given}, n=0)
        unknown = await server.get("/nowhere", headers={"x-request-id": given})
    assert {answer.headers["x-request-id"] for answer in (answer, refused, unknown)} == {given}
    assert [timeline.request_id for timeline in server.engine.closed] == [given, given]


@pytest.mark.parametrize("given", ["", "a b", "a/b", "a~b", "é", "x" * 129])
async def test_an_unusable_request_id_is_replaced(given: str) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.complete(headers={"x-request-id": given})
    made = answer.headers["x-request-id"]
    assert made not in {"", given}
    assert server.engine.requests[0].request_id == made


async def test_two_requests_at_once_may_carry_one_id() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        tasks = [asyncio.create_task(server.complete(headers={"x-request-id": "twin"})) for _ in range(2)]
        await engine.received(2)
        assert len({request.request_id for request in engine.requests}) == 2
        for index in range(2):
            engine.say("a", FinishReason.LENGTH, index=index)
        answers = [await task for task in tasks]
    assert [(answer.status, answer.headers["x-request-id"]) for answer in answers] == [(200, "twin")] * 2


async def test_the_access_log_has_one_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "roseinfer.access")
    async with serving(ScriptedEngine(says("a"))) as server:
        await server.complete(headers={"x-request-id": "one"})
        await server.complete(headers={"x-request-id": "two"}, n=0)
        await server.get("/livez")
    lines = [vars(record) for record in caplog.records if record.name == "roseinfer.access"]
    assert [(line["request_id"], line["method"], line["path"], line["status"]) for line in lines] == [
        ("one", "POST", "/v1/completions", 200),
        ("two", "POST", "/v1/completions", 400),
    ]


@pytest.mark.parametrize(
    ("body", "error", "code", "param"),
    [
        ({}, None, None, None),
        ({"n": 0}, "InvalidRequest", "invalid_value", "n"),
        ({"max_token": 5}, "UnknownField", "invalid_value", "max_token"),
        ({"a secret, word by word": 5}, "UnknownField", "invalid_value", None),
        ({"secret\n" * 9: 5}, "UnknownField", "invalid_value", None),
        ({"messages": []}, "InvalidRequest", "invalid_value", "messages"),
        ({"messages": None}, "InvalidRequest", "invalid_value", "messages"),
        ({"messages": [{"role": "secret", "content": "Hi"}]}, "InvalidRequest", "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "MissingField", "invalid_value", "messages[0].content"),
        ({"logit_bias": {"secret": 1}}, "InvalidRequest", "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": "secret"}}, "InvalidRequest", "invalid_value", "logit_bias"),
        ({"chat_template_kwargs": {"messages": "secret"}}, "InvalidRequest", "invalid_value", "chat_template_kwargs"),
        ({"model": "secret"}, "UnknownModel", "model_not_found", "model"),
        ({"max_tokens": 500}, "PromptTooLong", "context_length_exceeded", "max_tokens"),
    ],
)
async def test_the_access_log_says_why_a_client_got_an_error(
    body: dict[str, Any], error: str | None, code: str | None, param: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "roseinfer.access")
    async with serving(ScriptedEngine(says("a"))) as server:
        answer = await server.chat(**body)
    [line] = [vars(record) for record in caplog.records if record.name == "roseinfer.access"]
    assert (line.get("error"), line.get("error_code"), line.get("param")) == (error, code, param)
    assert (line["status"], line["api"]) == (answer.status, "chat")
    assert "secret" not in str({name: value for name, value in line.items() if name != "args"})
