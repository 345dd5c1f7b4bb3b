"""Turns what msgspec says of a JSON body into an `InvalidRequest` that names the field. Knows no body in particular."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from roseinfer.errors import InvalidRequest
from roseinfer.messages import locate

_MAX_KEYS = 1024  # of a mapping that is searched for the key that does not fit
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?")
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?")
_INVALID_CHOICE = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)
_OF_CONTENT = re.compile(r"(?P<part>messages\[\d+\]\.content\[\d+\])\.\w+")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_MALFORMED = "JSON is malformed: "
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


def decode_object(raw: bytes | bytearray) -> dict[str, Any]:
    """The object that a body is. Raises InvalidRequest that says where it is not JSON, or which field is too large."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
    except msgspec.ValidationError as error:  # JSON, but not an object, or with a number no machine type holds
        phrase, path = locate(error)
        if not path:
            raise InvalidRequest("The body must be a JSON object.") from None
        field = _oversized_field(raw)
        raise InvalidRequest(f"{phrase}." if field is None else f"`{field}`: {phrase}.", param=field) from None
    except ValueError as error:  # malformed, or not UTF-8
        raise InvalidRequest(_why_no_json(raw, error)) from None


def _why_no_json(raw: bytes | bytearray, error: ValueError) -> str:
    if not raw.strip():
        return "The body is empty; it must be a JSON object."
    if isinstance(error, UnicodeDecodeError):
        try:
            raw.decode()
        except UnicodeDecodeError as misread:  # the other counts from the beginning of a string
            return f"The body is not valid JSON: it is not UTF-8 (byte {misread.start})."
    elif str(error).startswith(_MALFORMED):
        return f"The body is not valid JSON: {str(error).removeprefix(_MALFORMED)}."
    elif isinstance(error, msgspec.DecodeError):  # all else that it says of JSON is that there is too little
        odd = ", or an escape is half of a surrogate pair" if _HALF_PAIR.search(raw) else ""
        return f"The body is not valid JSON: it ends too early (byte {len(raw)}){odd}."
    return "The body is not valid JSON."


def _oversized_field(raw: bytes | bytearray) -> str | None:
    """The first field whose value does not decode; None when the body is not an object."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return None
    for name, value in fields.items():
        try:
            msgspec.json.decode(value)
        except (ValueError, RecursionError):
            return name
    return None


def refusal(
    error: msgspec.ValidationError, fields: Mapping[str, Any], body_type: type[msgspec.Struct]
) -> InvalidRequest:
    """What msgspec says of the fields of a body, as an error that names one."""
    for pattern, word in ((_UNKNOWN_FIELD, "Unknown field"), (_MISSING_FIELD, "Missing field")):
        if found := pattern.fullmatch(str(error)):
            path = ".".join(part for part in (found["path"], found["name"]) if part)
            return _not_text(path, fields) or InvalidRequest(f"{word} `{path}`.", param=path)
    phrase, path = locate_choice(error, body_type)
    if (other := _not_text(path, fields)) is not None:
        return other
    name = path.removesuffix("[...]")
    if isinstance(mapping := fields.get(name), dict) and _is_mapping(body_type, name):
        phrase, path = _at_key(mapping, body_type, path, phrase)
    return InvalidRequest(f"`{path}`: {phrase}.", param=path or None)


def _not_text(path: str, fields: Mapping[str, Any]) -> InvalidRequest | None:
    """Of a part of a message's content that says itself that it is none of text."""
    found = _OF_CONTENT.fullmatch(path)
    if found is None:
        return None
    kind: Any = fields
    for name, index in _STEP.findall(f"{found['part']}.type"):
        kind = kind.get(name) if name else kind[int(index)]
    if not isinstance(kind, str) or kind in {"text", "refusal"}:
        return None
    return InvalidRequest(
        f"`{found['part']}`: Only text content is supported, not {kind[:100]!r}.", param=f"{found['part']}.type"
    )


def _is_mapping(body_type: type[msgspec.Struct], name: str) -> bool:
    """Whether the keys of a field are the client's own, and not the names of fields."""
    kinds = _inside(_type_info(body_type), name)
    return any(isinstance(part, inspect.DictType) for kind in kinds for part in _alternatives(kind))


def _at_key(mapping: dict[str, Any], body_type: type[msgspec.Struct], path: str, phrase: str) -> tuple[str, str]:
    """The same with the key that does not fit, where there are not too many to look through."""
    name = path.removesuffix("[...]")
    [kind] = [field.type for field in msgspec.structs.fields(body_type) if field.name == name]
    for key, value in mapping.items() if len(mapping) <= _MAX_KEYS else ():
        try:
            msgspec.convert({key: value}, kind, str_keys=True)
        except msgspec.ValidationError:
            return (f"{phrase}, {key[:100]!r}", name) if path == name else (phrase, f"{name}.{key[:100]}")
    return phrase, path


def locate_choice(error: msgspec.ValidationError, expected: type[msgspec.Struct]) -> tuple[str, str]:
    """As `locate`, and of a value that is not in a closed set, what is in it."""
    phrase, path = locate(error)
    if found := _INVALID_CHOICE.fullmatch(phrase):
        allowed = ", ".join(repr(value) for value in choices(expected, path))
        phrase = f"Expected {'one of ' if ', ' in allowed else ''}{allowed}; got {found['value']}"
    return phrase, path


def choices(body_type: type[msgspec.Struct], path: str) -> list[Any]:
    """All the values that a closed set at a path of a body may have, such as `messages[0].role`."""
    kinds = [_type_info(body_type)]
    for name, _ in _STEP.findall(path):
        kinds = [inner for kind in kinds for inner in _inside(kind, name)]
    return [
        value
        for kind in kinds
        for part in _alternatives(kind)
        if isinstance(part, inspect.LiteralType)
        for value in part.values
    ]


@cache
def _type_info(body_type: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(body_type)


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [inner for part in kind.types for inner in _alternatives(part)]
    return [kind]


def _inside(kind: inspect.Type, name: str) -> list[inspect.Type]:
    """What a field of this name may be; without a name, an element."""
    found: list[inspect.Type] = []
    for part in _alternatives(kind):
        if name and isinstance(part, inspect.StructType):
            found += [field.type for field in part.fields if field.encode_name == name]
        elif not name and isinstance(part, inspect.ListType | inspect.VarTupleType):
            found.append(part.item_type)
        elif not name and isinstance(part, inspect.DictType):
            found.append(part.value_type)
    return found
