"""Renders a recording for the timeline page or a trace viewer, in this process or in one of its own.

To name the causes of ten thousand gaps takes a fifth of a second of Python. In the front end that would be time of the
very streams that are being watched, so a server has a process for it, at low priority.
"""

import io
from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from roseinfer.errors import InvalidRequest
from roseinfer.observe.gaps.request_gaps import gaps_of
from roseinfer.observe.recorder.chrome_trace import chrome_trace
from roseinfer.observe.recorder.recording import Recording
from roseinfer.observe.recorder.timeline_view import Cursor, timeline_json
from roseinfer.runtime.child_process import ChildProcess, answer_requests

MAX_VIEWED_STEPS = 3000  # of a saved recording, its newest: with 64 requests that is 20 MB of gaps
IDLE_EXIT_S = 60.0

_NICER_BY = 10  # levels of nice(2): a person who watches can wait


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to render of a recording, and what counts as slow in it."""

    kind: Literal["timeline", "trace", "view"]
    slow_factor: float
    slow_min_ns: int
    origin_ns: int = 0  # for a timeline
    num_steps: int = 0
    since: Cursor | None = None


Render = Callable[[Job, bytes], bytes]


def render(job: Job, archive: bytes) -> bytes:
    """Renders in this process. Raises InvalidRequest for bytes that are no recording."""
    find_gaps = partial(gaps_of, slow_factor=job.slow_factor, slow_min_ns=job.slow_min_ns)
    recording = Recording.read(io.BytesIO(archive))
    if job.kind == "trace":
        return chrome_trace(recording, find_gaps(recording))
    if job.kind == "timeline":
        return timeline_json(recording, find_gaps, job.origin_ns, job.num_steps, job.since)
    try:
        return timeline_json(recording, find_gaps, recording.first_ns, MAX_VIEWED_STEPS)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        raise InvalidRequest("The file is damaged: its numbers contradict each other.", param="recording") from None


class RenderProcess:
    """Renders in a child, which is started when it is needed and ends when it has had nothing to do for a while."""

    def __init__(self) -> None:
        self._child = ChildProcess("roseinfer.observe.recorder.rendering", niceness=_NICER_BY)

    def render(self, job: Job, archive: bytes) -> bytes:
        """Renders a recording; blocks, so not on an event loop. Raises as `render` does, and NotReady after `close`."""
        try:
            answer = self._child.request(job, archive)
        except EOFError:  # it had just left, or died: once more with a new one
            answer = self._child.request(job, archive)
        if answer.refusal:
            raise InvalidRequest(answer.refusal, param="recording")
        return answer.payload

    def close(self) -> None:
        """Ends the child and the job under way, for which a server's exit would wait. Idempotent."""
        self._child.close()


if __name__ == "__main__":
    answer_requests(Job, render, IDLE_EXIT_S)
