"""Encodes the source of a grammar, checks that it is small and flat enough, and caches what was made of grammars.

Recursive code overflows its stack on deep nesting (CVE-2026-25048, CVE-2026-2069). The library has limits of its own;
deeper nesting than any form needs does not reach it.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from roseinfer.errors import InvalidRequest
from roseinfer.messages import Grammar, Thought, check_text, check_value

MAX_SOURCE_BYTES = {
    "json_schema": 128 << 10,
    "regex": 8 << 10,
    "choice": 256 << 10,
    "calls": 256 << 10,
    "lark": 64 << 10,
    "text": 0,
}
MAX_DEPTH = 64

Made = TypeVar("Made")


class GrammarCache(Generic[Made]):
    """Keeps what was made of the grammars used last, up to a number of bytes. One thread uses it at a time.

    The newest stays however large it is: the other sequences of its request need it next.
    """

    def __init__(self, max_bytes: int, bytes_of: Callable[[Grammar, Made], int]) -> None:
        self.entries: OrderedDict[Grammar, Made] = OrderedDict()
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._bytes_of = bytes_of

    def get(self, grammar: Grammar) -> Made | None:
        if grammar in self.entries:
            self.entries.move_to_end(grammar)
        return self.entries.get(grammar)

    def put(self, grammar: Grammar, made: Made) -> None:
        self.entries[grammar] = made
        self.num_bytes += self._bytes_of(grammar, made)
        while self.num_bytes > self._max_bytes and len(self.entries) > 1:
            self.remove(next(iter(self.entries)))

    def remove(self, grammar: Grammar) -> None:
        self.num_bytes -= self._bytes_of(grammar, self.entries.pop(grammar))


def encode_source(value: object, param: str) -> str:
    """JSON of a schema, which may be invalid as one. Raises InvalidRequest that names `param` for deep nesting."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise InvalidRequest(f"`{param}` is nested too deeply.", param=param) from None


def check_types(grammar: Grammar, param: str) -> None:
    """Raises InvalidRequest that names the field `param`."""
    check_text(grammar.kind, f"{param}.kind")  # a grammar given to `LLM` may hold anything
    check_value(msgspec.structs.asdict(grammar), Grammar, param)
    if grammar.thought is not None:
        check_value(msgspec.structs.asdict(grammar.thought), Thought, f"{param}.thought")


def check_bounds(grammar: Grammar, param: str) -> None:
    """As `check_types`, of a grammar that has passed it: whether it is too long or too deep."""
    size, limit = len(grammar.source.encode("utf-8", "surrogatepass")), MAX_SOURCE_BYTES[grammar.kind]
    if size > limit:
        raise InvalidRequest(f"`{param}` is {size} bytes long; at most {limit} are allowed.", param=param)
    if any("\ud800" <= char <= "\udfff" or char == "\0" for char in grammar.source):
        raise InvalidRequest(f"`{param}` holds a character that no text has.", param=param)
    is_json = grammar.kind in {"json_schema", "choice", "calls"}
    depth = _json_depth(grammar.source) if is_json else _bracket_depth(grammar.source)
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"`{param}` is nested more than {MAX_DEPTH} deep.", param=param)


def _json_depth(source: str) -> int:
    """Levels of objects and arrays; 0 for what is no JSON, which the library refuses."""
    try:
        level = [msgspec.json.decode(source)]
    except msgspec.DecodeError:
        return 0
    except RecursionError:
        return MAX_DEPTH + 1
    depth = 0
    while level := [inner for value in level for inner in _children(value)]:
        depth += 1
    return depth


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _bracket_depth(source: str) -> int:
    """The most unescaped brackets open at once."""
    depth = deepest = position = 0
    while position < len(source):
        char = source[position]
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
        position += 2 if char == "\\" else 1
    return deepest
