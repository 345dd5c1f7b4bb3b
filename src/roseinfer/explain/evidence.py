"""Reads what is to be explained: a running server, a recording, a capture, or the result of `bench serve`.

A result without a recording is explained from the ledgers of its requests. A ledger says what the whole time between a
request's first token and its last went to; divided by its tokens that is one gap of average length.
"""

import contextlib
import http.client
import io
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from roseinfer.errors import InvalidRequest, RoseinferError
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.recorder.recording import ClockPair, Recording, RecordingMeta, RequestRecord

RECORDING_NAME = "recording.npz"
_TIMEOUT_S = 30.0
RESULT_FORMAT = "roseinfer bench serve 1"  # as `bench/load/report.py` writes it
_PREFIX = "decode."

_Nanoseconds = Annotated[float, Meta(ge=-1e18, le=1e18)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


def is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


class Evidence(NamedTuple):
    """What an explanation is made from; `ledgers` instead of recorded gaps where nothing was recorded."""

    recording: Recording
    ledgers: list[Gap] | None = None


def read_evidence(source: str, api_key: str | None) -> Evidence:
    """Reads a URL or a path. Raises InvalidRequest, with the source as its `param`, if it holds nothing readable."""
    try:
        return Evidence(_fetch(source, api_key)) if is_url(source) else _read(Path(source))
    except RoseinferError as error:
        raise InvalidRequest(error.message, param=source) from None
    except OSError as error:  # such as a directory above it that is closed
        raise InvalidRequest(f"It cannot be read: {error.strerror}.", param=source) from None


def get(url: str, api_key: str | None = None, timeout_s: float = _TIMEOUT_S) -> bytes:
    """Returns the body of a GET. Raises InvalidRequest that says what answered, if anything did."""
    headers: Mapping[str, str] = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        # The scheme is http or https: `is_url` has looked.
        with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=timeout_s) as answer:  # noqa: S310
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        raise InvalidRequest(_refusal(url, error), param=url) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, OSError) and reason.strerror:
            reason = reason.strerror
        _origin(url)  # raises for what is no URL
        raise InvalidRequest(f"does not answer: {reason}.", param=url) from None


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    """Says what the server answered, or what its status usually means."""
    path = urllib.parse.urlsplit(url).path
    said = ""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = str(json.loads(error.read())["error"]["message"])
    if error.code == 404 and said.startswith("Not Found"):  # of a path, which the number says already
        said = ""
    hint = " Is it the operations port (server.ops_port) of roseinfer?" if error.code == 404 else ""
    return f"answered {error.code} for {path}{f': {said}'.rstrip('.') if said else ''}.{hint}"


def _origin(url: str) -> str:
    """Returns scheme, host and port. Raises InvalidRequest for what is no URL."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:
        raise InvalidRequest(f"It is no URL: {error}.", param=url) from None
    return f"{parts.scheme}://{parts.netloc}"


def _fetch(url: str, api_key: str | None) -> Recording:
    content = get(f"{_origin(url)}/debug/recording", api_key)
    return Recording.read(io.BytesIO(content), "What it sent")


def _read(path: Path) -> Evidence:
    if path.is_dir():
        if not (path / RECORDING_NAME).is_file():
            raise InvalidRequest(f"The directory holds no {RECORDING_NAME}, so it is no capture.")
        return Evidence(Recording.load(path / RECORDING_NAME))
    if path.suffix != ".json":
        return Evidence(Recording.load(path, "It"))  # the error's `param` names it
    result = BenchResult.read(path)
    if result.recording is not None:
        return Evidence(Recording.load(path.parent / result.recording))
    return Evidence(result.as_recording(), result.gaps())


# --- the result of `bench serve` --------------------------------------------------------------------------------------


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
    """The fields of a result file that are read."""

    format: str
    requests: list[_Row]
    recording: str | None = None
    settings: _Settings = msgspec.field(default_factory=_Settings)

    @classmethod
    def read(cls, path: Path) -> "BenchResult":
        """Reads a file. Raises InvalidRequest if it cannot be read, is no result, or has another version."""
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
        """Returns a gap for each request with a ledger and at least two tokens, in the order of their ends."""
        parts = {serial: found for serial, row in enumerate(self.requests) if (found := _parts_of(row))}
        usual = {cause: median(found.get(cause, 0) for found in parts.values()) for cause in Cause if parts}
        gaps = []
        for serial, found in parts.items():
            end_ns = round(self.requests[serial].end_s * 1e9)
            cause = max(found, key=lambda cause: found[cause] - usual[cause])
            gaps.append(Gap(serial, 1, end_ns - sum(found.values()), end_ns, 0, found, cause, False))
        return sorted(gaps, key=lambda gap: gap.end_ns)

    def as_recording(self) -> Recording:
        """Returns a recording of the requests' names, and nothing else: no step was recorded."""
        clock = ClockPair(0, 0)
        return Recording(
            meta=RecordingMeta(version="", model_name=self.settings.model, clock=clock, engine=None),
            requests=[
                RequestRecord(serial=serial, request_id=row.request_id, recv_ns=0)
                for serial, row in enumerate(self.requests)
            ],
        )


def _parts_of(row: _Row) -> dict[Cause, int]:
    """Returns what the average gap of a request went to, in nanoseconds; nothing for a request without gaps."""
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
