"""The configuration: one frozen tree, from which flags, variables, the file's keys, JSON Schema and docs are made.

`cli/main.py` fills the tree once, and each class gets the section that it needs; nothing below reads the environment.
Every `Config` is valid: bounds and relations between values are checked whenever one is made.
"""

import math
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

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
from roseinfer.runtime.validation import types_in

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
            "starve prefill",
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
    def choices(self) -> tuple[Any, ...]:
        """The closed set of values, or nothing."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def convert(self, value: Any, *, strict: bool = True) -> Any:
        """Convert a value to the type of the tree. Raises ConfigError.

        `strict=False` also reads it from text: a number, a boolean, or the parts of a list with semicolons between.
        """
        if not strict and isinstance(value, str) and get_origin(self.type) is tuple:
            value = [part.strip() for part in value.split(";") if part.strip()]
        try:
            converted = msgspec.convert(value, self.type, strict=strict)
        except msgspec.ValidationError as error:
            one_of = f"Expected one of {', '.join(map(str, self.choices))}, got {shown(value)}" if self.choices else ""
            raise ConfigError(one_of or refusal_of(value, self.type, error), param=self.path) from None
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ConfigError(f"Expected a finite number, got {shown(value)}", param=self.path)
        return converted


_READ_AS = {int: "an integer", float: "a number", bool: "true or false"}


def refusal_of(value: object, kind: Any, error: msgspec.ValidationError) -> str:
    """Why a value is refused, or a text that stands for one, such as `'many' is not an integer`."""
    if isinstance(value, str):
        for plain in _READ_AS.keys() & set(types_in(kind)):
            try:
                msgspec.convert(value, plain, strict=False)
            except msgspec.ValidationError:
                return f"{shown(value)} is not {_READ_AS[plain]}"
    reason = str(error)
    return reason if "got" in reason else f"{reason}, got {shown(value)}"


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: Any) -> str:
    """A value as a message quotes it, shortened: a few lines of YAML with aliases make one of gigabytes."""
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
            hint = hints[leaf.name]
            *bounds, meta = hint.__metadata__
            kind = Annotated[hint.__origin__, *bounds] if bounds else hint.__origin__
            option = Option(section, leaf.name, kind, meta.description, leaf.default, leaf.metadata["flag"])
            leaves[option.path] = option
    return leaves
