"""Watches the rules of `observe.capture_rules`, and saves what happened around a breach in a directory.

A breach takes a copy of what the flight recorder remembers, waits, takes another, and a thread writes both, with a
manifest. There is one capture at a time and a pause after each: what breaks a rule meanwhile is not counted.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from roseinfer.config.options import Config
from roseinfer.errors import ConfigError, RoseinferError
from roseinfer.messages import BeginProfile
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.hub import WriteObserver, Writes
from roseinfer.observe.recorder.capture_files import (
    MIB,
    RECORDING_NAME,
    make_room,
    manifest_facts,
    new_directory,
    profile_of,
    write_capture,
)
from roseinfer.observe.recorder.capture_rules import Rule, Window, parse_rules
from roseinfer.observe.recorder.recorder import FlightRecorder, Snapshot
from roseinfer.observe.recorder.recording import Recording, StructArray
from roseinfer.records import Advanced, Observer, RequestTimeline, StepRecord

AFTER_S = 2.0  # of what follows a breach are captured
COOLDOWN_S = 60.0  # from a breach to the next one that is captured
PROFILE_TIMEOUT_S = 30.0  # for the steps that are to be profiled to come, and for their trace to be written

_log = logging.getLogger(__name__)


class Breach(msgspec.Struct, frozen=True):
    """A rule was broken."""

    rule: Rule
    now_ns: int
    requests: dict[str, str]  # id -> trace id, empty without one


class BreachCapture(WriteObserver):
    """The observer that watches the rules. `on_slow_gap` must be called with each slow gap."""

    def __init__(
        self,
        config: Config,
        version: str,
        recorder: FlightRecorder,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        cooldown_s: float = COOLDOWN_S,
    ) -> None:
        """Raises ConfigError for a rule that makes no sense, or rules without a place for captures."""
        settings = self._settings = config.observe
        self.profile: BeginProfile | None = None  # once there is an engine
        self._parent = Path(settings.capture_dir)
        rules = parse_rules(settings.capture_rules)
        if rules and not settings.capture_dir:
            raise ConfigError(
                "Captures need a place: name a directory with observe.capture_dir.", param="observe.capture_rules"
            )
        self._windows = [Window(rule) for rule in rules]
        self._least_ns = {
            subject: min((rule.over_ns for rule in rules if rule.subject == subject), default=1 << 62)
            for subject in ("gap", "ttft")
        }
        self._recorder = recorder
        self.facts = manifest_facts(config, version)  # of the server, as manifests have them
        self._clock = clock
        self._sleep = sleep
        self._cooldown_ns = int(cooldown_s * 1e9)
        self._rests_until_ns = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def observers(self) -> list[Observer]:
        """Itself when there are rules; else it needs no facts."""
        return [self] if self._windows else []

    # --- facts ------------------------------------------------------------------------------------------------------

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        """Measures gaps and first tokens of requests that are not streamed."""
        for timeline, previous_ns in zip(advanced, advanced.previous_ns, strict=True):
            if not timeline.is_streamed:
                self._measure(timeline, previous_ns, record.tokens_ns)

    def on_writes(self, writes: Writes) -> None:
        """Measures those of streams."""
        columns = writes.columns()
        stamps = zip(columns["start_ns"].tolist(), columns["written_ns"].tolist(), strict=True)
        for timeline, (previous_ns, written_ns) in zip(writes.timelines, stamps, strict=True):
            if timeline.is_streamed:
                self._measure(timeline, previous_ns, written_ns)

    def on_slow_gap(self, gap: Gap, timeline: RequestTimeline) -> None:
        """Counts a gap that attribution found to be slow."""
        for window in self._windows:
            if window.rule.subject == "slow gap" and window.rule.cause in {None, gap.cause}:
                self._count(window, timeline)

    def _measure(self, timeline: RequestTimeline, previous_ns: int, now_ns: int) -> None:
        """Counts a duration that ended now: a gap or, for the first token of a request, its TTFT."""
        subject, start_ns = ("gap", previous_ns) if previous_ns else ("ttft", timeline.recv_ns)
        duration_ns = now_ns - start_ns
        if duration_ns <= self._least_ns[subject]:
            return
        for window in self._windows:
            if window.rule.subject == subject and duration_ns > window.rule.over_ns:
                self._count(window, timeline)

    def _count(self, window: Window, timeline: RequestTimeline) -> None:
        now_ns = self._clock()
        if self._task is not None or now_ns < self._rests_until_ns:
            return
        broken_by = window.add(now_ns, timeline.request_id, timeline.trace_id)
        if broken_by is not None:
            self._begin(Breach(window.rule, now_ns, broken_by))

    # --- captures ---------------------------------------------------------------------------------------------------

    def _begin(self, breach: Breach) -> None:
        self._rests_until_ns = breach.now_ns + self._cooldown_ns
        for window in self._windows:
            window.clear()
        before = self._recorder.snapshot(trigger=breach.rule.text)
        work = self._capture(breach, datetime.now(UTC), before)
        self._task = asyncio.get_running_loop().create_task(work, name="capture")

    async def _capture(self, breach: Breach, moment: datetime, before: Snapshot) -> None:
        directory = new_directory(self._parent, "breach")
        try:
            traced = asyncio.ensure_future(self._trace(directory))
            await self._sleep(AFTER_S)
            after = self._recorder.snapshot(trigger=breach.rule.text)
            manifest = {
                "rule": breach.rule.text,
                "breached_at": moment.isoformat(),
                "breached_monotonic_ns": breach.now_ns,
                "requests": [{"request_id": name, "trace_id": trace} for name, trace in breach.requests.items()],
                **self.facts,
                "recording": RECORDING_NAME,
                "profile": await traced,
            }
            await asyncio.to_thread(self._write, directory, before, after, manifest)
            _log.warning("captured a breach", extra={"rule": breach.rule.text, "directory": str(directory)})
        except OSError as error:
            _log.error("a capture could not be written: %s", error, extra={"rule": breach.rule.text})
        finally:
            self._task = None

    async def _trace(self, directory: Path) -> dict[str, Any] | None:
        """Has the next steps profiled, if that is configured, and returns what became of it."""
        num_steps = self._settings.capture_profile_steps
        if not num_steps or self.profile is None:
            return None
        try:
            async with asyncio.timeout(PROFILE_TIMEOUT_S):
                ended = await (await self.profile(num_steps, str(directory)))
        except RoseinferError as error:
            return {"error": error.message}
        except TimeoutError:
            return {"error": f"fewer steps came within {PROFILE_TIMEOUT_S:g} s; the trace may come later"}
        if ended.error:
            return {"error": ended.error}
        return profile_of(ended.num_steps)

    def _write(self, directory: Path, before: Snapshot, after: Snapshot, manifest: dict[str, Any]) -> None:
        """Writes the capture; called in a thread."""
        recording = join_recordings(before.recording(), after.recording())
        write_capture(directory, recording, manifest)
        for gone in make_room(self._parent, self._settings.capture_max_mib * MIB):
            _log.info("an old capture was deleted to stay below observe.capture_max_mib: %s", gone.name)


def join_recordings(before: Recording, after: Recording) -> Recording:
    """Returns all that either of two recordings of one server knows; where both do, the later one counts."""
    requests = {request.serial: request for request in (*before.requests, *after.requests)}
    return Recording(
        meta=after.meta,
        requests=[requests[serial] for serial in sorted(requests)],
        steps=_join_rows(before.steps, after.steps, "step_id"),
        writes=_join_rows(before.writes, after.writes, "written_ns"),
        interruptions=_join_rows(before.interruptions, after.interruptions, "start_ns"),
    )


def _join_rows(before: StructArray, after: StructArray, field: str) -> StructArray:
    """Joins rows in the order of a field that grows with them."""
    if not len(after):
        return before
    return np.concatenate((before[before[field] < after[field][0]], after))
