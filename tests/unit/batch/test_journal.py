"""The journal of a batch on a disk that is full."""

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
