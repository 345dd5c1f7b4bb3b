"""The journal of a batch on a disk that is full."""

import errno
import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from roseinfer.batch.journal import Journal
from roseinfer.errors import ConfigError

LONG, SHORT = b'"%s"' % (b"x" * 4000), b"1"


@contextmanager
def no_file_grows_beyond(size: int) -> Iterator[None]:
    """As on a full disk: of what crosses the size a part is written, and nothing of what follows."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_does_not_fit_is_not_there_at_all(tmp_path: Path) -> None:
    """One that fits may come before the end: it would follow the half of that line."""
    output = tmp_path / "out.jsonl"
    with Journal(output, "model") as journal:
        with no_file_grows_beyond(4096):
            journal.add(0, "zero", SHORT, is_error=False)
            with pytest.raises(ConfigError, match=r"--output: .*out\.jsonl\.partial cannot be written: No space left"):
                journal.add(1, "one", LONG, is_error=False)
            journal.add(2, "two", SHORT, is_error=False)
        assert not journal.has_answer(1, "one")
    with Journal(output, "model") as journal:
        assert [journal.has_answer(index, name) for index, name in enumerate(("zero", "one", "two"))] == [
            *(True, False, True)
        ]
        journal.add(1, "one", LONG, is_error=False)
        journal.finish()
    assert output.read_bytes().split() == [SHORT, LONG, SHORT]


@pytest.mark.parametrize(
    ("name", "words"),
    [(".", r"\. is a directory"), ("/", "/ is a directory"), ("x" * 250, "File name too long")],
)
def test_a_name_that_no_file_can_have_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Journal(Path(name), "model")
    assert caught.value.param == "--output"


def test_an_output_that_does_not_fit_is_written_by_the_next_run(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with Journal(output, "model") as journal:
        journal.add(0, "zero", LONG, is_error=False)
        with (
            no_file_grows_beyond(100),
            pytest.raises(ConfigError, match=r"cannot be written: .*the same command goes on"),
        ):
            journal.finish()
        assert not output.exists()
    with Journal(output, "model") as journal:
        journal.finish()
    assert output.read_bytes() == LONG + b"\n"


@pytest.mark.parametrize("content", [b"notes without an end", b'{"model":"\xff"}\n', b'{"model":"n', b"\n"])
def test_a_file_that_is_no_journal_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    """It may be the input: a header that was cut is known by its beginning."""
    file = tmp_path / "out.jsonl.partial"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is no journal of this batch with model"):
        Journal(tmp_path / "out.jsonl", "model")
    assert file.read_bytes() == content


def test_two_batches_do_not_write_the_same_errors(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.txt", "model") as journal:
        with pytest.raises(ConfigError, match=r"a\.txt\.partial is of a batch whose errors go to .*a\.errors"):
            Journal(tmp_path / "a.jsonl", "model")
        with Journal(tmp_path / "a.b.jsonl", "model") as other:
            other.finish()
        journal.finish()
    with Journal(tmp_path / "a.jsonl", "model"):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="cannot be locked: Function not implemented"):
        Journal(tmp_path / "out.jsonl", "model")
