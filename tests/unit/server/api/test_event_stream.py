"""Joined bytes are the same JSON as an encoded object."""

import json

import pytest

from roseinfer.records import FinishReason
from roseinfer.server.api.event_stream import event
from roseinfer.server.openai.chunks import NOTHING, ChunkTemplate


def template(*, include_usage: bool) -> ChunkTemplate:
    return ChunkTemplate(
        reply_id="cmpl-1",
        kind="text_completion",
        created=7,
        model='na"me',
        field="text",
        num_choices=4,
        include_usage=include_usage,
    )


def parse(frame: bytes) -> object:
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2, "one event is one line and an empty one"
    return json.loads(frame.removeprefix(b"data: "))


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("finish_reason", [None, FinishReason.STOP])
@pytest.mark.parametrize("logprobs", [None, {"tokens": ["a"]}])
def test_a_choice(include_usage: bool, finish_reason: FinishReason | None, logprobs: object) -> None:
    payload = json.dumps('a "line"\nand\r\u2028another').encode()
    told = None if logprobs is None else json.dumps(logprobs).encode()
    frame = template(include_usage=include_usage).choice(3, payload, told, finish_reason)
    choice = {
        "index": 3,
        "text": 'a "line"\nand\r\u2028another',
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
    head = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": 'na"me'}
    assert parse(frame) == head | {"choices": [choice]} | ({"usage": None} if include_usage else {})


def test_a_choice_that_has_nothing_to_tell_is_no_chunk() -> None:
    stream = template(include_usage=False)
    assert stream.choice(0, NOTHING) == b""
    assert stream.choice(0, b'{"content":"{}"}')
    assert stream.choice(0, NOTHING, b'{"content":[]}')
    assert parse(stream.choice(0, NOTHING, None, FinishReason.STOP))


def test_the_usage() -> None:
    frame = template(include_usage=True).usage(b'{"total_tokens":3}')
    head = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": 'na"me'}
    assert parse(frame) == head | {"choices": [], "usage": {"total_tokens": 3}}


def test_an_event() -> None:
    assert event(b"{}") == b"data: {}\n\n"


@pytest.mark.parametrize("include_usage", [False, True])
def test_the_ledger_is_a_chunk_like_those_before_the_usage(include_usage: bool) -> None:
    told = parse(template(include_usage=include_usage).ledger(b"[{}]"))
    head = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": 'na"me'}
    assert told == head | {"choices": [], "roseinfer_ledger": [{}]} | ({"usage": None} if include_usage else {})
