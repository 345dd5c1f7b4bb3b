"""Bytes of event streams into stamps and counts."""

import pytest

from roseinfer.bench.definitions import Observed
from roseinfer.bench.load.event_stream import count_tokens, read_events, read_refusal


def chunk(text: str = "a", finish: str = "null") -> bytes:
    return b'data: {"choices":[{"index":0,"text":"%b","finish_reason":%b}]}\n\n' % (text.encode(), finish.encode())


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d,"total_tokens":0}}\n\n'
DONE = b"data: [DONE]\n\n"


def read(*reads: bytes, interval: int | None = None) -> Observed:
    """The reads arrive at 10, 20, ... ns."""
    seen = Observed(request_id="a", intended_ns=1)
    read_events(seen, [(10 * (index + 1), data) for index, data in enumerate(reads)], interval)
    return seen


def test_a_chunk_has_the_stamp_of_the_read_that_completed_it() -> None:
    first, second, third = chunk(), chunk(), chunk(finish='"length"')
    seen = read(first + second[:20], second[20:-1], second[-1:] + third, USAGE % 3 + DONE)
    assert seen.token_ns == [10, 30, 30]
    assert seen.token_counts == [1, 1, 1]
    assert (seen.num_prompt_tokens, seen.finish_reason, seen.error) == (5, "length", "")


@pytest.mark.parametrize("changed", [(b"\n", b"\r\n"), (b"data: ", b"data:"), (b"data: {", b": hello\nid: 7\ndata: {")])
def test_every_form_of_an_event_is_read(changed: tuple[bytes, bytes]) -> None:
    pieces = [piece.replace(*changed) for piece in (chunk(), chunk(finish='"length"'), USAGE % 2 + DONE)]
    seen = read(pieces[0][:-1], pieces[0][-1:] + pieces[1], pieces[2])
    assert (seen.error, seen.token_ns, seen.token_counts) == ("", [20, 20], [1, 1])


@pytest.mark.parametrize(
    ("num_tokens", "num_chunks", "interval", "counts"),
    [
        (3, 3, None, [1, 1, 1]),
        (10, 3, 8, [1, 8, 1]),
        (17, 3, 8, [1, 8, 8]),
        (17, 3, None, [1, 8, 8]),  # the server's own interval is not known here
        (6, 4, 1, [1, 2, 2, 1]),  # some were due together
        (3, 5, None, [1, 1, 1]),  # chunks that only say that it is over
        (4, 1, None, [4]),
        (0, 0, None, []),
    ],
)
def test_tokens_are_counted_by_the_usage(
    num_tokens: int, num_chunks: int, interval: int | None, counts: list[int]
) -> None:
    assert count_tokens(num_tokens, num_chunks, interval) == counts


def test_without_a_usage_a_chunk_is_a_token() -> None:
    assert read(chunk() + chunk()).token_counts == [1, 1]


@pytest.mark.parametrize(
    ("details", "num_cached"),
    [(b'{"cached_tokens":4,"audio_tokens":0}', 4), (b'{"cached_tokens":null}', None), (b"null", None)],
)
def test_cached_tokens_are_those_of_the_usage(details: bytes, num_cached: int | None) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":%b}}\n\n'
    assert read(chunk() + usage % details + DONE).num_cached_tokens == num_cached
    assert read(chunk() + USAGE % 1 + DONE).num_cached_tokens is None


def test_the_ledger_is_kept_and_may_be_absent() -> None:
    told = b'data: {"choices":[],"roseinfer_ledger":[{"parts_ns":{"queue":1}}]}\n\n'
    assert read(chunk() + told).ledger == {"parts_ns": {"queue": 1}}
    assert read(chunk()).ledger is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'data: {"error":{"message":"the engine failed","type":"x"}}\n\n', "the engine failed"),
        (DONE, "without a token"),
        (b"", "without a token"),
        (b'data: {"choices":7}\n\n', "not as agreed"),
        (chunk() + USAGE % 10**12 + DONE, "not as agreed"),
        (b'data: {"error":{"message":"\xff"}}\n\n', "not as agreed"),
        (chunk() + chunk(finish='"length"'), "broke off"),
    ],
)
def test_what_is_no_answer_is_an_error(data: bytes, words: str) -> None:
    assert words in read(data).error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"full","code":"overloaded"},"roseinfer_ledger":[{"parts_ns":{}}]}', "429: full"),
        (b"<html>go away</html>", "429: <html>go away</html>"),
        (b"", "429: "),
        (b'{"error":{"message":"\xff"}}', '429: {"error":{"message":"\ufffd"}}'),
    ],
)
def test_a_refusal_is_its_status_and_its_sentence(body: bytes, words: str) -> None:
    seen = Observed(request_id="a", intended_ns=1)
    read_refusal(seen, 429, body)
    assert seen.error == words
    assert seen.ledger == ({"parts_ns": {}} if b"ledger" in body else None)
