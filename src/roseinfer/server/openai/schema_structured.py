"""The part of the request structs that is about the form of an answer: formats and tools.

The shapes are OpenAI's; `structured_outputs` is vLLM's. Knows no grammar and no template.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from roseinfer.runtime.validation import Misfit

MAX_TOOLS = 128  # OpenAI's own bound
_MAX_LEVELS = 6  # as deep as our own objects go: a message, its calls, a call, its function
_SCHEMAS = frozenset({"schema", "parameters", "json"})  # fields in which null is a value

# (?!\n): the end that Python means by $ may also be before a last newline; JSON Schema's may not.
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}(?!\n)$")]
Choices = Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=1024)]


class Part(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An object inside a body."""


class JsonSchemaFormat(Part, frozen=True, kw_only=True):
    """The schema that an answer follows, whatever `strict` says. `name` and `description` have no effect."""

    name: Name
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Part, frozen=True, kw_only=True):
    """`json_schema` belongs to the type `json_schema` alone."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def __post_init__(self) -> None:
        if self.type == "json_schema" and self.json_schema is None:
            raise Misfit.missing("json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise Misfit("`json_schema` belongs to the type `json_schema` alone")


class StructuredOutputs(Part, frozen=True, kw_only=True):
    """Exactly one of these."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = (self.json, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in given) != 1:
            raise Misfit("exactly one of `json`, `json_object`, `regex`, `choice` and `grammar` is needed")


class FunctionDefinition(Part, frozen=True, kw_only=True):
    """A function that the model may call. `strict` has no effect: calls that are forced follow the schema anyway."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part, frozen=True, kw_only=True):
    """What the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Part, frozen=True, kw_only=True):
    """One of the functions."""

    name: Name


class NamedTool(Part, frozen=True, kw_only=True):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def without_nulls(value: object, level: int = 0) -> object:
    """Null counts as left out, in this object and in those inside; schemas are left as they are."""
    if level == _MAX_LEVELS:
        return value
    if isinstance(value, list):
        return [without_nulls(inner, level + 1) for inner in value]
    if isinstance(value, dict):
        return {
            key: inner if key in _SCHEMAS else without_nulls(inner, level + 1)
            for key, inner in value.items()
            if inner is not None
        }
    return value
