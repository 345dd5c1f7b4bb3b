"""Plans a load from flags, a trace or a recording: when each request is due, how long it is, what prefix it shares.

A plan holds no token ids. A prompt is segments, each a key and a length, and `Tokens` derives ids from a key: prompts
share a prefix exactly where their segments agree, whatever the vocabulary is.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from roseinfer.bench.load.report import mean_interval_ns
from roseinfer.bench.options import DEFAULT_NUM_REQUESTS, MAX_REQUESTS, Lengths
from roseinfer.errors import ConfigError
from roseinfer.messages import TokenCount
from roseinfer.observe.recorder.recording import Recording, RequestRecord
from roseinfer.records import FinishReason
from roseinfer.runtime.validation import Misfit, convert

NS_PER_S = 1_000_000_000
_LONG_AT = (1.0,)  # seconds
_SAID_BY_TRACE = (
    *("num_requests", "duration", "prompt_tokens", "max_tokens", "shared_prefix_share"),
    *("long_prompt_tokens", "num_long", "long_at", "long_max_tokens"),
)
FIRST_TOKEN_ID = 3  # below it, vocabularies keep padding and the ends of texts
SHARED_KEY = 0


class Segment(NamedTuple):
    """The first `num_tokens` tokens of the endless sequence named `key`."""

    key: int
    num_tokens: int


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a load."""

    offset_ns: int  # due so long after the start
    segments: tuple[Segment, ...]
    max_tokens: int
    abort_after_tokens: int | None = None  # its client disconnects at this number of tokens
    abort_after_ns: int | None = None  # or so long after sending the request, without a token

    @property
    def num_prompt_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)


class LongPrompts(NamedTuple):
    """Prompts that come beside the others, at moments of their own."""

    num_tokens: int
    max_tokens: int
    offsets_ns: tuple[int, ...]


class Arrivals(NamedTuple):
    """When requests are due. An interval of 0 is a burst; otherwise a grid or, with `is_poisson`, a Poisson process."""

    interval_ns: float
    is_poisson: bool = False

    def offsets_ns(self, seed: int) -> Iterator[int]:
        """Without end; the first request is due at once."""
        source = random.Random(f"arrivals {seed}")
        offset = 0.0
        while True:
            yield round(offset)
            offset += source.expovariate(1.0) * self.interval_ns if self.is_poisson else self.interval_ns


class TraceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a trace in a file."""

    offset_s: Annotated[float, Meta(ge=0, le=86_400)]
    prompt_tokens: TokenCount
    max_tokens: TokenCount


class Tokens:
    """Token ids of segments: a key's are drawn with the seed and the key, from [FIRST_TOKEN_ID, vocab_size)."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._end = max(vocab_size, FIRST_TOKEN_ID + 1)

    def of(self, segments: Sequence[Segment]) -> list[int]:
        return [token_id for key, num_tokens in segments for token_id in self._draw(key, num_tokens)]

    def _draw(self, key: int, num_tokens: int) -> list[int]:
        source = np.random.default_rng([self._seed % 2**64, key % 2**64])
        token_ids: list[int] = source.integers(FIRST_TOKEN_ID, self._end, num_tokens).tolist()
        return token_ids


class Workload(NamedTuple):
    """A load by its rule. `num_requests` and `duration_ns` each end it; one of them is given."""

    arrivals: Arrivals
    num_requests: int | None
    duration_ns: int | None
    prompt: Lengths
    output: Lengths
    shared_prefix_share: float  # of each prompt, from its beginning, that all have in common
    long: LongPrompts | None
    seed: int

    def plan(self) -> list[PlannedRequest]:
        """The requests in the order in which they are due. Raises ConfigError for a duration that holds too many."""
        lengths = random.Random(f"lengths {self.seed}")
        planned = []
        for index, offset_ns in enumerate(self.arrivals.offsets_ns(self.seed)):
            if index == self.num_requests or (self.duration_ns is not None and offset_ns >= self.duration_ns):
                break
            if index == MAX_REQUESTS:
                raise ConfigError(f"holds more than {MAX_REQUESTS} requests", param="--duration")
            segments = prompt_segments(lengths.randint(*self.prompt), self.shared_prefix_share, 1 + index)
            max_tokens = lengths.randint(*self.output)
            planned.append(PlannedRequest(offset_ns=offset_ns, segments=segments, max_tokens=max_tokens))
        if self.long is not None:
            for index, offset_ns in enumerate(self.long.offsets_ns, len(planned)):
                segments = (Segment(1 + index, self.long.num_tokens),)
                planned.append(PlannedRequest(offset_ns=offset_ns, segments=segments, max_tokens=self.long.max_tokens))
        return sorted(planned, key=lambda request: request.offset_ns)


def prompt_segments(num_tokens: int, shared_share: float, key: int) -> tuple[Segment, ...]:
    """A prompt that begins with its share of what all prompts have in common."""
    num_shared = int(num_tokens * shared_share)
    parts = (Segment(SHARED_KEY, num_shared), Segment(key, num_tokens - num_shared))
    return tuple(part for part in parts if part.num_tokens)


def plan_of_trace(path: Path) -> list[PlannedRequest]:
    """The requests of a recording, or of a file with a JSON object a line. Raises InvalidRequest or ConfigError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="--trace") from None
    if raw.startswith(b"PK"):
        return plan_of_recording(Recording.load(path)).requests
    planned = []
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            read = convert(msgspec.json.decode(line), TraceLine)
        except Misfit as misfit:
            raise ConfigError(f"{path}, line {number}: {misfit}", param="--trace") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}", param="--trace") from None
        planned.append(
            PlannedRequest(
                offset_ns=round(read.offset_s * NS_PER_S),
                segments=(Segment(number, read.prompt_tokens),),
                max_tokens=read.max_tokens,
            )
        )
    if not planned:
        raise ConfigError(f"{path} holds no request", param="--trace")
    return sorted(planned, key=lambda request: request.offset_ns)


class RecordedPlan(NamedTuple):
    """What can be sent again of a recording; `records[i]` is the record of `requests[i]`."""

    requests: list[PlannedRequest]
    records: list[RequestRecord]
    num_skipped: int  # refused, or failed before they had a token


def plan_of_recording(recording: Recording) -> RecordedPlan:
    """Plans the same arrivals, lengths, prefixes and disconnects. Raises ConfigError when there is no request."""
    block_size = recording.meta.engine.block_size if recording.meta.engine is not None else 0
    arrivals = sorted(recording.requests, key=lambda record: record.recv_ns)  # serials follow tokenising
    planned, records = [], []
    for record in arrivals:
        outcome = _outcome(record)
        if outcome is None or not record.num_prompt_tokens:
            continue
        max_tokens, abort_after_tokens, abort_after_ns = outcome
        planned.append(
            PlannedRequest(
                offset_ns=record.recv_ns - arrivals[0].recv_ns,
                segments=_recorded_segments(record, block_size),
                max_tokens=max_tokens,
                abort_after_tokens=abort_after_tokens,
                abort_after_ns=abort_after_ns,
            )
        )
        records.append(record)
    if not planned:
        raise ConfigError("the recording holds no request that could be asked again", param="recording")
    return RecordedPlan(planned, records, len(recording.requests) - len(planned))


def _outcome(record: RequestRecord) -> tuple[int, int | None, int | None] | None:
    """Tokens to ask for, and the tokens or nanoseconds after which the client disconnects; None to leave it out."""
    num_tokens = len(record.token_ns)
    if record.client_disconnected and record.finish_reason is FinishReason.ABORT:
        max_tokens = max(record.max_tokens, num_tokens)
        if num_tokens:
            return max_tokens, num_tokens, None
        return (max_tokens, None, record.end_ns - record.recv_ns) if max_tokens else None
    return (num_tokens, None, None) if num_tokens else None


def _recorded_segments(record: RequestRecord, block_size: int) -> tuple[Segment, ...]:
    """One for each full block, named by its digest, and the rest, which no other prompt shares."""
    num_left = record.num_prompt_tokens - len(record.prefix_digests) * block_size
    if num_left < 0:
        raise ConfigError(f"is damaged: request {record.request_id} has more blocks than tokens", param="recording")
    blocks = [Segment(digest, block_size) for digest in record.prefix_digests]
    return (*blocks, Segment(1 + record.serial, num_left)) if num_left else tuple(blocks)


Planner = Callable[[int], list[PlannedRequest]]
"""Requests of a seed. Raises ConfigError where chance leaves no request."""


def planner_of(arguments: argparse.Namespace) -> Planner:
    """The requests that the flags ask for, as a function of the seed; the file of `--scenario` has been read.

    Raises ConfigError for wrong flags, before a server is needed, and InvalidRequest for a trace that cannot be read.
    """
    if arguments.scenario is not None:
        plan: Planner = arguments.scenario.plan
        return plan
    if arguments.trace is not None:
        refuse_flags(arguments, _SAID_BY_TRACE, "has no meaning beside --trace: the file says it")
        planned = plan_of_trace(arguments.trace)
        return lambda _: planned
    interval_ns = (arguments.interval_ms or 0.0) * 1e6
    arrivals = Arrivals(interval_ns) if arguments.rate is None else Arrivals(NS_PER_S / arguments.rate, is_poisson=True)
    num_requests = arguments.num_requests
    if arguments.duration is None:
        num_requests = num_requests or DEFAULT_NUM_REQUESTS
    elif not arrivals.interval_ns:
        raise ConfigError("needs --rate or --interval-ms: a burst has no duration", param="--duration")
    workload = Workload(
        arrivals=arrivals,
        num_requests=num_requests,
        duration_ns=None if arguments.duration is None else round(arguments.duration * NS_PER_S),
        prompt=arguments.prompt_tokens,
        output=arguments.max_tokens,
        shared_prefix_share=arguments.shared_prefix_share,
        long=_long_prompts(arguments),
        seed=0,
    )
    return lambda seed: workload._replace(seed=seed).plan()


def refuse_flags(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raises ConfigError for the first of these flags that is given."""
    for name in names:
        if getattr(arguments, name) != arguments.parser.get_default(name):
            raise ConfigError(why, param="--" + name.replace("_", "-"))


def interval_ns_of(arguments: argparse.Namespace, planned: Sequence[PlannedRequest]) -> float:
    """The mean interval of the schedule, with which the generator's lag is compared; 0 for a burst."""
    if arguments.rate is not None:
        return NS_PER_S / float(arguments.rate)
    if arguments.trace is not None or arguments.scenario is not None:
        return mean_interval_ns([request.offset_ns for request in planned])
    return float(arguments.interval_ms or 0.0) * 1e6


def _long_prompts(arguments: argparse.Namespace) -> LongPrompts | None:
    if arguments.long_prompt_tokens is None:
        refuse_flags(arguments, ("num_long", "long_at", "long_max_tokens"), "needs --long-prompt-tokens")
        return None
    moments: Sequence[float] = arguments.long_at or _LONG_AT
    offsets = tuple(round(moments[index % len(moments)] * NS_PER_S) for index in range(arguments.num_long or 1))
    return LongPrompts(arguments.long_prompt_tokens, arguments.long_max_tokens or arguments.max_tokens.high, offsets)


def describe(arguments: argparse.Namespace, planned: Sequence[PlannedRequest]) -> str:
    """The load in words, so that two reports can be compared."""
    if arguments.trace is not None:
        return f"{len(planned)} requests of {arguments.trace}, seed {arguments.seed}"
    if arguments.scenario is not None:
        return f"{len(planned)} requests of {arguments.scenario_file}, seed {arguments.seed}"
    num_long = 0 if arguments.long_prompt_tokens is None else arguments.num_long or 1
    when = "at once"
    if arguments.rate is not None:
        when = f"at {arguments.rate:g} a second (Poisson)"
    elif arguments.interval_ms:
        when = f"every {arguments.interval_ms:g} ms"
    words = [
        f"{len(planned) - num_long} requests {when}",
        f"{_range(arguments.prompt_tokens)} prompt and {_range(arguments.max_tokens)} output tokens each",
    ]
    if arguments.shared_prefix_share:
        words.append(f"{arguments.shared_prefix_share:.0%} of each prompt shared")
    if num_long:
        moments = "/".join(f"{moment:g}" for moment in arguments.long_at or _LONG_AT)
        words.append(f"{num_long} of {arguments.long_prompt_tokens} prompt tokens at {moments} s")
    return ", ".join([*words, f"seed {arguments.seed}"])


def _range(lengths: Lengths) -> str:
    return str(lengths.low) if lengths.low == lengths.high else f"{lengths.low}-{lengths.high}"


def echo_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags as plain data, the scenario with all that its file says."""
    echoed: dict[str, Any] = {}
    for name, value in vars(arguments).items():
        match value:
            case Lengths():
                echoed[name] = _range(value)
            case Path():
                echoed[name] = str(value)
            case msgspec.Struct():  # a scenario, as it will be read again
                echoed[name] = msgspec.json.decode(msgspec.json.encode(value))
            case bool() | str() | int() | float() | list():
                echoed[name] = value
            case _:  # not given, or no value of a flag
                pass
    return echoed
