"""Formats of tool calls: how families of models write calls, and which of them a chat template writes.

To add a format, add a row to FORMATS, its name to `structured.tool_format` in config/options.py, and to `_SIGNS`
what its chat templates hold. docs/structured-output.md shows the formats.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


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

    def can_write(self, key: str) -> bool:
        """Whether a parameter's name, where arguments are no JSON object, is read again as it was written."""
        assert self.parameters is not None, "an object holds any name"
        is_one_name = self.syntax != "python" or _NAME.fullmatch(key) is not None
        return is_one_name and key == key.strip() and self.parameters.after_key not in key


CALL_ID = "[CALL_ID]"
_NAME = re.compile(r"[\w.-]+")
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
    after_name=(CALL_ID, "[ARGS]"),
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
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def find_tool_format(wanted: str, template: str | None) -> ToolFormat:
    """The format named, or with `auto` the one in which the chat template writes the calls of earlier turns."""
    if wanted != "auto":
        return FORMATS[wanted]
    names = (name for signs, name in _SIGNS if template is not None and all(sign in template for sign in signs))
    return FORMATS[next(names, "hermes")]


def short_id(call_id: str) -> str:
    """Nine letters and digits, which Mistral's templates demand: the same ones for the same id."""
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
