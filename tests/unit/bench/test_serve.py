"""Planned requests into the bodies that are sent, and a server's recording into a file."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roseinfer.bench.endpoint import Endpoint, read_models
from roseinfer.bench.load import PlannedRequest, Segment
from roseinfer.bench.load_client import PreparedRequest
from roseinfer.bench.serve import fetch_recording, fresh_salt, prepare
from roseinfer.errors import ConfigError, InvalidRequest
from tests.unit.explain.operations_port import open_port

ENDPOINT = Endpoint("http://127.0.0.1:8000", "", "tiny", max_model_len=64, vocab_size=100, takes_salt=True)


def prepared(stream_interval: int | None = None, **changes: Any) -> tuple[PreparedRequest, dict[str, Any]]:
    planned = PlannedRequest(offset_ns=7, segments=(Segment(1, 5),), max_tokens=9, **changes)
    arguments = Namespace(seed=0, chat=False, ignore_eos=True, stream_interval=stream_interval)
    [request] = prepare([planned], ENDPOINT, arguments)
    body: dict[str, Any] = msgspec.json.decode(request.body)
    return request, body


def test_a_body_asks_for_exactly_what_was_planned() -> None:
    request, body = prepared()
    assert (len(body["prompt"]), body["max_tokens"], body["stream"]) == (5, 9, True)
    assert request.offset_ns == 7
    assert "stream_interval" not in body


@pytest.mark.parametrize("chat", [False, True])
def test_a_run_with_a_salt_shares_no_cache_with_others(chat: bool) -> None:
    planned = PlannedRequest(offset_ns=0, segments=(Segment(1, 5),), max_tokens=9)
    arguments = Namespace(seed=0, chat=chat, ignore_eos=True, stream_interval=None)
    bodies = [msgspec.json.decode(prepare([planned], ENDPOINT, arguments, salt)[0].body) for salt in ("", "a")]
    assert [body.get("cache_salt") for body in bodies] == [None, "a"]
    other = read_models("http://other", "", b'{"data":[{"id":"m","max_model_len":64}]}')
    assert "cache_salt" not in msgspec.json.decode(prepare([planned], other, arguments, "a")[0].body)
    ours = read_models("http://ours", "", b'{"data":[{"id":"m","vocab_size":100}]}')
    assert msgspec.json.decode(prepare([planned], ours, arguments, "a")[0].body)["cache_salt"] == "a"
    assert fresh_salt() != fresh_salt()


@pytest.mark.parametrize("stream_interval", [None, 8])
def test_a_client_that_goes_away_after_a_token_sees_each_one(stream_interval: int | None) -> None:
    """Chunks are what is counted until then, whatever interval the server has."""
    request, body = prepared(stream_interval, abort_after_tokens=3)
    assert body["stream_interval"] == request.stream_interval == 1
    request, body = prepared(stream_interval)
    assert body.get("stream_interval") == request.stream_interval == stream_interval


def test_what_the_server_would_refuse_is_told_before_anything_is_sent() -> None:
    planned = PlannedRequest(offset_ns=0, segments=(Segment(1, 60),), max_tokens=5)
    with pytest.raises(ConfigError, match="do not fit into the 64 tokens of tiny"):
        prepare([planned], ENDPOINT, Namespace(seed=0, chat=False, ignore_eos=True, stream_interval=None))


def test_what_is_no_recording_replaces_none(tmp_path: Path) -> None:
    file = tmp_path / "before.npz"
    file.write_bytes(b"an older one")
    with open_port() as port:
        port.answer("/debug/recording", b"<html>")
        with pytest.raises(InvalidRequest, match="is no recording"):
            fetch_recording(port.url, "", file)
    assert file.read_bytes() == b"an older one"
