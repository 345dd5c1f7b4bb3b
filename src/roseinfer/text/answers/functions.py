"""The functions that a model may call, and the types that their schemas give to parameters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

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


def parameter_types(parameters: Mapping[str, Any] | None) -> dict[str, set[str]]:
    """By the parameters' names, the types that a function's schema allows; none where it says nothing."""
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, dict):
        return {}
    referred: dict[str, set[str]] = {}
    return {key: _types(schema, parameters, referred) for key, schema in properties.items()}


def _types(schema: object, root: object, referred: dict[str, set[str]], depth: int = 16) -> set[str]:
    """`referred` keeps the types behind each reference, of which many properties may have the same."""
    if not isinstance(schema, dict) or not depth:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str | list):
        types = {declared} if isinstance(declared, str) else {*map(str, declared)}
    else:
        values = listed_values(schema)
        types = {_OF_JSON.get(type(value), "null") for value in values}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        if reference not in referred:
            referred[reference] = set()  # a circle adds nothing
            referred[reference] = _types(_at(root, reference), root, referred, depth - 1)
        types |= referred[reference]
    inner = [one for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for one in schema[key]]
    return types.union(*(_types(one, root, referred, depth - 1) for one in inner))


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists, if it does."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def _at(root: object, reference: str) -> object:
    for key in reference.split("/")[1:]:
        root = root.get(key) if isinstance(root, dict) else None
    return root


def may_be_text(types: Collection[str]) -> bool:
    """A parameter between tags stands there as text, without quotes."""
    return not types or "string" in types
