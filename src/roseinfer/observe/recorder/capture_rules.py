"""Sentences such as `3 gaps over 60 ms in 10 s` into rules, and moments into breaches. Knows no files and no requests.

    rule     = count what "in" duration
    what     = "gap" ["s"] "over" duration
             | "ttft" "over" duration
             | "slow" "gap" ["s"] ["of" cause]
    duration = number ("ms" | "s")

Words are separated by blanks, also a number and its unit may be. A gap is one between two writes of a stream, or
between two tokens of a request that is not streamed; `ttft` is the time to the first token of such an answer. A slow
gap is what `observe.slow_gap_factor` and `observe.slow_gap_min_ms` make of it.
"""

import re
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from roseinfer.errors import ConfigError
from roseinfer.observe.gaps.causes import Cause

OPTION = "observe.capture_rules"
MAX_COUNT = 100_000

_TOKEN = re.compile(r"\d+(?:\.\d+)?|[A-Za-z_0-9]+|\S")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_LONGEST = 1e6  # of either unit
_UNITS_NS = {"ms": 1e6, "s": 1e9}


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """So many events of one kind within a window."""

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
        """One more event: id and trace id of all requests that break the rule together; None if it is not broken."""
        self._events.append((now_ns, request_id, trace_id))
        while self._events[0][0] < now_ns - self.rule.window_ns:
            self._events.popleft()
        if len(self._events) < self.rule.count:
            return None
        return {name: trace for _, name, trace in self._events}

    def clear(self) -> None:
        self._events.clear()


def parse_rules(texts: Sequence[str]) -> list[Rule]:
    """Raises ConfigError with the option, the rule's number and the place in it."""
    return [_Sentence(number, text).rule() for number, text in enumerate(texts, 1)]


class _Sentence:
    """One rule while it is read, word by word."""

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
        word = self._peek()
        if not word.isdecimal() or not 1 <= int(word) <= MAX_COUNT:
            self._refuse(f"a count from 1 to {MAX_COUNT}")
        self._next += 1
        return int(word)

    def _duration(self) -> int:
        word = self._peek()
        if not _NUMBER.fullmatch(word) or not 0 < float(word) <= _LONGEST:
            self._refuse("a duration such as 60 ms, above 0")
        self._next += 1
        return int(float(word) * _UNITS_NS[self._word(*_UNITS_NS)])

    def _word(self, *expected: str) -> str:
        word = self._peek()
        if word not in expected:
            self._refuse(" or ".join(f"`{choice}`" for choice in expected))
        self._next += 1
        return word

    def _peek(self) -> str:
        return self._words[self._next][1] if self._next < len(self._words) else ""

    def _refuse(self, expected: str) -> NoReturn:
        is_over = self._next >= len(self._words)
        place = len(self._text) if is_over else self._words[self._next][0]
        got = "nothing" if is_over else f"{self._words[self._next][1]!r}"
        raise ConfigError(
            f"rule {self._number} ({self._text!r}), character {place + 1}: expected {expected}, got {got}", param=OPTION
        )
