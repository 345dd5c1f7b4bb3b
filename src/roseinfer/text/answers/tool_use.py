"""What one request allows the model to call, and the grammar that forces a call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roseinfer.errors import InvalidRequest
from roseinfer.messages import CallGrammar, CallShape, Grammar, ParameterShape
from roseinfer.text.answers.functions import Function, may_be_text, parameter_types
from roseinfer.text.answers.tool_calls import ToolCallParser
from roseinfer.text.answers.tool_formats import ToolFormat
from roseinfer.text.grammar.source import encode_source

MAX_FORCED_CALLS = 16  # in one answer; a small model would go on until its tokens are used up
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


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
    if (odd := next((key for key in types if not form.can_write(key)), None)) is not None:
        message = f"`tools`: The model's calls cannot hold a parameter called {odd[:100]!r}, as `{function.name}` has."
        raise InvalidRequest(message, param="tools")
    required = schema.get("required")
    properties: Any = schema["properties"] if types else {}
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    shapes = [
        ParameterShape(
            before=f"{marks.before_key}{key}{marks.after_key}{marks.before_value}",
            schema=properties[key] if isinstance(properties[key], dict) else {},
            after=marks.after_value,
            is_text=form.syntax == "named" and may_be_text(types[key]),
            is_required=isinstance(required, list) and key in required,
        )
        for key in types
    ]
    return CallShape(before, shared, form.after_call, shapes, marks.between, function.name)
