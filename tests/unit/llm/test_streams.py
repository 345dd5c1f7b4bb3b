"""Which requests of an `LLM` are remembered, and under what errors others are not."""

import pytest

from roseinfer.errors import InvalidRequest, UnknownRequest
from roseinfer.llm import streams as streams_module
from roseinfer.llm.streams import Stream, Streams
from roseinfer.records import RequestTimeline


def make_stream(request_id: str) -> Stream:
    return Stream(RequestTimeline(request_id=request_id, recv_ns=1))


def test_a_stream_is_found_until_it_is_removed_and_its_timeline_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "NUM_KEPT_TIMELINES", 2)
    all_of_them, streams = [make_stream(request_id) for request_id in "abc"], Streams()
    streams.add_streams(all_of_them)
    assert [streams.find(request_id) for request_id in "abc"] == all_of_them
    assert [streams.timeline(request_id) for request_id in "abc"] == [each.timeline for each in all_of_them]
    assert [streams.remove(request_id) for request_id in "abca"] == [*all_of_them, None]
    assert [streams.timeline(request_id) for request_id in "bc"] == [each.timeline for each in all_of_them[1:]]
    with pytest.raises(UnknownRequest, match="'a'"):
        streams.timeline("a")
    with pytest.raises(UnknownRequest, match="'c'"):
        streams.find("c")


def test_what_is_no_id_is_named() -> None:
    streams = Streams()
    for ask in (streams.find, streams.remove, streams.timeline):
        with pytest.raises(InvalidRequest) as caught:
            ask(5)  # type: ignore[arg-type]
        assert caught.value.param == "request_id"
