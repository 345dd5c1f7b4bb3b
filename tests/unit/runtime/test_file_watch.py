"""Files are read again whenever they change, whatever became of the reading before."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from roseinfer.errors import ConfigError
from roseinfer.runtime import file_watch
from roseinfer.runtime.file_watch import WatchedFiles

INTERVAL_S = 0.01


class Reader:
    """Reads a text file, or fails as it is told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = WatchedFiles([path])
        self.failure: Exception | None = None
        self.num_reads = 0
        self.taken: asyncio.Queue[str] = asyncio.Queue()

    def read(self) -> str:
        failure = self.failure
        self.num_reads += 1
        if failure is not None:
            raise failure
        return self.path.read_text()


@asynccontextmanager
async def watched(reader: Reader) -> AsyncIterator[None]:
    task = asyncio.create_task(reader.files.watch(reader.read, reader.taken.put_nowait))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.mark.parametrize(
    "failure", [ConfigError("It is odd."), OSError("It is gone."), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd")]
)
async def test_a_reading_that_fails_is_logged_and_the_next_change_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(file_watch, "WATCH_INTERVAL_S", INTERVAL_S)
    reader = Reader(tmp_path / "watched")
    async with watched(reader):
        reader.failure = failure
        reader.path.write_text("a")
        while not reader.num_reads:  # noqa: ASYNC110  # in a thread of its own
            await asyncio.sleep(INTERVAL_S)
        reader.failure = None
        reader.path.write_text("more")
        assert await reader.taken.get() == "more"
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.message == "a changed file cannot be used; what it held before stays"
    assert (record.exc_info is None) == isinstance(failure, ConfigError)
