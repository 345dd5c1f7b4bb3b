"""Facts: the record of a step, the timeline of a request, and the observer that receives them.

The hot paths fill these structs; `observe/` turns them into metrics, spans and logs. All stamps are
`time.monotonic_ns()`, which on Linux is one clock for every process of a host.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

import msgspec


class FinishReason(StrEnum):
    """Why a request ended. One closed set for code, metrics, logs and, where OpenAI has the word, the API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
    REJECTED = "rejected"


class Api(StrEnum):
    """The HTTP APIs that the engine works for. One closed set for metrics and logs."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"

    @property
    def operation(self) -> str:
        """OpenTelemetry's word for what it does, which is the same for all three that take a conversation."""
        return {Api.COMPLETIONS: "text_completion", Api.EMBEDDINGS: "embeddings"}.get(self, "chat")


class LifecycleState(StrEnum):
    """The states of the server, of which one holds at any time."""

    STARTING = "starting"
    LOADING = "loading"
    WARMUP = "warmup"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


# Steps for which a request waits for a prefix block that another one is computing: longer than any sound leader takes
# for a block, and a bound should one never publish it.
MAX_PREFIX_WAIT_STEPS = 64


class BlockedBy(StrEnum):
    """The limit that kept the first waiting request out of a step."""

    NOTHING = ""
    TOKEN_BUDGET = "token_budget"  # noqa: S105 - max_num_batched_tokens and max_prefill_tokens
    PREFILL_SEQS = "prefill_seqs"  # max_prefill_seqs
    SLOTS = "slots"  # max_active_seqs
    KV_BLOCKS = "kv_blocks"
    PREFIX = "prefix"  # another request is computing the prefix that it needs


class Invariant(StrEnum):
    """What must hold between two steps of the engine. A closed set, for metrics."""

    BLOCKS = "blocks"  # used + cached + free is the total, and no block is two of them
    REFCOUNTS = "refcounts"  # a block is counted as often as sequences hold it
    CACHED_BLOCKS = "cached_blocks"  # what may be evicted is what the prefix cache knows and no sequence holds
    PREFIX_CACHE = "prefix_cache"  # blocks and digests name each other
    PENDING = "pending"  # blocks are announced only while a sequence computes them
    SLOTS = "slots"  # each slot has one owner or is free, and its tokens fit its blocks
    STATES = "states"  # each unfinished request is waiting or holds a slot, never both
    TURNS = "turns"  # the lists of decoding and prefilling sequences are right
    ENDED = "ended"  # an ended sequence holds nothing once no step contains it
    BOUNDED = "bounded"  # what grows with requests shrinks with them
    REQUESTS = "requests"  # front end and engine agree on which requests there are


class Violation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An invariant that did not hold."""

    invariant: Invariant
    detail: str  # one phrase for a person; without ids or contents


class PhaseTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Nanoseconds that one step spent in each of its parts.

    The first four are the step, unless steps overlap: then the parts of the next one lie between its launch and wait.
    The others are parts of the launch.
    """

    schedule: int = 0
    launch: int = 0
    wait: int = 0
    commit: int = 0
    stage: int = 0  # writing the step's integers to where the device reads them
    h2d: int = 0  # of that, waiting for and queueing copies to a device with its own memory
    capture: int = 0  # recording a CUDA graph
    forward: int = 0  # computing on a CPU, queueing on a GPU
    sample: int = 0  # the same for drawing tokens, where that is not part of a graph


NO_TIMES = PhaseTimes()


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One engine step, output with its tokens; with a pipeline, after the next one was launched.

    Counts are of this step; `num_*_blocks`, running and waiting are the state when it is output.
    """

    step_id: int
    start_ns: int
    tokens_ns: int  # the sampled tokens of this step were known on the host: t_tok of each of them
    end_ns: int
    num_running: int
    num_waiting: int
    num_decode_seqs: int
    num_prefill_seqs: int
    num_prefill_tokens: int
    num_generated_tokens: int
    num_not_selected: int  # decodable sequences left out because more were active than a step decodes
    num_preemptions: int
    num_finished: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_used_blocks: int
    num_cached_blocks: int  # held for the prefix cache alone, so free to take
    num_total_blocks: int
    num_context_tokens: int  # tokens in the KV caches of its rows, its own included
    blocked_by: BlockedBy
    outbox_depth: int  # messages to the front end that the kernel has not taken yet
    outbox_wait_ns: int  # that the engine stood still before it, because the front end had stopped reading
    gc_ns: int  # garbage collections between the tokens of the step before and its own
    late_gc_ns: int  # those between its tokens and its end; they count for the next step too
    h2d_bytes: int
    is_profiled: bool
    graph_rows: int  # rows of the CUDA graph that ran, padding included; 0 when none did
    pipeline_depth: int  # steps that may be launched before the one before them has been read
    phases: PhaseTimes
    ahead: PhaseTimes  # with a pipeline, those of the step that was launched while this one was computed
    num_draft_tokens: int = 0  # drafted: repeated, or forced by a grammar; computed beside the known ones
    num_accepted_tokens: int = 0  # of those, the ones that would have been sampled: tokens without a step of their own
    cpu_throttled_ns: int = 0  # between the tokens of the step before and its own, that a CPU quota stopped the engine
    cpu_wait_ns: int = 0  # likewise, that the engine was ready to run and other processes had its core
    late_throttled_ns: int = 0  # both between its tokens and its end; they count for the next step too
    late_wait_ns: int = 0

    @property
    def kind(self) -> str:
        """`prefill`, `decode` or `mixed`: what the step's rows were; `idle` when it had none."""
        if self.num_prefill_seqs:
            return "mixed" if self.num_decode_seqs else "prefill"
        return "decode" if self.num_decode_seqs else "idle"


class CachedBlock(msgspec.Struct, frozen=True, gc=False):  # one a block: the collector need not walk them
    """A block of the prefix cache. As a change it can be found from now on, or, without content, no longer."""

    block_id: int
    digest: bytes
    parent: bytes = b""  # the digest of the block before it; of the first, the root of its chain
    content: bytes | None = None  # its token ids as int32
    is_first: bool = False  # of its chain
    client_salt: str = ""  # of the first: what the client itself gave of the chain's salt


class EngineTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The engine's part of one request's timeline; it crosses the link with the first output and with the last."""

    inbox_ns: int  # the engine loop took the request from its inbox
    scheduled_ns: int  # first time in a batch; 0 when it ended before that
    num_cached_tokens: int  # prompt tokens found in the prefix cache when it was first scheduled
    num_preemptions: int
    preempted_ns: int = 0  # the last time it lost its blocks; 0 when it never did
    resumed_ns: int = 0  # the first time in a batch after that


class StartEstimate(msgspec.Struct, frozen=True):
    """In how many seconds a request is predicted to start, with the tenth and the ninetieth percentile."""

    seconds: float
    low_seconds: float
    high_seconds: float
    num_starts: int  # ends of requests, each the start of another, from which it was made


class QueueReport(msgspec.Struct, frozen=True):
    """The requests that the engine has and has not started."""

    waiting: dict[str, StartEstimate | None] = {}  # by request id, in the order of the queue; None: not known yet
    is_order_exact: bool = True  # no later request may go first


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A step's tokens on their way from the engine into the front end."""

    tokens_ns: int
    sent_ns: int  # the engine sent them: the step's end
    read_ns: int  # the front end's event loop had the message
    gc_ns: int = 0  # of the time until they were sent, what collections in the engine took
    was_held: bool = False  # in the engine's outbox, behind messages not taken yet
    throttled_ns: int = 0  # of the time until they were sent, that a CPU quota stopped the engine
    wait_ns: int = 0  # likewise, that other processes had its core

    @property
    def delayed_ns(self) -> int:
        """Of the time until they were sent, what was not the engine's work."""
        return self.gc_ns + self.throttled_ns + self.wait_ns


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """Tokens on their way from the front end to the socket."""

    arrival: Arrival  # of the token that made the write due; later ones may have come along
    resumed_ns: int  # the request's handler went on
    encoded_ns: int  # text and frames were made
    written_ns: int  # the write returned
    was_paused: bool  # the socket did not take all: the client or the network is slow
    index: int  # of the write in its request's `write_ns`


@dataclass(slots=True, kw_only=True)
class RequestTimeline:
    """One request from its head to its last byte, in the terms of docs/metrics.md.

    The front end owns it: the server stamps its side, `AsyncEngine` copies in what the engine reports, and the
    observers get it once, when both sides have ended. A stamp of 0 means that the point was not reached. One HTTP
    request with `n` choices or several prompts has a timeline for each generated sequence.
    """

    request_id: str
    recv_ns: int  # request head parsed
    serial: int = 0  # requests that had been received before
    parsed_ns: int = 0  # body read and validated
    tokenized_ns: int = 0
    inbox_ns: int = 0
    scheduled_ns: int = 0
    token_ns: list[int] = field(default_factory=list)  # one per generated token
    write_ns: list[int] = field(default_factory=list)  # one per socket write that carried tokens, after it returned
    end_ns: int = 0
    num_prompt_tokens: int = 0
    api: Api = Api.COMPLETIONS  # through which it came; `LLM` takes prompts as completions do
    max_tokens: int = 0  # that it may generate; 0 when it never got so far
    priority: int = 0  # lower goes sooner, under the admission policy `priority`
    temperature: float | None = None  # None when it never got so far
    top_p: float | None = None  # likewise
    prefix_digests: bytes = b""  # eight bytes for each full block of its prompt, of the block and all before it
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0  # of its tokens: thoughts, with their tags
    num_preemptions: int = 0
    preempted_ns: int = 0
    resumed_ns: int = 0
    earlier_preemptions: tuple[tuple[int, int], ...] = ()  # both stamps of each before the last, oldest first
    arrivals: list[Arrival] = field(default_factory=list)  # one per token; tokens of one step share theirs
    is_streamed: bool = False
    client_disconnected: bool = False
    client_submit_lag_s: float | None = None  # head arrival minus the client's x-roseinfer-intended-time, if sent
    traceparent: str = ""  # as the two after it: the caller's header of this name
    tracestate: str = ""
    baggage: str = ""
    trace_id: str = ""  # 32 hexadecimal digits; empty when nothing is traced
    finish_reason: FinishReason | None = None
    error_code: str = ""  # for finish reasons error, timeout and rejected: the code of the error
    grammar_error: str = ""  # for the finish reason error: why its grammar could not be followed, where that was it

    @property
    def arrival(self) -> Arrival | None:
        """The newest token's."""
        return self.arrivals[-1] if self.arrivals else None

    @property
    def has_failed(self) -> bool:
        """Whether it ended by a fault of the server's."""
        return self.finish_reason in {FinishReason.ERROR, FinishReason.TIMEOUT}

    def stamp(self, times: EngineTimes) -> None:
        """Copy in what the engine reports."""
        if self.resumed_ns and times.preempted_ns != self.preempted_ns:
            self.earlier_preemptions = (*self.earlier_preemptions, (self.preempted_ns, self.resumed_ns))
        for name in EngineTimes.__struct_fields__:
            setattr(self, name, getattr(times, name))


class Advanced(list[RequestTimeline]):
    """The timelines that got a token in a step. Observers may hear of it when they hold newer tokens already."""

    def __init__(self, timelines: Iterable[RequestTimeline] = (), previous_ns: Iterable[int] = ()) -> None:
        """`previous_ns` has for each of them when its token before was known; 0 when this is its first."""
        super().__init__(timelines)
        self.previous_ns = list(previous_ns)

    @property
    def num_newcomers(self) -> int:
        """How many of the tokens are the first of their request."""
        return self.previous_ns.count(0)

    def last_ns(self, tokens_ns: int) -> int:
        """When the newest token that any of them had before this step, whose tokens came then, was known; or 0."""
        last_ns = max(self.previous_ns, default=0)
        if last_ns == tokens_ns:  # one got several tokens in this step
            last_ns = max((previous_ns for previous_ns in self.previous_ns if previous_ns != tokens_ns), default=0)
        return last_ns

    @property
    def newcomers(self) -> "list[RequestTimeline]":
        """Those whose first token it is."""
        return [each for each, previous_ns in zip(self, self.previous_ns, strict=True) if not previous_ns]

    @classmethod
    def newest(cls, timelines: Iterable[RequestTimeline]) -> Self:
        """The timelines, each advanced by the newest token that it holds."""
        advanced = list(timelines)
        return cls(advanced, [each.token_ns[-2] if len(each.token_ns) > 1 else 0 for each in advanced])


class Observer:
    """Receives facts on the front end's event loop, after the tokens have been routed. Subclasses override methods."""

    def on_lifecycle(self, state: LifecycleState) -> None:
        """The server entered `state`."""

    def on_start(self, timeline: RequestTimeline) -> None:
        """A request was received."""

    def on_refusal(self, code: str) -> None:
        """An HTTP request was answered with an error of this code before the engine got it."""

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        """A step ended, and gave these a token each."""

    def on_write(self, timeline: RequestTimeline, delivery: Delivery) -> None:
        """A socket write with tokens returned; it is the last entry of `write_ns`."""

    def on_finish(self, timeline: RequestTimeline) -> None:
        """A request ended; its timeline will not change any more."""

    def on_stall(self, since_ns: int) -> None:
        """The engine has had work and made no step since then; 0: it goes on."""

    def on_rest(self, violations: Sequence[Violation]) -> None:
        """The engine was idle, and the invariants were checked: these did not hold."""

    def on_resume(self, timelines: Sequence[RequestTimeline]) -> None:
        """Facts before this moment were lost; these requests are in flight."""
