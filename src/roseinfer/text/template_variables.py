"""The variables that a body gives to the chat template, and how many, how deep and how long they may be.

The field is vLLM's. Knows no template: which variables one has is in `chat_template.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from roseinfer.errors import InvalidRequest

FIELD = "chat_template_kwargs"
MAX_VARIABLES = 32
MAX_LEVELS = 16  # lists and objects within each other: enough for a JSON schema
MAX_BYTES = 16 * 1024  # all names and values together, as JSON

VariableName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}(?!\n)$")]  # as a name of a function
TemplateVariables = Annotated[
    dict[VariableName, Any],
    Meta(
        max_length=MAX_VARIABLES,
        description='Variables of the chat template, such as `{"enable_thinking": false}`; see "Template variables" in '
        f"http-api.md. At most {MAX_BYTES} bytes as JSON and {MAX_LEVELS} levels deep; null is a value.",
    ),
]


def check_variables(variables: Mapping[str, Any]) -> None:
    """Whether the values are within their bounds, which no type can say. Raises InvalidRequest that names the field."""
    num_bytes = len(msgspec.json.encode(variables))  # what was decoded is not too deep to be encoded
    if num_bytes > MAX_BYTES:
        raise InvalidRequest(f"`{FIELD}`: {num_bytes} bytes as JSON; at most {MAX_BYTES} are taken.", param=FIELD)
    for name, value in variables.items():
        level: list[Any] = [value]
        for _ in range(MAX_LEVELS):
            level = [inner for outer in level for inner in _within(outer)]
        if any(isinstance(inner, list | dict) for inner in level):
            param = f"{FIELD}.{name}"
            raise InvalidRequest(f"`{param}`: Nested deeper than {MAX_LEVELS} levels.", param=param)


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
