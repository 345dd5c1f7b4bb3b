"""Answers `/debug/*`: steps, requests, recordings, traces and the timeline page's data."""

import io
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from roseinfer.config.tree import Config
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.deliveries import LiveInterruptions
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.recorder.inspection import Inspection
from roseinfer.observe.recorder.recorder import Capture, FlightRecorder
from roseinfer.observe.recorder.recording import ClockPair, StructArray, step_of
from roseinfer.observe.recorder.rendering import Job, Render, render
from roseinfer.observe.recorder.timeline_view import CONTEXT_STEPS, Cursor
from roseinfer.records import QueueReport
from roseinfer.runtime.gc_pauses import GcPauses


class Flight(FlightRecorder):
    """The recorder, and the answers of `/debug/*` from what it remembers."""

    def __init__(self, config: Config, version: str, render: Render = render) -> None:
        super().__init__(config, version)
        self.max_steps = config.observe.recorder_steps
        self.catch_up: Callable[[], None] = lambda: None  # delivers facts that wait, before each answer
        self.queue: Callable[[], QueueReport] = QueueReport  # reports the requests that wait; set by the wiring
        self._inspection = Inspection(self)
        self._origin_ns = time.monotonic_ns()
        self._render = render
        slow_min_ns = int(config.observe.slow_gap_min_ms * 1e6)
        self._job = partial(Job, slow_factor=config.observe.slow_gap_factor, slow_min_ns=slow_min_ns)

    def listen(self, gc_pauses: GcPauses, metrics: Metrics, interruptions: LiveInterruptions) -> None:
        """Records what interrupts the front end, and adds it to `interruptions`."""

        def note(cause: Cause, start_ns: int, end_ns: int) -> None:
            self.note_interruption(cause, start_ns, end_ns)
            interruptions.add(start_ns, end_ns, cause)

        gc_pauses.listeners.append(partial(note, Cause.GC))
        metrics.render_listeners.append(partial(note, Cause.SCRAPE))

    # --- answers ----------------------------------------------------------------------------------------------------

    def steps(self, limit: int) -> Callable[[], bytes]:
        self.catch_up()
        return partial(_steps_json, self._steps.newest(limit), self.clock_pair)

    def recording(self, since_ns: int = 0) -> Callable[[], bytes]:
        self.catch_up()
        return partial(_archive_of, self.capture_since(since_ns), is_compressed=True)

    def trace(self, limit: int) -> Callable[[], bytes]:
        self.catch_up()
        return self._rendering(self.capture(limit), self._job(kind="trace"))

    def timeline(self, limit: int, since_step: int, since_ns: int) -> Callable[[], bytes]:
        self.catch_up()
        last = self.last_step
        num_steps = min(limit, max(0, (last.step_id if last else 0) - since_step))
        since = Cursor(since_step, since_ns)
        job = self._job(kind="timeline", origin_ns=self._origin_ns, num_steps=num_steps, since=since)
        return self._rendering(self.capture(num_steps + CONTEXT_STEPS), job)

    def view(self, content: bytes) -> bytes:
        """Returns the page's data of a saved recording. Raises InvalidRequest for bytes that are none."""
        return self._render(self._job(kind="view"), content)

    def _rendering(self, capture: Capture, job: Job) -> Callable[[], bytes]:
        return lambda: self._render(job, _archive_of(capture, is_compressed=False))

    def requests(self) -> dict[str, Any]:
        self.catch_up()
        return self._inspection.list(self.queue())

    def request(self, request_id: str) -> dict[str, Any] | None:
        self.catch_up()
        return self._inspection.show(request_id, self.queue())


def _steps_json(rows: StructArray, clock: ClockPair) -> bytes:
    steps = [
        msgspec.structs.asdict(step)
        | {"kind": step.kind}
        | {"phases": msgspec.structs.asdict(step.phases), "ahead": msgspec.structs.asdict(step.ahead)}
        for step in map(step_of, rows)
    ]
    return msgspec.json.encode({"clock": clock, "steps": steps})


def _archive_of(capture: Capture, *, is_compressed: bool) -> bytes:
    file = io.BytesIO()
    capture.recording().write(file, is_compressed=is_compressed)
    return file.getvalue()
