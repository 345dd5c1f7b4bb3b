"""Makes argparse flags of the options, and reads their values from a command line.

It imports nothing heavy, so `roseinfer --help` is fast.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from roseinfer.config.options import options
from roseinfer.config.sources import Given, closest
from roseinfer.config.values import Option, refusal_of
from roseinfer.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]

_HOST_AND_PORT = re.compile(r"(\[[\dA-Fa-f:.]+\]|[\w.-]+):\d{1,5}(/.*)?")
_VALUE_OF_SWITCH = "ignored explicit argument "


class _Formatter(argparse.HelpFormatter):
    """argparse's formatter, which also shows how to switch a boolean flag off."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        flag = next(iter(action.option_strings), "")
        # An alias has no form that switches it off.
        if isinstance(action, StoreGiven) and action.const == "true" and flag == options()[action.dest].flag:
            return f"--[no-]{flag[2:]}"
        return super()._format_action_invocation(action)


class Parser(argparse.ArgumentParser):
    """argparse, but an error is a ConfigError of one sentence, and no flag may be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        where, _, sentence = message.partition(": ")
        if where == "unrecognized arguments":
            argument = next(iter(sentence.split()), "''")  # of one that is empty, as of a variable that is not set
            raise ConfigError(f"is not an argument of {self.prog}{self._hint(argument)}", param=argument)
        if where.startswith("argument "):
            flag = where.removeprefix("argument ")
            if sentence.startswith(_VALUE_OF_SWITCH):  # argparse's words for what it refuses
                is_boolean = f"{flag}=false" in self._option_string_actions
                given = sentence.removeprefix(_VALUE_OF_SWITCH)
                sentence = f"{given} is not true or false" if is_boolean else f"takes no value, got {given}"
            raise ConfigError(sentence, param=flag)
        raise ConfigError(f"{message}; see {self.prog} --help")

    def _hint(self, argument: str) -> str:
        """`; did you mean X?` for an option without its section, a misspelled one or a checkpoint without its flag."""
        shown = [flag for flag in self._option_string_actions if "=" not in flag]
        if not argument.startswith("-"):
            return f"; did you mean --model {argument}?" if "/" in argument and "--model" in shown else ""
        name = argument.partition("=")[0]
        whole = [flag for flag in shown if flag.startswith("--") and flag.endswith(f".{name[2:]}")]
        return f"; did you mean {' or '.join(whole)}?" if whole else closest(name, shown, likeness=0.75)

    def check_switches(self, arguments: Sequence[str], left_over: str) -> None:
        """Raise ConfigError for a value after a boolean flag, which takes it only behind `=`."""
        for flag, value in itertools.pairwise(arguments):
            if value == left_over and f"{flag}=false" in self._option_string_actions:
                raise ConfigError(
                    f"takes no value after a blank: write {flag}, {flag}=false or --no-{flag[2:]}", param=flag
                )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse's, but the command that did not know an argument reports it."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            parsed.parser.check_switches(args, rest[0])
            parsed.parser.error(f"unrecognized arguments: {rest[0]}")
        return parsed


class StoreGiven(argparse.Action):
    """Stores a `Given` under an option's path, with the flag as the user typed it. Booleans take `const`.

    Several values become one text, as a variable has them.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = self.const if self.nargs == 0 else "; ".join(values) if self.nargs == "+" else values
        setattr(namespace, self.dest, Given(value, str(option_string)))


def add_alias(parser: argparse._ActionsContainer, flag: str, path: str, help: str, *, const: Any = None) -> None:  # noqa: A002
    """Add a flag that is another name for an option; with `const` it takes no value and means that one."""
    option = options()[path]
    kind: dict[str, Any] = {"nargs": 0, "const": const}
    if const is None:
        kind = {"metavar": _metavar(option)} | ({"nargs": "+"} if option.is_list else {})
    help = help if help is argparse.SUPPRESS else help.replace("%", "%%")  # noqa: A001
    parser.add_argument(flag, dest=path, action=StoreGiven, default=argparse.SUPPRESS, help=help, **kind)


def add_config_flags(parser: argparse.ArgumentParser, *, with_short: bool = True) -> None:
    """Add `--config` and a flag for every option; help shows the everyday options first, by their short flags.

    `with_short=False` leaves the short flags to the command.
    """
    everyday = parser.add_argument_group("everyday") if with_short else parser
    everyday.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file with options; see docs/configuration.md"
    )
    others = []
    for option in options().values():
        if with_short and option.short_flag:
            _add_option(everyday, option, option.short_flag)
            _add_option(everyday, option, option.flag, is_shown=False)
        else:
            others.append(option)
    for section, leaves in groupby(others, key=lambda option: option.section):
        group = parser.add_argument_group(section)
        for option in leaves:
            _add_option(group, option, option.flag)


def _add_option(group: argparse._ActionsContainer, option: Option, flag: str, *, is_shown: bool = True) -> None:
    default = "" if option.default is None else f" Default: {option.default}."
    shown = option.description + default if is_shown else argparse.SUPPRESS
    if option.type is not bool:
        add_alias(group, flag, option.path, shown)
        return
    add_alias(group, flag, option.path, shown, const="true")
    for spelling, const in ((f"--no-{flag[2:]}", "false"), (f"{flag}=true", "true"), (f"{flag}=false", "false")):
        add_alias(group, spelling, option.path, argparse.SUPPRESS, const=const)


def values_given(arguments: argparse.Namespace) -> dict[str, Given]:
    """The values that flags gave, by path of the option."""
    return {path: value for path, value in vars(arguments).items() if path in options()}


def parser_of(kind: Any) -> Callable[[str], Any]:
    """A parser for a flag whose values are of an annotated type, such as `TokenCount`."""

    def parse(text: str) -> Any:
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError as error:
            raise argparse.ArgumentTypeError(refusal_of(text, kind, error)) from None

    return parse


def positives(text: str) -> Sequence[int]:
    """`1,4`: a comma list of positive integers."""
    return [parser_of(Positive)(part.strip()) for part in text.split(",")]


def num_engines(text: str) -> tuple[int, int]:
    """`4`, or `1-8`: the least and the most engines."""
    least, dash, most = text.partition("-")
    numbers = parser_of(Positive)(least), parser_of(Positive)(most if dash else least)
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"expected a number such as 4, or a range such as 1-8, got {text!r}")
    return numbers


def url_of(text: str) -> str | None:
    """The URL that a text means, which may leave out the scheme; None for a text that is neither."""
    if text.startswith(("http://", "https://")):
        return text
    return f"http://{text}" if _HOST_AND_PORT.fullmatch(text) else None


def server_url(text: str) -> str:
    """Parse a URL such as `http://127.0.0.1:8000`, also without its scheme."""
    if (url := url_of(text)) is None:
        raise argparse.ArgumentTypeError(f"expected a URL such as http://127.0.0.1:8000, got {text!r}")
    return url


def url_or_path(text: str) -> str:
    """Parse a URL or a path; a file whose name looks like a host and a port is that file."""
    url = url_of(text)
    return text if url is None or Path(text).exists() else url


def _metavar(option: Option) -> str:
    return "{" + ",".join(map(str, option.choices)) + "}" if option.choices else option.name.rpartition("_")[2].upper()
