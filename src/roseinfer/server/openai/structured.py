"""Reads the form that a body asks of its answer: the grammar of its text, and the functions it may call."""

import asyncio

from roseinfer.errors import InvalidRequest
from roseinfer.messages import Grammar
from roseinfer.server.openai.schema import ChatBody, GenerationBody
from roseinfer.server.openai.schema_structured import NamedTool
from roseinfer.text.grammar.checker import GrammarChecker
from roseinfer.text.grammar.source import encode_source
from roseinfer.text.tool_calls import NO_PARAMETERS, Function, ToolFormat, ToolUse

_ANY_OBJECT = '{"type":"object"}'


def requested_grammar(body: GenerationBody, tool_use: ToolUse | None = None) -> tuple[Grammar, str] | None:
    """The grammar that the body asks for or its tools need, and the field it stands in. Raises InvalidRequest."""
    if tool_use is not None:
        calls = tool_use.grammar()
        return None if calls is None else (calls, "tools")
    grammar = _of_response_format(body)
    if body.structured_outputs is not None:
        if grammar is not None:
            raise InvalidRequest("`response_format` and `structured_outputs` exclude each other.", param=grammar[1])
        grammar = _of_structured_outputs(body)
    return grammar


def _of_response_format(body: GenerationBody) -> tuple[Grammar, str] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        return Grammar("json_schema", _ANY_OBJECT), "response_format"
    param = "response_format.json_schema.schema"
    return Grammar("json_schema", encode_source(wanted.json_schema.schema, param)), param


def _of_structured_outputs(body: GenerationBody) -> tuple[Grammar, str] | None:
    wanted = body.structured_outputs
    assert wanted is not None
    if wanted.json is not None:
        param = "structured_outputs.json"
        source = wanted.json if isinstance(wanted.json, str) else encode_source(wanted.json, param)
        return Grammar("json_schema", source), param
    if wanted.regex is not None:
        return Grammar("regex", wanted.regex), "structured_outputs.regex"
    if wanted.choice is not None:
        param = "structured_outputs.choice"
        return Grammar("choice", encode_source(wanted.choice, param)), param
    if wanted.grammar is not None:
        return Grammar("lark", wanted.grammar), "structured_outputs.grammar"
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
    """The functions that the model may call; None when it may call none. Raises InvalidRequest that names the field."""
    choice = body.tool_choice or ("auto" if body.tools else "none")
    names = [tool.function.name for tool in body.tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequest(f"`tools` has two functions called {twice}.", param="tools")
    if choice == "none":
        return None
    if not body.tools:
        raise InvalidRequest("`tool_choice` needs `tools`.", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise InvalidRequest(f"`tools` has no function {choice.function.name}.", param="tool_choice.function.name")
    functions = [
        Function(tool.function.name, tool.function.description or "", tool.function.parameters) for tool in body.tools
    ]
    for at, function in enumerate(functions):
        if (function.parameters or NO_PARAMETERS).get("type", "object") != "object":
            param = f"tools[{at}].function.parameters"
            raise InvalidRequest(f"`{param}` must be of type object: arguments are one.", param=param)
    if (wanted := requested_grammar(body)) is not None:
        param = wanted[1].partition(".")[0]
        raise InvalidRequest(f"`{param}` and `tools` exclude each other, but for `tool_choice` none.", param=param)
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
    is_parallel = body.parallel_tool_calls and not isinstance(choice, NamedTool)
    return ToolUse(functions, is_forced=choice != "auto", is_parallel=is_parallel, tool_format=tool_format)
