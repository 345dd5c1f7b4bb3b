"""Writes a grammar as llguidance reads it, in Lark or as a JSON schema, and its errors as the author can read them."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import llguidance
import msgspec
from msgspec.structs import replace

from roseinfer.errors import InvalidRequest
from roseinfer.messages import CallGrammar, Grammar, ParameterShape
from roseinfer.text.answers.functions import declared_types, joined_schemas, listed_values, may_be_text
from roseinfer.text.grammar.schemas import as_root, for_library, moved
from roseinfer.text.grammar.tokenizer_file import TokenizerFile

# No free whitespace, in which a small model can go on for ever: a blank after a comma and a colon, or none.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
}
# The library finds all that must come next at each mask. In a grammar whose terminals overlap, such as `/a+/` before
# `/a+b/`, that may never end, and a matcher cannot be stopped. Of several such lines the last holds.
_UNFORCED = '%llguidance {"no_forcing": true}'

MAX_MESSAGE_CHARS = 200
_TOO_WIDE = "Current row has"  # the library's words for more than `max_items_in_row`
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_PICTURE = re.compile(r"(?:\n +\d+ \| .*|\n *\^ *(?=\n|$))+")  # lines of the grammar, with a mark below one
_CALL_RULE = re.compile(r"\| (?:json|value)_(\d+)[_:].*\n *\^")  # the marked line, where `_calls` wrote it
_OF_SCHEMA = "failed to compile JSON schema: "
_BAD_EXPRESSION = re.compile(
    r"regex parse error:\n    (?P<expression>.*)\n    (?P<before> *)\^+\nerror: (?P<reason>.*)"
)


def source_of(grammar: Grammar, file: TokenizerFile) -> str:
    """The grammar in the library's own form: up to where a thought begins, or from where it has ended.

    Raises InvalidRequest.
    """
    form = _form(grammar, file)
    if grammar.thought is None:
        return form
    start = "BLANKS? @form"
    if not grammar.thought.is_open:
        control_id = next((i for i, name in file.control.items() if name == grammar.thought.opening), None)
        opening = _quote(grammar.thought.opening) if control_id is None else f"<[{control_id}]>"
        start = f"@form | {opening}"
    # Models write up to two ends of line behind a thought.
    return _joined(f"start: {start}\nBLANKS: /[ \\n]{{1,2}}/", form=form)


def _joined(frame: str, **parts: str) -> str:
    """A grammar in Lark that has others, in the library's own form, as parts that it calls by their names."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": frame}]
    for name, part in parts.items():
        first, *others = json.loads(part)["grammars"] if part.startswith("{") else [{"lark_grammar": part}]
        grammars += [first | {"name": name}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _form(grammar: Grammar, file: TokenizerFile) -> str:
    match grammar.kind:
        case "json_schema":
            try:
                schema = msgspec.json.decode(grammar.source, type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError):
                raise InvalidRequest("The schema is no JSON object.") from None
            return llguidance.LLMatcher.grammar_from_json_schema(_with_options(schema))
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            try:
                choices = msgspec.json.decode(grammar.source, type=list[str])
            except msgspec.DecodeError:
                raise InvalidRequest("The choices are no list of texts in JSON.") from None
            return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quote, choices)))
        case "calls":
            try:
                calls = msgspec.json.decode(grammar.source, type=CallGrammar)
            except msgspec.DecodeError:
                raise InvalidRequest("The calls are not of the form that they have in JSON.") from None
            lark = llguidance.LLMatcher.grammar_from_lark(_calls(calls))
            return (
                lark
                if calls.form is None
                else _joined("start: @calls | @text", calls=lark, text=_form(calls.form, file))
            )
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(f"{file.with_ids(grammar.source)}\n{_UNFORCED}")
        case "text":
            raise InvalidRequest("Any text is no grammar.")


def _calls(grammar: CallGrammar) -> str:
    """The grammar of calls in Lark. Each schema is a root of its own, so that its references stay valid."""
    more = f" ({_quote(grammar.between)} call){{0,{grammar.most - 1}}}" if grammar.most > 1 else ""
    calls = " | ".join(f"call_{i}" for i in range(len(grammar.shapes)))
    rules = [f"start: {_quote(grammar.before)} call{more} {_quote(grammar.after)}", f"call: {calls}"]
    for i, shape in enumerate(grammar.shapes):
        arguments = f"json_{i}" if shape.parameters is None else f"first_{i}_0"
        rules.append(f"call_{i}: {_quote(shape.before)} {arguments} {_quote(shape.after)}")
        if shape.parameters is None:
            rules.append(f"json_{i}: %json {_with_options(shape.schema)}")
        else:
            whole = moved(shape.schema)
            roots = [replace(each, schema=as_root(each.schema, whole)) for each in shape.parameters]
            rules += _parameters(i, roots, _quote(shape.between))
    return "\n".join(rules)


def _parameters(call: int, parameters: Sequence[ParameterShape], between: str) -> Iterator[str]:
    """The rules of parameters in their order: `first` is what may come at a place before any, `more` behind another."""
    for i, shape in enumerate(parameters):
        at, after = f"{call}_{i}", f"{call}_{i + 1}"
        yield f"parameter_{at}: {_quote(shape.before)} value_{at}"
        yield from _value(f"value_{at}", shape)
        without_first, without_more = ("", "") if shape.is_required else (f" | first_{after}", f" | more_{after}")
        yield f"first_{at}: parameter_{at} more_{after}{without_first}"
        yield f"more_{at}: {between} parameter_{at} more_{after}{without_more}"
    yield f'first_{call}_{len(parameters)}: ""'
    yield f'more_{call}_{len(parameters)}: ""'


def _value(name: str, shape: ParameterShape) -> Iterator[str]:
    if not shape.is_text:
        yield f"{name}: {name}_json {_quote(shape.after)}"
        yield f"{name}_json: %json {_with_options(shape.schema)}"
        return
    leaves = _leaves(shape.schema)
    if leaves and all(listed_values(leaf) or not may_be_text(declared_types(leaf)) for leaf in leaves):
        values = [value for leaf in leaves for value in listed_values(leaf)]
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        others = [leaf for leaf in leaves if not listed_values(leaf)]
        ways = [*map(_quote, texts), *(f"{name}_json_{i}" for i in range(len(others)))]
        yield f"{name}: ({' | '.join(ways)}) {_quote(shape.after)}"
        shared = {key: shape.schema[key] for key in ("$defs",) if key in shape.schema}
        for i, leaf in enumerate(others):
            yield f"{name}_json_{i}: %json {_with_options(leaf | shared)}"
        return
    end = shape.after.strip()  # where it ends for the parser too
    yield f"{name}: {name}_text {_quote(shape.after[shape.after.index(end) + len(end) :])}"
    yield f"{name}_text[lazy]: /(?s:.*){re.escape(end).replace('/', chr(92) + '/')}/"


def _leaves(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas that a value may follow: those behind references and in lists, in the place of what leads there."""
    leads = ("anyOf", "oneOf", "allOf")
    parts = [schema] if listed_values(schema) else joined_schemas(schema, leads)
    return [part for part in parts if listed_values(part) or not part.keys() & {"$ref", *leads}]


def _with_options(schema: dict[str, Any]) -> str:
    """The schema with the library's options inside, where its own could stand."""
    return json.dumps(for_library(schema) | {"x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def explain(message: str, grammar: Grammar) -> str:
    """The library's message as one line. Its places count in the text it was given, which may have more lines."""
    if _TOO_WIDE in message:
        return "too much may come next at one place, such as 500 properties that are not required"
    place = _PLACE.match(message)
    where = f"line {place[1]}, column {place[2]}: " if place and grammar.kind == "lark" else ""
    rest = message[place.end() :] if place else message
    if grammar.kind == "calls":
        rest, where = rest.removeprefix(_OF_SCHEMA), _called(rest, grammar)
    if found := _BAD_EXPRESSION.search(rest):
        what = "" if grammar.kind == "regex" else "an expression in it: "
        at = f" (character {len(found['before']) + 1})" if found["expression"] == grammar.source else ""
        return where + what + one_line(found["reason"]) + at
    return where + one_line(_PICTURE.sub("", rest))


def _called(message: str, grammar: Grammar) -> str:
    """Which function's schema the library's message is about, where it says so."""
    shapes = msgspec.json.decode(grammar.source, type=CallGrammar).shapes
    rule = _CALL_RULE.search(message)
    at = int(rule[1]) if rule else len(shapes)
    return f"in `{shapes[at].name}`, " if at < len(shapes) else ""


def one_line(message: str) -> str:
    """A message on one line, without what the library quotes of the grammar or says of its own settings."""
    if message.startswith("NoExtension"):
        return "no text can match it"
    words = " ".join(message.replace("<non-verbose/>", "").split())[:MAX_MESSAGE_CHARS]
    return "".join(char if char.isprintable() else "\ufffd" for char in words).rstrip(".")
