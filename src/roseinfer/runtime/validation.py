"""Converts plain objects into msgspec types, and finds the value that does not fit with its path and the reason.

msgspec says where a value does not fit only within a sentence. So after a refusal the value is searched: each part is
converted alone, until the refused one has no parts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

import msgspec

T = TypeVar("T")
Path = tuple[str | int, ...]
_TYPES = re.compile(r"`([a-z| ]+)`")  # in msgspec's sentences
_JSON_WORDS = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
_MAX_QUOTED = 100  # characters of a client's own text in an error


class Misfit(ValueError):
    """A value that does not fit its type; `path` leads to it, and `value` is what stands there.

    A struct's `__post_init__` raises it with a path from that struct.
    """

    def __init__(
        self,
        reason: str,
        path: Path = (),
        *,
        kind: Literal["value", "unknown field", "missing field"] = "value",
        value: object = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.kind = kind
        self.value = value

    @classmethod
    def missing(cls, *path: str | int) -> Self:
        return cls("Missing field", path, kind="missing field")

    @classmethod
    def unknown(cls, *path: str | int) -> Self:
        return cls("Unknown field", path, kind="unknown field")

    def within(self, *path: str | int) -> "Misfit":
        """The same, where the value that `path` leads to was converted alone."""
        return Misfit(self.reason, (*path, *self.path), kind=self.kind, value=self.value)

    @property
    def where(self) -> str:
        """The path as in `messages[0].role`."""
        steps = (f"[{step}]" if isinstance(step, int) else f".{step[:_MAX_QUOTED]}" for step in self.path)
        return "".join(steps).removeprefix(".")

    def __str__(self) -> str:
        """The path and the reason, to follow the name of a file: `phases[0].users: Expected …`."""
        if self.kind != "value":
            return f"{self.reason} `{self.where}`"
        return f"{self.where}: {self.reason}" if self.path else self.reason

    def sentence(self, note: str = "") -> str:
        """One sentence that names the value, such as "`top_p`: Expected `number` <= 1.0."."""
        return f"`{self.where}`: {self.reason}{note}." if self.kind == "value" else f"{self.reason} `{self.where}`."


def convert(value: Any, expected: type[T], *, str_keys: bool = False) -> T:
    """The value as one of the type `expected`. Raises Misfit.

    With `str_keys` the keys of mappings are texts, as in JSON, and may stand for numbers.
    """
    try:
        return msgspec.convert(value, expected, str_keys=str_keys)
    except msgspec.ValidationError as error:
        raise _Search(str_keys).misfit(value, expected, error) from None


class _Search:
    def __init__(self, str_keys: bool) -> None:
        self._str_keys = str_keys

    def misfit(self, value: Any, expected: Any, error: msgspec.ValidationError) -> Misfit:
        """The innermost part of a refused value that is refused itself."""
        alternatives = types_in(expected)
        found = None
        if isinstance(value, Mapping):
            found = self._in_mapping(value, alternatives)
        elif isinstance(value, list | tuple):
            found = self._in_list(value, alternatives)
        if found is not None:
            return found
        if isinstance(error.__cause__, Misfit):  # raised by the struct itself
            return error.__cause__
        return Misfit(_reason(value, alternatives, error), value=value)

    def _within(self, value: Any, expected: Any, *step: str | int) -> Misfit | None:
        error = self._error(value, expected=expected)
        return None if error is None else self.misfit(value, expected, error).within(*step)

    def _error(self, value: Any, *, expected: Any) -> msgspec.ValidationError | None:
        try:
            msgspec.convert(value, expected, str_keys=self._str_keys)
        except msgspec.ValidationError as error:
            return error
        return None

    def _in_list(self, values: Sequence[Any], alternatives: list[Any]) -> Misfit | None:
        for kind in alternatives:
            if get_origin(kind) in {list, tuple} and get_args(kind)[1:] in {(), (...,)}:
                element: Any = get_args(kind)[0]
                index = _first_refused(values, partial(self._error, expected=list[element]))
                return None if index is None else self._within(values[index], element, index)
        return None

    def _in_mapping(self, mapping: Mapping[Any, Any], alternatives: list[Any]) -> Misfit | None:
        if structs := [kind for kind in alternatives if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]:
            return self._in_fields(mapping, structs)
        for kind in alternatives:
            if get_origin(kind) is dict:
                return self._in_dict(mapping, kind)
        return None

    def _in_fields(self, fields: Mapping[Any, Any], structs: Sequence[type[msgspec.Struct]]) -> Misfit | None:
        tag_field = structs[0].__struct_config__.tag_field
        if tag_field is not None:
            by_tag = {struct.__struct_config__.tag: struct for struct in structs}
            if tag_field not in fields:
                return Misfit.missing(tag_field)
            if (misfit := self._within(fields[tag_field], Literal[tuple(by_tag)], tag_field)) is not None:
                return misfit
            structs = [by_tag[fields[tag_field]]]
        known = {field.encode_name: field for field in msgspec.structs.fields(structs[0])}
        for name, value in fields.items():
            if name in known:
                if (misfit := self._within(value, known[name].type, name)) is not None:
                    return misfit
            elif name != tag_field and structs[0].__struct_config__.forbid_unknown_fields:
                return Misfit.unknown(str(name))
        return next((Misfit.missing(name) for name in known if known[name].required and name not in fields), None)

    def _in_dict(self, mapping: Mapping[Any, Any], kind: Any) -> Misfit | None:
        items = list(mapping.items())
        index = _first_refused(items, lambda part: self._error(dict(part), expected=kind))
        if index is None:
            return None
        key, value = items[index]
        value_type = get_args(kind)[1]
        if (misfit := self._within(value, value_type, str(key))) is not None:
            return misfit
        # Converted alone, the text "1.0" would be the number that it is not as a key.
        reason = in_words_of_json(self._error({key: value}, expected=kind)).partition(" - at ")[0]
        return Misfit(f"{reason} as a key, {_quoted(key)}", value=key)


def _first_refused(values: Sequence[Any], error_of: Callable[[Sequence[Any]], Exception | None]) -> int | None:
    """The index of the first value that does not fit; halving looks at each about once."""
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if error_of(values[low:middle]) is None else (low, middle)
    return low if error_of(values[low:high]) is not None else None


def _reason(value: Any, alternatives: list[Any], error: msgspec.ValidationError) -> str:
    """The reason that msgspec gives for a value without parts; of a closed set, its members."""
    choices = [choice for kind in alternatives if get_origin(kind) is Literal for choice in get_args(kind)]
    if not any(type(value) is type(choice) for choice in choices):
        return in_words_of_json(error)
    one_of = "one of " if len(choices) > 1 else ""
    return f"Expected {one_of}{', '.join(sorted(map(repr, choices)))}; got {_quoted(value)}"


def in_words_of_json(error: Exception | None) -> str:
    """What msgspec says, with JSON's names of types for Python's."""

    def rename(types: re.Match[str]) -> str:
        return f"`{' or '.join(_JSON_WORDS.get(word, word) for word in types[1].split(' | '))}`"

    return _TYPES.sub(rename, str(error))


def _quoted(value: object) -> str:
    return repr(value[:_MAX_QUOTED] if isinstance(value, str) else value)


def types_in(expected: Any) -> list[Any]:
    """The types in a union, without what annotates them."""
    if get_origin(expected) is Annotated:
        return types_in(get_args(expected)[0])
    if get_origin(expected) in {Union, UnionType}:
        return [kind for part in get_args(expected) for kind in types_in(part)]
    return [expected]
