"""Finds the tool calls in an answer's text, which comes in pieces.

Texts that grow are lists of pieces, joined once: adding to a string copies it.
"""

import json
import re
import secrets
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

from roseinfer.text.answers.functions import Function, may_be_text, parameter_types
from roseinfer.text.answers.parts import CallPart, Parts
from roseinfer.text.answers.scanner import (
    BLANK_RUN,
    NAME_RUN,
    Malformed,
    Scanner,
    Step,
    is_json_value,
    json_text,
    literal_as_json,
    string_of,
)
from roseinfer.text.answers.tool_formats import CALL_ID, Parameters, ToolFormat
from roseinfer.text.tokenizer.detokenizer import first_candidate

_ARGUMENT_KEYS = ("arguments", "parameters")  # models mix them up
_CALL_KEYS = ("name", "type", "id", *_ARGUMENT_KEYS)
# What must follow where a call without an opening begins, as far as the text goes: most brackets are ruled out by it.
_FOLLOWS = {
    "{": rf'(?=[ \t\r\n]*+(?:\Z|"(?:[a-z]*\Z|(?:{"|".join(_CALL_KEYS)})")))',
    "[": r"(?=[ \t\r\n]*+[\w.-]*+(?:\Z|\())",
}
PIECE = 4096  # characters read at once: what is left of them is copied at each tag in them
MAX_RESCANNED_CHARS = 512  # of text that turns out to be no call: in more than that no other is looked for


@cache
def _openings(form: ToolFormat) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """What finds the first place where calls may begin, and the words that it is about, the longest first."""
    words = tuple(sorted((*form.openings, *form.begins), key=len, reverse=True))
    return re.compile("|".join(f"{re.escape(word)}{_FOLLOWS.get(word, '')}" for word in words)), words


def _typed(raw: str, types: Collection[str]) -> str:
    """The value of a parameter as JSON: what it says, or itself as a string where it says nothing of these types."""
    value = raw.strip() if is_json_value(raw) else literal_as_json(raw)
    if value is None or (may_be_text(types) and not _kinds(value) & {*types}):
        return json.dumps(raw, ensure_ascii=False)
    return value


def _kinds(value: str) -> set[str]:
    """The types of a value in JSON, by its first character."""
    kind = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}.get(value[0])
    return {kind} if kind else {"number", "integer"} if value.lstrip("-").isdigit() else {"number"}


class _Output:
    """Makes the parts of an answer. Blanks that stand alone at its beginning, between calls or behind them are none."""

    def __init__(self, *, has_short_ids: bool) -> None:
        self.parts = Parts()
        self.num_calls = 0
        self.is_cut = False  # the last call's arguments have not ended
        self._has_short_ids = has_short_ids
        self._blanks: list[str] = []
        self._has_text = False  # since the last call

    def add_text(self, text: str) -> None:
        if self._has_text:
            self.parts.texts.append(text)
        elif text.strip():
            self.parts.texts += [*self._blanks, text]
            self._has_text = True
        else:
            self._blanks.append(text)

    def begin_call(self, name: str) -> None:
        self._blanks, self._has_text = [], False
        call_id = secrets.token_hex(5)[:9] if self._has_short_ids else f"call_{secrets.token_hex(12)}"
        self.parts.add_part(CallPart(self.num_calls, [], call_id, name, len(self.parts.texts)))
        self.num_calls += 1
        self.is_cut = True

    def add_arguments(self, piece: str) -> None:
        self.parts.add_part(CallPart(self.num_calls - 1, [piece]))

    def end_arguments(self) -> None:
        self.is_cut = False

    def finish(self) -> None:
        """The text has ended, and was nothing but blanks unless there are calls."""
        if not self.num_calls and not self._has_text:
            self.parts.texts += self._blanks


class _UnknownFunction(Malformed):
    """A call of a function that was not listed, which is text."""


class _Functions:
    """The functions that may be called, and the types of their parameters once they are asked for."""

    def __init__(self, functions: Sequence[Function]) -> None:
        self._by_name = {function.name: function for function in functions}
        self._types: dict[str, dict[str, set[str]]] = {}

    def known(self, name: str) -> str:
        """The name, if it is one of a function."""
        if name not in self._by_name:
            raise _UnknownFunction
        return name

    def types(self, name: str) -> dict[str, set[str]]:
        if name not in self._types:
            self._types[name] = parameter_types(self._by_name[name].parameters)
        return self._types[name]


class _Reader(Scanner):
    """Reads a call, or a list of them, from the opening on."""

    def __init__(
        self, form: ToolFormat, opening: str, functions: _Functions, output: _Output, *, is_single: bool
    ) -> None:
        super().__init__()
        self.is_over = False
        self.is_malformed = False  # what was read since the last call is none
        self._form = form
        self._is_bare = opening in form.begins
        self._functions = functions
        self._output = output
        self._is_single = is_single
        self._state: Literal["open", "call", "text"] = "open"  # what the text being read is, as far as is known
        self._is_behind_call = False  # nothing but blanks and closing marks has come since
        self._raw: list[str] = []  # what was read while it is open
        self._settled = 0
        self._steps = self._read_block("" if self._is_bare else opening)

    def feed(self, text: str) -> str:
        """Read text up to where the calls are over. Returns what is left."""
        self.begin(text)
        self._settled = 0
        try:
            next(self._steps)
        except StopIteration:
            self.is_over = True
        except Malformed:
            self.is_over, self.is_malformed = True, not self._is_behind_call
        self.flush()
        self._settle()
        return self.rest if self.is_over else ""

    def unread(self) -> str:
        """What was read and belongs to no call."""
        return "".join(self._raw)

    def finish(self) -> str:
        """The text has ended. Returns what belongs to no call."""
        return "" if self._state == "call" or self._is_behind_call else self.unread() + self.rest

    def _settle(self) -> None:
        """Put what was read where it belongs."""
        if self._settled < self._position:
            if self._state == "open":
                self._raw.append(self._text[self._settled : self._position])
            elif self._state == "text":
                self._output.add_text(self._text[self._settled : self._position])
            self._settled = self._position

    def _turn(self, state: Literal["open", "call", "text"]) -> None:
        """Go on in another state; what was open belongs to it."""
        self._settle()
        if state == "text":
            self._output.add_text(self.unread())
        self._state, self._raw = state, []

    def _begin_call(self, name: str) -> None:
        self._turn("call")
        self._output.begin_call(name)

    def _read_block(self, opening: str) -> Step:
        yield from self.take(opening)
        is_list = (yield from self.skip(BLANK_RUN)) == "["
        if is_list:
            self._position += 1
        elif self._form.syntax == "python":
            raise Malformed
        while True:
            is_call = yield from self._read_element(is_list=is_list)
            self._turn("open")
            self._is_behind_call = is_call
            if not is_list or (is_call and self._is_single):
                break
            char = yield from self.skip(BLANK_RUN)
            if char == ",":
                self._position += 1
                char = yield from self.skip(BLANK_RUN)
            elif char != "{":
                break
            if char == "]":
                break
            self._is_behind_call = False
        if self._is_behind_call:
            for mark in ("]", *self._form.closings) if is_list else self._form.closings:
                yield from self.skip(BLANK_RUN)
                if (yield from self.take(mark)):
                    self._turn("open")

    def _read_element(self, *, is_list: bool) -> Generator[None, None, bool]:
        """Read a call. Returns whether it is one: in a list the others are read past one that is not."""
        is_python = self._form.syntax == "python"
        char = yield from self.skip(BLANK_RUN)
        try:
            if is_python:
                yield from self._read_python_call()
            elif char == "{":
                yield from self._read_json_call()
            elif self._form.syntax == "named":
                yield from self._read_named_call()
            else:
                raise Malformed
        except _UnknownFunction:
            if not is_list:
                raise
            self._turn("text")
            yield from self.read_brackets(is_python=is_python)
            return False
        return True

    def _read_json_call(self) -> Step:
        name: str | None = None
        early: list[str] | None = None  # arguments that came before the name
        try:
            yield from self.read_mark("{")
            char = yield from self.skip(BLANK_RUN)
            while char != "}":
                key = yield from self.read_string()
                yield from self.read_mark(":")
                if key == "name" and name is None:
                    name = self._functions.known((yield from self.read_string()))
                elif key in _ARGUMENT_KEYS and early is None:
                    early = yield from self._read_arguments(name)
                else:
                    self._check_key(key)
                    yield from self.read_value()
                if name is not None and early is not None:
                    self._begin_whole(name, early)
                char = yield from self.skip(BLANK_RUN)
                if char != "}":
                    yield from self.read_mark(",")
            self._position += 1
        except Malformed:
            if self._state == "open":
                raise
        if name is None or (early is None and self._is_bare):
            raise Malformed
        self._begin_whole(name, early or ["{}"])

    def _check_key(self, key: str) -> None:
        """An object without an opening may be an answer in JSON, which is not held back to its end."""
        if self._is_bare and self._state == "open" and key not in _CALL_KEYS:
            raise Malformed

    def _begin_whole(self, name: str, arguments: list[str]) -> None:
        """Begin a call whose arguments have ended, unless it has begun."""
        if self._state == "open":
            self._begin_call(name)
            for piece in arguments:
                self._output.add_arguments(piece)
            self._output.end_arguments()

    def _read_arguments(self, name: str | None) -> Generator[None, None, list[str]]:
        """Read an object, a string that holds one, or null, and return it. The object of a named call is output."""
        pieces: list[str] = []
        if (yield from self.skip(BLANK_RUN)) == "{":
            yield from self._read_object(name, pieces)
            return pieces
        self.capture(pieces.append)
        yield from self.read_value()
        self.release()
        raw = "".join(pieces)
        text = "{}" if raw == "null" else (string_of(raw) or "").strip()
        if not is_json_value(text, dict[str, Any]):
            raise Malformed
        return [text]

    def _read_object(self, name: str | None, pieces: list[str]) -> Step:
        if name is not None:
            self._begin_call(name)
        self.capture(pieces.append if name is None else self._output.add_arguments)
        self._position += 1
        yield from self.read_brackets()
        self.release()
        if name is not None:
            self._output.end_arguments()

    def _read_named_call(self) -> Step:
        form = self._form
        yield from self.take(form.before_name)
        name = self._functions.known((yield from self.read_run(NAME_RUN)))
        for mark in form.after_name:
            yield from self.skip(BLANK_RUN)
            if (yield from self.take(mark)) and mark == CALL_ID:
                yield from self.skip(NAME_RUN)
        char = yield from self.skip(BLANK_RUN)
        if char == "{":
            yield from self._read_object(name, [])
        elif char == "<" and form.parameters is not None:
            self._begin_call(name)
            yield from self._read_parameters(form.parameters, self._functions.types(name))
        else:
            raise Malformed

    def _read_parameters(self, marks: Parameters, types: Mapping[str, set[str]]) -> Step:
        """Read parameters, and output them as an object, which ends where no other parameter follows."""
        output, before = self._output, "{"
        before_value = marks.before_value.strip()
        while (yield from self.take(marks.before_key)):
            key: list[str] = []
            yield from self.read_until((marks.after_key,), key.append)
            if before_value:
                yield from self.skip(BLANK_RUN)
            yield from self.take(before_value or marks.before_value)
            name = "".join(key).strip()
            output.add_arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
            yield from self._read_parameter(types.get(name, set()), marks.after_value.rstrip())
            before = ", "
            yield from self.skip(BLANK_RUN)
        output.add_arguments("{}" if before == "{" else "}")
        output.end_arguments()

    def _read_parameter(self, types: set[str], end: str) -> Step:
        output, ends = self._output, (end, end.lstrip())  # the line's end before it may be left out
        if types <= {"string"}:
            output.add_arguments('"')
            yield from self.read_until(ends, lambda text: output.add_arguments(json_text(text)))
            output.add_arguments('"')
        else:
            raw: list[str] = []
            yield from self.read_until(ends, raw.append)
            output.add_arguments(_typed("".join(raw), types))

    def _read_python_call(self) -> Step:
        """Read a call to its end before it is one: what is wrong anywhere in it makes it text."""
        name = yield from self.read_run(NAME_RUN)
        if not (yield from self.take("(")):
            raise Malformed
        self._functions.known(name)
        pieces = ["{"]
        char = yield from self.skip(BLANK_RUN)
        while char != ")":
            key = yield from self.read_run(NAME_RUN)
            if not key:
                raise Malformed
            yield from self.read_mark("=")
            pieces.append(f"{json.dumps(key, ensure_ascii=False)}: ")
            yield from self.read_literal(pieces)
            char = yield from self.skip(BLANK_RUN)
            if char == ",":
                yield from self.read_mark(",")
                char = yield from self.skip(BLANK_RUN)
                pieces.append("" if char == ")" else ", ")
            elif char != ")":
                raise Malformed
        self._position += 1
        self._begin_whole(name, ["".join([*pieces, "}"])])


class ToolCallParser:
    """Separates the text of one answer from its calls. The parts, joined, do not depend on how the text was cut."""

    def __init__(
        self, tool_format: ToolFormat, functions: Sequence[Function], *, is_parallel: bool, is_forced: bool
    ) -> None:
        self._form = tool_format
        self._functions = _Functions(functions)
        self._is_single = not is_parallel
        self._is_forced = is_forced  # the text is nothing but calls
        self._output = _Output(has_short_ids=tool_format.has_short_ids)
        self._opening, self._words = _openings(tool_format)
        self._held = ""  # what may begin an opening
        self._reader: _Reader | None = None

    @property
    def num_calls(self) -> int:
        return self._output.num_calls

    @property
    def is_cut(self) -> bool:
        """The text so far ends amid the arguments of a call."""
        return self._output.is_cut

    def push(self, text: str) -> Parts:
        """Read the next text of the answer."""
        parts = self._output.parts = Parts()
        for piece in in_pieces(text):
            rest = piece
            while rest:
                rest = self._push_text(rest) if self._reader is None else self._push_calls(self._reader, rest)
        return parts

    def finish(self) -> Parts:
        """The text has ended: what was held back is text too, unless calls are forced."""
        parts = self._output.parts = Parts()
        if not self._is_forced:
            self._output.add_text(self._held if self._reader is None else self._reader.finish())
            self._output.finish()
        self._held, self._reader = "", None
        return parts

    def _push_calls(self, reader: _Reader, text: str) -> str:
        """Read text behind an opening. Returns what is to be read as text."""
        rest = reader.feed(text)
        if not reader.is_over:
            return ""
        self._reader, unread = None, reader.unread()
        if reader.is_malformed:
            # Its rest may hold the next opening.
            searched = 1 if len(unread) <= MAX_RESCANNED_CHARS else len(unread)
            self._output.add_text(unread[:searched])
            unread = unread[searched:]
        return unread + rest

    def _push_text(self, text: str) -> str:
        """Read text outside of calls. Returns what stands from the opening of one on."""
        if self._is_single and self.num_calls:
            return ""  # text behind the one call is dropped
        text, self._held = self._held + text, ""
        found = self._opening.search(text)
        if found is None:
            start = first_candidate(text, self._words, len(self._words[0]))
            self._held = text[start:]
        else:
            start = found.start()
            self._reader = _Reader(self._form, found[0], self._functions, self._output, is_single=self._is_single)
        if start:
            self._output.add_text(text[:start])
        return text[start:] if found else ""


def in_pieces(text: str) -> Iterator[str]:
    """Cut `text` into pieces that are each read in well under a millisecond; in some, if they hold little but tags."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))
