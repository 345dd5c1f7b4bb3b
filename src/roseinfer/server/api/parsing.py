"""Reads a request body: JSON bytes become a validated struct, or an error that names the field."""

import json
import time
from typing import Any, TypeGuard, TypeVar

import msgspec
from aiohttp import web

from roseinfer.config.sources import closest
from roseinfer.errors import InvalidRequest, MissingField, NotJSON, NotText, UnknownField, UnknownModel
from roseinfer.runtime.validation import Misfit, Path, convert
from roseinfer.server.api.fields import EngineBody, ModelBody
from roseinfer.server.connection.body import (
    INLINE_BYTES,
    check_levels,
    check_num_values,
    check_num_values_within,
    read_bytes,
)
from roseinfer.server.exchange import EXCHANGE
from roseinfer.server.service import SERVICE
from roseinfer.text.served_model import ServedModel

_MAX_LEVELS = 6  # as deep as our own objects go: a message, its calls, a call, its function
_SCHEMAS = frozenset({"schema", "value", "parameters", "json", "input", "input_schema"})  # in which null is a value
_PARTS = (
    *("messages", "stream_options", "response_format", "structured_outputs", "tools", "tool_choice"),
    *("input", "reasoning", "text", "system", "thinking", "output_config", "output_format"),
)

BodyT = TypeVar("BodyT", bound=ModelBody)

IGNORED = web.RequestKey("ignored", list[str])  # the unknown fields of the body, where they are ignored


async def read_body(request: web.Request, body_type: type[BodyT]) -> BodyT:
    """Step 2: the validated body. Raises RequestError, UnknownModel or Overloaded."""
    service = request.app[SERVICE]
    _check_media_type(request)
    raw = await read_bytes(request, service.config.max_body_bytes, service.config.body_timeout_s)
    request[IGNORED] = []
    unknown = request[IGNORED] if service.config.unknown_fields == "ignore" else None
    if len(raw) <= INLINE_BYTES:
        body = parse_body(raw, body_type, unknown)
    else:
        body = await service.long_bodies.do(_parse_long, raw, body_type, unknown, service.client.info.max_model_len)
    check_model(body, service)
    if (exchange := request.get(EXCHANGE)) is not None:
        exchange.timelines[0].parsed_ns = time.monotonic_ns()
        assert isinstance(body, EngineBody), "an exchange is with the engine"
        config = service.config
        exchange.set_deadlines(
            body.timeout_s or config.request_timeout_s, body.queue_timeout_s or config.queue_timeout_s
        )
    return body


def check_model(body: ModelBody, served: ServedModel) -> None:
    """Raise UnknownModel where the body names a model that is not served."""
    if body.model is not None and body.model not in served.model_names:
        message = f"The model `{body.model}` does not exist here; this is {' or '.join(served.model_names)}."
        raise UnknownModel(message, param="model")


def _check_media_type(request: web.Request) -> None:
    if request.content_type != "application/json":
        raise NotJSON("The body must be JSON, with the header Content-Type: application/json.")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise NotJSON(f"Compressed bodies are not read (Content-Encoding: {encoding}).")


def _parse_long(raw: bytearray, body_type: type[BodyT], unknown: list[str] | None, max_model_len: int) -> BodyT:
    check_num_values(raw, max_model_len)
    body = parse_body(raw, body_type, unknown)
    check_num_values_within(body.json_texts(), max_model_len)
    return body


def parse_body(raw: bytes | bytearray, body_type: type[BodyT], unknown: list[str] | None = None) -> BodyT:
    """Parse a request body. Raises InvalidRequest that names the field.

    The names of unknown fields are added to the list `unknown`; without one they are refused.
    """
    check_levels(raw)
    try:
        body = msgspec.json.decode(raw, type=body_type)
    except ValueError:
        body = _parse_loosely(raw, body_type, unknown)
    body.check()
    return body


def _parse_loosely(raw: bytes | bytearray, body_type: type[BodyT], unknown: list[str] | None) -> BodyT:
    """Read a body that may hold nulls for what is left out and fields without effect, and say what is wrong."""
    given = _decode_object(raw)
    fields = {name: value for name, value in given.items() if value is not None}
    for name in fields.keys() - body_type.__struct_fields__:
        _take_out(name, fields, body_type, unknown)
    for name in fields.keys() & set(_PARTS):
        fields[name] = _without_nulls(fields[name])
    while True:
        try:
            return convert(fields, body_type, str_keys=True)  # token ids are keys of `logit_bias`
        except Misfit as misfit:
            if not isinstance(misfit.value, float) or not misfit.value.is_integer():
                raise _refusal(misfit, given) from None
            name = str(misfit.path[0])
            fields[name] = _whole_numbers(fields[name])


def _take_out(name: str, fields: dict[str, Any], body_type: type[ModelBody], unknown: list[str] | None) -> None:
    """Remove a field that the body does not have, if it may come all the same. Raises InvalidRequest."""
    unserved = body_type.unserved.get(name)
    if unserved is None:
        if unknown is None:
            misfit = Misfit.unknown(name)
            meant = closest(misfit.where, body_type.__struct_fields__)
            raise UnknownField(f"{misfit}{meant or '.'}", param=misfit.where)
        unknown.append(name)
        del fields[name]
    elif unserved.accepts(fields[name]):
        del fields[name]
    else:
        instead = f": {unserved.instead}" if unserved.instead else ""
        raise InvalidRequest(f"`{name}` is not supported{instead}.", param=name)


def _without_nulls(value: object, level: int = 0) -> object:
    """Null counts as left out, in this object and in those inside; schemas are left as they are."""
    if level == _MAX_LEVELS:
        return value
    if isinstance(value, list):
        return [_without_nulls(inner, level + 1) for inner in value]
    if isinstance(value, dict):
        return {
            key: inner if key in _SCHEMAS else _without_nulls(inner, level + 1)
            for key, inner in value.items()
            if inner is not None
        }
    return value


def _whole_numbers(value: object) -> object:
    """Integers for numbers such as 1.0: JSON has one kind of number."""
    # By `map`, since a comprehension is a second frame at each level, and the stack bears no 1,000.
    if isinstance(value, list):
        return list(map(_whole_numbers, value))
    if isinstance(value, dict):
        return dict(zip(value, map(_whole_numbers, value.values()), strict=True))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refusal(misfit: Misfit, given: object) -> InvalidRequest:
    """What does not fit as an error, with what would do instead where types and bounds do not say it."""
    param, note = misfit.where, ""
    match misfit.path:
        case path if misfit.kind == "missing field" and _is_null(given, path):
            return InvalidRequest(f"`{param}` must not be null.", param=param)
        case (*_, int(), "content" | "output", int(), "type") if _is_no_text(misfit.value):
            part, kind = param.removesuffix(".type"), misfit.value[:100]
            message = f"`{part}`: Only text content is supported, not {kind!r}."
            return NotText(message, param=param, part=part, kind=kind)
        case ("tools", int(), _) if misfit.kind == "missing field" and (form := _tool_form(given, misfit.path)):
            return MissingField(f"Missing field `{param}`: the tool has the form of {form}.", param=param)
        case ("tools", int(), "type"):
            note = "; only functions are served as tools"
    kinds = {"unknown field": UnknownField, "missing field": MissingField}  # by which the log tells them apart
    return kinds.get(misfit.kind, InvalidRequest)(misfit.sentence(note), param=param)


def _is_no_text(kind: object) -> TypeGuard[str]:
    """Whether a part of this type is something else than text, for which each API has names of its own."""
    return isinstance(kind, str) and not kind.endswith("text")


def _tool_form(given: Any, missing: Path) -> str:
    """The endpoint in whose form the tool is that misses a field here; empty where that is not plain."""
    forms = {
        "function": "/v1/chat/completions, where the name is in `function`",
        "input_schema": "/v1/messages, where it needs no `type`",
        "name": "/v1/responses, where the name is beside `type`",
    }
    foreign = {"name": ("function",), "type": ("input_schema",), "function": ("input_schema", "name")}
    field, index, name = missing
    return next((forms[key] for key in foreign.get(str(name), ()) if key in given[field][index]), "")


def _is_null(given: Any, path: Path) -> bool:
    """Whether there is a null where a path leads."""
    *steps, name = path
    for step in steps:
        given = given[step]
    return name in given and given[name] is None


def _decode_object(raw: bytes | bytearray) -> dict[str, Any]:
    """The object that a body is. Raises InvalidRequest that says where it is not JSON, or which field is too large."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.ValidationError:  # JSON, but not an object, or with a number that no machine type holds
        pass
    except ValueError:
        raise InvalidRequest(_why_no_json(raw)) from None
    try:
        misfit = Misfit("Number out of range", _path_of_oversized(raw))
    except msgspec.ValidationError:
        raise InvalidRequest("The body must be a JSON object.") from None
    except ValueError:
        raise InvalidRequest(_why_no_json(raw)) from None
    raise InvalidRequest(misfit.sentence(), param=misfit.where)


def _path_of_oversized(raw: bytes | bytearray | msgspec.Raw, level: int = 0) -> tuple[str, ...]:
    """Where the first number is, in an object or in the first levels of those within it, that does not decode."""
    for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
        try:
            msgspec.json.decode(value)
        except msgspec.ValidationError:
            goes_on = level < _MAX_LEVELS and bytes(memoryview(value)[:1]) == b"{"  # each level decodes the rest anew
            return (name, *(_path_of_oversized(value, level + 1) if goes_on else ()))
    return ()


def _why_no_json(raw: bytes | bytearray) -> str:
    if not raw.strip():
        return "The body is empty; it must be a JSON object."
    try:
        json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return f"The body is not valid JSON: it is not UTF-8 (byte {error.start})."
    except json.JSONDecodeError as error:
        return f"The body is not valid JSON: {error.msg} (character {error.pos})."
    except ValueError:  # an integer of more digits than Python reads
        pass
    return "The body is not valid JSON: NaN, Infinity and half of a surrogate pair are none."
