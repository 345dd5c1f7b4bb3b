"""Follows one JSON object while its text comes in, and tells where the values of its keys begin and end.

Each character is looked at once, runs of them at a time, and nothing is decoded but the keys. Knows no tool.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

_BLANKS = " \t\r\n"
_BLANK_RUN = re.compile(r"[ \t\r\n]*")
_WORD_RUN = re.compile(r'[^"{}\[\], \t\r\n]*')  # of a value that is no string and not within brackets
_NESTED_RUN = re.compile(r'[^"{}\[\]]*')
_STRING_RUN = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)  # up to its last quote, or half an escape


class _Malformed(Exception):
    """The character there belongs to no JSON object."""

    def __init__(self, position: int) -> None:
        self.position = position


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
        self._key_raw: list[str] = []  # so far
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
        try:
            return self._feed(text, start)
        except _Malformed as malformed:
            self.is_malformed = True
            return None, malformed.position

    def _feed(self, text: str, position: int) -> tuple[Piece | None, int]:
        while position < len(text) and not self.is_done:
            char = text[position]
            if self._at is _At.VALUE and self._has_begun:
                return self._take_value(text, position)
            if self._at is _At.KEY and (self._is_string or char == '"'):
                position = self._take_key(text, position)
            elif char in _BLANKS:
                position = _end_of(_BLANK_RUN, text, position)
            elif self._at is _At.VALUE:
                return self._begin_value(char, position), position + 1
            else:
                self._take_mark(char, position)
                position += 1
        return None, position

    def _take_key(self, text: str, start: int) -> int:
        """Returns where the key ends, or the text."""
        is_begun, self._is_string = self._is_string, True
        end, has_ended = self._take_string(text, start if is_begun else start + 1)
        self._key_raw.append(text[start:end])
        if has_ended:
            try:
                self._key = msgspec.json.decode("".join(self._key_raw), type=str)
            except msgspec.DecodeError:
                raise _Malformed(end - 1) from None
            self._key_raw, self._at = [], _At.COLON
        return end

    def _take_mark(self, char: str, position: int) -> None:
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
            raise _Malformed(position)

    def _begin_value(self, char: str, position: int) -> Piece:
        if char in "}],":
            raise _Malformed(position)
        self._has_begun, self._is_string, self._depth = True, char == '"', int(char in "{[")
        return Piece(self._key, char, is_last=False)

    def _take_value(self, text: str, start: int) -> tuple[Piece, int]:
        """The rest of the value, as far as it is there, and where it ends."""
        position = start
        while position < len(text):
            if self._is_string:
                position, has_ended = self._take_string(text, position)
                if has_ended and not self._depth:
                    return self._end_value(text[start:position]), position
                continue
            position = _end_of(_NESTED_RUN if self._depth else _WORD_RUN, text, position)
            if position == len(text):
                break
            char = text[position]
            if not self._depth and char in "}]," + _BLANKS:  # behind a number or a word
                return self._end_word(text[start:position], char, position), position + 1
            position += 1
            if char == '"':
                self._is_string = True
            else:
                self._depth += 1 if char in "{[" else -1
                if not self._depth:
                    return self._end_value(text[start:position]), position
        return Piece(self._key, text[start:], is_last=False), position

    def _take_string(self, text: str, position: int) -> tuple[int, bool]:
        """Take a string from behind its first quote on. Returns where it, or the text, ends, and whether it did."""
        if self._is_escaped and position < len(text):
            self._is_escaped = False
            position += 1
        position = _end_of(_STRING_RUN, text, position)
        if position == len(text):
            return position, False
        self._is_string = self._is_escaped = text[position] == "\\"
        return position + 1, not self._is_string

    def _end_word(self, raw: str, char: str, position: int) -> Piece:
        """A value that ends before what follows it."""
        if char == "]":
            raise _Malformed(position)
        piece = self._end_value(raw)
        if char not in _BLANKS:
            self._take_mark(char, position)
        return piece

    def _end_value(self, raw: str) -> Piece:
        self._at = _At.END
        return Piece(self._key, raw, is_last=True)


def _end_of(run: re.Pattern[str], text: str, position: int) -> int:
    found = run.match(text, position)
    assert found is not None, "a run may be empty"
    return found.end()
