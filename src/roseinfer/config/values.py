"""One option as flags, variables and files give it: its names, and how a value becomes its type or is refused."""

import math
from dataclasses import dataclass
from reprlib import Repr
from typing import Any, Literal, get_args, get_origin

import msgspec

from roseinfer.errors import ConfigError
from roseinfer.runtime.validation import in_words_of_json, types_in

ENVIRONMENT_PREFIX = "ROSEINFER_"


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the tree, with its flag, variable and path."""

    section: str
    name: str
    type: Any
    description: str
    default: Any
    short_flag: str | None

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return f"--{self.path.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"{ENVIRONMENT_PREFIX}{self.section}__{self.name}".upper()

    @property
    def is_list(self) -> bool:
        """Whether it may have several values: in a flag with blanks between, in a variable with semicolons."""
        return any(get_origin(kind) is tuple for kind in types_in(self.type))

    @property
    def choices(self) -> tuple[Any, ...]:
        """The closed set of values, or nothing."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def convert(self, value: Any, *, strict: bool = True) -> Any:
        """Convert a value to the type of the tree. Raises ConfigError.

        `strict=False` also reads it from text: a number, a boolean, or the parts of a list with semicolons between.
        """
        if not strict and isinstance(value, str) and self.is_list:
            value = [part.strip() for part in value.split(";") if part.strip()]
        if not strict and value is False and ("off" in _words_of(self.type) or self.path == "model.packed_cache"):
            value = "off"  # YAML reads the bare word as false
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str) and not _is_utf8(text):  # as in a path: processes send each other the tree
                raise ConfigError(f"{shown(text)} is not UTF-8", param=self.path)
        try:
            converted = msgspec.convert(value, self.type, strict=strict)
        except msgspec.ValidationError as error:
            one_of = f"Expected one of {', '.join(map(str, self.choices))}, got {shown(value)}" if self.choices else ""
            reason = one_of or refusal_of(value, self.type, error, strict=strict)
            if not one_of and str in types_in(self.type) and not isinstance(value, str | list | dict | None):
                reason += "; in quotes it is a string"  # a name such as 1.0, or a commit of digits
            raise ConfigError(reason, param=self.path) from None
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ConfigError(f"Expected a finite number, got {shown(value)}", param=self.path)
        return converted


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_READ_AS = {int: "an integer", float: "a number", bool: "true or false"}


def _words_of(kind: Any) -> list[Any]:
    """The closed sets of values in a type."""
    return [word for each in types_in(kind) if get_origin(each) is Literal for word in get_args(each)]


def refusal_of(value: object, kind: Any, error: msgspec.ValidationError, *, strict: bool = False) -> str:
    """Why a value is refused, or without `strict` a text that stands for one.

    Such as `'many' is not an integer, nor auto or off`.
    """
    kinds, words = types_in(kind), _words_of(kind)
    if isinstance(value, str) or words:
        for plain in _READ_AS.keys() & {each for each in kinds if isinstance(each, type)}:
            try:
                msgspec.convert(value, plain, strict=strict)
            except msgspec.ValidationError:
                return f"{shown(value)} is not {_READ_AS[plain]}" + (f", nor {' or '.join(words)}" if words else "")
    reason = in_words_of_json(error)
    return reason if "got" in reason else f"{reason}, got {shown(value)}"


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: Any) -> str:
    """A value as a message quotes it, shortened: a few lines of YAML with aliases make one of gigabytes."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of too many digits"
