"""Turns the wish for a load into planned requests: when each is due, how long it is, what it shares. Sends nothing.

A plan holds no token ids. A prompt is segments, each a key and a length, and `Tokens` makes ids of a key: so prompts
share a prefix exactly where their segments agree, whatever the vocabulary is.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from roseinfer.bench.load.options import Lengths
from roseinfer.engine.core.batch import Int32Array
from roseinfer.errors import ConfigError
from roseinfer.messages import TokenCount
from roseinfer.observe.recorder.recording import Recording, RequestRecord
from roseinfer.records import FinishReason
from roseinfer.runtime.validation import Misfit, convert

NS_PER_S = 1_000_000_000
FIRST_TOKEN_ID = 3  # below it, vocabularies keep padding and the ends of texts
SHARED_KEY = 0

_GOLDEN = 0x9E3779B97F4A7C15  # the constants of splitmix64's step and finaliser (Steele et al., 2014)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = 2**64 - 1

UInt64Array = npt.NDArray[np.uint64]


class Segment(NamedTuple):
    """The first `num_tokens` tokens of the endless sequence named `key`."""

    key: int
    num_tokens: int


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a load."""

    offset_ns: int  # due so long after the start
    segments: tuple[Segment, ...]
    max_tokens: int
    abort_after_tokens: int | None = None  # its client goes away as soon as it has so many
    abort_after_ns: int | None = None  # or so long after sending it, without a token

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
    """Token ids of segments: id i of a key is a hash of seed, key and i, in [FIRST_TOKEN_ID, vocab_size)."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._num_ids = np.uint64(max(1, vocab_size - FIRST_TOKEN_ID))

    def of(self, segments: Sequence[Segment]) -> list[int]:
        return [token_id for segment in segments for token_id in self._segment(segment).tolist()]

    def _segment(self, segment: Segment) -> Int32Array:
        start = np.array([(self._seed + _GOLDEN * (segment.key + 1)) & _MASK], np.uint64)
        places = np.arange(1, segment.num_tokens + 1, dtype=np.uint64)
        ids: Int32Array = (hash64(mix64(start), places) % self._num_ids).astype(np.int32) + FIRST_TOKEN_ID
        return ids


def hash64(keys: UInt64Array, places: UInt64Array) -> UInt64Array:
    """The number at each place of the endless sequence of a key; the two arrays are broadcast."""
    return mix64(keys + places * np.uint64(_GOLDEN))


def mix64(values: UInt64Array) -> UInt64Array:
    """Splitmix64's finaliser: a bijection of 64-bit numbers in which every bit of the output depends on every input."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


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
        """The requests in the order in which they are due."""
        lengths = random.Random(f"lengths {self.seed}")
        planned = []
        for index, offset_ns in enumerate(self.arrivals.offsets_ns(self.seed)):
            if index == self.num_requests or (self.duration_ns is not None and offset_ns >= self.duration_ns):
                break
            segments = self._segments(index, lengths.randint(*self.prompt))
            max_tokens = lengths.randint(*self.output)
            planned.append(PlannedRequest(offset_ns=offset_ns, segments=segments, max_tokens=max_tokens))
        if self.long is not None:
            for index, offset_ns in enumerate(self.long.offsets_ns, len(planned)):
                segments = (Segment(1 + index, self.long.num_tokens),)
                planned.append(PlannedRequest(offset_ns=offset_ns, segments=segments, max_tokens=self.long.max_tokens))
        return sorted(planned, key=lambda request: request.offset_ns)

    def _segments(self, index: int, num_tokens: int) -> tuple[Segment, ...]:
        num_shared = int(num_tokens * self.shared_prefix_share)
        parts = (Segment(SHARED_KEY, num_shared), Segment(1 + index, num_tokens - num_shared))
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
    """What can be asked again of a recording; `records[i]` is what `requests[i]` was."""

    requests: list[PlannedRequest]
    records: list[RequestRecord]
    num_skipped: int  # refused, or failed before they had a token


def plan_of_recording(recording: Recording) -> RecordedPlan:
    """Arrivals, lengths, shared prefixes and clients that went away, as they were. Raises ConfigError for none."""
    block_size = recording.meta.engine.block_size if recording.meta.engine is not None else 0
    arrivals = sorted(recording.requests, key=lambda record: record.recv_ns)  # a serial is given after tokenising
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
    """Tokens to ask for, and after how many tokens or nanoseconds the client goes away; None to leave it out."""
    num_tokens = len(record.token_ns)
    if record.client_disconnected and record.finish_reason is FinishReason.ABORT:
        max_tokens = max(record.max_tokens, num_tokens)
        if num_tokens:
            return max_tokens, num_tokens, None
        return (max_tokens, None, record.end_ns - record.recv_ns) if max_tokens else None
    return (num_tokens, None, None) if num_tokens else None


def _recorded_segments(record: RequestRecord, block_size: int) -> tuple[Segment, ...]:
    """One for each full block, named by its digest, and the rest, which nobody shares."""
    num_left = record.num_prompt_tokens - len(record.prefix_digests) * block_size
    if num_left < 0:
        raise ConfigError(f"is damaged: request {record.request_id} has more blocks than tokens", param="recording")
    blocks = [Segment(digest, block_size) for digest in record.prefix_digests]
    return (*blocks, Segment(1 + record.serial, num_left)) if num_left else tuple(blocks)
