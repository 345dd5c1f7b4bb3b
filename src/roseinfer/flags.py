"""Turns the configuration tree into argparse flags, and a command line into given values.

It knows no option and no command by name, and imports nothing heavy: `roseinfer --help` is its speed.
"""

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from roseinfer.config import Option, options
from roseinfer.config_sources import Given
from roseinfer.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is a ConfigError of one sentence, and no flag may be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        where, _, sentence = message.partition(": ")
        if where == "unrecognized arguments":
            argument = sentence.split()[0]
            close = difflib.get_close_matches(argument.partition("=")[0], self._option_string_actions, n=1, cutoff=0.75)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"is not an argument of {self.prog}{hint}", param=argument)
        if where.startswith("argument "):
            raise ConfigError(sentence, param=where.removeprefix("argument "))
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse's, but what is left over is told by the command that did not know it."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            parsed.parser.error(f"unrecognized arguments: {rest[0]}")
        return parsed


class Give(argparse.Action):
    """Stores a `Given` under an option's path, with the flag as the user typed it. Booleans take `const`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = self.const if self.nargs == 0 else values
        setattr(namespace, self.dest, Given(value, str(option_string)))


def give(parser: argparse._ActionsContainer, flag: str, path: str, help: str, *, const: Any = None) -> None:  # noqa: A002
    """A flag that is another name for an option of the tree; with `const` it takes no value and means that one."""
    if const is not None:
        parser.add_argument(
            flag, dest=path, action=Give, nargs=0, const=const, default=argparse.SUPPRESS, help=_escape(help)
        )
        return
    parser.add_argument(
        flag, dest=path, action=Give, default=argparse.SUPPRESS, help=_escape(help), metavar=_metavar(options()[path])
    )


def add_config_flags(parser: argparse.ArgumentParser, *, with_short: bool = True) -> None:
    """`--config` and every option of the tree; `with_short=False` leaves the short names to the command."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with options; see docs/configuration.md")
    for section, leaves in groupby(options().values(), key=lambda option: option.section):
        group = parser.add_argument_group(section)
        for option in leaves:
            _add_option(group, option, with_short=with_short)


def _add_option(group: argparse._ArgumentGroup, option: Option, *, with_short: bool) -> None:
    if option.type is bool:
        give(group, option.flag, option.path, f"{option.description} Default: {option.default}.", const="true")
        for flag, const in ((f"--no-{option.flag[2:]}", "false"), (f"{option.flag}=true", "true")):
            give(group, flag, option.path, argparse.SUPPRESS, const=const)
        give(group, f"{option.flag}=false", option.path, argparse.SUPPRESS, const="false")
        return
    flags = [option.flag] + ([option.short_flag] if option.short_flag and with_short else [])
    shown = "" if option.default is None else f" Default: {option.default}."
    group.add_argument(
        *flags,
        dest=option.path,
        action=Give,
        default=argparse.SUPPRESS,
        help=_escape(option.description + shown),
        metavar=_metavar(option),
    )


def given_by(arguments: argparse.Namespace) -> dict[str, Given]:
    """What the flags gave for each path of the tree."""
    return {path: value for path, value in vars(arguments).items() if path in options()}


def number(kind: type[int] | type[float], *, least: float = 0, most: float = math.inf) -> Callable[[str], Any]:
    """A parser for a flag's value that must be in [least, most]."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"Expected `{kind.__name__}`, got {text!r}") from None
        if not least <= value:
            raise argparse.ArgumentTypeError(f"Expected `{kind.__name__}` >= {least:g}, got {text!r}")
        if not value <= most:
            raise argparse.ArgumentTypeError(f"Expected `{kind.__name__}` <= {most:g}, got {text!r}")
        return value

    return parse


def positives(text: str) -> Sequence[int]:
    """`1,4`: a comma list of positive integers."""
    return [number(int, least=1)(part.strip()) for part in text.split(",")]


def _metavar(option: Option) -> str:
    return "{" + ",".join(map(str, option.choices)) + "}" if option.choices else option.name.rpartition("_")[2].upper()


def _escape(text: str) -> str:
    return text if text == argparse.SUPPRESS else text.replace("%", "%%")
