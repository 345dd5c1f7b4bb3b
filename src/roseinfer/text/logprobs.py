"""Turns scored tokens into JSON as they come, and a prompt's in pieces between which the event loop goes on.

A reply may hold hundreds of thousands of log-probabilities, which take some microseconds each: encoded at its end, in
one piece, they would keep every stream and every probe waiting for most of a second; and kept as objects until then,
they would make each garbage collection as long. Knows no dialect.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

PIECE = 64  # tokens: with twenty likely ones beside each, some milliseconds


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability and the likeliest tokens in its place, likeliest first."""

    token: bytes
    offset: int  # characters of the text before it
    logprob: float | None  # None of a prompt's first token, which nothing stands before
    top: list[tuple[bytes, float]] | None
    is_end: bool = False  # it ended the text and is no part of it


# What a dialect tells of some tokens, of none too: columns of what is ready for JSON, or None, which is null.
Columns = Callable[[Sequence[ScoredToken]], Mapping[str, Sequence[object] | None]]


class Scores:
    """The scores of consecutive tokens, told as one JSON object."""

    def __init__(self, columns: Columns) -> None:
        self.num_tokens = 0
        self._columns = columns
        self._prompt: Iterable[ScoredToken] = ()
        self._parts: dict[str, list[bytes]] = {}

    def add_prompt(self, scored: Iterable[ScoredToken]) -> None:
        """What comes before all others; gone through when it is told."""
        self._prompt = scored

    def add(self, token: ScoredToken) -> None:
        self.num_tokens += 1
        self._encode_into(self._parts, (token,))

    async def encode(self) -> msgspec.Raw:
        """The object, once: what has been told is not kept."""
        parts: dict[str, list[bytes]] = {}
        tokens = iter(self._prompt)
        while piece := list(islice(tokens, PIECE)):
            self._encode_into(parts, piece)
            await asyncio.sleep(0)
        if self.num_tokens > PIECE:
            await asyncio.sleep(0)  # the join of one choice may take as long as a piece of another
        told: list[bytes] = []  # one join at the end: an answer may be ten megabytes long
        for name, nothing in self._columns(()).items():
            column = b",".join(parts.pop(name, []) + self._parts.pop(name, []))
            told += [b"," if told else b"{", msgspec.json.encode(name), b":"]
            told += [b"null"] if nothing is None else [b"[", column, b"]"]
        return msgspec.Raw(b"".join([*told, b"}"]))

    def _encode_into(self, parts: dict[str, list[bytes]], tokens: Sequence[ScoredToken]) -> None:
        for name, values in self._columns(tokens).items():
            if values:
                parts.setdefault(name, []).append(msgspec.json.encode(values)[1:-1])
