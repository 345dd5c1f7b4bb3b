"""Merges a file, the environment and flags into one `Config`: defaults < file < environment < flags.

Every error names the option and the source of the value.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import yaml

from roseinfer.config.api_keys import KEYS_VARIABLE
from roseinfer.config.options import Config, options
from roseinfer.config.values import ENVIRONMENT_PREFIX, shown
from roseinfer.errors import ConfigError

MAX_PROBLEM_CHARS = 300
_LIKE = 0.6  # of 1, two names are alike: difflib's own measure

# Variables of ours that are not options, and what each of them is.
FOREIGN_VARIABLES: Mapping[str, str] = {
    KEYS_VARIABLE: "holds API keys beside those of `server.api_key_file`",
    "ROSEINFER_REQUIRE_ALL": "belongs to the tests",
}

# Variables that Kubernetes puts into every pod of a namespace with a service called `roseinfer…`.
_SERVICE_LINK = re.compile(
    r"\w+(_SERVICE_(HOST|PORT)(_\w+)?=.*|_PORT(_\d+_[A-Z]+)?=\w+://.*|_PORT_\d+_[A-Z]+_(PROTO|PORT|ADDR)=.*)"
)

_MERGE = "tag:yaml.org,2002:merge"  # of the key <<

# Errors of `read_yaml`: PyYAML has others beside its own for invalid dates and numbers, and deep nesting. A text that
# is no UTF-8 is a ValueError too.
NO_YAML = (yaml.YAMLError, ValueError, AttributeError, LookupError, TypeError, RecursionError)


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, and a key that a mapping has twice is an error: the first one's values would be lost."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]
        seen = set()
        for key in keys:
            if key.value in seen:
                raise yaml.composer.ComposerError(problem=f"{key.value} comes twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


class Given(NamedTuple):
    """A value as it was written, and its source: a flag, a variable, or a file."""

    value: Any
    source: str


class LoadedConfig(NamedTuple):
    """The merged tree, and the source of each value that was given; all others are defaults."""

    config: Config
    sources: dict[str, str]


def gather(flags: Mapping[str, Given], env: Mapping[str, str], file: Path | None) -> dict[str, Given]:
    """Merge the given values by path, not yet converted; the stronger source wins. Raises ConfigError."""
    return {**(_from_file(file) if file else {}), **_from_environment(env), **flags}


def build(given: Mapping[str, Given]) -> LoadedConfig:
    """Convert the given values and make the tree. Raises ConfigError with the path of the option."""
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
    """Merge and convert in one call; `flags` are by dotted path."""
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
            raise ConfigError(f"names no option{_variable_meant(name, by_variable)}", param=name)
    return given


def _variable_meant(name: str, known: Iterable[str]) -> str:
    """The hint for a variable with one underscore where there are two, or in small letters, or else `closest`."""
    known = [*known, *FOREIGN_VARIABLES]
    flat = name.upper().replace("__", "_")
    same = [variable for variable in known if variable.replace("__", "_") == flat]
    return f"; did you mean {same[0]}?" if same else closest(name, known)


def _from_file(file: Path) -> dict[str, Given]:
    try:
        tree = read_yaml(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", param=str(file)) from None
    except NO_YAML as error:
        raise ConfigError(f"is not YAML: {yaml_problem(error)}{_wanted(file)}", param=str(file)) from None
    given = {}
    for section, values in _mapping(tree, str(file), _wanted(file)).items():
        if not isinstance(values, dict) and (hint := _nested(str(section))):
            raise ConfigError(f"names no option; did you mean {hint}?", param=f"{file}: {section}")
        for name, value in _mapping(values, f"{file}: {section}").items():
            path = f"{section}.{name}"
            if path not in options():
                raise ConfigError(f"names no option{closest(path, options())}", param=f"{file}: {path}")
            given[path] = Given(value, str(file))
    return given


def read_yaml(text: str) -> Any:
    """Like `yaml.safe_load`, but a key that a mapping has twice is an error. Raises one of NO_YAML."""
    loader = _StrictLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _nested(name: str) -> str:
    """How options are written that a file has outside of their section, such as `port` or `server.port`."""
    found = [option for path, option in options().items() if name in (path, option.name)]
    return " or ".join(f"{option.section}: {{{option.name}: ...}}" for option in found)


def yaml_problem(error: Exception) -> str:
    """Where and why PyYAML stopped, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {_one_line(error.problem or error.context or '')}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position + 1}: {_one_line(error.reason)}"
    return _one_line(str(error))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_PROBLEM_CHARS]


def _wanted(file: Path) -> str:
    return "; a file of options is YAML, not TOML" if file.suffix == ".toml" else ""


def _mapping(value: Any, where: str, note: str = "") -> dict[str, Any]:
    if value is None:  # an empty file, or a section whose lines are all comments
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"expected a mapping, got {shown(value)}{note}", param=where)
    return value


def closest(name: str, known: Iterable[str], likeness: float = _LIKE) -> str:
    """`; did you mean X?` for a known name like this one, or nothing. A section in common is not enough."""
    for match in difflib.get_close_matches(name, list(known), cutoff=likeness):
        if difflib.SequenceMatcher(None, _leaf(name), _leaf(match)).ratio() >= _LIKE:
            return f"; did you mean {match}?"
    return ""


def _leaf(name: str) -> str:
    return re.split(r"\.|__", name)[-1]
