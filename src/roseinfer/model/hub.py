"""Fetches what serving needs of a Hugging Face model, from where an earlier fetch broke off, and checks its digests.

The files go into huggingface_hub's own cache, so that its other tools find them, and are not fetched where those were
first. That library resolves names and lays out the snapshot; the bytes are fetched here, since it begins a file anew in
each process and compares no digest. It also reads the environment: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE,
HF_HUB_DOWNLOAD_TIMEOUT and the others.
"""

import hashlib
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx2
from huggingface_hub import HfApi, constants, errors, hf_hub_url, snapshot_download
from huggingface_hub.file_download import get_hf_file_metadata, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session, hf_raise_for_status, tqdm

from roseinfer.errors import ConfigError

_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")  # configs, tokenizer, template
_SUBFOLDER_FILES = ("*_Pooling/config.json", "additional_chat_templates/*.jinja")
_WEIGHTS_FILE = "model.safetensors"
_NUM_AT_ONCE = 4
_NUM_TRIES = 5  # in succession that bring nothing
_RETRY_S = 0.5  # before the second try; each further wait is twice as long
_CHUNK_BYTES = 1 << 20
_LOG_EVERY_S = 10.0  # where no terminal shows a bar
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(rf"[0-9a-f]{{40}}|{_SHA256.pattern}")
_TAG = re.compile(r"\w[\w.=+-]{0,127}")  # what can be the name of a file

_log = logging.getLogger(__name__)


def fetch(repo_id: str, revision: str | None, *, has_weights: bool) -> Path:
    """The directory of a model's snapshot. Without `has_weights`, only of its small files.

    Raises ConfigError, in one sentence, about `model.path` or `model.revision`.
    """
    try:
        try:
            files = _list_files(repo_id, revision)
        except (httpx2.TransportError, OSError) as error:  # HfHubHTTPError and OfflineModeIsEnabled are OSErrors
            return _cached(repo_id, revision, error)
        with _Fetch(repo_id, revision, files) as fetching:
            names = fetching.small_files()
            fetching.fetch(names)
            if has_weights:
                weights = fetching.weights()
                fetching.fetch(weights)
                names += weights
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=names, tqdm_class=_NoBar))
    except errors.GatedRepoError as error:
        told, param = f"{repo_id} needs permission of its owner; set HF_TOKEN to a token that has it.", "model.path"
        raise ConfigError(told, param=param) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        told = f"There is no directory {repo_id} here and no model of this name on Hugging Face"
        told += "; one that is private needs HF_TOKEN."
        raise ConfigError(told, param="model.path") from error
    except errors.RevisionNotFoundError as error:
        told = f"{repo_id} has no revision {revision} on Hugging Face."
        raise ConfigError(told, param="model.revision") from error
    except errors.LocalEntryNotFoundError as error:
        told = (
            f"There is no directory {repo_id} here, and the model cannot be fetched: Hugging Face is out of reach or "
            "switched off (HF_HUB_OFFLINE), and its cache has no copy."
        )
        raise ConfigError(told, param="model.path") from error
    except (httpx2.TransportError, OSError) as error:
        told = f"{repo_id} could not be fetched from Hugging Face: {_first_line(error)}"
        raise ConfigError(told, param="model.path") from error


class _File(NamedTuple):
    name: str
    commit: str
    size: int  # bytes
    tag: str  # the cache names the file by it, and a file that changes gets another
    has_digest: bool  # the tag is one: SHA-256 of a large file, git's SHA-1 of a small one


def _list_files(repo_id: str, revision: str | None) -> dict[str, _File | None]:
    """By name; None of a file whose size or digest the list does not tell, as on some mirrors."""
    info = HfApi().model_info(
        repo_id, revision=revision, files_metadata=True, timeout=float(constants.HF_HUB_ETAG_TIMEOUT)
    )
    files = dict[str, _File | None]()
    for listed in info.siblings or ():
        digest = listed.lfs.sha256 if listed.lfs else listed.blob_id or ""
        is_known = info.sha is not None and listed.size is not None and _DIGEST.fullmatch(digest)
        file = _File(listed.rfilename, info.sha or "", listed.size or 0, digest, has_digest=True)
        files[listed.rfilename] = file if is_known else None
    return files


def _cached(repo_id: str, revision: str | None, error: Exception) -> Path:
    """The snapshot that is here when the hub gave none. Raises what the hub said if there is no copy."""
    if isinstance(error, errors.RevisionNotFoundError | errors.HFValidationError):
        raise error
    try:
        directory = Path(
            snapshot_download(repo_id, revision=revision, local_files_only=True, allow_patterns="config.json")
        )
    except errors.LocalEntryNotFoundError as missing:
        if isinstance(error, errors.HfHubHTTPError):
            raise error from None
        raise missing from error
    if not isinstance(error, errors.OfflineModeIsEnabled):
        _log.warning("%s is taken from the cache, since Hugging Face says: %s", repo_id, _first_line(error))
    return directory


class _Fetch:
    """Fetches files of one repository into the cache's `blobs`. A context manager: threads and bar end with it."""

    def __init__(self, repo_id: str, revision: str | None, files: dict[str, _File | None]) -> None:
        folder = repo_folder_name(repo_id=repo_id, repo_type="model")
        self._repo_id = repo_id
        self._revision = revision
        self._files = files
        self._blobs = Path(constants.HF_HUB_CACHE) / folder / "blobs"
        self._locks = Path(constants.HF_HUB_CACHE) / ".locks" / folder
        self._threads = ThreadPoolExecutor(_NUM_AT_ONCE, "fetch")
        self._must_stop = threading.Event()
        self._progress = _Progress(repo_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._must_stop.set()
        self._threads.shutdown(cancel_futures=True)
        self._progress.close()

    def small_files(self) -> list[str]:
        top = [name for name in self._files if "/" not in name and _is_any(name, _SMALL_FILES)]
        return top + [name for name in self._files if name.count("/") == 1 and _is_any(name, _SUBFOLDER_FILES)]

    def weights(self) -> list[str]:
        """The files that the index names, once it is here; else `model.safetensors`, else all that there are."""
        offered = [
            name
            for name in self._files  # without the same weights in the vendor's own form
            if "/" not in name and name.endswith(".safetensors") and not name.startswith("consolidated")
        ]
        if not offered:
            raise ConfigError(
                f"{self._repo_id} has no safetensors file; other formats, as .bin and GGUF, are not read.",
                param="model.path",
            )
        index = f"{_WEIGHTS_FILE}.index.json"
        if index in self._files:
            try:
                content = (self._blobs / file.tag).read_bytes() if (file := self._files[index]) else b""
                named = set(json.loads(content)["weight_map"].values())
            except (ValueError, KeyError, AttributeError, TypeError):
                return offered  # its tag is not known, or reading the checkpoint says what is wrong with it
            return [name for name in offered if name in named]
        return [_WEIGHTS_FILE] if _WEIGHTS_FILE in offered else offered

    def fetch(self, names: Sequence[str]) -> None:
        """Fetch what is not in the cache. A file that no answer tells enough of is left to huggingface_hub."""
        unknown = [name for name in names if self._files[name] is None]
        self._files.update(zip(unknown, self._threads.map(self._ask, unknown), strict=True))
        files = [file for name in names if (file := self._files[name]) and not (self._blobs / file.tag).exists()]
        if not files:
            return
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._locks.mkdir(parents=True, exist_ok=True)
        self._progress.expect(sum(file.size for file in files))
        for _ in self._threads.map(self._fetch_file, files):
            pass  # raises what a thread raised

    def _ask(self, name: str) -> _File | None:
        """What the server tells of one file: its tag may be no digest, and then its size is all that is compared."""
        url = hf_hub_url(self._repo_id, name, revision=self._revision)
        found = get_hf_file_metadata(url, timeout=float(constants.HF_HUB_ETAG_TIMEOUT))
        if not (found.commit_hash and found.size is not None and found.etag and _TAG.fullmatch(found.etag)):
            return None
        has_digest = _SHA256.fullmatch(found.etag) is not None
        return _File(name, found.commit_hash, found.size, found.etag, has_digest)

    def _fetch_file(self, file: _File) -> None:
        blob, partial = self._blobs / file.tag, self._blobs / f"{file.tag}.partial"
        with WeakFileLock(self._locks / f"{file.tag}.lock"):  # another process may fetch the same
            if blob.exists():
                self._progress.add(file.size)
                return
            self._progress.add(_size_of(partial))
            for is_last in (False, True):
                self._fetch_bytes(file, partial)
                if not (difference := _difference(partial, file)):
                    partial.replace(blob)
                    return
                self._progress.add(-_size_of(partial))
                partial.unlink()
                if not is_last:
                    _log.warning("%s of %s is fetched again: %s", file.name, self._repo_id, difference)
        told = f"{file.name} of {self._repo_id} arrived damaged twice: {difference}."
        raise ConfigError(told, param="model.path")

    def _fetch_bytes(self, file: _File, partial: Path) -> None:
        """Append to `partial` until it is as long as the file. Raises the last error when tries bring nothing."""
        num_tries, length = 0, _size_of(partial)
        longest = length  # so far: what a server without ranges sends again is nothing new
        while length < file.size:
            try:
                self._append(file, partial, length)
                told: Exception = ConnectionError(f"{file.name} ended after {_size_of(partial)} of {file.size} bytes")
            except httpx2.TransportError as error:
                told = error
            except errors.HfHubHTTPError as error:
                if error.response.status_code < 500 and error.response.status_code not in {408, 429}:
                    raise
                told = error
            length = _size_of(partial)
            num_tries = 1 if length > longest else num_tries + 1
            longest = max(longest, length)
            if length >= file.size:
                return
            if num_tries == _NUM_TRIES:
                raise ConnectionError(f"{file.name}: {_first_line(told)}") from told
            _log.warning("%s of %s broke off and is resumed: %s", file.name, self._repo_id, _first_line(told))
            if self._must_stop.wait(_RETRY_S * 2 ** (num_tries - 1)):
                raise ConnectionAbortedError(f"{file.name}: another file could not be fetched")

    def _append(self, file: _File, partial: Path, length: int) -> None:
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if length:
            headers["Range"] = f"bytes={length}-"
        url = hf_hub_url(self._repo_id, file.name, revision=file.commit)
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        ) as answer:
            hf_raise_for_status(answer)
            is_rest = answer.status_code == httpx2.codes.PARTIAL_CONTENT
            if length and not is_rest:  # a server that sends all of it again
                self._progress.add(-length)
            with partial.open("ab" if is_rest else "wb") as to:
                for chunk in answer.iter_bytes(_CHUNK_BYTES):
                    to.write(chunk)
                    self._progress.add(len(chunk))
                    if self._must_stop.is_set():
                        raise ConnectionAbortedError(f"{file.name}: another file could not be fetched")


class _NoBar(tqdm):  # type: ignore[misc]
    """Shows nothing: the files that huggingface_hub counts are here already."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


class _Progress:
    """Shows the bytes that are here: as a bar on a terminal, else as lines of the log."""

    def __init__(self, repo_id: str) -> None:
        self._repo_id = repo_id
        self._has_bar = sys.stderr.isatty()
        self._bar = tqdm(total=0, unit="B", unit_scale=True, desc=repo_id, disable=not self._has_bar)
        self._lock = threading.Lock()
        self._num_bytes = self._total = 0
        self._start_s = self._told_s = time.monotonic()

    def expect(self, num_bytes: int) -> None:
        self._total += num_bytes
        self._bar.total = self._total
        self._bar.refresh()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            self._bar.update(num_bytes)
            if not self._has_bar and time.monotonic() - self._told_s >= _LOG_EVERY_S:
                self._tell()

    def close(self) -> None:
        self._bar.close()
        if self._total and not self._has_bar:
            self._tell()

    def _tell(self) -> None:
        self._told_s = time.monotonic()
        here, total = self._num_bytes / 1e6, self._total / 1e6
        rate = here / max(self._told_s - self._start_s, 1e-3)
        _log.info("%s: %.1f of %.1f MB are here, at %.1f MB/s", self._repo_id, here, total, rate)


def _difference(path: Path, file: _File) -> str:
    """What is wrong with a fetched file; nothing if its size is the one that the hub told, and its digest if it did."""
    size = _size_of(path)
    if size != file.size:
        return f"it has {size} bytes instead of {file.size}"
    if not file.has_digest:
        return ""
    is_large = _SHA256.fullmatch(file.tag) is not None
    digest = hashlib.sha256() if is_large else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return "" if digest.hexdigest() == file.tag else f"its digest is {digest.hexdigest()} instead of {file.tag}"


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
