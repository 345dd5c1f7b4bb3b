"""Yields the values at the edges of a JSON schema, on both sides of every bound, and those of every other type."""

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

Schema = dict[str, Any]

WRONG_TYPES: tuple[Any, ...] = (None, True, 1, 0.5, "a", [], {})
ANYTHING = {"": [-1.7e308, "😀" * 1000]}  # beside the values that a schema lists, or where it allows all
INTEGERS = (0, -1, 1, 2**31 - 1, 2**31, -(2**63), 2**63 - 1, 2**63, 10**30)
NUMBERS = (
    *(0.0, -0.0, 1.0, -1.0, 5e-324, -5e-324, 2.2e-308, 1e-45, 1e-39, 1.2e-38, 1e-6),
    *(6e-8, 65520.0, 3.4e38, 3.5e38, 1.7e308, -1.7e308),  # where float16 and float32 begin and end
)
TEXTS = ("", " ", "\0", "é", "😀", "\u2028", "<|eos|>", "a" * 1000)


class Extremes:
    """The extremes of a document's schemas; `definitions` are those that a `$ref` names."""

    def __init__(self, definitions: dict[str, Schema]) -> None:
        self._definitions = definitions

    def of_fields(self, schema: Schema) -> dict[str, list[Any]]:
        """Of each field of an object its extremes, without doubles."""
        properties = self._resolved(schema)["properties"]
        return {name: self.of(inner) for name, inner in properties.items()}

    def of(self, schema: Schema) -> list[Any]:
        choices = self._choices(schema)
        if not any(choice.keys() & {"type", "properties"} for choice in choices):  # a list of values, or anything
            return [*(value for choice in choices for value in choice.get("enum", ())), ANYTHING]
        values = (value for choice in choices for value in self._of_one(choice))
        return list({json.dumps(value): value for value in (*values, *WRONG_TYPES)}.values())

    def example(self, schema: Schema) -> Any:
        """A small value that fits."""
        choice = self._choices(schema)[0]
        if "enum" in choice:
            return choice["enum"][0]
        match choice.get("type"):
            case "object":
                properties = choice.get("properties", {})
                return {name: self.example(properties[name]) for name in choice.get("required", ())}
            case "array":
                return [self.example(choice.get("items", {}))] * choice.get("minItems", 0)
            case "string":
                return "a" * choice.get("minLength", 1)
            case "integer" | "number":
                return choice.get("maximum", 1)
        return None

    def _resolved(self, schema: Schema) -> Schema:
        return self._definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    def _choices(self, schema: Schema) -> list[Schema]:
        schema = self._resolved(schema)
        return [inner for part in schema["anyOf"] for inner in self._choices(part)] if "anyOf" in schema else [schema]

    def _of_one(self, schema: Schema) -> Iterable[Any]:
        match schema.get("type"):
            case "integer":
                return _around(schema, INTEGERS, lambda bound: (bound - 1, bound, bound + 1))
            case "number":
                return _around(
                    schema, NUMBERS, lambda b: (math.nextafter(b, -math.inf), b, math.nextafter(b, math.inf))
                )
            case "string":
                longest = schema.get("maxLength", 64)
                return (*TEXTS, "a" * longest, "😀" * longest, "a" * (longest + 1))
            case "array":
                return self._of_array(schema)
            case "object":
                return (*self._of_object(schema), *self._of_mapping(schema))
        return (*schema.get("enum", ()), True, False)

    def _of_array(self, schema: Schema) -> Iterator[list[Any]]:
        items = schema.get("items", {})
        one, longest = self.example(items), schema.get("maxItems", 65)
        yield from ([one], [one] * longest, [one] * (longest + 1))
        yield from ([value] for value in self.of(items))

    def _of_object(self, schema: Schema) -> Iterator[dict[str, Any]]:
        least = self.example(schema)
        yield from (least, {**least, "unknown": 1})
        for name, inner in schema.get("properties", {}).items():
            yield {key: value for key, value in least.items() if key != name}
            yield from ({**least, name: value} for value in self.of(inner))

    def _of_mapping(self, schema: Schema) -> Iterator[dict[str, Any]]:
        if "properties" in schema:
            return
        values = schema.get("additionalProperties", {})
        values = values if isinstance(values, dict) else {}
        one, most = self.example(values), schema.get("maxProperties", 300)
        yield from ({key: one} for key in ("", "0", "a", "1999", "999999999", "9" * 400, "a" * 65))
        yield from ({f"{prefix}{i}": one for i in range(num)} for num in (most, most + 1) for prefix in ("", "a"))
        yield from ({key: value} for value in self.of(values) for key in ("0", "a"))


def _around(schema: Schema, always: Iterable[Any], sides: Any) -> Iterator[Any]:
    yield from always
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if name in schema:
            yield from sides(schema[name])
