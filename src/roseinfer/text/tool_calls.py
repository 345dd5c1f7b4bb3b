"""Tool calls: which functions a model may call, the grammar that forces a call, and the calls in an answer's text.

To add a format, add a row to FORMATS, its name to `structured.tool_format` in config/options.py, and to `find_format`
what tells its chat templates. docs/structured-output.md shows the formats.

Texts that grow are lists of pieces, joined once: adding to a string copies it.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from roseinfer.messages import CallGrammar, CallShape, Grammar, ParameterShape
from roseinfer.text.detokenizer import first_candidate
from roseinfer.text.grammar.source import encode_source
from roseinfer.text.scanner import (
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


@dataclass(frozen=True, slots=True)
class Parameters:
    """How a call writes one parameter, where its arguments are no JSON object."""

    before_key: str
    after_key: str
    before_value: str
    after_value: str
    between: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls.

    Behind one of `openings`, or where `begins` stands, comes a call or a list of calls in brackets. A call is an object
    with a name and arguments. With the syntax `named` it may also be a name and then an object of arguments, or the
    parameters, each between tags; with `python` it is written as Python does, and always in a list.
    """

    openings: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()  # with which a call without an opening begins
    syntax: Literal["json", "named", "python"] = "json"
    before_name: str = ""  # what may stand there
    after_name: tuple[str, ...] = ()  # marks that may stand between the name and the arguments
    parameters: Parameters | None = None
    closings: tuple[str, ...] = ()  # marks that may stand behind a call, in this order
    # What is forced: fixed text around all calls, between two (None: there is one at most), and around the arguments.
    before: str = ""
    between: str | None = None
    after: str = ""
    before_call: str  # with NAME for the function's
    after_call: str
    has_short_ids: bool = False  # its templates demand nine letters or digits


_CALL_ID = "[CALL_ID]"
_LIST = ToolFormat(before_call='{"name": "NAME", "arguments": ', between=", ", after_call="}", after="]")
_DEEPSEEK_V3 = ToolFormat(
    openings=("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>"),
    syntax="named",
    before_name="function<｜tool▁sep｜>",
    after_name=("<｜tool▁sep｜>", "```json"),
    closings=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    before="<｜tool▁calls▁begin｜>",
    between="\n",
    after="<｜tool▁calls▁end｜>",
    before_call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    after_call="\n```<｜tool▁call▁end｜>",
)
_MISTRAL = replace(
    _LIST,
    openings=("[TOOL_CALLS]",),
    syntax="named",
    after_name=(_CALL_ID, "[ARGS]"),
    before="[TOOL_CALLS] [",
    has_short_ids=True,
)
FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        between="\n",
        before_call='<tool_call>\n{"name": "NAME", "arguments": ',
        after_call="}\n</tool_call>",
    ),
    "llama3_json": ToolFormat(
        openings=("<|python_tag|>",),
        begins=("{",),
        closings=(";",),
        before_call='{"name": "NAME", "parameters": ',
        after_call="}",
    ),
    "pythonic": ToolFormat(
        openings=("<|python_start|>",),
        begins=("[",),
        syntax="python",
        parameters=Parameters("", "=", "", "", between=", "),
        closings=("<|python_end|>",),
        before="[",
        between=", ",
        after="]",
        before_call="NAME(",
        after_call=")",
    ),
    "mistral": _MISTRAL,
    "mistral_v11": replace(
        _MISTRAL, before="", between="", after="", before_call="[TOOL_CALLS]NAME[ARGS]", after_call=""
    ),
    "qwen3_coder": ToolFormat(
        openings=("<tool_call>",),
        begins=("<function=",),
        syntax="named",
        before_name="<function=",
        after_name=(">",),
        parameters=Parameters("<parameter=", ">", "\n", "\n</parameter>\n"),
        closings=("</function>", "</tool_call>"),
        between="\n",
        before_call="<tool_call>\n<function=NAME>\n",
        after_call="</function>\n</tool_call>",
    ),
    "glm45": ToolFormat(
        openings=("<tool_call>",),
        syntax="named",
        parameters=Parameters("<arg_key>", "</arg_key>", "\n<arg_value>", "</arg_value>\n"),
        closings=("</tool_call>",),
        between="\n",
        before_call="<tool_call>NAME\n",
        after_call="</tool_call>",
    ),
    "granite": replace(_LIST, openings=("<|tool_call|>", "<tool_call>"), before="<|tool_call|>["),
    "phi4_mini": replace(
        _LIST,
        openings=("<|tool_call|>", "functools"),
        closings=("<|/tool_call|>",),
        before="<|tool_call|>[",
        after="]<|/tool_call|>",
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": replace(
        _DEEPSEEK_V3,
        between="",
        before_call="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        after_call="<｜tool▁call▁end｜>",
    ),
}
_TAG = re.compile(r"<[^<>=\s]+>|\[[A-Z_]+\]")
# Where they are tokens of the vocabulary they are written and forced as such, also where it marks them special.
CALL_TAGS = tuple(sorted({tag for row in FORMATS.values() for tag in _TAG.findall(repr(row))}))
# The first row of which all stands in a chat template says how it writes the calls of earlier turns.
_SIGNS = (
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_v11"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<function=",), "qwen3_coder"),
    (("<arg_key>",), "glm45"),
    (("functools[",), "phi4_mini"),
    (("<|/tool_call|>",), "phi4_mini"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("func_name1(",), "pythonic"),
    ((".name + '('",), "pythonic"),
    (('"parameters"',), "llama3_json"),
)
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ARGUMENT_KEYS = ("arguments", "parameters")  # models mix them up
_CALL_KEYS = ("name", "type", "id", *_ARGUMENT_KEYS)
# What must follow where a call without an opening begins, as far as the text goes: most brackets are ruled out by it.
_FOLLOWS = {
    "{": rf'(?=[ \t\r\n]*+(?:\Z|"(?:[a-z]*\Z|(?:{"|".join(_CALL_KEYS)})")))',
    "[": r"(?=[ \t\r\n]*+[\w.-]*+(?:\Z|\())",
}
PIECE = 4096  # characters read at once: what is left of them is copied at each tag in them
MAX_RESCANNED_CHARS = 512  # of text that turns out to be no call: in more than that no other is looked for
MAX_FORCED_CALLS = 16  # in one answer; a small model would go on until its tokens are used up
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def find_format(wanted: str, template: str | None) -> ToolFormat:
    """The format named, or with `auto` the one in which the chat template writes the calls of earlier turns."""
    if wanted != "auto":
        return FORMATS[wanted]
    names = (name for signs, name in _SIGNS if template is not None and all(sign in template for sign in signs))
    return FORMATS[next(names, "hermes")]


@cache
def _openings(form: ToolFormat) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """What finds the first place where calls may begin, and the words that it is about, the longest first."""
    words = tuple(sorted((*form.openings, *form.begins), key=len, reverse=True))
    return re.compile("|".join(f"{re.escape(word)}{_FOLLOWS.get(word, '')}" for word in words)), words


def short_id(call_id: str) -> str:
    """Nine letters and digits, which Mistral's templates demand: the same ones for the same id."""
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


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


_OF_JSON = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def parameter_types(parameters: Mapping[str, Any] | None) -> dict[str, set[str]]:
    """By the parameters' names, the types that a function's schema allows; none where it says nothing."""
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, dict):
        return {}
    referred: dict[str, set[str]] = {}
    return {key: _types(schema, parameters, referred) for key, schema in properties.items()}


def _types(schema: object, root: object, referred: dict[str, set[str]], depth: int = 16) -> set[str]:
    """`referred` keeps the types behind each reference, of which many properties may have the same."""
    if not isinstance(schema, dict) or not depth:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str | list):
        types = {declared} if isinstance(declared, str) else {*map(str, declared)}
    else:
        values = listed_values(schema)
        types = {_OF_JSON.get(type(value), "null") for value in values}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        if reference not in referred:
            referred[reference] = set()  # a circle adds nothing
            referred[reference] = _types(_at(root, reference), root, referred, depth - 1)
        types |= referred[reference]
    inner = [one for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for one in schema[key]]
    return types.union(*(_types(one, root, referred, depth - 1) for one in inner))


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists, if it does."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def _at(root: object, reference: str) -> object:
    for key in reference.split("/")[1:]:
        root = root.get(key) if isinstance(root, dict) else None
    return root


def _is_text(types: Collection[str]) -> bool:
    """A parameter between tags stands there as text, without quotes."""
    return not types or "string" in types


def _typed(raw: str, types: Collection[str]) -> str:
    """The value of a parameter as JSON: what it says, or itself as a string where it says nothing of these types."""
    value = raw.strip() if is_json_value(raw) else literal_as_json(raw)
    if value is None or (_is_text(types) and not _kinds(value) & {*types}):
        return json.dumps(raw, ensure_ascii=False)
    return value


def _kinds(value: str) -> set[str]:
    """The types of a value in JSON, by its first character."""
    kind = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}.get(value[0])
    return {kind} if kind else {"number", "integer"} if value.lstrip("-").isdigit() else {"number"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that one request allows the model to call, and whether it must."""

    functions: Sequence[Function]  # at least one
    is_forced: bool
    is_parallel: bool
    tool_format: ToolFormat

    def grammar(self, form_of_text: Grammar | None = None) -> Grammar | None:
        """Allows calls by their schemas or, unless calls are forced, a text of a form; None where nothing is forced."""
        if not self.is_forced and form_of_text is None:
            return None
        form = self.tool_format
        shapes = [_shape(form, function) for function in self.functions]
        most = MAX_FORCED_CALLS if self.is_parallel and form.between is not None else 1
        instead = None if self.is_forced else form_of_text
        grammar = CallGrammar(shapes, form.between or "", most, form.before, form.after, instead)
        return Grammar("calls", encode_source(grammar, "tools"))

    def parser(self) -> "ToolCallParser":
        return ToolCallParser(self.tool_format, self.functions, is_parallel=self.is_parallel, is_forced=self.is_forced)


def _shape(form: ToolFormat, function: Function) -> CallShape:
    before = form.before_call.replace("NAME", function.name)
    # A call's arguments are an object, whatever else is left open.
    schema: dict[str, Any] = {"type": "object"} | (function.parameters or NO_PARAMETERS)
    if form.parameters is None:
        return CallShape(before, schema, form.after_call)
    marks, types = form.parameters, parameter_types(schema)
    required = schema.get("required")
    properties: Any = schema["properties"] if types else {}
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    shapes = [
        ParameterShape(
            before=f"{marks.before_key}{key}{marks.after_key}{marks.before_value}",
            schema=properties[key] if isinstance(properties[key], dict) else {},
            after=marks.after_value,
            is_text=form.syntax == "named" and _is_text(types[key]),
            is_required=isinstance(required, list) and key in required,
        )
        for key in types
    ]
    return CallShape(before, shared, form.after_call, shapes, marks.between)


@dataclass(slots=True)
class CallPart:
    """What a piece of text adds to one call: its id and name at first, then pieces of its arguments."""

    index: int
    pieces: list[str] = field(default_factory=list)
    call_id: str | None = None
    name: str | None = None
    num_texts: int = 0  # of its `Parts`, that came before it

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Parts:
    """What a piece of text adds to the answer: thoughts, and behind them texts and calls."""

    texts: list[str] = field(default_factory=list)
    calls: list[CallPart] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    def in_order(self) -> Iterator[str | CallPart]:
        """The texts and the calls as they came."""
        start = 0
        for call in self.calls:
            if text := "".join(self.texts[start : call.num_texts]):
                yield text
            yield call
            start = call.num_texts
        if text := "".join(self.texts[start:]):
            yield text

    def extend(self, later: "Parts") -> None:
        for part in later.calls:
            part.num_texts += len(self.texts)
            self.add_part(part)
        self.texts += later.texts
        self.thoughts += later.thoughts

    def add_part(self, part: CallPart) -> None:
        """Add a call, or arguments to the last one."""
        if self.calls and self.calls[-1].index == part.index:
            self.calls[-1].pieces += part.pieces
        else:
            self.calls.append(part)


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
            if (yield from self.take(mark)) and mark == _CALL_ID:
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
