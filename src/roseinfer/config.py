"""The configuration: one frozen tree with five faces — flags, environment, file, JSON Schema and documentation.

`config_sources.py` fills the tree, once, in `cli.py`; it is passed down as the sub-tree a class needs, and nothing
below reads the environment. `docs/configuration.md` is generated from the annotations. A `Config` that exists is valid:
bounds and relations between values are checked whenever one is made.
"""

import math
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from roseinfer.errors import ConfigError

DEMO_MODEL = "roseinfer/demo"
ENVIRONMENT_PREFIX = "ROSEINFER_"


def _option(default: Any, *, flag: str | None = None) -> Any:
    """A leaf with a default and, for an everyday option, the short flag it also goes by."""
    return field(default=default, metadata={"flag": flag} if flag else {})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how its numbers are held."""

    path: Annotated[
        str, Meta(description="A checkpoint directory, a Hugging Face id, or `roseinfer/demo` for the embedded model.")
    ] = _option(DEMO_MODEL, flag="--model")
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of a Hugging Face id.")] = _option(None)
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(
            description="Type of weights and KV cache. `auto` is bfloat16 on CUDA and on CPUs that multiply it in "
            "hardware, float32 elsewhere, where bfloat16 would be emulated and slower."
        ),
    ] = _option("auto", flag="--dtype")
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="Longest prompt plus completion, in tokens. Default: what the model allows."),
    ] = _option(None, flag="--max-model-len")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: Annotated[
        Literal[8, 16, 32, 64],
        Meta(description="Tokens in one block. 16 wastes at most 15 positions a sequence and shares prefixes finely."),
    ] = _option(16)
    num_blocks: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="Blocks in the pool. Default: `memory_utilization` on CUDA, `cpu_memory_mib` on CPU."),
    ] = _option(None)
    memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1, description="Share of the GPU's memory that weights and KV cache may take together."),
    ] = _option(0.9)
    cpu_memory_mib: Annotated[
        int,
        Meta(
            ge=1, description="Most memory the KV cache takes on a CPU, in MiB; less when every sequence fits in less."
        ),
    ] = _option(2048)
    prefix_caching: Annotated[
        bool, Meta(description="Share the KV blocks of equal prompt prefixes between requests of one cache salt.")
    ] = _option(True)


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's limits with every default resolved.

    Two bounds on starvation follow from them. Decode: a sequence decodes at least once in
    ceil(max_active_seqs / max_num_seqs) steps, and no step carries more than `max_prefill_tokens` of others' prompts.
    Prefill: decode rows leave at least one block of the budget, so the oldest prompt advances in every step.
    """

    max_num_seqs: int
    max_prefill_seqs: int
    max_active_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What goes into one step."""

    max_num_seqs: Annotated[int, Meta(ge=1, description="Sequences decoded in one step.")] = _option(
        64, flag="--max-num-seqs"
    )
    max_prefill_seqs: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Sequences admitted to prefill in one step. Default: the same as `max_num_seqs`."),
    ] = _option(None)
    max_active_seqs: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Sequences that hold KV blocks; when more are active than one step decodes, they take turns. "
            "Default: the larger of `max_num_seqs` and `max_prefill_seqs`.",
        ),
    ] = _option(None)
    max_num_batched_tokens: Annotated[
        int,
        Meta(
            ge=2,
            description="Token budget of one step: decode rows first, prefill chunks in the rest. It must exceed "
            "`max_num_seqs` by at least one block, so that decoding can never shut prefill out.",
        ),
    ] = _option(512)
    max_prefill_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Most prefill tokens in one step, which bounds how much a newcomer can slow the streams "
            "already running. Default: all that the token budget leaves.",
        ),
    ] = _option(None)
    admission: Annotated[
        Literal["fifo", "pack"],
        Meta(description="`fifo`: in order of arrival. `pack`: the shortest prompts of the look-ahead window first."),
    ] = _option("fifo")
    lookahead: Annotated[int, Meta(ge=1, description="Waiting requests among which `pack` chooses.")] = _option(64)
    fifo_every: Annotated[
        int,
        Meta(
            ge=1,
            description="Under `pack`, the oldest request goes first once in this number of admitting steps, so that "
            "none starves.",
        ),
    ] = _option(8)
    max_prefix_wait_steps: Annotated[
        int,
        Meta(
            ge=0,
            description="Most steps for which a request waits for a prefix block that another request is computing. "
            "0 turns the waiting off.",
        ),
    ] = _option(64)

    @property
    def limits(self) -> Limits:
        max_prefill_seqs = self.max_prefill_seqs or self.max_num_seqs
        return Limits(
            max_num_seqs=self.max_num_seqs,
            max_prefill_seqs=max_prefill_seqs,
            max_active_seqs=self.max_active_seqs or max(self.max_num_seqs, max_prefill_seqs),
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_tokens=self.max_prefill_tokens or self.max_num_batched_tokens,
        )


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Where and how the model runs."""

    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="`auto` takes CUDA when a GPU is present.")] = (
        _option("auto", flag="--device")
    )
    attention: Annotated[
        Literal["auto", "reference"],
        Meta(description="Attention backend. `auto` takes `reference`, the only one so far."),
    ] = _option("auto")
    num_threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Threads of the model on a CPU. Default: the cores this process may use; in bfloat16 at most "
            "8, beyond which a row could depend on its neighbours."
        ),
    ] = _option(None)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's place and its watchdog."""

    transport: Annotated[
        Literal["process", "thread"],
        Meta(description="`process`: the engine has its own interpreter and its own GIL. `thread`: for debugging."),
    ] = _option("process")
    step_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest time without a step while there is work; then `/livez` fails.")
    ] = _option(30.0)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """HTTP."""

    host: Annotated[str, Meta(description="Address of the API port.")] = _option("127.0.0.1", flag="--host")
    port: Annotated[int, Meta(ge=0, le=65535, description="API port; 0 takes a free one.")] = _option(
        8000, flag="--port"
    )
    ops_host: Annotated[str, Meta(description="Address of the operations port.")] = _option("127.0.0.1")
    ops_port: Annotated[
        int, Meta(ge=0, le=65535, description="Operations port: probes and `/metrics` again. 0 turns it off.")
    ] = _option(8001, flag="--ops-port")
    served_model_name: Annotated[
        str | None,
        Meta(description="The `model` that clients name. Default: the last part of the path; `roseinfer-demo`."),
    ] = _option(None, flag="--served-model-name")
    api_key_file: Annotated[
        str | None,
        Meta(description="File with one API key a line. When given, everything on the API port but probes needs one."),
    ] = _option(None, flag="--api-key-file")
    max_inflight: Annotated[
        int, Meta(ge=1, description="HTTP requests served at once; the next one is answered 429 with `Retry-After`.")
    ] = _option(256)
    stream_interval: Annotated[
        int,
        Meta(
            ge=1,
            description="Tokens that a stream sends together; the first always goes at once. Requests may differ.",
        ),
    ] = _option(1)
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0, description="Longest time for streams to finish after SIGTERM; then they end with an error event."),
    ] = _option(25.0)
    max_body_bytes: Annotated[int, Meta(ge=1024, description="Longest request body.")] = _option(2 * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    """What is told, and how."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Lowest level that is logged.")
    ] = _option("info", flag="--log-level")
    log_format: Annotated[
        Literal["auto", "json", "text"],
        Meta(description="`auto`: text on a terminal, one JSON object a line elsewhere."),
    ] = _option("auto")
    log_summary_interval_s: Annotated[
        float, Meta(ge=0, description="Seconds between summary lines while there is work; 0 turns them off.")
    ] = _option(10.0)
    nvtx: Annotated[bool, Meta(description="Mark the phases of each step with NVTX ranges for Nsight.")] = _option(
        False
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    def __post_init__(self) -> None:
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
        """The value as the tree holds it. Raises ConfigError. `strict=False` reads numbers and booleans from text."""
        try:
            converted = msgspec.convert(value, self.type, strict=strict)
        except msgspec.ValidationError as error:
            expected = f"Expected one of {', '.join(map(str, self.choices))}" if self.choices else str(error)
            got = "" if "got" in expected else f", got {value!r}"
            raise ConfigError(expected + got, param=self.path) from None
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ConfigError(f"Expected a finite number, got {value!r}", param=self.path)
        return converted


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
