"""Reads JSON and Python literals in a text that comes in pieces. Each character is read once, and nothing is evaluated.

What reads is a generator that stops where the text ends so far, and goes on in the next piece. Nesting is counted or
kept in a list: generators within each other would be gone through at each step (CVE-2025-9141, CVE-2025-48887).
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import Any

import msgspec

from roseinfer.text.tokenizer.detokenizer import first_candidate

Step = Generator[None, None, None]
Char = Generator[None, None, str]
Sink = Callable[[str], None]

BLANK_RUN = re.compile(r"[ \t\r\n]*")
NO_RUN = re.compile("")
NAME_RUN = re.compile(r"[\w.-]*")
_WORD_RUN = re.compile(r"""[^"'{}()\[\]:=, \t\r\n]*""")
_NESTED_RUN = re.compile(r'[^"{}\[\]]*')
_PYTHON_NESTED_RUN = re.compile(r"""[^"'(){}\[\]]*""")
# Up to the last quote, or half an escape.
_STRING_RUNS = {quote: re.compile(rf"(?:[^{quote}\\]++|\\.)*+", re.DOTALL) for quote in "\"'"}
_PLAIN_RUNS = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {char: "\\" + char for char in 'ntrbf/\\"'} | {"'": "'", "\n": ""}
_NUM_DIGITS = {"x": 2, "u": 4}


class Malformed(Exception):
    """The next character belongs to nothing that could stand here."""


def json_text(text: str) -> str:
    """The text as it stands within the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_json_value(text: str, kind: Any = Any) -> bool:
    """Whether the text is a value in JSON, of this type."""
    try:
        msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True


def string_of(raw: str) -> str | None:
    """What a string in JSON says; None where it is none."""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, ValueError):
        return None


def literal_as_json(text: str) -> str | None:
    """A JSON value, or a literal of Python, as JSON; None where the text is neither."""
    scanner, pieces = Scanner(), list[str]()
    scanner.begin(text + "\n")
    try:
        for _ in scanner.read_literal(pieces):
            return None  # it goes on
    except Malformed:
        return None
    return None if scanner.rest.strip() else "".join(pieces)


@cache
def any_of(words: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)))


class Scanner:
    """Reads one text. What `read_…` goes over is given to the sink that `capture` set, as far as there is one."""

    def __init__(self) -> None:
        self._text, self._position = "", 0
        self._sink: Sink | None = None
        self._captured = 0  # where in the text the sink goes on

    @property
    def rest(self) -> str:
        """What was not read yet."""
        return self._text[self._position :]

    def begin(self, text: str) -> None:
        """Add the next piece of the text."""
        self._text, self._position, self._captured = self.rest + text, 0, 0

    def capture(self, sink: Sink) -> None:
        self._sink, self._captured = sink, self._position

    def flush(self) -> None:
        """Give the sink what was read."""
        if self._sink is not None and self._captured < self._position:
            self._sink(self._text[self._captured : self._position])
            self._captured = self._position

    def release(self) -> None:
        self.flush()
        self._sink = None

    def skip(self, run: re.Pattern[str]) -> Char:
        """Read a run of characters. Returns the one behind it, which is not read."""
        while True:
            found = run.match(self._text, self._position)
            assert found is not None, "a run may be empty"
            self._position = found.end()
            if self._position < len(self._text):
                return self._text[self._position]
            yield

    def take(self, mark: str) -> Generator[None, None, bool]:
        """Read the mark if the text goes on with it."""
        while True:
            found = self._text[self._position : self._position + len(mark)]
            if found == mark:
                self._position += len(mark)
                return True
            if not mark.startswith(found):
                return False
            yield

    def read_mark(self, mark: str) -> Step:
        """Read a character that must come, and the blanks before it."""
        if (yield from self.skip(BLANK_RUN)) != mark:
            raise Malformed
        self._position += 1

    def read_run(self, run: re.Pattern[str]) -> Char:
        """Read a run of characters, and return it."""
        found: list[str] = []
        self.capture(found.append)
        yield from self.skip(run)
        self.release()
        return "".join(found)

    def read_until(self, ends: Sequence[str], sink: Sink) -> Step:
        """Read up to the end of the word of `ends` that comes first; the sink gets what is before it."""
        longest = max(map(len, ends))
        self.capture(sink)
        while (found := any_of(ends).search(self._text, self._position)) is None:
            self._position = max(self._position, first_candidate(self._text, ends, longest))
            yield
        self._position = found.start()
        self.release()
        self._position = found.end()

    # JSON

    def read_string(self) -> Char:
        """Read a string, and return what it says."""
        raw: list[str] = []
        yield from self.skip(BLANK_RUN)
        self.capture(raw.append)
        yield from self.read_mark('"')
        yield from self._read_quoted('"')
        self.release()
        text = string_of("".join(raw))
        if text is None:
            raise Malformed
        return text

    def read_value(self) -> Step:
        char = yield from self.skip(BLANK_RUN)
        if char in "}],:":
            raise Malformed
        if char not in '"{[':
            yield from self.skip(_WORD_RUN)
            return
        self._position += 1
        yield from self._read_quoted('"') if char == '"' else self.read_brackets()

    def read_brackets(self, *, is_python: bool = False) -> Step:
        """Read lists and objects from behind the first bracket, which kind it is and whatever stands in them."""
        depth, run = 1, _PYTHON_NESTED_RUN if is_python else _NESTED_RUN
        while depth:
            char = yield from self.skip(run)
            self._position += 1
            if char in "\"'":
                yield from self._read_quoted(char)
            else:
                depth += 1 if char in "([{" else -1

    def _read_quoted(self, quote: str) -> Step:
        """Read a string from behind its first quote."""
        while (yield from self.skip(_STRING_RUNS[quote])) != quote:  # half an escape
            self._position += 1
            yield from self.skip(NO_RUN)
            self._position += 1
        self._position += 1

    # Python

    def read_literal(self, pieces: list[str]) -> Step:
        """Read a literal of Python, or a value of JSON, and write it to `pieces` as JSON."""
        closing: list[str] = []  # of the brackets that are open
        while True:
            char = yield from self.skip(BLANK_RUN)
            if char in "[{":
                self._position += 1
                pieces.append(char)
                closing.append("]" if char == "[" else "}")
                if (yield from self.skip(BLANK_RUN)) != closing[-1]:
                    yield from self._read_key(closing[-1], pieces)
                    continue
            elif char in "\"'":
                yield from self._read_python_string(char, pieces)
            else:
                yield from self._read_word(pieces)
            while closing and (yield from self._is_last(closing[-1], pieces)):
                pieces.append(closing.pop())
            if not closing:
                return
            yield from self._read_key(closing[-1], pieces)

    def _is_last(self, closing: str, pieces: list[str]) -> Generator[None, None, bool]:
        """Read what stands behind a value in brackets: the closing one, or a comma before the next value."""
        char = yield from self.skip(BLANK_RUN)
        if char == ",":
            self._position += 1
            char = yield from self.skip(BLANK_RUN)
            if char != closing:
                pieces.append(", ")
                return False
        if char != closing:
            raise Malformed
        self._position += 1
        return True

    def _read_key(self, closing: str, pieces: list[str]) -> Step:
        """Read the key of a dictionary's value; in a list there is none."""
        if closing == "}":
            char = yield from self.skip(BLANK_RUN)
            if char not in "\"'":
                raise Malformed
            yield from self._read_python_string(char, pieces)
            yield from self.read_mark(":")
            pieces.append(": ")

    def _read_word(self, pieces: list[str]) -> Step:
        word = yield from self.read_run(_WORD_RUN)
        if word not in _WORDS and _NUMBER.fullmatch(word) is None:
            raise Malformed
        pieces.append(_WORDS.get(word, word))

    def _read_python_string(self, quote: str, pieces: list[str]) -> Step:
        self._position += 1
        pieces.append('"')
        while True:
            self.capture(lambda text: pieces.append(json_text(text)))
            char = yield from self.skip(_PLAIN_RUNS[quote])
            self.release()
            self._position += 1
            if char == quote:
                pieces.append('"')
                return
            char = yield from self.skip(NO_RUN)
            self._position += 1
            if char in _NUM_DIGITS:
                digits = yield from self._read_digits(_NUM_DIGITS[char])
                pieces.append("\\u" + digits.zfill(4))
            else:
                pieces.append(_ESCAPES[char] if char in _ESCAPES else json_text("\\" + char))

    def _read_digits(self, num_digits: int) -> Char:
        """Read the digits of an escape."""
        digits = ""
        while len(digits) < num_digits:
            char = yield from self.skip(NO_RUN)
            if char not in "0123456789abcdefABCDEF":
                raise Malformed
            digits += char
            self._position += 1
        return digits
