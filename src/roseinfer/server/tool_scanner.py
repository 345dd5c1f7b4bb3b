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

    def feed(self, text: str, start: int) -> tuple[Piece | None, int]:
        """Take `text` from `start` on, up to the next place at which somebody may have seen enough.

        These are behind the first character of a value and behind its last: so what is known there does not depend on
        how the text was cut. Returns what was read of a value, and where it stopped: there, behind the object, at a
        character that belongs to none, or behind the text.
        """
        for position in range(start, len(text)):
            try:
                piece = self._take(text[position])
            except _Malformed:
                self.is_malformed = True
                return None, position
            if piece is not None or self.is_done:
                return piece, position + 1
        if self._at is _At.VALUE and self._raw:
            return self._piece(is_last=False), len(text)
        return None, len(text)

    def _take(self, char: str) -> Piece | None:
        if self._at is _At.VALUE:
            return self._take_value(char)
        if self._at is _At.KEY and (self._raw or char == '"'):
            self._take_key(char)
        elif char not in _BLANKS:
            self._take_mark(char)
        return None

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

    def _take_value(self, char: str) -> Piece | None:
        """The value's beginning, or its end."""
        if not self._has_begun:
            return None if char in _BLANKS else self._begin_value(char)
        if self._is_string:
            self._raw += char
            return self._end_value() if self._ends_string(char) and not self._depth else None
        if not self._depth and char in "}]," + _BLANKS:  # behind a number or a word
            if char == "]":
                raise _Malformed
            piece = self._end_value()
            if char not in _BLANKS:
                self._take_mark(char)
            return piece
        self._raw += char
        if char == '"':
            self._is_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return None if self._depth else self._end_value()
        return None

    def _begin_value(self, char: str) -> Piece:
        if char in "}],":
            raise _Malformed
        self._has_begun, self._is_string, self._depth = True, char == '"', int(char in "{[")
        self._raw = char
        return self._piece(is_last=False)

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

    def _end_value(self) -> Piece:
        self._at = _At.END
        return self._piece(is_last=True)

    def _piece(self, *, is_last: bool) -> Piece:
        piece, self._raw = Piece(self._key, self._raw, is_last), ""
        return piece
