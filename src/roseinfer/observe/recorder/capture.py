"""Watches the rules of `observe.capture_rules`, and saves what happened around a breach in a directory.

A breach takes a copy of what the flight recorder remembers, waits, takes another, and a thread writes both, with a
manifest. There is one capture at a time and a pause after each: what breaks a rule meanwhile is not counted. A rule is
a sentence such as `3 gaps over 60 ms in 10 s`; docs/capture.md has the grammar.
"""

import asyncio
import contextlib
import importlib.metadata
import logging
import platform
import re
import secrets
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from roseinfer.config.options import Config
from roseinfer.errors import ConfigError, RoseinferError
from roseinfer.messages import BeginProfile
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.hub import WriteObserver, Writes
from roseinfer.observe.recorder.recorder import FlightRecorder, Snapshot
from roseinfer.observe.recorder.recording import Recording, StructArray
from roseinfer.records import Advanced, Observer, RequestTimeline, StepRecord

# --- rules ------------------------------------------------------------------------------------------------------------


_OPTION = "observe.capture_rules"
MAX_COUNT = 100_000

_TOKEN = re.compile(r"\d+(?:\.\d+)?|[A-Za-z_0-9]+|\S")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_LONGEST = 1e6  # of either unit
_UNITS_NS = {"ms": 1e6, "s": 1e9}


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A number of events of one kind within a window."""

    text: str
    count: int
    subject: str  # `gap`, `ttft` or `slow gap`
    over_ns: int = 0  # longer than that; for slow gaps 0
    cause: Cause | None = None  # of slow gaps; None: any
    window_ns: int


class Window:
    """The events of one rule within its window, newest last."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._events: deque[tuple[int, str, str]] = deque(maxlen=rule.count)

    def add(self, now_ns: int, request_id: str, trace_id: str) -> dict[str, str] | None:
        """Adds an event; returns request id -> trace id of those that break the rule together, None if unbroken."""
        self._events.append((now_ns, request_id, trace_id))
        while self._events[0][0] < now_ns - self.rule.window_ns:
            self._events.popleft()
        if len(self._events) < self.rule.count:
            return None
        return {name: trace for _, name, trace in self._events}

    def clear(self) -> None:
        self._events.clear()


def parse_rules(texts: Sequence[str]) -> list[Rule]:
    """Parses rules. Raises ConfigError with the option, the rule's number and the place in it."""
    return [_Sentence(number, text).rule() for number, text in enumerate(texts, 1)]


class _Sentence:
    """Parses one rule, word by word."""

    def __init__(self, number: int, text: str) -> None:
        self._number = number
        self._text = text
        self._words = [(found.start(), found[0]) for found in _TOKEN.finditer(text)]
        self._next = 0

    def rule(self) -> Rule:
        count = self._count()
        subject, over_ns, cause = self._word("gap", "gaps", "ttft", "slow"), 0, None
        if subject == "slow":
            self._word("gap", "gaps")
            subject = "slow gap"
            if self._word("of", "in") == "of":
                cause = Cause(self._word(*Cause))
                self._word("in")
        else:
            self._word("over")
            over_ns = self._duration()
            self._word("in")
        window_ns = self._duration()
        if self._next < len(self._words):
            self._refuse("the end of the rule")
        return Rule(
            text=self._text.strip(),
            count=count,
            subject=subject.removesuffix("s"),
            over_ns=over_ns,
            cause=cause,
            window_ns=window_ns,
        )

    def _count(self) -> int:
        return int(
            self._next_word(
                lambda word: word.isdecimal() and 1 <= int(word) <= MAX_COUNT, f"a count from 1 to {MAX_COUNT}"
            )
        )

    def _duration(self) -> int:
        number = self._next_word(
            lambda word: bool(_NUMBER.fullmatch(word)) and 0 < float(word) <= _LONGEST,
            "a duration such as 60 ms, above 0",
        )
        return int(float(number) * _UNITS_NS[self._word(*_UNITS_NS)])

    def _word(self, *expected: str) -> str:
        return self._next_word(expected.__contains__, " or ".join(f"`{choice}`" for choice in expected))

    def _next_word(self, is_right: Callable[[str], bool], expected: str) -> str:
        word = self._peek()
        if not is_right(word):
            self._refuse(expected)
        self._next += 1
        return word

    def _peek(self) -> str:
        return self._words[self._next][1] if self._next < len(self._words) else ""

    def _refuse(self, expected: str) -> NoReturn:
        is_over = self._next >= len(self._words)
        place = len(self._text) if is_over else self._words[self._next][0]
        got = "nothing" if is_over else f"{self._words[self._next][1]!r}"
        raise ConfigError(
            f"rule {self._number} ({self._text!r}), character {place + 1}: expected {expected}, got {got}",
            param=_OPTION,
        )


# --- directories ------------------------------------------------------------------------------------------------------


MANIFEST_NAME = "manifest.json"
RECORDING_NAME = "recording.npz"
TRACE_NAME = "trace.json"
MIB = 1 << 20

_SECTIONS = ("model", "cache", "scheduler", "runner", "engine")  # nothing in them is a secret or leads to one
_PACKAGES = ("torch", "numpy", "triton")
_DRIVER = Path("/proc/driver/nvidia/version")
_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-(breach|profile)-[0-9a-f]{6}")  # so the order of names is that of time


def new_directory(parent: Path, kind: str) -> Path:
    """Returns a path that does not exist yet; `kind` is `breach` or `profile`."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    return parent.absolute() / f"{moment}-{kind}-{secrets.token_hex(3)}"


def profile_directory(capture_dir: str, max_mib: float) -> Path:
    """Returns where a profile asked for by hand goes: beside the captures or, without a place for them, in /tmp.

    Beside the captures it counts as one of them, so room is made for it first.
    """
    if capture_dir:
        with contextlib.suppress(OSError):  # no directory yet, or one that a breach is just deleting from
            make_room(Path(capture_dir), max_mib * MIB)
    return new_directory(Path(capture_dir or tempfile.gettempdir()), "profile")


def manifest_facts(config: Config, version: str) -> dict[str, Any]:
    """Returns what a manifest says of the server itself: model, configuration without secrets, versions."""
    installed = {distribution.name for distribution in map(_find, _PACKAGES) if distribution is not None}
    driver = _DRIVER.read_text(encoding="ascii", errors="replace").partition("\n")[0] if _DRIVER.is_file() else None
    return {
        "model_name": config.served_model_name,
        "config": {name: msgspec.to_builtins(getattr(config, name)) for name in _SECTIONS},
        "versions": {
            "roseinfer": version,
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: importlib.metadata.version(name) for name in sorted(installed)},
            "nvidia_driver": driver,
        },
    }


def _find(package: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_capture(directory: Path, recording: Recording, manifest: Mapping[str, Any]) -> None:
    """Writes a capture, its manifest last and whole: a directory that has one is complete. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    recording.save(directory / RECORDING_NAME)
    _write_manifest(directory, manifest)


def write_profile_manifest(server: Mapping[str, Any], directory: Path, num_steps: int) -> None:
    """Writes the manifest of a profile asked for by hand, with the keys of a breach's, once its trace is written.

    `server` is what `manifest_facts` says. Raises OSError.
    """
    manifest = {
        "rule": None,
        "breached_at": None,
        "breached_monotonic_ns": None,
        "requests": [],
        **server,
        "recording": None,
        "profile": profile_of(num_steps),
    }
    _write_manifest(directory, manifest)


def profile_of(num_steps: int) -> dict[str, Any]:
    """Returns what a manifest says of a profile that was written."""
    return {"num_steps": num_steps, "trace": TRACE_NAME}


def _write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    scratch = directory / f".{MANIFEST_NAME}.part"
    try:
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        scratch.replace(directory / MANIFEST_NAME)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def make_room(parent: Path, max_bytes: float) -> list[Path]:
    """Deletes the oldest captures until the rest fits, but never the newest; returns what went. Raises OSError."""
    captures = sorted(path for path in parent.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
    sizes = {path: _size(path) for path in captures}
    total, gone = sum(sizes.values()), []
    for path in captures[:-1]:
        if total <= max_bytes:
            break
        shutil.rmtree(path)
        total -= sizes[path]
        gone.append(path)
    return gone


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


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


# --- captures ---------------------------------------------------------------------------------------------------------


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
