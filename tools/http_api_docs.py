"""Writes the tables of fields and errors into docs/http-api.md, from the request structs and the error tree."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from generated_files import filled
from roseinfer.errors import CapacityError, EngineError, RequestError, RoseinferError
from roseinfer.server.anthropic.schema import MessagesBody
from roseinfer.server.api.fields import EngineBody, ModelBody, SamplingBody
from roseinfer.server.api.unserved import (
    OF_CHAT,
    OF_COMPLETIONS,
    OF_DETOKENIZE,
    OF_EMBEDDINGS,
    OF_MESSAGES,
    OF_RESPONSES,
    OF_SAMPLING,
    OF_TOKENIZE,
    Unserved,
)
from roseinfer.server.connection.body import FEW_VALUES
from roseinfer.server.openai.chat_schema import ChatBody
from roseinfer.server.openai.embeddings import EmbeddingsBody
from roseinfer.server.openai.responses_schema import ResponseBody
from roseinfer.server.openai.schema import CompletionBody, GenerationBody
from roseinfer.server.openai.tokenize import DetokenizeBody, TokenizeBody

LIMITS = {
    "minimum": "≥",
    "minLength": "≥",
    "minItems": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "maxLength": "≤",
    "maxItems": "≤",
    "exclusiveMaximum": "<",
}
NO_LIMIT = 2**31 - 1  # where a field says no more than that an integer fits
NO_EFFECT = "No effect."
UNSERVED = {
    "fields of every body that asks for tokens": OF_SAMPLING,
    "fields of a completion": OF_COMPLETIONS,
    "fields of a chat": OF_CHAT,
    "fields of a response": OF_RESPONSES,
    "fields of Anthropic's Messages": OF_MESSAGES,
    "fields of /v1/embeddings": OF_EMBEDDINGS,
    "fields of /tokenize": OF_TOKENIZE,
    "fields of /detokenize": OF_DETOKENIZE,
}
REMARKS: Mapping[type[ModelBody], str] = {
    ChatBody: "The role `developer` is `system` to the template.",
}


def page() -> str:
    shared, model = frozenset(GenerationBody.__struct_fields__), frozenset(ModelBody.__struct_fields__)
    sampling = frozenset(SamplingBody.__struct_fields__)
    engine = frozenset(EngineBody.__struct_fields__)
    fields = [
        _fields("Every body that the engine works on", EngineBody),
        _fields("Every body that asks for tokens", SamplingBody, engine),
        _fields("Completions and chats", GenerationBody, sampling),
        _fields("POST /v1/completions", CompletionBody, shared),
        _fields("POST /v1/chat/completions", ChatBody, shared),
        _fields("POST /v1/responses", ResponseBody, sampling),
        "`/v1/responses/input_tokens` takes the same body and answers with `input_tokens`.\n",
        _fields("POST /v1/messages", MessagesBody, sampling),
        _fields("POST /v1/embeddings", EmbeddingsBody, engine),
        _fields("POST /tokenize", TokenizeBody, model),
        "The answer has `count`, `max_model_len`, `tokens` and `token_strs`, as vLLM's has.\n",
        _fields("POST /detokenize", DetokenizeBody, model),
        "The answer has the text as `prompt`; special tokens are spelled out. A list may have fewer than",
        f"{FEW_VALUES} + 2 × `max_model_len` ids. `/tokenize` encodes all that a body holds and may answer with more:",
        "send those in parts, cut where a character ends.\n",
        *(_unserved(title, rows) for title, rows in UNSERVED.items()),
    ]
    rows = [f"| {status} | `{kind}` | `{code}` | {meaning} |\n" for status, code, kind, meaning in _errors()]
    errors = "".join(["| status | type | code | means |\n|---|---|---|---|\n", *rows])
    return filled("docs/http-api.md", {"fields of bodies": "\n".join(fields), "table of errors": errors})


def _fields(title: str, body: type[ModelBody], described: frozenset[str] = frozenset()) -> str:
    """The table of a body's fields, less those that were described before, and the fields it only tolerates."""
    schema = msgspec.json.schema(body)
    definitions = schema["$defs"]
    required = definitions[body.__name__].get("required", ())
    lines = [f"## {title}\n", "| field | default | values | meaning |", "|---|---|---|---|"]
    fields = {name: field for name, field in definitions[body.__name__]["properties"].items() if name not in described}
    for name, field in fields.items():
        if field["description"] != NO_EFFECT:
            default = "required" if name in required else f"`{json.dumps(field['default'])}`"
            lines.append(f"| `{name}` | {default} | {_values(field, definitions)} | {field['description']} |")
    if idle := [f"`{name}`" for name, field in fields.items() if field["description"] == NO_EFFECT]:
        lines.append(f"\nAccepted, and without any effect: {', '.join(idle)}.")
    if body in REMARKS:
        lines.append(f"\n{REMARKS[body]}")
    return "\n".join(lines) + "\n"


def _unserved(title: str, rows: Mapping[str, Unserved]) -> str:
    """The table of fields that may come all the same."""
    ignored = ", ".join(f"`{name}`" for name, field in sorted(rows.items()) if field.is_ignored)
    lines = [f"## Not served: {title}\n", "| field | accepted | instead |", "|---|---|---|"]
    for name, field in sorted(rows.items()):
        if not field.is_ignored:
            lines.append(f"| `{name}` | {_accepted(field)} | {field.instead} |")
    if ignored:
        lines.append(f"\nAccepted whatever they hold: {ignored}.")
    return "\n".join(lines) + "\n"


def _accepted(field: Unserved) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)


def _values(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON Schema in words."""
    if "$ref" in schema:
        properties = definitions[schema["$ref"].rpartition("/")[2]]["properties"]
        return "object with " + ", ".join(f"`{name}`" for name in properties)
    if "enum" in schema:
        return ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in schema["enum"])
    if "anyOf" in schema:
        choices = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        return ", or ".join(_values(choice, definitions) for choice in choices)
    kind, unit = schema["type"], ""
    if kind == "object":
        values = (
            f" of ({_values(schema['additionalProperties'], definitions)})" if "additionalProperties" in schema else ""
        )
        most = f", ≤ {schema['maxProperties']} entries" if "maxProperties" in schema else ""
        return f"object{values}{most}"
    if kind == "array":
        kind, unit = f"list of ({_values(schema['items'], definitions)})", " items"
    elif kind == "string":
        unit = " characters"
    limits = [
        f"{sign} {schema[key]}{unit}" for key, sign in LIMITS.items() if abs(schema.get(key, NO_LIMIT)) < NO_LIMIT
    ]
    return ", ".join([kind, *limits])


def _errors() -> list[tuple[int, str, str, str]]:
    """Every error a client can meet, by status and code: status, code, type, meaning."""
    rows = [(500, "internal_error", "server_error", "Something that was not foreseen.")]
    todo: list[type[RoseinferError]] = [RequestError, CapacityError, EngineError]
    while todo:
        error = todo.pop()
        todo += error.__subclasses__()
        if {"code", "status"} & vars(error).keys() and error.code is not None and error is not EngineError:
            rows.append((error.status, error.code, error.error_type, _meaning(error)))
    return sorted(rows)


def _meaning(error: type[RoseinferError]) -> str:
    return " ".join((error.__doc__ or "").split("\n\n")[0].split())
