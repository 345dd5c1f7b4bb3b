"""A URL or a path into what can be explained: a living server, a file, a capture, or the result of a benchmark."""

import contextlib
import http.client
import io
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from roseinfer.errors import InvalidRequest, RoseinferError
from roseinfer.explain.ledgers import BenchResult
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.recorder.recording import Recording

RECORDING_NAME = "recording.npz"
_TIMEOUT_S = 30.0


def is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


class Evidence(NamedTuple):
    """What an explanation is made from; `ledgers` are there where nothing was recorded."""

    recording: Recording
    ledgers: list[Gap] | None = None


def read_evidence(source: str, api_key: str | None = None) -> Evidence:
    """Raises InvalidRequest, with the source as its `param`, for whatever holds nothing that we can read."""
    try:
        return Evidence(_fetch(source, api_key)) if is_url(source) else _read(Path(source))
    except RoseinferError as error:
        raise InvalidRequest(error.message, param=source) from None


def get(url: str, api_key: str | None = None, timeout_s: float = _TIMEOUT_S) -> bytes:
    """The body of a GET. Raises InvalidRequest that says what answered, if anything did."""
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
        _origin(url)  # what is no URL is told as that
        raise InvalidRequest(f"does not answer: {reason}.", param=url) from None


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    """What the server said, or what its status usually means."""
    path = urllib.parse.urlsplit(url).path
    said = ""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = str(json.loads(error.read())["error"]["message"])
    if error.code == 404 and said.startswith("Not Found"):  # of a path, which the number says already
        said = ""
    hint = " Is it the operations port (server.ops_port) of roseinfer?" if error.code == 404 else ""
    return f"answered {error.code} for {path}{f': {said}'.rstrip('.') if said else ''}.{hint}"


def _origin(url: str) -> str:
    """Scheme, host and port. Raises InvalidRequest for what is no URL."""
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
