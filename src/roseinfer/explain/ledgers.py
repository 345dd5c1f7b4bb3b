"""The result of `bench serve` into its recording's path or, without one, into gaps made from the requests' ledgers.

A ledger says what the whole time between a request's first token and its last went to. Divided by its tokens that is
one gap of average length, so what is explained then is the time per output token of requests, and no single gap.
"""

from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
from msgspec import Meta

from roseinfer.errors import InvalidRequest
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.recorder.recording import ClockPair, Recording, RecordingMeta, RequestRecord

RESULT_FORMAT = "roseinfer bench serve 1"  # as `bench/load/report.py` writes it
_PREFIX = "decode."

_Nanoseconds = Annotated[float, Meta(ge=-1e18, le=1e18)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class _Ledger(msgspec.Struct):
    parts_ns: dict[str, _Nanoseconds]
    num_output_tokens: int


class _Row(msgspec.Struct):
    request_id: str
    end_s: _Seconds
    ledger: _Ledger | None = None


class _Settings(msgspec.Struct):
    model: str = ""


class BenchResult(msgspec.Struct):
    """What is read of a result file."""

    format: str
    requests: list[_Row]
    recording: str | None = None
    settings: _Settings = msgspec.field(default_factory=_Settings)

    @classmethod
    def read(cls, path: Path) -> "BenchResult":
        """Raises InvalidRequest for a file that cannot be read, is no result, or one of another version."""
        try:
            result = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise InvalidRequest(f"It cannot be read: {error.strerror}.") from None
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"It is no result of `roseinfer bench serve`: {error}.") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"It is not JSON: {error}.") from None
        if result.format != RESULT_FORMAT:
            raise InvalidRequest(f"Its format is {result.format!r}; this version of roseinfer reads {RESULT_FORMAT!r}.")
        return result

    def gaps(self) -> list[Gap]:
        """One for each request with a ledger and at least two tokens, in the order of their ends."""
        parts = {serial: found for serial, row in enumerate(self.requests) if (found := _parts_of(row))}
        usual = {cause: median(found.get(cause, 0) for found in parts.values()) for cause in Cause if parts}
        gaps = []
        for serial, found in parts.items():
            end_ns = round(self.requests[serial].end_s * 1e9)
            cause = max(found, key=lambda cause: found[cause] - usual[cause])
            gaps.append(Gap(serial, 1, end_ns - sum(found.values()), end_ns, 0, found, cause, False))
        return sorted(gaps, key=lambda gap: gap.end_ns)

    def as_recording(self) -> Recording:
        """The requests' names, and nothing else: no step was recorded."""
        clock = ClockPair(0, 0)
        return Recording(
            meta=RecordingMeta(version="", model_name=self.settings.model, clock=clock, engine=None),
            requests=[
                RequestRecord(serial=serial, request_id=row.request_id, recv_ns=0)
                for serial, row in enumerate(self.requests)
            ],
        )


def _parts_of(row: _Row) -> dict[Cause, int]:
    """What the average gap of a request went to, in nanoseconds; nothing for a request without one."""
    if row.ledger is None or row.ledger.num_output_tokens < 2:
        return {}
    num_gaps = row.ledger.num_output_tokens - 1
    parts: dict[Cause, int] = {}
    for name, total_ns in row.ledger.parts_ns.items():
        if name.startswith(_PREFIX):
            word = name.removeprefix(_PREFIX)
            cause = Cause(word) if word in set(Cause) else Cause.UNKNOWN
            parts[cause] = parts.get(cause, 0) + round(total_ns / num_gaps)
    return parts
