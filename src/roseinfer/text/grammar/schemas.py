"""Rewrites JSON schemas as llguidance needs them: the bounds and keywords it mistakes, references of a part alone."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

_DATA_KEYS = frozenset({"const", "enum", "default", "examples"})
_NAMING_KEYS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# What excludes nothing, and the library does not know; zod writes the names' type for each record, and pydantic these
# formats for secrets, bytes and paths.
_VOID: Sequence[tuple[str, object]] = (
    ("uniqueItems", False),
    ("propertyNames", {"type": "string"}),
    ("propertyNames", {}),
    *(("format", name) for name in ("password", "binary", "path", "file-path", "directory-path")),
)
_MINIMA, _MAXIMA = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_LEAST_ABOVE_0 = 1e-30  # the library writes bounds out, and not with hundreds of zeros


def as_root(schema: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """A schema from within another, which its references go by, as one that stands alone; `whole` is moved."""
    root: dict[str, Any] = moved(schema)
    return root if root == schema else root | {"$defs": {"whole": whole}}


def moved(schema: Any) -> Any:
    """The schema with references that go by another, which is in its `$defs`."""
    if isinstance(schema, list):
        return list(map(moved, schema))
    if not isinstance(schema, dict):
        return schema
    parts: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMING_KEYS and isinstance(value, dict):  # names may be any words
            parts[key] = dict(zip(value, map(moved, value.values()), strict=True))
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            parts[key] = f"#/$defs/whole{value[1:]}"
        else:
            parts[key] = value if key in _DATA_KEYS else moved(value)
    return parts


def for_library(schema: Any) -> Any:
    """The schema without what excludes nothing, and with bounds that the library excludes where they are excluded.

    Of numbers above 2 and up to 2.5, or of others with one whole part, it allows 2 too. Above the float that follows 2
    it does not, and nothing is lost. Data in a schema, such as a `const`, stays as it is.
    """
    # By `map`, since a comprehension is a second frame at each level, and a body may have 500.
    if isinstance(schema, list):
        return list(map(for_library, schema))
    if not isinstance(schema, dict):
        return schema
    strict: dict[str, Any] = {}
    for key, value in schema.items():
        if (key, value) in _VOID:
            continue
        if key in _NAMING_KEYS and isinstance(value, dict):  # names may be any words
            strict[key] = dict(zip(value, map(for_library, value.values()), strict=True))
        else:
            strict[key] = value if key in _DATA_KEYS else for_library(value)
    low, high = strict.get("exclusiveMinimum"), strict.get("exclusiveMaximum")
    if _is_number(low) and low >= 0 and any(low < end < low + 1 for end in _numbers(strict, _MAXIMA)):
        strict["exclusiveMinimum"] = math.nextafter(low, math.inf) if low else _LEAST_ABOVE_0
    elif _is_number(high) and high < 0 and any(high - 1 < end < high for end in _numbers(strict, _MINIMA)):
        strict["exclusiveMaximum"] = math.nextafter(high, -math.inf)
    return strict


def _numbers(schema: dict[str, Any], keys: Iterable[str]) -> list[int | float]:
    """The numbers that these keywords have."""
    return [value for key in keys if _is_number(value := schema.get(key))]


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
