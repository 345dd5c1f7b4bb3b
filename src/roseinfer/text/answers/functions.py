"""The functions that a model may call, and the types that their schemas give to parameters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

_OF_JSON = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None

    def for_template(self) -> dict[str, object]:
        """The function in the form that chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def joined_schemas(schema: Mapping[str, Any], keywords: Collection[str]) -> list[dict[str, Any]]:
    """The schema and those that it consists of, in their order: behind `$ref`, and in the lists of these keywords."""
    ahead: list[object] = [schema]
    found, seen = list[dict[str, Any]](), set[int]()
    while ahead:
        part = ahead.pop()
        if isinstance(part, dict) and id(part) not in seen:  # a circle adds nothing
            seen.add(id(part))
            found.append(part)
            lists = (part[key] for key in keywords if isinstance(part.get(key), list))
            ahead += reversed([referred(schema, part.get("$ref")), *(inner for each in lists for inner in each)])
    return found


def parameter_types(parameters: Mapping[str, Any] | None) -> dict[str, set[str]]:
    """By the parameters' names, the types that a function's schema allows; none where it says nothing."""
    types: dict[str, set[str]] = {}
    kept: dict[str, set[str]] = {}
    for part in joined_schemas(parameters or {}, ("allOf", "anyOf", "oneOf")):
        properties = part.get("properties")
        for key, schema in properties.items() if isinstance(properties, dict) else ():
            types[key] = types.get(key, set()) | _types(schema, parameters, kept)
    return types


def _types(schema: object, root: object, kept: dict[str, set[str]], depth: int = 16) -> set[str]:
    """`kept` has the types behind each reference, of which many properties may have the same."""
    if not isinstance(schema, dict) or not depth:
        return set()
    types = declared_types(schema)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in kept:
            kept[reference] = set()  # a circle adds nothing
            kept[reference] = _types(referred(root, reference), root, kept, depth - 1)
        types |= kept[reference]
    inner = [one for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for one in schema[key]]
    return types.union(*(_types(one, root, kept, depth - 1) for one in inner))


def declared_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names itself, or those of the values that it lists."""
    declared = schema.get("type")
    if isinstance(declared, str | list):
        return {declared} if isinstance(declared, str) else {*map(str, declared)}
    return {_OF_JSON.get(type(value), "null") for value in listed_values(schema)}


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists, if it does."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def referred(root: object, reference: object) -> Any:
    """What a reference within a schema refers to; None for any other."""
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        return None
    for key in reference.split("/")[1:]:
        name = unquote(key).replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            is_index = name.isdecimal() and len(name) <= len(str(len(root)))  # int() refuses what is very long
            root = root[int(name)] if is_index and int(name) < len(root) else None
        else:
            root = root.get(name) if isinstance(root, dict) else None
    return root


def may_be_text(types: Collection[str]) -> bool:
    """A parameter between tags stands there as text, without quotes."""
    return not types or "string" in types
