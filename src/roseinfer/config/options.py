"""The sections of the configuration: every option with its type, bounds, default and description, and nothing else."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from roseinfer.messages import MAX_PROFILE_STEPS

DEMO_MODEL = "roseinfer/demo"


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
    quantization: Annotated[
        Literal["none", "int8"],
        Meta(
            description="`int8`: weights of linears in int8, a scale for each output, and activations in int8, a scale "
            "for each token; on a CPU only. An option, not a default: it changes the model's answers."
        ),
    ] = _option("none", flag="--quantization")
    generation_config: Annotated[
        Literal["auto", "ignore"],
        Meta(
            description="`auto`: sampling parameters that a request leaves out come from the checkpoint's "
            "generation_config.json. Its end-of-sequence ids count either way."
        ),
    ] = _option("auto")
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
        Literal["fifo", "pack", "priority"],
        Meta(
            description="`fifo`: in order of arrival. `pack`: the shortest prompts of the look-ahead window first. "
            "`priority`: the lowest `priority` first, each level counting as a second of waiting."
        ),
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
class RunnerConfig:
    """Where and how the model runs."""

    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="`auto` takes CUDA when a GPU is present.")] = (
        _option("auto", flag="--device")
    )
    attention: Annotated[
        Literal["auto", "native", "gathered", "reference", "triton", "flashinfer"],
        Meta(
            description="Attention backend. `auto` takes `native`, the compiled kernel, on a CPU where it was built, "
            "and `gathered`, plain torch, where not; on CUDA `flashinfer` where it is installed, and `triton` where "
            "not. `reference` is slow and obvious."
        ),
    ] = _option("auto")
    kernels: Annotated[
        Literal["auto", "off", "avx2", "avx512", "avx512_bf16", "amx"],
        Meta(
            description="Level of the compiled CPU kernels (`roseinfer kernels build`). `auto`: the highest that this "
            "processor has and that was built; without one, plain torch."
        ),
    ] = _option("auto")
    kernels_dir: Annotated[
        str | None, Meta(description="Where compiled kernels lie. Default: `roseinfer/kernels` in the user's cache.")
    ] = _option(None)
    cuda_graphs: Annotated[
        Literal["startup", "lazy", "off"],
        Meta(
            description="When decode steps are captured as CUDA graphs: before the port is ready, each size when it is "
            "first met (which a stream then waits for), or never."
        ),
    ] = _option("startup")
    staging: Annotated[
        Literal["pinned", "pageable"],
        Meta(
            description="Host memory from which a step's integers are copied to the GPU; `pageable` is for comparison."
        ),
    ] = _option("pinned")
    pipeline_depth: Annotated[
        Literal[0, 1],
        Meta(description="Steps launched before the result of the one before has been read. On a CPU always 0."),
    ] = _option(0)
    batch_invariant: Annotated[
        bool,
        Meta(
            description="On CUDA: attention by Triton gives a token the same bits whatever else is in the batch, at "
            "the cost of long sequences in small batches. It is no promise about a request's tokens: matrix products "
            "are the library's, which chooses by the number of rows. A CPU has it always, and there the tokens do not "
            "depend on the batch either, bit for bit, unless linears are plain `torch` (label `linear` of "
            "`roseinfer_model_info`), as where torch has no oneDNN and there are no compiled kernels."
        ),
    ] = _option(False)
    num_threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Threads of the model on a CPU. Default: one for each 16 MiB of weights, up to the cores that "
            "this process may use; in bfloat16 without kernels that multiply it (levels `avx512_bf16` and `amx`) at "
            "most 8, beyond which a row could depend on its neighbours."
        ),
    ] = _option(None)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Where the engine runs, and what follows when it fails."""

    transport: Annotated[
        Literal["process", "thread"],
        Meta(description="`process`: the engine has its own interpreter and its own GIL. `thread`: for debugging."),
    ] = _option("process")
    step_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Longest time that a step may take, from its start; then the engine counts as hung and is "
            "ended. Collections of garbage, captures of CUDA graphs and the writing of a profile may take ten times as "
            "long. Far above any step that is only slow, and below what an orchestrator waits.",
        ),
    ] = _option(30.0)
    on_failure: Annotated[
        Literal["exit", "restart"],
        Meta(
            description="When the engine dies or hangs. `exit`: code 70, and whoever supervises the process starts a "
            "new one, which is the only state known to be clean. `restart`: a new engine in the same process, ports "
            "staying open, once in ten minutes; needs the transport `process`."
        ),
    ] = _option("exit")


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
        Meta(
            description="File with one API key a line, after its name if it has one. When given, everything on the API "
            "port but probes needs one. It is read again when it changes. More keys, separated by semicolons, may "
            "stand in the variable ROSEINFER_API_KEYS."
        ),
    ] = _option(None, flag="--api-key-file")
    tls_cert_file: Annotated[
        str | None,
        Meta(
            description="PEM file with the certificate and its chain: the API port then speaks TLS. Both files are "
            "read again when they change. The operations port stays plain, for the cluster's own network."
        ),
    ] = _option(None)
    tls_key_file: Annotated[str | None, Meta(description="PEM file with the certificate's private key.")] = _option(
        None
    )
    chat_template: Annotated[
        str | None,
        Meta(description="File with a Jinja chat template, instead of the checkpoint's."),
    ] = _option(None, flag="--chat-template")
    max_inflight: Annotated[
        int,
        Meta(
            ge=1,
            description="HTTP requests served at once; the next one is answered 429 with `Retry-After`. A request "
            "counts once, however many sequences its prompts and `n` make.",
        ),
    ] = _option(256)
    max_inflight_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Tokens served at once, of prompts and of what they may generate; a request that comes on top "
            "is answered 429, unless it is alone. Default: no limit but those on requests and waiting."
        ),
    ] = _option(None)
    max_queue_wait_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Longest predicted wait for a first token, in seconds; a request that would wait longer is "
            "answered 429 at once, with a `Retry-After`. Half a minute is half of what patient clients allow for an "
            "answer.",
        ),
    ] = _option(30.0)
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
    max_bodies_mib: Annotated[
        int,
        Meta(
            ge=1,
            description="Bodies of more than 64 KiB that are held at once, from their first byte to the last of their "
            "answer; one that comes on top is answered 429, unless it is alone. 128 are half a megabyte for each of "
            "`max_inflight`. `/tokenize` and `/detokenize` count what they answer too.",
        ),
    ] = _option(128)
    request_timeout_s: Annotated[
        float,
        Meta(ge=0, description="Longest time of a request without `timeout_s`; 0: as long as its client stays."),
    ] = _option(0.0)
    queue_timeout_s: Annotated[
        float,
        Meta(ge=0, description="Longest wait of a request without `queue_timeout_s`; 0: as long as its client stays."),
    ] = _option(0.0)
    keepalive_interval_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a stream that has nothing to say sends a comment, so that no proxy takes "
            "it for dead: a quarter of the usual 60 s. 0 sends none.",
        ),
    ] = _option(15.0)
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest time for the body; then 408. 2 MiB in it is a slow telephone line.")
    ] = _option(30.0)
    idle_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Longest rest between two requests of a connection: over the 60 s of usual balancers."),
    ] = _option(75.0)
    write_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Longest time that a client leaves a full buffer unread; then its request is aborted."),
    ] = _option(30.0)


@dataclass(frozen=True, slots=True)
class StructuredConfig:
    """Structured output: grammars that clients send."""

    compile_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Longest time of a processor that a grammar may take to compile, else 400; five times as long "
            "on the clock where others have the processors. Most take a millisecond, a schema of 4,000 required "
            "properties half a second. Clients wait for each other's.",
        ),
    ] = _option(2.0)
    tool_format: Annotated[
        Literal["auto", "hermes", "llama3_json"],
        Meta(
            description="How the model writes a tool call: `hermes` is `<tool_call>{…}</tool_call>` (Qwen, Hermes), "
            "`llama3_json` a bare object with `name` and `parameters`. `auto` looks into the chat template."
        ),
    ] = _option("auto")


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
    slow_gap_factor: Annotated[
        float, Meta(gt=1, description="A gap between two tokens is slow when it is so many times the recent median.")
    ] = _option(3.0)
    slow_gap_min_ms: Annotated[
        float, Meta(ge=0, description="And only when it is longer than this, in milliseconds.")
    ] = _option(2.0)
    nvtx: Annotated[bool, Meta(description="Mark the phases of each step with NVTX ranges for Nsight.")] = _option(
        False
    )
    recorder_steps: Annotated[
        int,
        Meta(
            ge=16,
            le=1 << 20,
            description="Engine steps that the flight recorder remembers, 360 bytes each; for each of them 8 socket "
            "writes, 57 bytes each; and for each 8 steps a finished request, about nine bytes for each of its tokens.",
        ),
    ] = _option(8192)
    capture_rules: Annotated[
        tuple[str, ...],
        Meta(
            description="Rules such as `3 gaps over 60 ms in 10 s`, `1 ttft over 2 s in 30 s` or `1 slow gap of "
            "graph_capture in 60 s`; whatever breaks one is captured. In a flag or variable they are separated by "
            "semicolons. See docs/capture.md."
        ),
    ] = _option(())
    capture_dir: Annotated[
        str, Meta(description="Where captures go, a directory for each; empty: nothing is captured.")
    ] = _option("")
    capture_max_mib: Annotated[
        float,
        Meta(gt=0, description="Most MiB that captures take: the oldest are deleted first, the newest never is."),
    ] = _option(1024.0)
    capture_profile_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_PROFILE_STEPS,
            description="Steps that the profiler records after a breach; 0 records none. It slows them, and no step "
            "runs while the trace is written.",
        ),
    ] = _option(0)


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Traces for an OpenTelemetry collector (docs/tracing.md). OTEL_ variables of the environment are not read."""

    endpoint: Annotated[
        str | None,
        Meta(description="OTLP/HTTP address; `/v1/traces` is added to one without a path. Default: nothing is traced."),
    ] = _option(None)
    ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="Share of ordinary requests that is kept, unless the caller's traceparent says."),
    ] = _option(0.01)
    slow_ttft_s: Annotated[
        float,
        Meta(
            gt=0,
            description="A request is always kept that had a slow gap, ended in error or timeout, or took longer than "
            "this to its first token: to its write in a stream, else to the engine's having it.",
        ),
    ] = _option(1.0)
    step_interval: Annotated[
        int,
        Meta(ge=0, description="Beside slow ones, one engine step in this number is traced; 0: slow ones only."),
    ] = _option(1000)
