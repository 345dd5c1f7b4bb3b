"""Parses the event stream of an answer, with a stamp for each read, into an `Observed`.

`LoadClient` and Locust share it, so that both report the same for the same bytes.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from roseinfer.bench.definitions import Observed

DATA = b"data: {"
_FIELD = b"data:"
_DONE = b"[DONE]"
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: Annotated[int, Meta(ge=0, le=1 << 22)]  # each is a latency in memory
    prompt_tokens_details: _PromptTokensDetails | None = None  # not every server reports them


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None
    roseinfer_ledger: list[dict[str, Any]] = []  # of each choice


_decode_event = msgspec.json.Decoder(_Event).decode


def read_answer(seen: Observed, reads: Sequence[tuple[int, bytes]], interval: int | None) -> None:
    """Fill in what an answer says, whose status has been filled in, unless an error has ended it."""
    if seen.error:
        return
    if seen.status in {0, 200}:
        read_events(seen, reads, interval)
    else:
        read_refusal(seen, seen.status, b"".join(data for _, data in reads))


def read_events(seen: Observed, reads: Sequence[tuple[int, bytes]], interval: int | None) -> None:
    """Fill in what an event stream says. An event's stamp is that of the read that completed it."""
    ends = list(accumulate(len(data) for _, data in reads))
    stream = b"".join(data for _, data in reads)
    stamps: list[int] = []
    num_tokens: int | None = None
    position, is_done = 0, False
    for end in _EVENT_END.finditer(stream):
        data, position = _data_of(stream[position : end.start()]), end.end()
        if not data.startswith(b"{"):
            is_done = is_done or data == _DONE
            continue
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            seen.error = f"an event is not as agreed: {error}"
            return
        if event.error is not None:
            seen.error = _message(event.error)[:300]
        if event.choices:
            stamps.append(reads[bisect_left(ends, position)][0])
            seen.finish_reason = event.choices[0].finish_reason or seen.finish_reason
        if event.usage is not None:
            num_tokens, seen.num_prompt_tokens = event.usage.completion_tokens, event.usage.prompt_tokens
            if event.usage.prompt_tokens_details is not None:
                seen.num_cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        if event.roseinfer_ledger:
            seen.ledger = event.roseinfer_ledger[0]
    seen.token_counts = count_tokens(len(stamps) if num_tokens is None else num_tokens, len(stamps), interval)
    seen.token_ns = stamps[: len(seen.token_counts)]
    if not seen.error and not seen.was_aborted and not seen.token_ns:
        seen.error = "the stream ended without a token"
    if not seen.error and not seen.was_aborted and not is_done:
        seen.error = "the stream broke off"


def _data_of(event: bytes) -> bytes:
    """The data of an event, which may have other fields and comments beside it."""
    lines = [line.removeprefix(_FIELD) for line in event.splitlines() if line.startswith(_FIELD)]
    return b"\n".join(lines).strip()


def _message(error: dict[str, Any]) -> str:
    return str(error.get("message", error))


def read_refusal(seen: Observed, status: int, body: bytes) -> None:
    """Fill in what an answer with another status than 200 says."""
    try:
        event = _decode_event(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        event = _Event()
    message = body.decode(errors="replace") if event.error is None else _message(event.error)
    seen.error = f"{status}: {message[:300]}"
    if event.roseinfer_ledger:
        seen.ledger = event.roseinfer_ledger[0]


def count_tokens(num_tokens: int, num_chunks: int, interval: int | None) -> list[int]:
    """How many tokens each chunk carries, of `num_tokens` by the server's count.

    The first chunk is sent with the first token, each later one with `interval` tokens, and the last with the rest.
    Where that does not add up (tokens were due together, or half a character was held back) the tokens after the first
    are spread evenly. A chunk beyond the number of tokens carries none and is left out.
    """
    num_chunks = min(num_chunks, num_tokens)
    if num_chunks <= 1:
        return [num_tokens] * num_chunks
    interval = interval or 1
    last = num_tokens - 1 - interval * (num_chunks - 2)
    if 1 <= last <= interval:
        return [1, *[interval] * (num_chunks - 2), last]
    each, more = divmod(num_tokens - 1, num_chunks - 1)
    return [1, *[each + (index < more) for index in range(num_chunks - 1)]]
