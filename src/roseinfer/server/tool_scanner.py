"""Follows one JSON object while its text comes in, and tells where the values of its keys begin and end.

Each character is looked at once and nothing is decoded but the keys. Knows no tool.
"""

from dataclasses import dataclass
from enum import Enum, auto

import msgspec

_BLANKS = " \t\r\n"


class _Malformed(Exception):
    """The next character belongs to no JSON object."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the raw text of a key's value, and whether the value ends with it."""

    key: str
    text: str
    is_last: bool


class _At(Enum):
    """What comes next."""

    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    END = auto()  # of the object, or a comma
    DONE = auto()


class ObjectScanner:
    """One object, from its brace to the one that closes it."""

    def __init__(self) -> None:
        self.is_malformed = False  # the text is no JSON object
        self._at = _At.OPEN
        self._key = ""
        self._raw = ""  # of the key, or of a value's part, so far
        self._depth = 0  # of the value's brackets
        self._is_string = self._is_escaped = False
        self._is_first = True  # no key has been read
        self._has_begun = False  # the value, after the blanks before it

    @property
    def is_done(self) -> bool:
        return self._at is _At.DONE

    def feed(self, text: str) -> tuple[list[Piece], str]:
        """The pieces of values in the text, and the rest of it: behind the object, or from where it is none."""
        pieces: list[Piece] = []
        for position, char in enumerate(text):
            if self._at is _At.DONE:
                return pieces, text[position:]
            try:
                self._take(char, pieces)
            except _Malformed:
                self.is_malformed = True
                return pieces, text[position:]
        if self._at is _At.VALUE and self._raw:
            pieces.append(Piece(self._key, self._raw, is_last=False))
            self._raw = ""
        return pieces, ""

    def _take(self, char: str, pieces: list[Piece]) -> None:
        if self._at is _At.VALUE:
            self._take_value(char, pieces)
        elif self._at is _At.KEY and (self._raw or char == '"'):
            self._take_key(char)
        elif char not in _BLANKS:
            self._take_mark(char)

    def _take_key(self, char: str) -> None:
        self._raw += char
        if not self._is_string:
            self._is_string = True
        elif self._ends_string(char):
            try:
                self._key = msgspec.json.decode(self._raw, type=str)
            except msgspec.DecodeError:
                raise _Malformed from None
            self._raw, self._at = "", _At.COLON

    def _take_mark(self, char: str) -> None:
        """A brace, colon or comma of the object itself."""
        if self._at is _At.OPEN and char == "{":
            self._at = _At.KEY
        elif self._at is _At.COLON and char == ":":
            self._at, self._has_begun = _At.VALUE, False
        elif self._at is _At.END and char == ",":
            self._at, self._is_first = _At.KEY, False
        elif char == "}" and (self._at is _At.END or (self._at is _At.KEY and self._is_first)):
            self._at = _At.DONE
        else:
            raise _Malformed

    def _take_value(self, char: str, pieces: list[Piece]) -> None:
        if not self._has_begun and char in _BLANKS:
            return
        if self._is_string:
            self._raw += char
            if self._ends_string(char) and not self._depth:
                self._end_value(pieces)
        elif char in "}]," and not self._depth:  # behind a number or a word
            if not self._has_begun or char == "]":
                raise _Malformed
            self._end_value(pieces)
            self._take_mark(char)
        elif char in _BLANKS and not self._depth:
            self._end_value(pieces)
        else:
            self._has_begun = True
            self._raw += char
            if char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self._end_value(pieces)

    def _ends_string(self, char: str) -> bool:
        """Take a character of a string behind its first quote; whether it is the last quote."""
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_string = False
            return True
        return False

    def _end_value(self, pieces: list[Piece]) -> None:
        pieces.append(Piece(self._key, self._raw, is_last=True))
        self._raw, self._at = "", _At.END
