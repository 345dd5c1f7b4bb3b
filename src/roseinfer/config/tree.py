"""The configuration: one frozen tree with five faces — flags, environment, file, JSON Schema and documentation.

`config_sources.py` fills the tree, once, in `cli.py`; it is passed down as the sub-tree a class needs, and nothing
below reads the environment. `docs/configuration.md` is generated from the annotations. A `Config` that exists is valid:
bounds and relations between values are checked whenever one is made.
"""

import math
import re
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from roseinfer.config.options import (
    DEMO_MODEL,
    CacheConfig,
    EngineConfig,
    Limits,
    ModelConfig,
    ObserveConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
    StructuredConfig,
    TracingConfig,
)
from roseinfer.errors import ConfigError

__all__ = [
    "DEMO_MODEL",
    "ENVIRONMENT_PREFIX",
    "CacheConfig",
    "Config",
    "EngineConfig",
    "Limits",
    "ModelConfig",
    "ObserveConfig",
    "Option",
    "RunnerConfig",
    "SchedulerConfig",
    "ServerConfig",
    "StructuredConfig",
    "TracingConfig",
    "options",
]

ENVIRONMENT_PREFIX = "ROSEINFER_"


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        for section, kind in get_type_hints(Config).items():
            if not isinstance(given := getattr(self, section), kind):
                raise ConfigError(f"expected a {kind.__name__}, got {shown(given)}", param=section)
        for option in options().values():
            option.convert(getattr(getattr(self, option.section), option.name))
        _check_relations(self)

    @property
    def served_model_name(self) -> str:
        if self.server.served_model_name is not None:
            return self.server.served_model_name
        if self.model.path == DEMO_MODEL:
            return "roseinfer-demo"
        return Path(self.model.path).name or self.model.path


def _check_relations(config: Config) -> None:
    scheduler, server = config.scheduler, config.server
    least = scheduler.max_num_seqs + config.cache.block_size
    if scheduler.max_num_batched_tokens < least:
        raise ConfigError(
            f"{scheduler.max_num_batched_tokens} is less than max_num_seqs + block_size = {least}, so decoding could "
            "shut prefill out",
            param="scheduler.max_num_batched_tokens",
        )
    limits = scheduler.limits
    for name in ("max_num_seqs", "max_prefill_seqs"):
        if limits.max_active_seqs < (rows := getattr(limits, name)):
            raise ConfigError(
                f"{limits.max_active_seqs} is less than {name} = {rows}, which could never be reached",
                param="scheduler.max_active_seqs",
            )
    if config.engine.on_failure == "restart" and config.engine.transport != "process":
        raise ConfigError(
            "an engine in a thread cannot be started again: `restart` needs the transport `process`",
            param="engine.on_failure",
        )
    if server.ops_port and server.ops_port == server.port and server.ops_host == server.host:
        raise ConfigError(f"{server.ops_port} is the API port already", param="server.ops_port")


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the tree, and how each face names it."""

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
    def choices(self) -> tuple[Any, ...]:
        """The closed set of values, or nothing."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def convert(self, value: Any, *, strict: bool = True) -> Any:
        """The value as the tree holds it. Raises ConfigError. `strict=False` also reads it from text.

        Text is a number, a boolean, or the parts of a list with semicolons between them.
        """
        if not strict and isinstance(value, str) and get_origin(self.type) is tuple:
            value = [part.strip() for part in value.split(";") if part.strip()]
        try:
            converted = msgspec.convert(value, self.type, strict=strict)
        except msgspec.ValidationError as error:
            expected = f"Expected one of {', '.join(map(str, self.choices))}" if self.choices else str(error)
            got = "" if "got" in expected else f", got {shown(value)}"
            message = expected + got if strict else misread(value, expected + got)
            raise ConfigError(message, param=self.path) from None
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ConfigError(f"Expected a finite number, got {shown(value)}", param=self.path)
        return converted


_READ_AS = {"int": "an integer", "float": "a number", "bool": "true or false"}
_MISREAD = re.compile(r"Expected `(?P<kind>int|float|bool)( \| null)?`.*, got .*", re.DOTALL)


def misread(value: object, phrase: str) -> str:
    """What to say of a text that should be read as a number or a boolean; else what msgspec does."""
    found = _MISREAD.fullmatch(phrase) if isinstance(value, str) else None
    if found is None or (" `str`" not in phrase.rpartition(", got")[2]):
        return phrase
    return f"{shown(value)} is not {_READ_AS[found['kind']]}"


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: Any) -> str:
    """A value in a message: a few lines of YAML with aliases make one of gigabytes."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of too many digits"


@cache
def options() -> dict[str, Option]:
    """Every leaf by its dotted path, in the order of the tree."""
    leaves = {}
    for section, section_type in get_type_hints(Config).items():
        hints = get_type_hints(section_type, include_extras=True)
        for leaf in fields(section_type):
            annotation, meta = get_args(hints[leaf.name])[0], hints[leaf.name].__metadata__[-1]
            bounds = Meta(**{k: getattr(meta, k) for k in ("gt", "ge", "lt", "le") if getattr(meta, k) is not None})
            kind = annotation if bounds == Meta() else Annotated[annotation, bounds]
            option = Option(section, leaf.name, kind, meta.description, leaf.default, leaf.metadata.get("flag"))
            leaves[option.path] = option
    return leaves
