"""Facts into breaches of rules, and a breach into a directory that says what happened before and after it.

A breach takes a copy of what the flight recorder remembers, waits, takes another, and has both written by a thread,
with a manifest. There is one capture at a time and a rest after each: what happens meanwhile is not counted.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec

from roseinfer.config.tree import Config
from roseinfer.errors import ConfigError, RoseinferError
from roseinfer.messages import ProfileEnded
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.gaps.writes import WriteObserver, Writes
from roseinfer.observe.recorder import capture_files
from roseinfer.observe.recorder.capture_rules import Rule, Window, parse_rules
from roseinfer.observe.recorder.recording import Recording
from roseinfer.records import Advanced, Observer, RequestTimeline, StepRecord

PROFILE_TIMEOUT_S = 30.0  # for the steps that are to be profiled to come, and for their trace to be written

_log = logging.getLogger(__name__)


class Snapshot(Protocol):
    """A copy of what was remembered."""

    def recording(self) -> Recording:
        """It takes milliseconds, in any thread."""


class Recorder(Protocol):
    """Whoever remembers: `observe/recorder/recorder.py`."""

    def capture(self, num_steps: int | None = None, trigger: str = "") -> Snapshot: ...


Profile = Callable[[int, str], Awaitable[ProfileEnded]]
"""Have so many steps profiled into a directory; raises RoseinferError when that cannot be now."""


class Breach(msgspec.Struct, frozen=True):
    """A rule was broken."""

    rule: Rule
    now_ns: int
    requests: dict[str, str]  # id -> trace id, empty without one


class BreachCapture(WriteObserver):
    """The observer that watches the rules. Attach `on_slow_gap` to whoever finds slow gaps."""

    def __init__(
        self,
        config: Config,
        version: str,
        recorder: Recorder,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Raises ConfigError for a rule that makes no sense, or rules without a place for captures."""
        settings = self._settings = config.observe
        self.profile: Profile | None = None  # once there is an engine
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
        self.facts = capture_files.facts(config, version)  # of the server, as manifests have them
        self._clock = clock
        self._sleep = sleep
        self._rests_until_ns = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def observers(self) -> list[Observer]:
        """Itself when there are rules; else nobody need tell it of each write."""
        return [self] if self._windows else []

    # --- facts ------------------------------------------------------------------------------------------------------

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        """Gaps and first tokens of requests that are not streamed."""
        for timeline, previous_ns in zip(advanced, advanced.previous_ns, strict=True):
            if not timeline.is_streamed:
                self._measure(timeline, previous_ns, record.tokens_ns)

    def on_writes(self, writes: Writes) -> None:
        """Those of streams."""
        for timeline, delivery in zip(writes.timelines, writes.deliveries, strict=True):
            if timeline.is_streamed:
                previous_ns = timeline.write_ns[delivery.index - 1] if delivery.index else 0
                self._measure(timeline, previous_ns, delivery.written_ns)

    def on_slow_gap(self, gap: Gap, timeline: RequestTimeline) -> None:
        """See Attribution."""
        for window in self._windows:
            if window.rule.subject == "slow gap" and window.rule.cause in {None, gap.cause}:
                self._count(window, timeline)

    def _measure(self, timeline: RequestTimeline, previous_ns: int, now_ns: int) -> None:
        """What came now ends a gap, or is the first of its request."""
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
        self._rests_until_ns = breach.now_ns + int(self._settings.capture_cooldown_s * 1e9)
        for window in self._windows:
            window.clear()
        before = self._recorder.capture(trigger=breach.rule.text)
        work = self._capture(breach, datetime.now(UTC), before)
        self._task = asyncio.get_running_loop().create_task(work, name="capture")

    async def _capture(self, breach: Breach, moment: datetime, before: Snapshot) -> None:
        directory = capture_files.new_directory(self._parent, "breach")
        try:
            traced = asyncio.ensure_future(self._trace(directory))
            await self._sleep(self._settings.capture_after_s)
            after = self._recorder.capture(trigger=breach.rule.text)
            manifest = {
                "rule": breach.rule.text,
                "breached_at": moment.isoformat(),
                "breached_monotonic_ns": breach.now_ns,
                "requests": [{"request_id": name, "trace_id": trace} for name, trace in breach.requests.items()],
                **self.facts,
                "recording": capture_files.RECORDING_NAME,
                "profile": await traced,
            }
            await asyncio.to_thread(self._write, directory, before, after, manifest)
            _log.warning("captured a breach", extra={"rule": breach.rule.text, "directory": str(directory)})
        except OSError as error:
            _log.error("a capture could not be written: %s", error, extra={"rule": breach.rule.text})
        finally:
            self._task = None

    async def _trace(self, directory: Path) -> dict[str, Any] | None:
        """Have the next steps profiled, if that is wanted, and say what became of it."""
        num_steps = self._settings.capture_profile_steps
        if not num_steps or self.profile is None:
            return None
        try:
            async with asyncio.timeout(PROFILE_TIMEOUT_S):
                ended = await self.profile(num_steps, str(directory))
        except RoseinferError as error:
            return {"error": error.message}
        except TimeoutError:
            return {"error": f"not so many steps came within {PROFILE_TIMEOUT_S:g} s; the trace may come later"}
        if ended.error:
            return {"error": ended.error}
        return capture_files.profile_of(ended.num_steps)

    def _write(self, directory: Path, before: Snapshot, after: Snapshot, manifest: dict[str, Any]) -> None:
        """In a thread."""
        recording = capture_files.joined(before.recording(), after.recording())
        capture_files.write(directory, recording, manifest)
        for gone in capture_files.make_room(self._parent, self._settings.capture_max_mib * capture_files.MIB):
            _log.info("an old capture was deleted to stay below observe.capture_max_mib: %s", gone.name)
