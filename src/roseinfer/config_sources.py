"""Turns a file, the environment and flags into one `Config`; it knows the tree's paths and no option by name.

Order of precedence: defaults < file < environment < flags. Every error names the path and where the value came from.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import yaml

from roseinfer.config import ENVIRONMENT_PREFIX, Config, options, shown
from roseinfer.errors import ConfigError

FOREIGN_VARIABLES = frozenset({"ROSEINFER_REQUIRE_ALL", "ROSEINFER_API_KEYS"})  # ours, but no part of the tree

# What Kubernetes puts into every pod of a namespace that has a service called `roseinfer…`.
_SERVICE_LINK = re.compile(
    r"\w+(_SERVICE_(HOST|PORT)(_\w+)?=.*|_PORT(_\d+_[A-Z]+)?=\w+://.*|_PORT_\d+_[A-Z]+_(PROTO|PORT|ADDR)=.*)"
)

# What PyYAML lets through of a text that is none, of a date or number that is none, and of endless nesting.
_UNREADABLE = (ValueError, AttributeError, LookupError, TypeError, RecursionError)


class Given(NamedTuple):
    """A value as somebody wrote it, and where: a flag, a variable, or a file."""

    value: Any
    source: str


class LoadedConfig(NamedTuple):
    """The merged tree, and for each path whose value was given, by whom. All other paths have their defaults."""

    config: Config
    sources: dict[str, str]


def gather(flags: Mapping[str, Given], env: Mapping[str, str], file: Path | None) -> dict[str, Given]:
    """What was given for each path, the stronger source winning, not yet converted. Raises ConfigError."""
    return {**(_from_file(file) if file else {}), **_from_environment(env), **flags}


def build(given: Mapping[str, Given]) -> LoadedConfig:
    """The tree. Raises ConfigError with the path; `given[path].source` tells who is to blame."""
    sections: dict[str, dict[str, Any]] = {}
    for path, (value, _) in given.items():
        option = options()[path]
        sections.setdefault(option.section, {})[option.name] = option.convert(value, strict=False)
    types = get_type_hints(Config)
    config = Config(**{name: types[name](**values) for name, values in sections.items()})
    return LoadedConfig(config, {path: source for path, (_, source) in given.items()})


def load(
    flags: Mapping[str, Given] | None = None, env: Mapping[str, str] | None = None, file: Path | None = None
) -> LoadedConfig:
    """Defaults < file < environment < flags; `flags` and the file speak in dotted paths."""
    return build(gather(flags or {}, env or {}, file))


def _from_environment(env: Mapping[str, str]) -> dict[str, Given]:
    by_variable = {option.variable: path for path, option in options().items()}
    given = {}
    for name, text in env.items():
        if not name.startswith(ENVIRONMENT_PREFIX) or name in FOREIGN_VARIABLES:
            continue
        if name in by_variable:
            given[by_variable[name]] = Given(text, name)
        elif not _SERVICE_LINK.fullmatch(f"{name}={text}"):
            raise ConfigError(f"names no option{_closest(name, by_variable)}", param=name)
    return given


def _from_file(file: Path) -> dict[str, Given]:
    try:
        tree = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", param=str(file)) from None
    except (yaml.YAMLError, *_UNREADABLE) as error:
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}", param=str(file)) from None
    given = {}
    for section, values in _mapping(tree, str(file)).items():
        for name, value in _mapping(values, f"{file}: {section}").items():
            path = f"{section}.{name}"
            if path not in options():
                raise ConfigError(f"names no option{_closest(path, options())}", param=f"{file}: {path}")
            given[path] = Given(value, str(file))
    return given


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if value is None:  # an empty file, or a section whose lines are all comments
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"expected a mapping, got {shown(value)}", param=where)
    return value


def _closest(name: str, known: Mapping[str, Any]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
