"""Turns the text of an answer into what is said and which functions are called with what, while it comes in.

Two formats are recognised (docs/structured-output.md). Nothing is evaluated, and no expression backtracks: the text is
searched for one tag, and what stands inside is scanned once (CVE-2025-9141, CVE-2025-48887). Texts that grow are lists
of pieces, joined when they are told: adding to a text copies it. Knows no wire format.
"""

import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from roseinfer.messages import CALL_TAGS
from roseinfer.text.tool_scanner import ObjectScanner, Piece

ToolFormat = Literal["hermes", "llama3_json"]

OPENING, CLOSING = CALL_TAGS
_ARGUMENT_KEYS = ("arguments", "parameters")
PIECE = 4096  # characters that are read at once: what is left of them is copied at each tag in them
MAX_RESCANNED_CHARS = 512  # of a call that turns out to be none: in more than that no other is looked for


@dataclass(slots=True)
class CallPart:
    """What has become known of one call: its id and name at first, pieces of its arguments then."""

    index: int
    pieces: list[str] = field(default_factory=list)
    call_id: str | None = None
    name: str | None = None

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Parts:
    """What a piece of text amounts to. Text between two calls is told before both, which nothing but order loses."""

    texts: list[str] = field(default_factory=list)
    calls: list[CallPart] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(self.texts)

    def extend(self, later: "Parts") -> None:
        self.texts += later.texts
        for part in later.calls:
            self.add(part)

    def add(self, part: CallPart) -> None:
        """A call that is here already grows."""
        if self.calls and self.calls[-1].index == part.index:
            self.calls[-1].pieces += part.pieces
        else:
            self.calls.append(part)


class _Call:
    """One call, from its brace on."""

    def __init__(self, index: int, names: Collection[str]) -> None:
        self.is_told = False  # its id and name are out
        self.is_refused = False  # it is no call of a function that is there
        self.has_arguments = False  # from their first brace to their last
        self.raw: list[str] = []  # until it is told
        self.scanner = ObjectScanner()
        self._index = index
        self._names = names
        self._name: str | None = None
        self._name_raw: list[str] = []
        self._arguments: list[str] = []  # not told yet
        self._key: str | None = None  # that the arguments stand under

    @property
    def is_named(self) -> bool:
        """It has the name of a function that is there."""
        return self._name is not None and not self.is_refused

    def feed(self, text: str, parts: Parts) -> str:
        """Take text, up to where the call ends or is known to be none. Returns what lies behind."""
        scanner, position = self.scanner, 0
        while position < len(text) and not (self.is_refused or scanner.is_done or scanner.is_malformed):
            piece, position = scanner.feed(text, position)
            if piece is not None:
                self._take(piece)
        if not self.is_told:
            self.raw.append(text[:position])
        if self.is_named and (self._key is not None or scanner.is_done):
            self._tell(parts)
        elif scanner.is_done or scanner.is_malformed:
            self.is_refused = True
        return text[position:]

    def _take(self, piece: Piece) -> None:
        if piece.key == "name" and self._name is None:
            self._name_raw.append(piece.text)
            if piece.is_last:
                self._name = _text_of("".join(self._name_raw))
                self.is_refused = self.is_refused or self._name not in self._names
        elif piece.key in _ARGUMENT_KEYS and self._key in {None, piece.key} and not self.has_arguments:
            if self._key is None and not piece.text.startswith("{"):
                self.is_refused = True
            self._key = piece.key
            self._arguments.append(piece.text)
            self.has_arguments = piece.is_last

    def _tell(self, parts: Parts) -> None:
        told, self._arguments = self._arguments, []
        if self.is_told:
            if told:  # not what stands around the arguments
                parts.add(CallPart(self._index, told))
            return
        call_id = f"call_{secrets.token_hex(12)}"
        parts.add(CallPart(self._index, told if self._key is not None else ["{}"], call_id, self._name))
        self.is_told, self.raw = True, []


def _text_of(raw: str) -> str | None:
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return None


class ToolCallParser:
    """One answer. Its parts, joined, do not depend on how the text was cut."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str], *, is_parallel: bool, is_forced: bool) -> None:
        self.num_calls = 0
        self.is_cut = False  # the text ended amid the arguments of a call that was told
        self._opening = OPENING if tool_format == "hermes" else ""
        self._names = names
        self._is_single = not is_parallel or tool_format != "hermes"
        self._is_forced = is_forced  # the text is calls, as far as it goes
        self._held: list[str] = []  # blanks that a call may follow, and what may be the beginning of a tag
        self._blanks = ""  # before the tag of the call
        self._call: _Call | None = None
        self._is_after_call = False  # nothing but blanks and a closing tag has come since
        self._expects_closing = False
        self._has_said = False

    def push(self, text: str) -> Parts:
        """Take some of the answer's text."""
        parts = Parts()
        for piece in in_pieces(text):
            rest = piece
            while rest:
                rest = self._push_call(rest, parts) if self._call is not None else self._push_text(rest, parts)
        return parts

    def finish(self) -> Parts:
        """The text has ended: what was held back, where it is text. Where calls are forced nothing is."""
        parts = Parts()
        call = self._call
        if call is not None and call.is_told:
            self.is_cut = not call.has_arguments
        elif not self._is_forced:
            self._say(self._rest(), parts)
        self._call, self._held = None, []
        return parts

    def _rest(self) -> str:
        """What was held back, as far as it is text."""
        if self._call is None:
            held = "".join(self._held)
            return "" if self._expects_closing or (self.num_calls and not held.strip()) else held
        # A whole tag opens a call. A bare object may be any answer in JSON until it has the name of a function.
        return "" if self._opening or self._call.is_named else self._blanks + "".join(self._call.raw)

    def _push_call(self, text: str, parts: Parts) -> str:
        """Take text inside a call. Returns what is to be taken as text."""
        call = self._call
        assert call is not None
        was_told = call.is_told
        rest = call.feed(text, parts)
        self.num_calls += call.is_told and not was_told
        if call.is_refused:
            self._call = None
            self._has_said = True
            self._say(self._blanks + self._opening, parts)
            raw = "".join(call.raw)
            if len(raw) <= MAX_RESCANNED_CHARS:
                return raw + rest  # which may hold the next tag
            self._say(raw, parts)
            return rest
        if call.scanner.is_done or call.scanner.is_malformed:
            self._call, self._is_after_call, self._expects_closing = None, True, bool(self._opening)
        return rest

    def _push_text(self, text: str, parts: Parts) -> str:
        """Take text outside of calls. Returns what stands behind the opening of one."""
        if text.isspace() and self._held and not self._held[-1].strip():
            self._held.append(text)  # of blanks there may be many
            return ""
        if self._held:
            text, self._held = "".join([*self._held, text]), []
        if self._is_single and self.num_calls:
            return ""  # what comes behind the one call is not told
        if self._is_after_call:
            text = self._drop_closing(text.lstrip())
        if not text:
            return ""
        self._is_after_call = False
        if not self._opening:
            return self._push_untagged(text, parts)
        start = text.find(self._opening)
        if start >= 0:
            said = text[:start].rstrip()
            self._say(said, parts)
            self._blanks = text[len(said) : start]
            self._call = _Call(self.num_calls, self._names)
            return text[start + len(self._opening) :]
        certain = len(text[: _first_candidate(text, self._opening)].rstrip())
        self._hold(text[certain:])
        self._say(text[:certain], parts)
        return ""

    def _push_untagged(self, text: str, parts: Parts) -> str:
        """An answer that begins with a brace is a call, as far as it goes."""
        begin = text.lstrip()
        if self._has_said or (begin and not begin.startswith("{")):
            self._say(text, parts)
        elif begin:
            self._call = _Call(self.num_calls, self._names)
            self._blanks = text[: len(text) - len(begin)]
            return begin
        else:
            self._hold(text)
        return ""

    def _drop_closing(self, text: str) -> str:
        """Take a closing tag away, and the blanks behind it, or wait for the rest of it."""
        if not self._expects_closing:
            return text
        if text != CLOSING and CLOSING.startswith(text):
            self._hold(text)
            return ""
        self._expects_closing = False
        return text.removeprefix(CLOSING).lstrip()

    def _hold(self, text: str) -> None:
        self._held = [text] if text else []

    def _say(self, text: str, parts: Parts) -> None:
        parts.texts.append(text)
        self._has_said = self._has_said or bool(text)


def in_pieces(text: str) -> Iterator[str]:
    """As it may be read with others having their turn between."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def _first_candidate(text: str, tag: str) -> int:
    """Where the longest tail of `text` begins that the tag starts with; its length when there is none."""
    for start in range(max(0, len(text) - len(tag) + 1), len(text)):
        if tag.startswith(text[start:]):
            return start
    return len(text)
