"""Facts: what happened in one step, and what happened to one request.

The hot paths fill these structs and call nobody; `observe/` turns them into metrics, spans and logs.
All stamps are `time.monotonic_ns()`, which on Linux is one clock for every process of a host.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, Self

import msgspec


class FinishReason(StrEnum):
    """Why a request ended. One closed set for code, metrics, logs and, where OpenAI has the word, the API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
    REJECTED = "rejected"


class LifecycleState(StrEnum):
    """What the server is doing; exactly one holds at any time."""

    STARTING = "starting"
    LOADING = "loading"
    WARMUP = "warmup"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class PhaseTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Nanoseconds that one step spent in each of its parts.

    Together they are the step, unless steps overlap: then the parts of the next one lie between its launch and wait.
    """

    schedule: int = 0
    launch: int = 0
    wait: int = 0
    commit: int = 0


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One engine step, told with its tokens; with a pipeline, after the next one was launched.

    Counts are of this step; `num_*_blocks`, running and waiting are the state when it is told.
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
    outbox_depth: int  # messages to the front end that are not yet with the kernel
    graph_rows: int  # rows of the CUDA graph that ran, padding included; 0 when none did
    pipeline_depth: int  # steps that may be launched before the one before them has been read
    phases: PhaseTimes

    @property
    def kind(self) -> str:
        """`prefill`, `decode` or `mixed`: what the step's rows were; `idle` when it had none."""
        if self.num_prefill_seqs:
            return "mixed" if self.num_decode_seqs else "prefill"
        return "decode" if self.num_decode_seqs else "idle"


class EngineTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The engine's part of one request's timeline; it crosses the link with the first output and with the last."""

    inbox_ns: int  # the engine loop took the request from its inbox
    scheduled_ns: int  # first time in a batch; 0 when it ended before that
    num_cached_tokens: int  # prompt tokens found in the prefix cache when it was first scheduled
    num_preemptions: int


@dataclass(slots=True, kw_only=True)
class RequestTimeline:
    """One request from its first byte to its last, in the words of docs/metrics.md.

    The front end owns it: the server stamps its side, `AsyncEngine` copies in what the engine reports, and it is
    handed to the observers once, when both sides have ended. A stamp of 0 means that the point was not reached.
    One HTTP request with `n` choices or several prompts has a timeline for each generated sequence.
    """

    request_id: str
    recv_ns: int  # request head parsed
    parsed_ns: int = 0  # body read and validated
    tokenized_ns: int = 0
    inbox_ns: int = 0
    scheduled_ns: int = 0
    token_ns: list[int] = field(default_factory=list)  # one per generated token
    write_ns: list[int] = field(default_factory=list)  # one per socket write that carried tokens, after it returned
    end_ns: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    is_streamed: bool = False
    client_disconnected: bool = False
    client_submit_lag_s: float | None = None  # head arrival minus the client's x-roseinfer-intended-time, if sent
    traceparent: str = ""
    finish_reason: FinishReason | None = None
    error_code: str = ""  # for finish reasons error, timeout and rejected: the code of the error


class Observer(Protocol):
    """Somebody who is told facts, on the front end's event loop, after the tokens have been routed."""

    def on_lifecycle(self, state: LifecycleState) -> None:
        """The server entered `state`."""

    def on_start(self, timeline: RequestTimeline) -> None:
        """A request was received."""

    def on_step(self, record: StepRecord, advanced: Sequence[RequestTimeline]) -> None:
        """A step ended; each timeline in `advanced` has just got a new last entry in `token_ns`."""

    def on_finish(self, timeline: RequestTimeline) -> None:
        """A request ended; its timeline will not change any more."""


class RangeMarker(Protocol):
    """Marks the start and the end of a named range for an attached profiler."""

    def push(self, name: str, payload: int) -> None: ...

    def pop(self) -> None: ...


class Phases:
    """Makes the stopwatch of each step. One instance serves one engine; with a marker it also opens ranges."""

    def __init__(self, marker: RangeMarker | None = None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self._marker = marker

    def begin(self, step_id: int) -> "Stopwatch":
        return Stopwatch(step_id, self.clock, self._marker)


class Stopwatch:
    """One step's times: `with watch("launch"):` adds its nanoseconds and, with a marker, opens a range.

    The names are the fields of `PhaseTimes`. A class and no generator, which would cost several times as much.
    """

    __slots__ = ("_clock", "_elapsed", "_marker", "_open", "start_ns", "step_id")

    def __init__(self, step_id: int, clock: Callable[[], int], marker: RangeMarker | None) -> None:
        self.step_id = step_id
        self.start_ns = clock()
        self._clock = clock
        self._marker = marker
        self._elapsed: dict[str, int] = {}
        self._open: list[tuple[str, int]] = []  # phases begun and not ended, and when

    def __call__(self, name: str) -> Self:
        """The phase begins here; the `with` that follows ends it."""
        if self._marker is not None:
            self._marker.push(name, self.step_id)
        self._open.append((name, self._clock()))
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        name, begin_ns = self._open.pop()
        self._elapsed[name] = self._elapsed.get(name, 0) + self._clock() - begin_ns
        if self._marker is not None:
            self._marker.pop()

    def times(self) -> PhaseTimes:
        return PhaseTimes(**self._elapsed)
