"""The rules of `observe.capture_rules`: their sentences, such as `3 gaps over 60 ms in 10 s`, and what breaks them.

docs/capture.md has the grammar.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from roseinfer.errors import ConfigError
from roseinfer.observe.gaps.causes import Cause

_OPTION = "observe.capture_rules"
MAX_COUNT = 100_000

_TOKEN = re.compile(r"\d+(?:\.\d+)?|[A-Za-z_0-9]+|\S")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_LONGEST = 1e6  # of either unit
_UNITS_NS = {"ms": 1e6, "s": 1e9}


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A number of events of one kind within a window."""

    text: str
    count: int
    subject: str  # `gap`, `ttft` or `slow gap`
    over_ns: int = 0  # longer than that; for slow gaps 0
    cause: Cause | None = None  # of slow gaps; None: any
    window_ns: int


class Window:
    """The events of one rule within its window, newest last."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._events: deque[tuple[int, str, str]] = deque(maxlen=rule.count)

    def add(self, now_ns: int, request_id: str, trace_id: str) -> dict[str, str] | None:
        """Adds an event; returns request id -> trace id of those that break the rule together, None if unbroken."""
        self._events.append((now_ns, request_id, trace_id))
        while self._events[0][0] < now_ns - self.rule.window_ns:
            self._events.popleft()
        if len(self._events) < self.rule.count:
            return None
        return {name: trace for _, name, trace in self._events}

    def clear(self) -> None:
        self._events.clear()


def parse_rules(texts: Sequence[str]) -> list[Rule]:
    """Parses rules. Raises ConfigError with the option, the rule's number and the place in it."""
    return [_Sentence(number, text).rule() for number, text in enumerate(texts, 1)]


class _Sentence:
    """Parses one rule, word by word."""

    def __init__(self, number: int, text: str) -> None:
        self._number = number
        self._text = text
        self._words = [(found.start(), found[0]) for found in _TOKEN.finditer(text)]
        self._next = 0

    def rule(self) -> Rule:
        count = self._count()
        subject, over_ns, cause = self._word("gap", "gaps", "ttft", "slow"), 0, None
        if subject == "slow":
            self._word("gap", "gaps")
            subject = "slow gap"
            if self._word("of", "in") == "of":
                cause = Cause(self._word(*Cause))
                self._word("in")
        else:
            self._word("over")
            over_ns = self._duration()
            self._word("in")
        window_ns = self._duration()
        if self._next < len(self._words):
            self._refuse("the end of the rule")
        return Rule(
            text=self._text.strip(),
            count=count,
            subject=subject.removesuffix("s"),
            over_ns=over_ns,
            cause=cause,
            window_ns=window_ns,
        )

    def _count(self) -> int:
        return int(
            self._next_word(
                lambda word: word.isdecimal() and 1 <= int(word) <= MAX_COUNT, f"a count from 1 to {MAX_COUNT}"
            )
        )

    def _duration(self) -> int:
        number = self._next_word(
            lambda word: bool(_NUMBER.fullmatch(word)) and 0 < float(word) <= _LONGEST,
            "a duration such as 60 ms, above 0",
        )
        return int(float(number) * _UNITS_NS[self._word(*_UNITS_NS)])

    def _word(self, *expected: str) -> str:
        return self._next_word(expected.__contains__, " or ".join(f"`{choice}`" for choice in expected))

    def _next_word(self, is_right: Callable[[str], bool], expected: str) -> str:
        word = self._peek()
        if not is_right(word):
            self._refuse(expected)
        self._next += 1
        return word

    def _peek(self) -> str:
        return self._words[self._next][1] if self._next < len(self._words) else ""

    def _refuse(self, expected: str) -> NoReturn:
        is_over = self._next >= len(self._words)
        place = len(self._text) if is_over else self._words[self._next][0]
        got = "nothing" if is_over else f"{self._words[self._next][1]!r}"
        raise ConfigError(
            f"rule {self._number} ({self._text!r}), character {place + 1}: expected {expected}, got {got}",
            param=_OPTION,
        )
