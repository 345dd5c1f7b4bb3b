"""Scrapes of real servers whose engines hang or die, once a second: recorded here, replayed by `test_failures.py`.

    python -m tests.monitoring.failures

takes five minutes and writes `failures.json`. A supervisor, which is this script, starts the server again ABSENT_S
after its exit. Times are seconds since the record began, as in promtool, whose clock begins at 0.
"""

import contextlib
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import Server
from tests.integration.faults import die, hang

RECORDED = Path(__file__).with_name("failures.json")
STAMP = "roseinfer_start_time_seconds"
NAMES = {  # that the alerts of failures read
    "roseinfer_engine_stalled_seconds",
    "roseinfer_engine_restarts_total",
    STAMP,
}
FAILED = "roseinfer_lifecycle_state", "failed"
STREAMS_S, STRUCK_S, ABSENT_S, TAIL_S = 80, 90, 100, 60

Page = dict[str, float] | None
"""Values of one second by series; None while nothing answers."""


class Record(msgspec.Struct):
    """What Prometheus would have been shown: of each series the seconds in which it changed, and its values then."""

    num_seconds: int
    absent: list[int]  # seconds in which nothing answered
    changes: dict[str, list[tuple[int, float]]]

    def at(self, second: int) -> Page:
        """The page of a second; None where nothing answered."""
        if second in self.absent:
            return None
        return {
            name: max((change for change in changes if change[0] <= second), default=(0, 0.0))[1]
            for name, changes in self.changes.items()
        }


class Failure(NamedTuple):
    """What is done to the engine, and what the server was told to do about it."""

    strike: Callable[[int], None]
    on_failure: str


FAILURES = {
    "hang": Failure(hang, "exit"),
    "death": Failure(die, "exit"),
    "death, restart": Failure(die, "restart"),
}


def record(failure: Failure, folder: Path) -> list[Page]:
    """The pages of a server from a while before the failure to a while after the server's return."""
    options = ("--engine.on-failure", failure.on_failure)
    server = Server(folder / "log", *options)
    pages: list[Page] = []
    ended_at = back_at = 0
    try:
        server.wait_ready()
        began_s = time.time()
        while not back_at or len(pages) < back_at + TAIL_S:
            time.sleep(max(0.0, began_s + len(pages) - time.time()))
            pages.append(_page(server, began_s))
            if len(pages) == STREAMS_S:
                threading.Thread(target=_stream, args=(server,), daemon=True).start()
            elif len(pages) == STRUCK_S:
                failure.strike(server.engine_pid())
            elif len(pages) > STRUCK_S and not ended_at and server.process.poll() is not None:
                ended_at = len(pages)
            elif ended_at and not back_at and len(pages) >= ended_at + ABSENT_S:
                server = Server(folder / "log", *options, port=server.port)
                back_at = len(pages)
            elif failure.on_failure == "restart" and len(pages) == STRUCK_S + ABSENT_S:
                back_at = len(pages)
        return pages
    finally:
        server.stop(signal.SIGKILL)


def _stream(server: Server) -> None:
    """Tokens, one request after the other, until the server fails."""
    with contextlib.suppress(OSError):
        while server.post("/v1/completions", {"prompt": "x", "max_tokens": 200, "ignore_eos": True})[0] == 200:
            pass


def _page(server: Server, began_s: float) -> Page:
    try:
        with urllib.request.urlopen(server.url + "/metrics", timeout=1) as response:
            text = response.read().decode()
    except OSError:
        return None
    page = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in NAMES or (sample.name, sample.labels.get("state")) == FAILED:
                value = sample.value - began_s if sample.name == STAMP else sample.value
                page[sample.name] = round(value, 2)
    return page


def compressed(pages: list[Page]) -> Record:
    """The record of pages, without what did not change."""
    changes: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for second, page in enumerate(pages):
        for name, value in (page or {}).items():
            if not changes[name] or changes[name][-1][1] != value:
                changes[name].append((second, value))
    return Record(len(pages), [second for second, page in enumerate(pages) if page is None], dict(changes))


def main() -> int:
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor() as pool:
        folders = {name: Path(directory) / str(number) for number, name in enumerate(FAILURES)}
        for folder in folders.values():
            folder.mkdir()
        found = {name: pool.submit(record, failure, folders[name]) for name, failure in FAILURES.items()}
        pages = {name: each.result() for name, each in found.items()}
        RECORDED.write_bytes(msgspec.json.encode({name: compressed(each) for name, each in pages.items()}) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
