"""Encodes log-probabilities as JSON while tokens come in, and bounds how many one answer may hold.

An answer may hold hundreds of thousands. Encoding them at once would block the event loop for most of a second, and
keeping them as objects would make each garbage collection as long; a prompt's are encoded in pieces, between which the
event loop runs.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from roseinfer.errors import InvalidRequest

PIECE = 64  # tokens: with twenty likely ones beside each, some milliseconds
MAX_PROMPT_LOGPROBS = 1 << 18  # in one answer: a fraction of a second of the front end, some tens of megabytes
MAX_KEPT_LOGPROBS = 1 << 20  # until the end of an answer that is not streamed: a hundred megabytes


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability and the likeliest tokens in its place, likeliest first."""

    token: bytes
    offset: int  # characters of the text before it
    logprob: float | None  # None for a prompt's first token, which has nothing before it
    top: list[tuple[bytes, float]] | None
    is_end: bool = False  # it ended the text and is no part of it


# An endpoint's form of some tokens, or of none: columns of values ready for JSON, or None, which becomes null.
Columns = Callable[[Sequence[ScoredToken]], Mapping[str, Sequence[object] | None]]


class EncodedLogprobs:
    """The log-probabilities of consecutive tokens as one JSON object, whose columns grow with each token."""

    def __init__(self, columns: Columns) -> None:
        self.num_tokens = 0
        self._columns = columns
        self._prompt: Iterable[ScoredToken] = ()
        self._parts: dict[str, list[bytes]] = {}

    def add_prompt(self, scored: Iterable[ScoredToken]) -> None:
        """Put a prompt's tokens before all others. `encode` reads them."""
        self._prompt = scored

    def add_token(self, token: ScoredToken) -> None:
        self.num_tokens += 1
        self._encode_into(self._parts, (token,))

    async def encode(self) -> msgspec.Raw:
        """The JSON object. Call it once: encoded tokens are not kept."""
        parts: dict[str, list[bytes]] = {}
        tokens = iter(self._prompt)
        while piece := list(islice(tokens, PIECE)):
            self._encode_into(parts, piece)
            await asyncio.sleep(0)
        if self.num_tokens > PIECE:
            await asyncio.sleep(0)  # joining one choice may take as long as encoding a piece of another
        encoded: list[bytes] = []  # one join at the end: an answer may be ten megabytes long
        for name, nothing in self._columns(()).items():
            column = b",".join(parts.pop(name, []) + self._parts.pop(name, []))
            encoded += [b"," if encoded else b"{", msgspec.json.encode(name), b":"]
            encoded += [b"null"] if nothing is None else [b"[", column, b"]"]
        return msgspec.Raw(b"".join([*encoded, b"}"]))

    def _encode_into(self, parts: dict[str, list[bytes]], tokens: Sequence[ScoredToken]) -> None:
        for name, values in self._columns(tokens).items():
            if values:
                parts.setdefault(name, []).append(msgspec.json.encode(values)[1:-1])


def check_prompt_logprobs(num_tokens: int, num_logprobs: int) -> None:
    """Raise InvalidRequest where tokens of prompts, counted for each sequence, have too many."""
    total = num_tokens * (num_logprobs + 1)
    if total > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"`logprobs`: the prompts would have {total} log-probabilities, and {MAX_PROMPT_LOGPROBS} fit into "
            "an answer; send fewer prompts at once.",
            param="logprobs",
        )


def most_kept_tokens(num_sequences: int, num_logprobs: int | None, max_tokens: int | None, name: str) -> int:
    """Tokens that each sequence of an unstreamed answer may generate; unbounded without log-probabilities.

    Raises InvalidRequest where `max_tokens`, the field `name`, is more.
    """
    if num_logprobs is None:
        return sys.maxsize
    most = max(1, MAX_KEPT_LOGPROBS // (num_sequences * (num_logprobs + 1)))
    if max_tokens is not None and max_tokens > most:
        raise InvalidRequest(
            f"`{name}`: an answer that is not streamed holds, with these log-probabilities, at most {most} tokens of "
            f"each of {num_sequences} sequences, and {max_tokens} are asked for.",
            param=name,
        )
    return most
