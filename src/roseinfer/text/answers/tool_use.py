"""What one request allows the model to call, and the grammar that forces a call."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roseinfer.errors import InvalidRequest
from roseinfer.messages import CallGrammar, CallShape, Grammar, ParameterShape
from roseinfer.text.answers.functions import Function, joined_schemas, may_be_text, parameter_types, referred
from roseinfer.text.answers.tool_calls import ToolCallParser
from roseinfer.text.answers.tool_formats import ToolFormat
from roseinfer.text.grammar.source import encode_source

MAX_FORCED_CALLS = 16  # in one answer; a small model would go on until its tokens are used up
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ELSEWHERE = re.compile(r'"\$ref":"#(?!/\$defs/|/definitions/)')
_OF_WHOLE_OBJECTS = frozenset(
    {
        *("anyOf", "oneOf", "not", "if", "enum", "const", "minProperties", "maxProperties", "propertyNames"),
        *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
    }
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that one request allows the model to call, and whether it must."""

    functions: Sequence[Function]  # at least one
    is_forced: bool
    is_parallel: bool
    tool_format: ToolFormat

    def grammar(self, form_of_text: Grammar | None = None) -> Grammar | None:
        """Allows calls by their schemas or, unless calls are forced, a text of a form; None where nothing is forced.

        Raises InvalidRequest for a parameter whose name the format cannot hold.
        """
        if not self.is_forced and form_of_text is None:
            return None
        form = self.tool_format
        shapes = [_shape(form, function) for function in self.functions]
        most = MAX_FORCED_CALLS if self.is_parallel and form.between is not None else 1
        instead = None if self.is_forced else form_of_text
        grammar = CallGrammar(shapes, form.between or "", most, form.before, form.after, instead)
        return Grammar("calls", encode_source(grammar, "tools"))

    def parser(self) -> ToolCallParser:
        return ToolCallParser(self.tool_format, self.functions, is_parallel=self.is_parallel, is_forced=self.is_forced)


def _shape(form: ToolFormat, function: Function) -> CallShape:
    before = form.before_call.replace("NAME", function.name)
    # A call's arguments are an object, whatever else is left open.
    schema: dict[str, Any] = {"type": "object"} | (function.parameters or NO_PARAMETERS)
    if form.parameters is None:
        return CallShape(before, schema, form.after_call, name=function.name)
    marks, types = form.parameters, parameter_types(schema)
    properties, required = _properties(schema, function.name)
    shapes = [
        ParameterShape(
            before=f"{marks.before_key}{key}{marks.after_key}{marks.before_value}",
            schema=one,
            after=marks.after_value,
            is_text=form.syntax == "named" and may_be_text(types.get(key, ())),
            is_required=key in required,
        )
        for key, one in properties.items()
    ]
    if (odd := next((key for key in properties if not form.can_write(key)), None)) is not None:
        raise _refusal(f"The model's calls cannot hold a parameter called {odd[:100]!r}, as `{function.name}` has.")
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    refers_elsewhere = _ELSEWHERE.search(encode_source([properties, shared], "tools")) is not None
    whole = schema if refers_elsewhere else shared
    return CallShape(before, whole, form.after_call, shapes, marks.between, function.name)


def _properties(schema: dict[str, Any], name: str) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """The schemas of the parameters of a function, and which are required. Raises InvalidRequest.

    A call that writes them one by one follows no rule about all of them.
    """
    parts = joined_schemas(schema, ("allOf",))
    keyword = next((key for part in parts for key in part if key in _OF_WHOLE_OBJECTS), None)
    lacks = any("$ref" in part and not isinstance(referred(schema, part["$ref"]), dict) for part in parts)
    if keyword is not None or lacks:
        raise _refusal(f"The model's calls cannot follow the `{keyword or '$ref'}` of the parameters of `{name}`.")
    found: dict[str, list[Any]] = {}
    required: list[str] = []
    for part in parts:
        properties, names = part.get("properties"), part.get("required")
        for key, one in properties.items() if isinstance(properties, dict) else ():
            found.setdefault(key, []).append(one)
        required += map(str, names) if isinstance(names, list) else ()
    for key in required:
        found.setdefault(key, [{}])
    joined = {key: one[0] if len(one) == 1 else {"allOf": one} for key, one in found.items()}
    return {key: one if isinstance(one, dict) else {} for key, one in joined.items()}, {*required}


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(f"`tools`: {message}", param="tools")
