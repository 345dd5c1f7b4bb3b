"""Fetches files of a model from where an earlier fetch broke off, checks them, and says how far it is.

Where the files come from, and what there is to check, a subclass of `Fetch` says: `hub.py` for Hugging Face,
`object_store.py` for S3.
"""

import json
import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, Self

from huggingface_hub.utils import WeakFileLock, tqdm

from roseinfer.errors import ConfigError

_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")  # configs, tokenizer, template
_SUBFOLDER_FILES = ("*_Pooling/config.json", "additional_chat_templates/*.jinja")
_WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{_WEIGHTS_FILE}.index.json"
_NUM_AT_ONCE = 4
_NUM_TRIES = 5  # in succession that bring nothing
_RETRY_S = 0.5  # before the second try; each further wait is twice as long
CHUNK_BYTES = 1 << 20
_LOG_EVERY_S = 10.0  # where no terminal shows a bar

_log = logging.getLogger(__name__)


class File(NamedTuple):
    """A file at its source."""

    name: str
    version: str  # what asks for exactly these bytes
    size: int  # bytes
    tag: str  # the cache names the file by it, and a file that changes gets another
    has_digest: bool  # the tag is one


class Interrupted(Exception):
    """A transfer broke off in a way that trying again may mend."""


def small_files(names: Iterable[str]) -> list[str]:
    """Returns those that are needed to know a model, without its weights."""
    offered = list(names)
    top = [name for name in offered if "/" not in name and _is_any(name, _SMALL_FILES)]
    return top + [name for name in offered if name.count("/") == 1 and _is_any(name, _SUBFOLDER_FILES)]


def weights(source: str, names: Iterable[str], index: bytes | None) -> list[str]:
    """Returns the files that the index names; without one (None) `model.safetensors`, else all that there are.

    Raises ConfigError where there are none.
    """
    offered = [
        name
        for name in names  # without the same weights in the vendor's own form
        if "/" not in name and name.endswith(".safetensors") and not name.startswith("consolidated")
    ]
    if not offered:
        raise ConfigError(
            f"{source} has no safetensors file; other formats, as .bin and GGUF, are not read.", param="model.path"
        )
    if index is not None:
        try:
            named = set(json.loads(index)["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            return offered  # reading the checkpoint says what is wrong with it
        return [name for name in offered if name in named]
    return [_WEIGHTS_FILE] if _WEIGHTS_FILE in offered else offered


class Fetch(ABC):
    """Fetches files into a directory, each named by its tag. A context manager: threads and bar end with it."""

    def __init__(self, source: str, blobs: Path, locks: Path) -> None:
        self._source = source
        self._blobs = blobs
        self._locks = locks
        self._threads = ThreadPoolExecutor(_NUM_AT_ONCE, "fetch")
        self._must_stop = threading.Event()
        self._progress = Progress(source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._must_stop.set()
        self._threads.shutdown(cancel_futures=True)
        self._progress.close()

    @abstractmethod
    def _append(self, file: File, partial: Path, length: int) -> None:
        """Append to `partial`, which has `length` bytes. Raises Interrupted for what may go better next time."""

    @abstractmethod
    def _digest_differs(self, path: Path, file: File) -> str:
        """What is wrong with the digest of a file of the right size; nothing if it is right or not known."""

    def fetch_files(self, wanted: Sequence[File]) -> None:
        """Fetch what is not here yet."""
        files = [file for file in wanted if not (self._blobs / file.tag).exists()]
        if not files:
            return
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._locks.mkdir(parents=True, exist_ok=True)
        self._progress.expect(sum(file.size for file in files))
        for _ in self._threads.map(self._fetch_file, files):
            pass  # raises what a thread raised

    def _fetch_file(self, file: File) -> None:
        blob, partial = self._blobs / file.tag, self._blobs / f"{file.tag}.partial"
        with WeakFileLock(self._locks / f"{file.tag}.lock"):  # another process may fetch the same
            if blob.exists():
                self._progress.add(file.size)
                return
            self._progress.add(size_of(partial))
            for is_last in (False, True):
                self._fetch_bytes(file, partial)
                if not (difference := self._difference(partial, file)):
                    partial.replace(blob)
                    return
                self._progress.add(-size_of(partial))
                partial.unlink()
                if not is_last:
                    _log.warning("%s of %s is fetched again: %s", file.name, self._source, difference)
        message = f"{file.name} of {self._source} arrived damaged twice: {difference}."
        raise ConfigError(message, param="model.path")

    def _fetch_bytes(self, file: File, partial: Path) -> None:
        """Append to `partial` until it is as long as the file. Raises ConnectionError when tries bring nothing."""
        num_tries, length = 0, size_of(partial)
        longest = length  # so far: what a server without ranges sends again is nothing new
        if not file.size:
            partial.touch()
        while length < file.size:
            try:
                self._append(file, partial, length)
                failure: Exception = ConnectionError(f"{file.name} ended after {size_of(partial)} of {file.size} bytes")
            except Interrupted as error:
                failure = error
            length = size_of(partial)
            num_tries = 1 if length > longest else num_tries + 1
            longest = max(longest, length)
            if length >= file.size:
                return
            if num_tries == _NUM_TRIES:
                raise ConnectionError(f"{file.name}: {first_line(failure)}") from failure
            _log.warning("%s of %s broke off and is resumed: %s", file.name, self._source, first_line(failure))
            if self._must_stop.wait(_RETRY_S * 2 ** (num_tries - 1)):
                raise ConnectionAbortedError(f"{file.name}: another file could not be fetched")

    def _write(self, file: File, partial: Path, chunks: Iterable[bytes], *, is_rest: bool) -> None:
        """Append the chunks, or begin anew with them where they are not the rest."""
        if not is_rest:
            self._progress.add(-size_of(partial))
        with partial.open("ab" if is_rest else "wb") as to:
            for chunk in chunks:
                to.write(chunk)
                self._progress.add(len(chunk))
                if self._must_stop.is_set():
                    raise ConnectionAbortedError(f"{file.name}: another file could not be fetched")

    def _difference(self, path: Path, file: File) -> str:
        """What is wrong with a fetched file; nothing if its size is right, and its digest where there is one."""
        size = size_of(path)
        if size != file.size:
            return f"it has {size} bytes instead of {file.size}"
        return self._digest_differs(path, file) if file.has_digest else ""


class Progress:
    """Shows the bytes that are here: as a bar on a terminal, else as lines of the log."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._has_bar = sys.stderr.isatty()
        self._bar = tqdm(total=0, unit="B", unit_scale=True, desc=source, disable=not self._has_bar)
        self._lock = threading.Lock()
        self._num_bytes = self._total = 0
        self._start_s = self._reported_s = time.monotonic()

    def expect(self, num_bytes: int) -> None:
        self._total += num_bytes
        self._bar.total = self._total
        self._bar.refresh()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            self._bar.update(num_bytes)
            if not self._has_bar and time.monotonic() - self._reported_s >= _LOG_EVERY_S:
                self._report()

    def close(self) -> None:
        self._bar.close()
        if self._total and not self._has_bar:
            self._report()

    def _report(self) -> None:
        self._reported_s = time.monotonic()
        here, total = self._num_bytes / 1e6, self._total / 1e6
        rate = here / max(self._reported_s - self._start_s, 1e-3)
        _log.info("%s: %.1f of %.1f MB are here, at %.1f MB/s", self._source, here, total, rate)


def digest_of(path: Path, digest: Callable[[bytes], object]) -> None:
    """Give `digest` a file's bytes in pieces."""
    with path.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            digest(chunk)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
