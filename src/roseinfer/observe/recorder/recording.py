"""The recording file: what a server did, as numbers: steps, requests and writes, never text or token ids.

A recording is a NumPy archive, `numpy.load(path)["steps"]`, so it can be read without us. All stamps are those of
`time.monotonic_ns()` on the recorded host; `meta.clock` places them on the calendar.
"""

import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from roseinfer.errors import InvalidRequest
from roseinfer.messages import EngineInfo
from roseinfer.observe.gaps.causes import CAUSES
from roseinfer.records import BlockedBy, FinishReason, PhaseTimes, RequestTimeline, StepRecord

FORMAT_VERSION = 4
MAX_BYTES = 1 << 30  # of a recording in memory

StructArray = npt.NDArray[np.void]
BLOCKED_BY = tuple(BlockedBy)

_OTHERS = frozenset({"phases", "ahead", "blocked_by", "is_profiled"})
_COUNTS = tuple(name for name in StepRecord.__struct_fields__ if name not in _OTHERS)
_PHASES = PhaseTimes.__struct_fields__
_counts_of = attrgetter(*_COUNTS)  # a row is made in each step, so in C
_phases_of = attrgetter(*_PHASES)
_BLOCKED_BY_INDEX = {limit: index for index, limit in enumerate(BLOCKED_BY)}
_TIMES = (*(f"{name}_ns" for name in _PHASES), *(f"ahead_{name}_ns" for name in _PHASES))
STEP_DTYPE = np.dtype(
    [
        *((name, np.int64) for name in _COUNTS),
        *((name, np.int64) for name in _TIMES),
        ("blocked_by", np.uint8),  # index into BLOCKED_BY
        ("is_profiled", np.bool_),
    ]
)
_SINCE_2, _SINCE_3 = ("num_draft_tokens", "num_accepted_tokens"), ("cpu_throttled_ns", "cpu_wait_ns")
_SINCE_4 = ("late_throttled_ns", "late_wait_ns")
_EARLIER = {  # format -> its steps
    found: np.dtype([(name, STEP_DTYPE[name]) for name in STEP_DTYPE.names or () if name not in lacking])
    for found, lacking in ((1, _SINCE_2 + _SINCE_3 + _SINCE_4), (2, _SINCE_3 + _SINCE_4), (3, _SINCE_4))
}
WRITE_DTYPE = np.dtype(
    [
        ("serial", np.int64),  # of the request; what `RequestRecord.serial` says
        *((name, np.int64) for name in ("tokens_ns", "sent_ns", "read_ns", "resumed_ns", "encoded_ns", "written_ns")),
        ("was_paused", np.bool_),
    ]
)
INTERRUPTION_DTYPE = np.dtype([("start_ns", np.int64), ("end_ns", np.int64), ("cause", np.uint8)])
"""When the front end's interpreter did something else, or had no core. The cause is an index into CAUSES."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a recording; the fields are those of `RequestTimeline`. Stamps of 0 were not reached."""

    serial: int  # order of arrival
    request_id: str
    recv_ns: int
    parsed_ns: int = 0
    tokenized_ns: int = 0
    inbox_ns: int = 0
    scheduled_ns: int = 0
    end_ns: int = 0  # 0: it was still running
    token_ns: list[int] = []
    first_write_ns: int = 0  # the first write of tokens; 0, too, in recordings of versions that did not say it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    max_tokens: int = 0
    num_preemptions: int = 0
    preempted_ns: int = 0
    resumed_ns: int = 0
    earlier_preemptions: tuple[tuple[int, int], ...] = ()  # not in recordings of versions that did not say them
    is_streamed: bool = False
    client_disconnected: bool = False
    finish_reason: FinishReason | None = None
    error_code: str = ""
    trace_id: str = ""
    prefix_digests: list[int] = []  # one for each full block of the prompt and all before it; keyed, so not reversible

    @classmethod
    def of(cls, timeline: RequestTimeline) -> "RequestRecord":
        digests = np.frombuffer(timeline.prefix_digests, np.int64).tolist() if timeline.prefix_digests else []
        same = dict(zip(_SAME_IN_TIMELINE, _same_in_timeline(timeline), strict=True))
        first_write_ns = timeline.write_ns[0] if timeline.write_ns else 0
        return cls(prefix_digests=digests, token_ns=timeline.token_ns.copy(), first_write_ns=first_write_ns, **same)


_SAME_IN_TIMELINE = tuple(
    name for name in RequestRecord.__struct_fields__ if name not in {"prefix_digests", "token_ns", "first_write_ns"}
)
_same_in_timeline = attrgetter(*_SAME_IN_TIMELINE)


class ClockPair(msgspec.Struct, frozen=True):
    """One moment on both clocks."""

    monotonic_ns: int
    unix_ns: int


class RecordingMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What the numbers are of."""

    format_version: int = FORMAT_VERSION
    version: str  # of roseinfer
    model_name: str
    clock: ClockPair
    engine: EngineInfo | None
    config: dict[str, dict[str, Any]] = {}  # sections of the configuration; of `observe`, which gaps are slow
    trigger: str = ""  # why it was saved, if a rule did it
    num_forgotten_writes: int | None = None  # made before those that it holds; None where they were not counted
    begin_ns: int = 0  # what had ended by then was left out, and was not forgotten; 0: nothing was


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Rows are in the order of their stamps; `requests` in that of arrival."""

    meta: RecordingMeta
    requests: list[RequestRecord]
    steps: StructArray = field(default_factory=lambda: np.zeros(0, STEP_DTYPE))
    writes: StructArray = field(default_factory=lambda: np.zeros(0, WRITE_DTYPE))
    interruptions: StructArray = field(default_factory=lambda: np.zeros(0, INTERRUPTION_DTYPE))

    @property
    def first_ns(self) -> int:
        """The earliest stamp in it; 0 in an empty one."""
        stamps = [request.recv_ns for request in self.requests]
        stamps += [int(stamp) for rows in (self.steps, self.interruptions) for stamp in rows["start_ns"][:1]]
        return min(stamps, default=0)

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all; a link, a pipe or a device stays what it is. Raises OSError."""
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                self.write(file)
            return
        path = Path(os.path.realpath(path))
        scratch = path.with_name(f".{path.name}.part")
        try:
            with scratch.open("wb") as file:
                self.write(file)
            scratch.replace(path)
        except OSError:
            scratch.unlink(missing_ok=True)  # on a full disk it holds what is free, and a capture tries again
            raise

    def write(self, file: BinaryIO) -> None:
        """Writes the archive into an open file."""
        np.savez_compressed(
            file,
            meta=np.frombuffer(msgspec.json.encode(self.meta), np.uint8),
            requests=np.frombuffer(msgspec.json.encode(self.requests), np.uint8),
            steps=self.steps,
            writes=self.writes,
            interruptions=self.interruptions,
        )

    @classmethod
    def load(cls, path: Path, name: str = "") -> "Recording":
        """Reads a file, which errors call by `name`, or by its path.

        Raises InvalidRequest if it is no recording, or one of another version.
        """
        name = name or str(path)
        try:
            with path.open("rb") as file:
                return cls.read(file, name)
        except OSError as error:
            raise InvalidRequest(f"{name} cannot be read: {error.strerror or error}.", param="recording") from None

    @classmethod
    def read(cls, file: BinaryIO, name: str = "The file") -> "Recording":
        """Reads an open file, which errors call by `name`, and trusts nothing in it. Raises InvalidRequest."""
        arrays = _arrays_in(file, name)
        try:
            found = msgspec.json.decode(arrays["meta"].tobytes(), type=_Versioned).format_version
            if found not in (*_EARLIER, FORMAT_VERSION):
                raise InvalidRequest(
                    f"{name} is a recording of format {found}; this version of roseinfer reads formats 1 to "
                    f"{FORMAT_VERSION}.",
                    param="recording",
                )
            meta = msgspec.json.decode(arrays["meta"].tobytes(), type=RecordingMeta)
            requests = msgspec.json.decode(arrays["requests"].tobytes(), type=list[RequestRecord])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"{name} is damaged: {error}.", param="recording") from None
        if arrays["steps"].dtype == _EARLIER.get(found):
            arrays["steps"] = _of_today(arrays["steps"])
        for table, dtype in (("steps", STEP_DTYPE), ("writes", WRITE_DTYPE), ("interruptions", INTERRUPTION_DTYPE)):
            if arrays[table].dtype != dtype or arrays[table].ndim != 1:
                raise InvalidRequest(f"{name} is damaged: its {table} have other fields.", param="recording")
        for table, column, num_known in (
            ("steps", "blocked_by", len(BLOCKED_BY)),
            ("interruptions", "cause", len(CAUSES)),
        ):
            if (arrays[table][column] >= num_known).any():
                raise InvalidRequest(f"{name} is damaged: its {table} have an unknown {column}.", param="recording")
        return cls(
            meta=meta,
            requests=requests,
            steps=arrays["steps"],
            writes=arrays["writes"],
            interruptions=arrays["interruptions"],
        )


def _arrays_in(file: BinaryIO, name: str) -> dict[str, npt.NDArray[Any]]:
    """Returns the archive's arrays by name. Raises InvalidRequest for anything else, also for a bomb."""
    try:
        with zipfile.ZipFile(file) as archive:
            num_bytes = sum(entry.file_size for entry in archive.infolist())
        if num_bytes > MAX_BYTES:
            raise InvalidRequest(f"{name} would take more than {MAX_BYTES} bytes of memory.", param="recording")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            found = {table: arrays[table] for table in ("meta", "requests", "steps", "writes", "interruptions")}
        if all(isinstance(array, np.ndarray) for array in found.values()):  # numpy gives what is no array as bytes
            return found
    except (KeyError, ValueError, TypeError, EOFError, MemoryError, NotImplementedError, RuntimeError):
        pass
    except (zipfile.BadZipFile, zlib.error, struct.error, SyntaxError, tokenize.TokenError):
        pass
    raise InvalidRequest(f"{name} is no recording of roseinfer.", param="recording")


@contextmanager
def refusing_contradictions(name: str, param: str = "recording") -> Iterator[None]:
    """Raises InvalidRequest, which calls a recording by `name`, where work on it fails for what its numbers are."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError):
        raise InvalidRequest(f"{name} is damaged: its numbers contradict each other.", param=param) from None


def _of_today(steps: StructArray) -> StructArray:
    """Returns the steps of an earlier format; what it did not count is zero."""
    filled = np.zeros(steps.shape, STEP_DTYPE)
    for name in steps.dtype.names or ():
        filled[name] = steps[name]
    return filled


class _Versioned(msgspec.Struct):
    format_version: int


def step_row(record: StepRecord) -> tuple[Any, ...]:
    """Returns the record as a row of STEP_DTYPE."""
    blocked_by = _BLOCKED_BY_INDEX[record.blocked_by]
    times = (*_phases_of(record.phases), *_phases_of(record.ahead))
    return (*_counts_of(record), *times, blocked_by, record.is_profiled)


def step_of(row: np.void) -> StepRecord:
    """Returns the record of a row."""
    times = [int(row[name]) for name in _TIMES]
    counts = {name: int(row[name]) for name in _COUNTS}
    return StepRecord(
        **counts,
        phases=PhaseTimes(*times[: len(_PHASES)]),
        ahead=PhaseTimes(*times[len(_PHASES) :]),
        blocked_by=BLOCKED_BY[int(row["blocked_by"])],
        is_profiled=bool(row["is_profiled"]),
    )
