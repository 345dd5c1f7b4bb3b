"""Turns the tools of a body into what the template is told, what the text must be, and who reads the calls in it.

Knows the two formats in which models write calls, and no vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

from roseinfer.errors import InvalidRequest
from roseinfer.messages import CallGrammar, CallShape, Grammar
from roseinfer.server.openai.schema import ChatBody
from roseinfer.server.openai.schema_structured import NamedTool, Tool
from roseinfer.server.openai.structured import dump, requested_grammar
from roseinfer.text.tool_calls import CLOSING, OPENING, ToolCallParser, ToolFormat

MAX_FORCED_CALLS = 16  # in one answer; a small model would go on until its tokens are used up
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def find_format(wanted: Literal["auto"] | ToolFormat, template: str | None) -> ToolFormat:
    """How the model writes calls. A template shows it, since it writes the calls of earlier turns."""
    if wanted != "auto":
        return wanted
    is_llama = template is not None and OPENING not in template and '"parameters"' in template
    return "llama3_json" if is_llama else "hermes"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one body allows the model to call, and whether it must."""

    tools: list[Tool]  # at least one
    is_forced: bool
    is_parallel: bool
    tool_format: ToolFormat

    @classmethod
    def of(cls, body: ChatBody, tool_format: ToolFormat) -> "ToolUse | None":
        """None when nothing is to be called. Raises InvalidRequest that names the field."""
        choice = body.tool_choice or ("auto" if body.tools else "none")
        names = [tool.function.name for tool in body.tools]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InvalidRequest(f"`tools` has two functions called {twice}.", param="tools")
        if choice == "none":
            return None
        if not body.tools:
            raise InvalidRequest("`tool_choice` needs `tools`.", param="tool_choice")
        tools = body.tools
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool.function.name == choice.function.name]
            if not tools:
                raise InvalidRequest(
                    f"`tools` has no function {choice.function.name}.", param="tool_choice.function.name"
                )
        for at, tool in enumerate(body.tools):
            if (tool.function.parameters or _NO_PARAMETERS).get("type", "object") != "object":
                param = f"tools[{at}].function.parameters"
                raise InvalidRequest(f"`{param}` must be of type object: arguments are one.", param=param)
        is_forced = choice != "auto"
        if (wanted := requested_grammar(body)) is not None:
            param = wanted[1].partition(".")[0]
            raise InvalidRequest(f"`{param}` and `tools` exclude each other, but for `tool_choice` none.", param=param)
        is_parallel = body.parallel_tool_calls and not isinstance(choice, NamedTool)
        return cls(tools, is_forced, is_parallel, tool_format)

    def grammar(self) -> tuple[Grammar, str] | None:
        """What makes the text nothing but calls that follow their schemas, where calls are forced."""
        if not self.is_forced:
            return None
        is_hermes = self.tool_format == "hermes"
        before, key, after = (f"{OPENING}\n", "arguments", f"\n{CLOSING}") if is_hermes else ("", "parameters", "")
        shapes = [
            CallShape(
                before=f'{before}{{"name": "{tool.function.name}", "{key}": ',
                # A call's arguments are an object, whatever else is left open.
                schema={"type": "object"} | (tool.function.parameters or _NO_PARAMETERS),
                after="}" + after,
            )
            for tool in self.tools
        ]
        most = MAX_FORCED_CALLS if self.is_parallel and is_hermes else 1
        return Grammar("calls", dump(CallGrammar(shapes, "\n", most), "tools")), "tools"

    def parser(self) -> ToolCallParser:
        names = {tool.function.name for tool in self.tools}
        return ToolCallParser(self.tool_format, names, is_parallel=self.is_parallel, is_forced=self.is_forced)
