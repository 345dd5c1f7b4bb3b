"""Tool calls: which functions a model may call, the grammar that forces a call, and the calls in an answer's text.

To add a format, add a row to FORMATS and its name to `structured.tool_format` in config/options.py; where the option is
`auto`, `find_format` chooses by the chat template. docs/structured-output.md shows the formats.

Nothing is evaluated and no expression backtracks: the text is searched for one tag, and the JSON behind it is scanned
once (CVE-2025-9141, CVE-2025-48887). Texts that grow are lists of pieces, joined once: adding to a string copies it.
"""

import re
import secrets
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from roseinfer.messages import CallGrammar, CallShape, Grammar
from roseinfer.text.detokenizer import first_candidate
from roseinfer.text.grammar.source import encode_source


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes a call: an object with a name and arguments, between tags where it has any."""

    opening: str
    closing: str
    arguments_key: str
    can_repeat: bool  # an answer may hold several calls


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", "arguments", can_repeat=True),
    "llama3_json": ToolFormat("", "", "parameters", can_repeat=False),
}
CALL_TAGS = tuple(tag for row in FORMATS.values() for tag in (row.opening, row.closing) if tag)
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ARGUMENT_KEYS = tuple(row.arguments_key for row in FORMATS.values())  # models mix them up
PIECE = 4096  # characters read at once: what is left of them is copied at each tag in them
MAX_RESCANNED_CHARS = 512  # of text that turns out to be no call: in more than that no other is looked for
MAX_FORCED_CALLS = 16  # in one answer; a small model would go on until its tokens are used up


def find_format(wanted: str, template: str | None) -> ToolFormat:
    """The format named, or with `auto` the one in which the chat template writes the calls of earlier turns."""
    if wanted != "auto":
        return FORMATS[wanted]
    hermes = FORMATS["hermes"]
    is_llama = template is not None and hermes.opening not in template and '"parameters"' in template
    return FORMATS["llama3_json"] if is_llama else hermes


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None

    def for_template(self) -> dict[str, object]:
        """The function in the form that chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that one request allows the model to call, and whether it must."""

    functions: Sequence[Function]  # at least one
    is_forced: bool
    is_parallel: bool
    tool_format: ToolFormat

    def grammar(self) -> Grammar | None:
        """Allows calls that follow their schemas and nothing else; None unless calls are forced."""
        if not self.is_forced:
            return None
        form = self.tool_format
        before, after = (f"{form.opening}\n", f"\n{form.closing}") if form.opening else ("", "")
        shapes = [
            CallShape(
                before=f'{before}{{"name": "{function.name}", "{form.arguments_key}": ',
                # A call's arguments are an object, whatever else is left open.
                schema={"type": "object"} | (function.parameters or NO_PARAMETERS),
                after="}" + after,
            )
            for function in self.functions
        ]
        most = MAX_FORCED_CALLS if self.is_parallel and form.can_repeat else 1
        return Grammar("calls", encode_source(CallGrammar(shapes, "\n", most), "tools"))

    def parser(self) -> "ToolCallParser":
        names = {function.name for function in self.functions}
        return ToolCallParser(self.tool_format, names, is_parallel=self.is_parallel, is_forced=self.is_forced)


@dataclass(slots=True)
class CallPart:
    """What a piece of text adds to one call: its id and name at first, then pieces of its arguments."""

    index: int
    pieces: list[str] = field(default_factory=list)
    call_id: str | None = None
    name: str | None = None

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Parts:
    """What a piece of text adds to the answer. Text between two calls comes before both: only the order is lost."""

    texts: list[str] = field(default_factory=list)
    calls: list[CallPart] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    def extend(self, later: "Parts") -> None:
        self.texts += later.texts
        self.thoughts += later.thoughts
        for part in later.calls:
            self.add_part(part)

    def add_part(self, part: CallPart) -> None:
        """Add a call, or arguments to the last one."""
        if self.calls and self.calls[-1].index == part.index:
            self.calls[-1].pieces += part.pieces
        else:
            self.calls.append(part)


class _Call:
    """One call in the text, from its brace on."""

    def __init__(self, index: int, names: Collection[str]) -> None:
        self.is_begun = False  # its id and name are in the parts
        self.is_refused = False  # it calls no function that may be called
        self.has_arguments = False  # from their first brace to their last
        self.raw: list[str] = []  # until it is begun
        self.scanner = ObjectScanner()
        self._index = index
        self._names = names
        self._name: str | None = None
        self._name_raw: list[str] = []
        self._arguments: list[str] = []  # not in the parts yet
        self._key: str | None = None  # that the arguments stand under

    @property
    def is_named(self) -> bool:
        """It has the name of a function that may be called."""
        return self._name is not None and not self.is_refused

    def feed(self, text: str, parts: Parts) -> str:
        """Read text up to where the call ends or is refused. Returns what is left."""
        scanner, position = self.scanner, 0
        while position < len(text) and not (self.is_refused or scanner.is_done or scanner.is_malformed):
            piece, position = scanner.feed(text, position)
            if piece is not None:
                self._add_piece(piece)
        if not self.is_begun:
            self.raw.append(text[:position])
        if self.is_named and (self._key is not None or scanner.is_done):
            self._move_arguments(parts)
        elif scanner.is_done or scanner.is_malformed:
            self.is_refused = True
        return text[position:]

    def _add_piece(self, piece: "Piece") -> None:
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

    def _move_arguments(self, parts: Parts) -> None:
        arguments, self._arguments = self._arguments, []
        if self.is_begun:
            if arguments:  # not what stands around them
                parts.add_part(CallPart(self._index, arguments))
            return
        call_id = f"call_{secrets.token_hex(12)}"
        parts.add_part(CallPart(self._index, arguments if self._key is not None else ["{}"], call_id, self._name))
        self.is_begun, self.raw = True, []


def _text_of(raw: str) -> str | None:
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return None


class ToolCallParser:
    """Separates the text of one answer from its calls. The parts, joined, do not depend on how the text was cut."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str], *, is_parallel: bool, is_forced: bool) -> None:
        self.num_calls = 0
        self.is_cut = False  # the text ended amid the arguments of a call
        self._opening, self._closing = tool_format.opening, tool_format.closing
        self._names = names
        self._is_single = not (is_parallel and tool_format.can_repeat)
        self._is_forced = is_forced  # the text is nothing but calls
        self._held: list[str] = []  # blanks that a call may follow, and what may begin a tag
        self._blanks = ""  # before the tag of the call
        self._call: _Call | None = None
        self._is_after_call = False  # nothing but blanks and a closing tag has come since
        self._expects_closing = False
        self._has_text = False

    def push(self, text: str) -> Parts:
        """Read the next text of the answer."""
        parts = Parts()
        for piece in in_pieces(text):
            rest = piece
            while rest:
                rest = self._push_call(rest, parts) if self._call is not None else self._push_text(rest, parts)
        return parts

    def finish(self) -> Parts:
        """The text has ended: add what was held back, unless calls are forced and it is no text."""
        parts = Parts()
        call = self._call
        if call is not None and call.is_begun:
            self.is_cut = not call.has_arguments
        elif not self._is_forced:
            self._add_text(self._rest(), parts)
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
        """Read text inside a call. Returns what is to be read as text."""
        call = self._call
        assert call is not None
        was_begun = call.is_begun
        rest = call.feed(text, parts)
        self.num_calls += call.is_begun and not was_begun
        if call.is_refused:
            self._call = None
            self._has_text = True
            self._add_text(self._blanks + self._opening, parts)
            raw = "".join(call.raw)
            if len(raw) <= MAX_RESCANNED_CHARS:
                return raw + rest  # which may hold the next tag
            self._add_text(raw, parts)
            return rest
        if call.scanner.is_done or call.scanner.is_malformed:
            self._call, self._is_after_call, self._expects_closing = None, True, bool(self._closing)
        return rest

    def _push_text(self, text: str, parts: Parts) -> str:
        """Read text outside of calls. Returns what stands behind the opening of one."""
        if text.isspace() and self._held and not self._held[-1].strip():
            self._held.append(text)  # there may be many blanks
            return ""
        if self._held:
            text, self._held = "".join([*self._held, text]), []
        if self._is_single and self.num_calls:
            return ""  # text behind the one call is dropped
        if self._is_after_call:
            text = self._drop_closing(text.lstrip())
        if not text:
            return ""
        self._is_after_call = False
        if not self._opening:
            return self._push_untagged(text, parts)
        start = text.find(self._opening)
        if start >= 0:
            before = text[:start].rstrip()
            self._add_text(before, parts)
            self._blanks = text[len(before) : start]
            self._call = _Call(self.num_calls, self._names)
            return text[start + len(self._opening) :]
        certain = len(text[: first_candidate(text, (self._opening,), len(self._opening))].rstrip())
        self._hold(text[certain:])
        self._add_text(text[:certain], parts)
        return ""

    def _push_untagged(self, text: str, parts: Parts) -> str:
        """An answer that begins with a brace may be a call."""
        begin = text.lstrip()
        if self._has_text or (begin and not begin.startswith("{")):
            self._add_text(text, parts)
        elif begin:
            self._call = _Call(self.num_calls, self._names)
            self._blanks = text[: len(text) - len(begin)]
            return begin
        else:
            self._hold(text)
        return ""

    def _drop_closing(self, text: str) -> str:
        """Drop a closing tag and the blanks behind it, or hold the beginning of one."""
        if not self._expects_closing:
            return text
        if text != self._closing and self._closing.startswith(text):
            self._hold(text)
            return ""
        self._expects_closing = False
        return text.removeprefix(self._closing).lstrip()

    def _hold(self, text: str) -> None:
        self._held = [text] if text else []

    def _add_text(self, text: str, parts: Parts) -> None:
        parts.texts.append(text)
        self._has_text = self._has_text or bool(text)


def in_pieces(text: str) -> Iterator[str]:
    """Cut `text` into pieces that are each read in well under a millisecond."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


_BLANK_RUN = re.compile(r"[ \t\r\n]*")
_WORD_RUN = re.compile(r'[^"{}\[\], \t\r\n]*')  # of a value that is no string and not within brackets
_NESTED_RUN = re.compile(r'[^"{}\[\]]*')
_STRING_RUN = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)  # up to its last quote, or half an escape
_NO_RUN = re.compile("")

_Step = Generator[None, None, None]
_Char = Generator[None, None, str]


class _Malformed(Exception):
    """The next character belongs to no JSON object."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the raw text of a key's value."""

    key: str
    text: str
    is_last: bool  # the value ends with it


class ObjectScanner:
    """Follows one JSON object while its text comes in. Each character is read once, and only keys are decoded."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_malformed = False  # the text is no JSON object
        self._text, self._position = "", 0
        self._key = ""
        self._is_in_value = False
        self._parsing = self._parse()

    def feed(self, text: str, start: int) -> tuple[Piece | None, int]:
        """Read `text` from `start` up to behind the first or the last character of a value, whichever comes next.

        A caller may have seen enough there, and does not depend on how the text was cut. Returns what was read of a
        value, and where reading stopped: there, behind the object, at a character that belongs to none, or behind the
        text.
        """
        self._text, self._position = text, start
        was_in_value = self._is_in_value
        next(self._parsing, None)
        if not (was_in_value or self._is_in_value):
            return None, self._position
        begin = start if was_in_value else self._position - 1
        return Piece(self._key, text[begin : self._position], not self._is_in_value), self._position

    # Each of these stops at the end of the text, and goes on in the next.

    def _parse(self) -> _Step:
        try:
            yield from self._read_object()
            self.is_done = True
        except _Malformed:
            self.is_malformed = True

    def _read_object(self) -> _Step:
        yield from self._read_mark("{")
        char = yield from self._skip(_BLANK_RUN)
        while char != "}":
            yield from self._read_mark('"')
            yield from self._read_key()
            yield from self._read_mark(":")
            yield from self._read_value()
            char = yield from self._skip(_BLANK_RUN)
            if char != "}":
                yield from self._read_mark(",")
        self._position += 1

    def _skip(self, run: re.Pattern[str]) -> _Char:
        """Read a run of characters. Returns the one behind it, which is not read."""
        while True:
            found = run.match(self._text, self._position)
            assert found is not None, "a run may be empty"
            self._position = found.end()
            if self._position < len(self._text):
                return self._text[self._position]
            yield

    def _read_mark(self, mark: str) -> _Step:
        if (yield from self._skip(_BLANK_RUN)) != mark:
            raise _Malformed
        self._position += 1

    def _read_key(self) -> _Step:
        raw, begin = ['"'], self._position
        for _ in self._read_string():
            raw.append(self._text[begin:])
            yield
            begin = 0
        raw.append(self._text[begin : self._position])
        try:
            self._key = msgspec.json.decode("".join(raw), type=str)
        except msgspec.DecodeError:
            self._position -= 1
            raise _Malformed from None

    def _read_string(self) -> _Step:
        """Read a string from behind its first quote."""
        while (yield from self._skip(_STRING_RUN)) != '"':  # half an escape
            self._position += 1
            yield from self._skip(_NO_RUN)
            self._position += 1
        self._position += 1

    def _read_value(self) -> _Step:
        char = yield from self._skip(_BLANK_RUN)
        if char in "}],":
            raise _Malformed
        self._position, self._is_in_value = self._position + 1, True
        yield  # behind the first character
        if char not in '"{[':
            char = yield from self._skip(_WORD_RUN)
            if char in '"{[':  # invalid JSON, read as one value
                self._position += 1
        if char == '"':
            yield from self._read_string()
        elif char in "{[":
            yield from self._read_brackets()
        self._is_in_value = False
        yield  # behind the last

    def _read_brackets(self) -> _Step:
        """Read lists and objects from behind the first bracket."""
        depth = 1
        while depth:
            char = yield from self._skip(_NESTED_RUN)
            self._position += 1
            if char == '"':
                yield from self._read_string()
            else:
                depth += 1 if char in "{[" else -1
