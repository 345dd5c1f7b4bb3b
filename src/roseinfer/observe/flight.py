"""The recorder and its views as one object: what `/debug/*` is told. Knows no HTTP."""

import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from roseinfer.config import Config
from roseinfer.errors import InvalidRequest
from roseinfer.gc_pauses import GcPauses
from roseinfer.messages import EngineInfo
from roseinfer.observe.causes import gaps_of
from roseinfer.observe.chrome_trace import chrome_trace
from roseinfer.observe.deliveries import Interruptions
from roseinfer.observe.inspection import Inspection
from roseinfer.observe.metrics import Metrics
from roseinfer.observe.recorder import Capture, FlightRecorder
from roseinfer.observe.recording import Recording, step_of
from roseinfer.observe.timeline_view import CONTEXT_STEPS, Cursor, origin_of, timeline_json
from roseinfer.observe.waiting import QueueDrain
from roseinfer.records import Cause, Delivery, Observer, RequestTimeline, StepRecord

_SWITCH_S, _USUAL_SWITCH_S = 0.0005, 0.005
MAX_VIEWED_STEPS = 3000  # of a saved recording, its newest: with 64 requests that is 20 MB of gaps


class Flight(Observer):
    """The observer that remembers, and the answers that it gives."""

    def __init__(self, config: Config, version: str) -> None:
        self.recorder = FlightRecorder(config, version)
        self.max_steps = config.observe.recorder_steps
        self._drain = QueueDrain()
        self._inspection = Inspection(self.recorder, self._drain)
        self._origin_ns = time.monotonic_ns()
        slow_min_ns = int(config.observe.slow_gap_min_ms * 1e6)
        self._gaps_of = partial(gaps_of, slow_factor=config.observe.slow_gap_factor, slow_min_ns=slow_min_ns)

    def listen(self, gc_pauses: GcPauses, metrics: Metrics, interruptions: Interruptions) -> None:
        """Hear of what interrupts the front end, and let `interruptions` know too."""

        def note(cause: Cause, start_ns: int, end_ns: int) -> None:
            self.recorder.note_interruption(cause, start_ns, end_ns)
            interruptions.add(start_ns, end_ns, cause)

        gc_pauses.listeners.append(partial(note, Cause.GC))
        metrics.render_listeners.append(partial(note, Cause.SCRAPE))

    def set_engine_info(self, info: EngineInfo) -> None:
        self.recorder.engine_info = info

    # --- facts ------------------------------------------------------------------------------------------------------

    def on_start(self, timeline: RequestTimeline) -> None:
        self.recorder.on_start(timeline)

    def on_step(self, record: StepRecord, advanced: Sequence[RequestTimeline]) -> None:
        self.recorder.on_step(record, advanced)
        self._drain.note_step(record, advanced)

    def on_write(self, timeline: RequestTimeline, delivery: Delivery) -> None:
        self.recorder.on_write(timeline, delivery)

    def on_finish(self, timeline: RequestTimeline) -> None:
        self.recorder.on_finish(timeline)

    # --- answers ----------------------------------------------------------------------------------------------------

    def steps(self, limit: int) -> dict[str, Any]:
        steps = [step_of(row) for row in self.recorder.steps(limit)]
        rows = [msgspec.to_builtins(msgspec.structs.asdict(step) | {"kind": step.kind}) for step in steps]
        for row, step in zip(rows, steps, strict=True):
            row["phases"] = msgspec.structs.asdict(step.phases)
        return {"clock": msgspec.structs.asdict(self.recorder.clock_pair), "steps": rows}

    def recording(self) -> Callable[[], bytes]:
        return partial(_file_of, self.recorder.capture())

    def trace(self, limit: int) -> Callable[[], bytes]:
        capture = self.recorder.capture(limit)

        def render() -> bytes:
            with _yielding():
                recording = capture.recording()
                return chrome_trace(recording, self._gaps_of(recording))

        return render

    def timeline(self, limit: int, since_step: int, since_ns: int) -> Callable[[], bytes]:
        last = self.recorder.last_step
        num_new = max(0, (last.step_id if last else 0) - since_step)
        num_steps = min(limit, num_new)
        capture = self.recorder.capture(num_steps + CONTEXT_STEPS)
        since = Cursor(since_step, since_ns)

        def render() -> bytes:
            with _yielding():
                return timeline_json(capture.recording(), self._gaps_of, self._origin_ns, num_steps, since)

        return render

    def view(self, content: bytes) -> bytes:
        """The page's data of a saved recording. Raises InvalidRequest for bytes that are none."""
        with _yielding():
            recording = Recording.read(io.BytesIO(content))
            try:
                return timeline_json(recording, self._gaps_of, origin_of(recording), MAX_VIEWED_STEPS)
            except (ArithmeticError, LookupError, TypeError, ValueError):
                message = "The file is damaged: its numbers contradict each other."
                raise InvalidRequest(message, param="recording") from None

    def requests(self) -> dict[str, Any]:
        return self._inspection.list()

    def request(self, request_id: str) -> dict[str, Any] | None:
        return self._inspection.show(request_id)


@contextmanager
def _yielding() -> Iterator[None]:
    """Hands the interpreter over to the event loop ten times as fast, as long as a thread computes what to tell."""
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(_USUAL_SWITCH_S)


def _file_of(capture: Capture) -> bytes:
    file = io.BytesIO()
    capture.recording().write(file)
    return file.getvalue()
