"""A recording's bytes into what the timeline page or a trace viewer shows, in this process or in one of its own.

To name the causes of ten thousand gaps takes a fifth of a second of Python. In the front end that would be time of the
very streams that are being watched, so a server has a process for it, at low priority. Knows no HTTP and no recorder.
"""

import io
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import IO, Literal

import msgspec

from roseinfer.errors import InvalidRequest, NotReady
from roseinfer.observe.gaps.request_gaps import gaps_of
from roseinfer.observe.recorder.chrome_trace import chrome_trace
from roseinfer.observe.recorder.recording import Recording
from roseinfer.observe.recorder.timeline_view import Cursor, origin_of, timeline_json
from roseinfer.runtime.child_process import start_nicer_child

MAX_VIEWED_STEPS = 3000  # of a saved recording, its newest: with 64 requests that is 20 MB of gaps
IDLE_EXIT_S = 60.0

_HEAD = struct.Struct(">QQ")  # length of the job, of the archive
_ANSWER = struct.Struct(">?Q")  # whether it is what was asked for, or else why not; its length
_NICER_BY = 10  # levels of nice(2): whoever watches can wait


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to make of a recording, and what counts as slow in it."""

    kind: Literal["timeline", "trace", "view"]
    slow_factor: float
    slow_min_ns: int
    origin_ns: int = 0  # for a timeline
    num_steps: int = 0
    since: Cursor | None = None


Render = Callable[[Job, bytes], bytes]


def render(job: Job, archive: bytes) -> bytes:
    """Do the job here. Raises InvalidRequest for bytes that are no recording."""
    find_gaps = partial(gaps_of, slow_factor=job.slow_factor, slow_min_ns=job.slow_min_ns)
    recording = Recording.read(io.BytesIO(archive))
    if job.kind == "trace":
        return chrome_trace(recording, find_gaps(recording))
    if job.kind == "timeline":
        return timeline_json(recording, find_gaps, job.origin_ns, job.num_steps, job.since)
    try:
        return timeline_json(recording, find_gaps, origin_of(recording), MAX_VIEWED_STEPS)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        raise InvalidRequest("The file is damaged: its numbers contradict each other.", param="recording") from None


class RenderProcess:
    """The same in a child, which is started when it is needed and goes when it has had nothing to do for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def render(self, job: Job, archive: bytes) -> bytes:
        """May be called in any thread, but blocks: not on an event loop.

        Raises as `render` does, and NotReady once it is closed.
        """
        with self._lock:
            try:
                is_made, answer = self._ask(job, archive)
            except (BrokenPipeError, EOFError):  # it had just left, or died: once more with a new one
                self._stop()
                is_made, answer = self._ask(job, archive)
        if not is_made:
            raise InvalidRequest(answer.decode(), param="recording")
        return answer

    def close(self) -> None:
        """Also ends the job under way, for which a server's exit would wait. Idempotent."""
        self._is_closed = True
        child = self._child
        if child is not None:
            child.kill()  # whoever waits for its answer has the lock
        with self._lock:
            self._stop()

    def _ask(self, job: Job, archive: bytes) -> tuple[bool, bytes]:
        if self._is_closed:
            raise NotReady("The server is shutting down.")
        if self._child is None:
            self._child = start_nicer_child("roseinfer.observe.recorder.rendering", _NICER_BY)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        told = msgspec.json.encode(job)
        for piece in (_HEAD.pack(len(told), len(archive)), told, archive):
            self._child.stdin.write(piece)
        self._child.stdin.flush()
        is_made, length = _ANSWER.unpack(_read(self._child.stdout, _ANSWER.size))
        return is_made, _read(self._child.stdout, length)

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def _read(file: IO[bytes], length: int) -> bytes:
    content = file.read(length)
    if len(content) < length:
        raise EOFError
    return content


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The child: one answer for each request, until there are no more, or none for a while."""
    while select.select([requests], [], [], IDLE_EXIT_S)[0]:
        try:
            job_length, archive_length = _HEAD.unpack(_read(requests, _HEAD.size))
            job = msgspec.json.decode(_read(requests, job_length), type=Job)
            archive = _read(requests, archive_length)
        except EOFError:
            return
        try:
            is_made, answer = True, render(job, archive)
        except InvalidRequest as refusal:
            is_made, answer = False, refusal.message.encode()
        answers.write(_ANSWER.pack(is_made, len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
