"""Keeps the answers of a batch in a journal beside the output, so that a run that was killed is gone on with.

The journal is `OUTPUT.partial`: a header, then one line for each answer in the order in which they came. At the end the
answers are written in the order of the input, and the journal is removed. An answer is appended in one write, so of a
run that was killed at most the last one is cut, and that line is answered again.
"""

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Self

import msgspec

from roseinfer.errors import ConfigError

ERRORS_SUFFIX = ".errors.jsonl"
JOURNAL_SUFFIX = ".partial"


class Header(msgspec.Struct, frozen=True):
    """Says what makes answers comparable: one output has the answers of one model."""

    model: str
    kind: Literal["roseinfer batch"] = "roseinfer batch"
    version: Literal[1] = 1


class Entry(msgspec.Struct, frozen=True):
    """One answer: to which line of the input, by its number from 0 and its digest."""

    index: int
    digest: str
    is_error: bool
    line: msgspec.Raw


class Journal:
    """The journal of one output, which no other process may have open. A context manager."""

    def __init__(self, output: Path, model: str) -> None:
        """Raises ConfigError when the output is complete, or the journal cannot be used."""
        if not output.name:
            raise ConfigError(f"{output} is a directory, and no name for a file", param="--output")
        self._output = output
        self._errors = output.with_name(output.stem + ERRORS_SUFFIX)
        self.path = output.with_name(output.name + JOURNAL_SUFFIX)
        self._places: dict[int, tuple[int, int, bool]] = {}  # by the index of a line: offset, length, whether an error
        self._digests: dict[int, str] = {}
        try:
            if not self.path.exists():
                for file in (self._output, self._errors):
                    if file.exists():
                        raise ConfigError(f"{file} is there already; move it away, or name another", param="--output")
                self._refuse_shared_errors()
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}", param="--output") from None
        try:
            self._lock()
            self._read(Header(model))
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    @property
    def num_answers(self) -> int:
        return len(self._places)

    @property
    def num_errors(self) -> int:
        return sum(is_error for _, _, is_error in self._places.values())

    def has_answer(self, index: int, digest: str) -> bool:
        """Whether the line of this number is answered. Raises ConfigError if it was another line then."""
        if index not in self._places:
            return False
        if self._digests[index] != digest:
            raise ConfigError(
                f"{self.path} has the answer to another line {index + 1}: the input was changed, so remove the journal "
                "to begin anew, or name another output",
                param="--input",
            )
        return True

    def add(self, index: int, digest: str, line: bytes, *, is_error: bool) -> None:
        """Append the answer to a line."""
        entry = msgspec.json.encode(Entry(index, digest, is_error, msgspec.Raw(line))) + b"\n"
        self._write(entry)
        self._note(index, digest, self._end - len(entry), len(entry), is_error=is_error)

    def finish(self) -> Path | None:
        """Write the output, and the errors where there are some, whose path it returns; remove the journal."""
        chosen = sorted(self._places)
        errors = None
        if any(self._places[index][2] for index in chosen):
            errors = self._errors
            self._publish(errors, (index for index in chosen if self._places[index][2]))
        self._publish(self._output, (index for index in chosen if not self._places[index][2]))
        self.path.unlink()
        return errors

    def _publish(self, file: Path, indices: Iterable[int]) -> None:
        """Write a file under another name, and rename it when it is whole and on the disk."""
        unfinished = file.with_name(file.name + ".writing")
        with _writing(unfinished), unfinished.open("wb") as written:
            for index in indices:
                offset, length, _ = self._places[index]
                entry = msgspec.json.decode(os.pread(self._file, length, offset), type=Entry)
                written.write(bytes(entry.line) + b"\n")
            written.flush()
            os.fsync(written.fileno())
        unfinished.replace(file)

    def _refuse_shared_errors(self) -> None:
        """Raises ConfigError where an unfinished batch, as into a.txt beside a.jsonl, will write the same errors."""
        for other in self.path.parent.glob(f"*{JOURNAL_SUFFIX}"):
            if Path(other.stem).stem == self._output.stem:
                problem = f"{other} is of a batch whose errors go to {self._errors} too; finish it, or name another"
                raise ConfigError(problem, param="--output")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is writing {self.path}", param="--output") from None
        except OSError as error:  # some network file systems have no locks
            raise ConfigError(f"{self.path} cannot be locked: {error.strerror}", param="--output") from None

    def _read(self, header: Header) -> None:
        """Find the answers of an earlier run, and cut off a last one that is not whole."""
        self._end = 0
        lines = self._whole_lines()
        first = next(lines, b"")
        encoded = msgspec.json.encode(header) + b"\n"
        if not first and encoded.startswith(os.pread(self._file, len(encoded), 0)):  # it is new, or cut in its header
            os.ftruncate(self._file, 0)
            self._write(encoded)
            return
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            if msgspec.json.decode(first, type=Header) == header:
                self._end = len(first)
                for line in lines:
                    entry = msgspec.json.decode(line, type=Entry)
                    self._note(entry.index, entry.digest, self._end, len(line), is_error=entry.is_error)
                    self._end += len(line)
                os.ftruncate(self._file, self._end)
                return
        raise ConfigError(
            f"{self.path} is no journal of this batch with {header.model}; remove it, or name another", param="--output"
        )

    def _whole_lines(self) -> Iterator[bytes]:
        with open(os.dup(self._file), "rb") as file:
            file.seek(0)
            yield from (line for line in file if line.endswith(b"\n"))

    def _note(self, index: int, digest: str, offset: int, length: int, *, is_error: bool) -> None:
        self._places[index] = (offset, length, is_error)
        self._digests[index] = digest

    def _write(self, content: bytes) -> None:
        """Append a whole line or nothing. Raises ConfigError, as when the disk is full."""
        with _writing(self.path):
            written = os.write(self._file, content)
            if written != len(content):
                os.ftruncate(self._file, self._end)  # or a line that still fits would follow the half of this one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += written


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the system says against writing a file becomes a ConfigError; the answers so far are in the journal."""
    try:
        yield
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}; once it can be, the same command goes on"
        raise ConfigError(message, param="--output") from None
