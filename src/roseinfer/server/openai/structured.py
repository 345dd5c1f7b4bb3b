"""Reads the form that a body asks of its answer: the grammar of its text, and the functions it may call."""

import asyncio

from roseinfer.errors import InvalidRequest
from roseinfer.messages import Grammar, GrammarKind
from roseinfer.server.openai.schema import ChatBody, GenerationBody, NamedTool, StructuredOutputs
from roseinfer.text.grammar.checker import GrammarChecker
from roseinfer.text.grammar.source import encode_source
from roseinfer.text.tool_calls import Function, ToolFormat, ToolUse

_ANY_OBJECT = '{"type":"object"}'


def requested_grammar(body: GenerationBody, tool_use: ToolUse | None = None) -> tuple[Grammar, str] | None:
    """The grammar that the body asks for or its tools need, and the field it stands in. Raises InvalidRequest."""
    if tool_use is not None:
        calls = tool_use.grammar()
        return None if calls is None else (calls, "tools")
    if body.structured_outputs is not None:
        return _of_structured_outputs(body.structured_outputs)
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.json_schema is None or form.json_schema.schema is None:
        return Grammar("json_schema", _ANY_OBJECT), "response_format"
    param = "response_format.json_schema.schema"
    return Grammar("json_schema", encode_source(form.json_schema.schema, param)), param


def _of_structured_outputs(wanted: StructuredOutputs) -> tuple[Grammar, str]:
    sources: dict[str, tuple[GrammarKind, object]] = {
        "json": ("json_schema", wanted.json),
        "regex": ("regex", wanted.regex),
        "choice": ("choice", wanted.choice),
        "grammar": ("lark", wanted.grammar),
    }
    for name, (kind, source) in sources.items():
        if source is not None:
            param = f"structured_outputs.{name}"
            return Grammar(kind, source if isinstance(source, str) else encode_source(source, param)), param
    return Grammar("json_schema", _ANY_OBJECT), "structured_outputs.json_object"


async def check_grammar(wanted: tuple[Grammar, str] | None, checker: GrammarChecker | None) -> None:
    """Raises InvalidRequest that names the field of a grammar that cannot be used, Overloaded or NotReady."""
    if wanted is None:
        return
    grammar, param = wanted
    if checker is None:
        raise InvalidRequest(f"`{param}`: this server has no grammars.", param=param)
    await asyncio.wrap_future(checker.check(grammar, param))


def requested_tools(body: ChatBody, tool_format: ToolFormat) -> ToolUse | None:
    """The functions that the model may call; None when it may call none."""
    choice = body.tool_choice or "auto"
    if not body.tools or choice == "none":
        return None
    functions = [
        Function(tool.function.name, tool.function.description or "", tool.function.parameters)
        for tool in body.tools
        if not isinstance(choice, NamedTool) or tool.function.name == choice.function.name
    ]
    is_parallel = body.parallel_tool_calls and not isinstance(choice, NamedTool)
    return ToolUse(functions, is_forced=choice != "auto", is_parallel=is_parallel, tool_format=tool_format)
