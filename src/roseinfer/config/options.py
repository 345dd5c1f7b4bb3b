"""The configuration: one frozen tree, from which flags, variables, the file's keys, JSON Schema and docs are made.

Each option has its type, default, description, bounds and short flag; a class is a section. `cli/main.py` fills the
tree once, and each class gets the section that it needs; nothing below reads the environment. Every `Config` is valid:
bounds and relations between values are checked whenever one is made.
"""

import re
from dataclasses import Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from msgspec import Meta

from roseinfer.config.values import Option, shown
from roseinfer.errors import ConfigError
from roseinfer.messages import MAX_PROFILE_STEPS

Section = TypeVar("Section")
DEMO_MODEL = "roseinfer/demo"
_X86Level = Literal["avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
_ArmLevel = Literal["neon", "neon_dotprod", "neon_i8mm"]


def option(default: Any, description: str, *, flag: str | None = None, **bounds: float) -> Any:
    """An option with its default and bounds, and for an everyday option the short flag that it also goes by."""
    return field(default=default, metadata={"description": description, "bounds": bounds, "flag": flag})


def _described(section: type[Section]) -> type[Section]:
    """Put bounds and descriptions into the annotations of a section, where msgspec looks for them."""
    for name, leaf in vars(section).items():
        if isinstance(leaf, Field):
            kind, bounds = section.__annotations__[name], leaf.metadata["bounds"]
            if bounds and (alternatives := get_args(kind)):  # a number, or None or a word
                kind = Annotated[alternatives[0], Meta(**bounds)] | alternatives[1]
            elif bounds:
                kind = Annotated[kind, Meta(**bounds)]
            section.__annotations__[name] = Annotated[kind, Meta(description=leaf.metadata["description"])]
    return section


@dataclass(frozen=True, slots=True)
@_described
class ModelConfig:
    """Which model, and the types of its numbers."""

    path: str = option(
        DEMO_MODEL,
        "A checkpoint directory, a Hugging Face id, an address such as `s3://BUCKET/FOLDER`, or `roseinfer/demo` for "
        "the embedded model.",
        flag="--model",
    )
    revision: str | None = option(None, "Branch, tag or commit of a Hugging Face id.")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "Type of weights and KV cache, unless `cache.dtype` says otherwise. `auto` is bfloat16 on CUDA and on CPUs "
        "that multiply it in hardware, float32 elsewhere, where bfloat16 would be emulated and slower.",
        flag="--dtype",
    )
    quantization: Literal["none", "int8", "int4"] = option(
        "none",
        "`int8`: weights of linears in int8, a scale for each output, and activations in int8, a scale for each "
        "token. `int4`: weights of four bits, the head's too, a scale for each 32 inputs of an output; activations as "
        "in int8. On a CPU only. An option, not a default: it changes the model's answers.",
        flag="--quantization",
    )
    packed_cache: str = option(
        "auto",
        "Directory for packed weights, which the next start maps instead of packing them, and which processes on one "
        "machine share. `auto`: `roseinfer/packed` in the user's cache. `off`: none. The weights of four models that "
        "were used last are kept. On a CPU with compiled kernels, and for int8 and int4 on any; not for checkpoints of "
        "less than 64 MiB.",
        min_length=1,
    )
    generation_config: Literal["auto", "ignore"] = option(
        "auto",
        "`auto`: sampling parameters that a request leaves out come from the checkpoint's generation_config.json. "
        "Its end-of-sequence ids count either way.",
    )
    max_model_len: int | None = option(
        None,
        "Longest prompt plus completion, in tokens. Default: what the model allows, or all that the KV cache holds if "
        "that is less (and at least 1024).",
        ge=2,
        flag="--max-model-len",
    )


@dataclass(frozen=True, slots=True)
@_described
class CacheConfig:
    """The paged KV cache."""

    dtype: Literal["auto", "int8"] = option(
        "auto",
        "Type of keys and values. `auto`: `model.dtype`. `int8`: eight bits and a float32 scale for each token and "
        "head, about half the memory of bfloat16 and a quarter of float32's. An option, not a default: it changes the "
        "model's answers. On CUDA not with `flashinfer`.",
        flag="--kv-cache-dtype",
    )
    block_size: Literal[8, 16, 32, 64] = option(
        16, "Tokens in one block. 16 wastes at most 15 positions a sequence and shares prefixes finely."
    )
    num_blocks: int | None = option(
        None, "Blocks in the pool. Default: `memory_utilization` on CUDA, `cpu_memory_mib` on CPU.", ge=2
    )
    memory_utilization: float = option(
        0.9, "Share of the GPU's memory that weights and KV cache may take together.", gt=0, le=1
    )
    cpu_memory_mib: int = option(
        2048, "Most memory the KV cache takes on a CPU, in MiB; less when every sequence fits in less.", ge=1
    )
    prefix_caching: bool = option(
        True, "Share the KV blocks of equal prompt prefixes between requests of one cache salt."
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's limits with every default resolved.

    A sequence decodes at least once in ceil(max_active_seqs / max_num_seqs) steps, and no step carries more than
    `max_prefill_tokens` of prompts. Decode rows leave at least one block of the budget to the oldest prompt.
    """

    max_num_seqs: int
    max_prefill_seqs: int
    max_active_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int


@dataclass(frozen=True, slots=True)
@_described
class SchedulerConfig:
    """Which sequences and tokens go into one step."""

    max_num_seqs: int = option(64, "Sequences decoded in one step.", ge=1, flag="--max-num-seqs")
    max_prefill_seqs: int | None = option(
        None, "Sequences admitted to prefill in one step. Default: the same as `max_num_seqs`.", ge=1
    )
    max_active_seqs: int | None = option(
        None,
        "Sequences that hold KV blocks; when more are active than one step decodes, they take turns. Default: the "
        "larger of `max_num_seqs` and `max_prefill_seqs`.",
        ge=1,
    )
    max_num_batched_tokens: int = option(
        512,
        "Token budget of one step: decode rows first, prefill chunks in the rest. It must exceed `max_num_seqs` by at "
        "least one block, so that decoding cannot starve prefill.",
        ge=2,
    )
    max_prefill_tokens: int | None = option(
        None,
        "Most prefill tokens in one step. Default on a CPU, beside streams: as many as let a step take 30 ms, or twice "
        "what its decoding rows take alone, by what steps took lately; more where more requests wait for their first "
        "token than stream. Default on CUDA, and where nothing decodes: all that the token budget leaves.",
        ge=1,
    )
    target_itl_ms: float | None = option(
        None,
        "In place of `max_prefill_tokens`: the longest gap between two tokens of a stream, in milliseconds. A step has "
        "as many prefill tokens as fit by what steps took lately, and one block at least. Where nothing decodes, a "
        "step has all that the token budget leaves.",
        gt=0,
        le=60_000,
    )
    admission: Literal["fifo", "pack", "priority"] = option(
        "fifo",
        "`fifo`: in order of arrival. `pack`: the shortest prompts of the look-ahead window first. `priority`: the "
        "lowest `priority` first, each level counting as a second of waiting.",
    )
    speculation: int | Literal["auto", "off"] = option(
        "auto",
        "Tokens that a row drafts from what its text said before, or what its grammar forces; each is checked in the "
        "same step, so the answer is the same. `auto`: as many as pay, by the time of steps and by what has held. On "
        "CUDA every value means `off`.",
        ge=1,
        le=16,
    )
    lookahead: int = option(64, "Waiting requests among which `pack` chooses.", ge=1)
    fifo_every: int = option(
        8,
        "Under `pack`, the oldest request goes first once in this number of admitting steps, so that none starves.",
        ge=1,
    )

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

    def option_of(self, limit: str) -> str:
        """The path of the option that a field of `limits` has its value from: its own, or that of its default."""
        larger = "max_prefill_seqs" if self.limits.max_prefill_seqs > self.max_num_seqs else "max_num_seqs"
        followed = {
            "max_prefill_seqs": "max_num_seqs",
            "max_active_seqs": larger,
            "max_prefill_tokens": "max_num_batched_tokens",
        }
        return f"scheduler.{limit if getattr(self, limit) is not None else followed[limit]}"


@dataclass(frozen=True, slots=True)
@_described
class RunnerConfig:
    """Where and how the model runs."""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "`auto` takes CUDA when a GPU is present.", flag="--device")
    attention: Literal["auto", "native", "gathered", "reference", "triton", "flashinfer"] = option(
        "auto",
        "Attention backend. On a CPU `auto` takes `native`, the compiled kernel, where it was built, else `gathered`, "
        "plain torch; on CUDA it takes `flashinfer` where that is installed and works, else `triton`. `reference` is "
        "slow and simple.",
    )
    kernels: Literal["auto", "off", _X86Level, _ArmLevel] = option(
        "auto",
        "Level of the compiled CPU kernels (`roseinfer kernels build`). `auto`: the highest that this processor has "
        "and that was built; without one, plain torch.",
    )
    kernels_dir: str | None = option(
        None, "Directory of the compiled kernels. Default: `roseinfer/kernels` in the user's cache."
    )
    cuda_graphs: Literal["startup", "lazy", "off"] = option(
        "startup",
        "When steps are captured as CUDA graphs: before the port is ready, at the first step of each size (a stream "
        "waits for that), or never. Graphs take half of the GPU's memory that is free then, at most.",
    )
    staging: Literal["pinned", "pageable"] = option(
        "pinned", "Host memory from which a step's integers are copied to the GPU; `pageable` is for comparison."
    )
    pipeline_depth: Literal["auto", 0, 1] = option(
        "auto", "Steps launched before the result of the previous one has been read. `auto`: 1 on a GPU. On a CPU 0."
    )
    batch_invariant: bool = option(
        False,
        "On CUDA: attention by Triton gives a token the same bits whatever else is in the batch, at the cost of long "
        "sequences in small batches. The tokens of a request may still depend on the batch, since the library chooses "
        "matrix products by the number of rows. On a CPU this is always on, and tokens do not depend on the batch, "
        "bit for bit, unless linears are plain `torch` (label `linear` of `roseinfer_model_info`), as where torch has "
        "no oneDNN and there are no compiled kernels.",
    )
    num_threads: int | None = option(
        None,
        "Threads of the model on a CPU. Default: one for each 16 MiB of weights, up to the cores that this process "
        "may use; in bfloat16 without kernels that multiply it (levels `avx512_bf16` and `amx`, and those of Arm) at "
        "most 8, since with more a row could depend on its neighbours.",
        ge=1,
        le=1024,
    )

    def pipeline_depth_on(self, device: str) -> int:
        """The depth on a device of this type. A CPU computes while it launches: a step ahead would only be a delay."""
        if device == "cpu":
            return 0
        return 1 if self.pipeline_depth == "auto" else self.pipeline_depth


@dataclass(frozen=True, slots=True)
@_described
class EngineConfig:
    """Where the engine runs, and what follows when it fails."""

    transport: Literal["process", "thread"] = option(
        "process", "`process`: the engine has its own interpreter and its own GIL. `thread`: for debugging."
    )
    step_timeout_s: float = option(
        30.0,
        "Longest time of a step; after it the engine counts as hung and is killed. Garbage collections, captures of "
        "CUDA graphs and the writing of a profile may take ten times as long. The default is far above any slow step, "
        "and below the patience of an orchestrator.",
        gt=0,
    )
    on_failure: Literal["exit", "restart"] = option(
        "exit",
        "What follows when the engine dies or hangs. `exit`: exit code 70; the supervisor of the process starts a new "
        "one, which is the only state known to be clean. `restart`: a new engine in the same process, with the ports "
        "open, once in ten minutes; needs the transport `process`.",
    )


@dataclass(frozen=True, slots=True)
@_described
class ServerConfig:
    """The HTTP ports, and what they admit."""

    host: str = option(
        "127.0.0.1", "Address of the API port; empty: all that the machine has, of IPv4 and of IPv6.", flag="--host"
    )
    port: int = option(8000, "API port; 0 takes a free one.", ge=0, le=65535, flag="--port")
    ops_host: str = option("127.0.0.1", "Address of the operations port; empty as for the API port.")
    ops_port: int = option(
        8001, "Operations port: probes and `/metrics` again. 0 turns it off.", ge=0, le=65535, flag="--ops-port"
    )
    served_model_name: str | tuple[str, ...] | None = option(
        None,
        "The `model` that clients name, or several: the first is the one in metrics, logs and traces, and in answers "
        "to requests that name none. Default: the last part of the path; `roseinfer-demo`.",
        flag="--served-model-name",
    )
    api_key_file: str | None = option(
        None,
        "File with one API key a line, after its name if it has one. With it every endpoint of the API port but the "
        "probes needs a key. It is read again when it changes. The variable ROSEINFER_API_KEYS holds more keys, "
        "separated by semicolons.",
        flag="--api-key-file",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins such as `https://example.com` whose pages may send requests and read answers (CORS), or `*` for "
        "all. Semicolons separate them in a variable. Default: none, and a page of another origin reads no answer.",
    )
    tls_cert_file: str | None = option(
        None,
        "PEM file with the certificate and its chain: the API port then speaks TLS. Both files are read again when "
        "they change. The operations port stays plain, for the cluster's own network.",
    )
    tls_key_file: str | None = option(None, "PEM file with the certificate's private key.")
    chat_template: str | None = option(
        None, "File with a Jinja chat template, instead of the checkpoint's.", flag="--chat-template"
    )
    max_inflight: int = option(
        4096,
        "HTTP requests served or waiting at once; the next one is answered 429 with `Retry-After`. A request counts "
        "once, however many sequences its prompts and `n` make. The default is a bound of memory, of some 31 KiB a "
        "request and 0.2 KiB a token; `max_queue_wait_s` is met long before, once requests have been measured.",
        ge=1,
    )
    max_inflight_tokens: int | None = option(
        None,
        "Tokens served at once: prompts, and what they may generate. A request that would exceed it is answered 429, "
        "unless it is alone. Default: no limit but those on requests and waiting.",
        ge=1,
    )
    max_queue_wait_s: float = option(
        30.0,
        "Longest predicted wait for a first token, in seconds; a request that would wait longer is answered 429 at "
        "once, with `Retry-After`. The default is half of what patient clients allow for an answer.",
        gt=0,
    )
    stream_interval: int = option(
        1, "Tokens that a stream sends together; the first is always sent at once. A request may set its own.", ge=1
    )
    drain_timeout_s: float = option(
        25.0, "Longest time that streams have to finish after SIGTERM; then they end with an error event.", ge=0
    )
    unknown_fields: Literal["refuse", "ignore"] = option(
        "refuse",
        "A field of a body that no server has: `refuse` answers 400, `ignore` lists it in the header "
        "`x-roseinfer-ignored`. A known one that is not served and would change the answer is a 400 either way.",
    )
    max_body_bytes: int = option(2 * 1024 * 1024, "Longest request body.", ge=1024)
    max_bodies_mib: int = option(
        128,
        "Memory of all bodies of more than 64 KiB together, each from its first byte to the last of its answer; one "
        "that would exceed it is answered 429, unless it is alone. 128 are 64 of the longest. The "
        "answers of `/tokenize` and `/detokenize` count too.",
        ge=1,
    )
    request_timeout_s: float = option(
        0.0, "Longest time of a request without `timeout_s`; 0: as long as its client stays.", ge=0
    )
    queue_timeout_s: float = option(
        0.0, "Longest wait of a request without `queue_timeout_s`; 0: as long as its client stays.", ge=0
    )
    keepalive_interval_s: float = option(
        15.0,
        "Seconds after which a silent stream sends a comment, so that no proxy closes it: a quarter of the usual 60 "
        "s. 0 sends none.",
        ge=0,
    )
    body_timeout_s: float = option(
        30.0, "Longest time for the body; then 408. The default allows 2 MiB over a slow line.", gt=0
    )
    idle_timeout_s: float = option(
        75.0, "Longest pause between two requests of a connection: more than the usual 60 s of balancers.", gt=0
    )
    write_timeout_s: float = option(
        30.0, "Longest time that a client may leave a full buffer unread; then its request is aborted.", gt=0
    )


@dataclass(frozen=True, slots=True)
@_described
class StructuredConfig:
    """Structured output: grammars that clients send."""

    compile_timeout_s: float = option(
        2.0,
        "Longest processor time that a grammar may take to compile, else 400; five times as long on the clock where "
        "others have the processors. Most take a millisecond, a schema of 4,000 required properties half a second. "
        "Grammars of all clients are checked one after the other.",
        gt=0,
    )
    tool_format: Literal[
        "auto",
        "hermes",
        "llama3_json",
        "pythonic",
        "mistral",
        "mistral_v11",
        "qwen3_coder",
        "glm45",
        "granite",
        "phi4_mini",
        "deepseek_v3",
        "deepseek_v31",
    ] = option(
        "auto",
        "How the model writes a tool call; structured-output.md has a table of the formats. `auto` looks into the chat "
        "template.",
    )
    reasoning_format: Literal["auto", "none", "think", "mistral", "seed", "thought", "kimi", "cohere", "granite"] = (
        option(
            "auto",
            "How the model marks its thoughts: `think` is `<think>…</think>` (Qwen3, DeepSeek-R1, SmolLM3), `mistral` "
            "`[THINK]…[/THINK]`; structured-output.md lists all. `auto` looks into the chat template; `none` leaves "
            "thoughts in the content.",
        )
    )


@dataclass(frozen=True, slots=True)
@_described
class ObserveConfig:
    """Logs, the flight recorder and captures."""

    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Lowest level that is logged.", flag="--log-level"
    )
    log_format: Literal["auto", "json", "text"] = option(
        "auto", "`auto`: text on a terminal, one JSON object a line elsewhere."
    )
    log_summary_interval_s: float = option(
        10.0, "Seconds between summary lines while there is work; 0 turns them off.", ge=0
    )
    vllm_names: bool = option(
        True,
        "Show the load on `/metrics` and `/metrics/load` under vLLM's names too, which pickers and routers read. Off "
        "where Prometheus keeps vLLM's own series, among which these would count.",
    )
    slow_gap_factor: float = option(
        3.0,
        "A gap between two tokens is slow when it is this many times the recent median, and longer than "
        "`slow_gap_min_ms`.",
        gt=1,
    )
    slow_gap_min_ms: float = option(2.0, "Gaps that are not longer than this, in milliseconds, are never slow.", ge=0)
    nvtx: bool = option(False, "Mark the phases of each step with NVTX ranges for Nsight.")
    recorder_steps: int = option(
        8192,
        "Engine steps that the flight recorder remembers, 402 bytes each. For each step it remembers 8 socket writes, "
        "57 bytes each, and for every 8 steps a finished request, about nine bytes a token.",
        ge=16,
        le=1 << 20,
    )
    capture_rules: tuple[str, ...] = option(
        (),
        "Rules such as `3 gaps over 60 ms in 10 s`, `1 ttft over 2 s in 30 s` or `1 slow gap of graph_capture in 60 "
        "s`; a breach is captured. Semicolons separate rules in a flag or variable. See docs/capture.md.",
    )
    capture_dir: str = option("", "Directory for captures, each in one of its own; empty: nothing is captured.")
    capture_max_mib: float = option(
        1024.0, "Most MiB of captures: the oldest are deleted first, the newest never is.", gt=0
    )
    capture_profile_steps: int = option(
        0,
        "Steps that the profiler records after a breach; 0 records none. The profiler slows them, and no step runs "
        "while the trace is written.",
        ge=0,
        le=MAX_PROFILE_STEPS,
    )


@dataclass(frozen=True, slots=True)
@_described
class KVEventsConfig:
    """Says over ZeroMQ which blocks the prefix cache holds, for routers that choose by prefix (docs/fleet.md)."""

    endpoint: str | None = option(
        None,
        "Address of the events, such as `tcp://*:5557`: with `*` or `::` the engine binds it, another it connects to. "
        "Needs `roseinfer[kv-events]`. Default: none.",
    )
    replay_endpoint: str | None = option(
        None, "Address, which the engine binds, at which readers ask for events that they missed."
    )
    topic: str | None = option(None, "First frame of each message. Default: `kv@HOST@MODEL`, as llm-d reads it.")
    form: Literal["array", "map"] = option(
        "array",
        "How an event is written: `array` is what llm-d's adapter for vLLM reads (June 2026), `map` what the classes "
        "of vLLM 0.32 read.",
    )


@dataclass(frozen=True, slots=True)
@_described
class TracingConfig:
    """Traces for an OpenTelemetry collector (docs/tracing.md). The OTEL_ variables of the environment come first."""

    endpoint: str | None = option(
        None,
        "OTLP address where OTEL_EXPORTER_OTLP_ENDPOINT has none; `/v1/traces` is added to one without a path. Without "
        "either nothing is traced.",
    )
    ratio: float = option(
        0.01,
        "Share of ordinary requests that is traced, unless the caller's traceparent or OTEL_TRACES_SAMPLER decides.",
        ge=0,
        le=1,
    )
    slow_ttft_s: float = option(
        1.0,
        "A request is always traced that had a slow gap, ended in an error or timeout, or took longer than this to "
        "its first token: until its write in a stream, else until the engine had it.",
        gt=0,
    )
    step_interval: int = option(1000, "Beside slow steps, one step in this number is traced; 0: slow ones only.", ge=0)


_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+")  # as browsers write it


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
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        for section, kind in get_type_hints(Config).items():
            if not isinstance(given := getattr(self, section), kind):
                raise ConfigError(f"expected a {kind.__name__}, got {shown(given)}", param=section)
        for option in options().values():
            option.convert(getattr(getattr(self, option.section), option.name))
        _check_relations(self)

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names of the model that clients may give."""
        given = self.server.served_model_name
        if given:
            return (given,) if isinstance(given, str) else given
        if self.model.path == DEMO_MODEL:
            return ("roseinfer-demo",)
        return (Path(self.model.path).name or self.model.path,)

    @property
    def served_model_name(self) -> str:
        return self.served_model_names[0]


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
    if scheduler.target_itl_ms is not None and scheduler.max_prefill_tokens is not None:
        raise ConfigError(
            f"{scheduler.target_itl_ms:g} cannot be kept beside scheduler.max_prefill_tokens "
            f"{scheduler.max_prefill_tokens}: both say how many prompt tokens a step has, so give one of them",
            param="scheduler.target_itl_ms",
        )
    if config.kv_events.endpoint is not None and not config.cache.prefix_caching:
        raise ConfigError("there are no events with cache.prefix_caching off", param="kv_events.endpoint")
    for origin in server.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"expected * or an origin such as https://example.com, in small letters and without a path; got "
                f"{shown(origin)}",
                param="server.allowed_origins",
            )
    if server.ops_port and server.ops_port == server.port and server.ops_host == server.host:
        raise ConfigError(f"{server.ops_port} is the API port already", param="server.ops_port")


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
