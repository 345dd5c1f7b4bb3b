"""Signs of life: none when it is quick, a line for each change otherwise, on standard error alone."""

import io
import time
from contextlib import redirect_stderr

import pytest

from roseinfer.cli import progress
from roseinfer.cli.progress import Progress


def wait_for(text: str, stream: io.StringIO) -> None:
    deadline = time.monotonic() + 10
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.005)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "_PLAIN_REFRESH_S", 0.001)
    monkeypatch.setattr(progress, "_PLAIN_INTERVAL_S", 0.001)


def test_what_is_quick_says_nothing() -> None:
    with redirect_stderr(io.StringIO()) as stderr, Progress("loading"):
        pass
    assert stderr.getvalue() == ""


@pytest.mark.usefixtures("impatient")
def test_each_stage_is_printed_once() -> None:
    with redirect_stderr(io.StringIO()) as stderr, Progress("loading") as shown:
        wait_for("loading", stderr)
        shown.update(what="warming up")
        wait_for("warming up", stderr)
    assert stderr.getvalue() == "roseinfer: loading\nroseinfer: warming up\n"


@pytest.mark.usefixtures("impatient")
def test_work_that_goes_on_begins_with_what_is_done() -> None:
    with redirect_stderr(io.StringIO()) as stderr, Progress("answering", total=9, done=4):
        wait_for("answering: 4/9", stderr)
    assert "0/9" not in stderr.getvalue()


@pytest.mark.usefixtures("impatient")
def test_a_count_moves_on() -> None:
    with redirect_stderr(io.StringIO()) as stderr, Progress("run", total=9) as shown:
        wait_for("run: 0/9", stderr)
        shown.update(done=7)
        wait_for("run: 7/9", stderr)


def test_the_last_line_has_the_last_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    with redirect_stderr(io.StringIO()) as stderr, Progress("requests", total=53) as shown:
        wait_for("requests: 0/53", stderr)
        shown.update(done=53)
    assert stderr.getvalue() == "roseinfer: requests: 0/53\nroseinfer: requests: 53/53\n"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("total", [None, 9])
def test_on_a_terminal_one_line_lives(total: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with redirect_stderr(Terminal()) as stderr, Progress("loading weights", total=total) as shown:
        wait_for("loading weights", stderr)
        shown.update(done=4, what="warming up")
        wait_for("warming up", stderr)
    assert "\x1b[" in stderr.getvalue(), "the line is rewritten in place"
