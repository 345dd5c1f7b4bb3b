"""Builds a server's observers from its configuration and connects them."""

import contextlib
import gzip
import importlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from roseinfer.config.options import Config
from roseinfer.messages import EngineInfo
from roseinfer.observe import otel
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.hub import MAX_DELAY_S, MAX_STEPS, Hub
from roseinfer.observe.logs import Logs, StateLog
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.metrics.totals import Load
from roseinfer.observe.recorder.capture import BreachCapture
from roseinfer.observe.recorder.flight import Flight
from roseinfer.observe.telemetry.facts import Page
from roseinfer.records import Invariant, LifecycleState, Observer, RequestTimeline, Violation
from roseinfer.runtime.cpu_waits import LoopWaits
from roseinfer.runtime.gc_pauses import GcPauses
from roseinfer.runtime.host import read_host

_LARGE_PAGE = 16384  # bytes, from which on a page is compressed
_GZIP_LEVEL = 1  # makes 9 KB of 67 in a fifth of a millisecond, zlib's own 6 makes 8 KB in half a millisecond

_log = logging.getLogger(__name__)


class Integrity(Observer):
    """Counts checks of the invariants, and violations of each, with the last detail."""

    def __init__(self) -> None:
        self.num_checks = 0
        self.last_check_unix_s: float | None = None
        self._num_found = Counter[Invariant]()
        self._last: dict[Invariant, tuple[float, str]] = {}  # when, and the detail

    def on_rest(self, violations: Sequence[Violation]) -> None:
        self.num_checks += 1
        self.last_check_unix_s = time.time()
        for violation in violations:
            self._num_found[violation.invariant] += 1
            self._last[violation.invariant] = self.last_check_unix_s, violation.detail
            _log.error(
                "an invariant does not hold", extra={"invariant": violation.invariant, "detail": violation.detail}
            )

    def report(self) -> dict[str, Any]:
        """Returns every invariant, broken or not, as JSON values."""
        return {
            "num_checks": self.num_checks,
            "last_check_unix_s": self.last_check_unix_s,
            "is_sound": not self._num_found,
            "invariants": {
                invariant: {
                    "num_violations": self._num_found[invariant],
                    "last_violation_unix_s": self._last[invariant][0] if invariant in self._last else None,
                    "last_detail": self._last[invariant][1] if invariant in self._last else None,
                }
                for invariant in Invariant
            },
        }


def import_exporters(config: Config) -> None:
    """Imports what the observers of such a configuration import only where it asks for exports."""
    environment = otel.sdk_environment()
    modules: dict[otel.Signal, str] = {"traces": "tracing.tracing", "metrics": "metrics.otlp"}
    for signal, module in modules.items():
        if otel.exporter_names(signal, config.tracing.endpoint, environment):
            with contextlib.suppress(ValueError):  # of a limit, which `Observation` refuses
                importlib.import_module(f"roseinfer.observe.{module}")


class Observation:
    """All observers of a server: `hub` gets the facts, the others answer questions about them."""

    def __init__(
        self,
        config: Config,
        version: str,
        num_dropped_log_lines: Callable[[], int],
        take_gc_pauses_ns: Callable[[], Sequence[int]],
        spent_ns: Callable[[], int] | None = None,
        server_pid: int | None = None,
    ) -> None:
        """`spent_ns` reports what the front end spends on facts, and `server_pid` is its id, if it is another process.

        Raises ConfigError for a rule that makes no sense.
        """
        observe = config.observe
        self.flight = Flight(config, version)
        self.capture = BreachCapture(config, version, self.flight)
        self.metrics = Metrics(
            config.served_model_name,
            version,
            num_dropped_log_lines,
            take_gc_pauses_ns,
            has_vllm_names=observe.vllm_names,
        )
        self.metrics.read_host = read_host
        self.attribution = Attribution(slow_factor=observe.slow_gap_factor, slow_min_ms=observe.slow_gap_min_ms)
        self.attribution.on_slow_gap.append(self.capture.on_slow_gap)
        self.integrity = Integrity()
        self._tracing = []
        environment = otel.sdk_environment()
        otel.warn(environment)
        if exporters := otel.exporter_names("traces", config.tracing.endpoint, environment):
            otel.check_limits(environment)
            from roseinfer.observe.tracing.tracing import make_tracing  # imports the SDK

            made = make_tracing(config, version, self.metrics, self.attribution, exporters, environment, server_pid)
            self._tracing.append(made)
        self._metrics_exports = []
        if exporters := otel.exporter_names("metrics", None, environment):
            from roseinfer.observe.metrics.otlp import make_metrics_export  # imports the SDK

            name = config.served_model_name
            self._metrics_exports.append(
                make_metrics_export(self.metrics, name, version, exporters, environment, server_pid)
            )
        summaries = Logs(observe.log_summary_interval_s)
        # The recorder is first: a gap that the others find to be too slow is then in what they freeze.
        observers = [self.flight, self.attribution, self.metrics, *self.capture.observers, summaries, *self._tracing]
        states = [StateLog()] if spent_ns is None else []  # else the front end logs them, as they come
        # Facts of another process come in batches.
        hub = Hub([*states, *observers, self.integrity], MAX_DELAY_S, MAX_STEPS if spent_ns is None else sys.maxsize)
        self.hub = hub
        self.flight.catch_up = self.hub.catch_up
        self.metrics.watch(self.attribution, spent_ns or (lambda: self.hub.spent_ns), is_front_end=spent_ns is None)

    def listen(self, gc_pauses: GcPauses, loop_waits: LoopWaits) -> None:
        """Hears what interrupts this process, which is the front end; rendering the metrics is one of the things."""
        self.flight.listen(gc_pauses, loop_waits, self.metrics, self.attribution.interruptions)
        self.hub.on_write_returned, self.hub.on_step_read = loop_waits.glance, loop_waits.note_message

    def note_interruption(self, cause: Cause, start_ns: int, end_ns: int) -> None:
        """Notes what interrupted the front end, which is another process."""
        self.flight.note_interruption(cause, start_ns, end_ns)
        self.attribution.interruptions.add(start_ns, end_ns, cause)

    def set_engine_info(self, info: EngineInfo, entered_ns: Mapping[LifecycleState, int] | None = None) -> None:
        """Takes what the engine turned out to be; `entered_ns` has the states of its start, if it is ready just now."""
        self.metrics.set_engine_info(info)
        self.flight.engine_info = info
        self.attribution.set_graphs(has_graphs=bool(info.decode_graph_sizes))
        if entered_ns is not None:
            for observer in self._tracing:
                observer.note_startup(info, entered_ns)

    async def page(self, accept: str, *, is_load: bool, takes_gzip: bool) -> Page:
        """See `render_page`."""
        return self.render_page(accept, is_load=is_load, takes_gzip=takes_gzip)

    def render_page(self, accept: str, *, is_load: bool, takes_gzip: bool, load: Load | None = None) -> Page:
        """Returns a page of metrics of this moment: `/metrics`, or `/metrics/load`, of which `load` may say more."""
        self.hub.catch_up()
        content, content_type = self.metrics.render_load(accept, load) if is_load else self.metrics.render(accept)
        is_compressed = takes_gzip and len(content) >= _LARGE_PAGE
        return Page(gzip.compress(content, _GZIP_LEVEL) if is_compressed else content, content_type, is_compressed)

    async def ledgers(self, timelines: Sequence[RequestTimeline], until_ns: int) -> list[dict[str, object]]:
        """See Attribution.ledger."""
        self.hub.catch_up()
        return [self.attribution.ledger(timeline, until_ns) for timeline in timelines]

    def causes(self, timelines: Iterable[RequestTimeline | None]) -> list[dict[Cause, int]]:
        """See Attribution.decode_ns; of a request that is not known, nothing."""
        self.hub.catch_up()
        return [{} if timeline is None else self.attribution.decode_ns(timeline) for timeline in timelines]

    def close(self) -> None:
        """Delivers what waits to the observers, and spans and metrics as far as the flush timeout allows."""
        self.hub.catch_up()
        closes = [each.close for each in self._tracing] + [each.close for each in self._metrics_exports]
        closing = [threading.Thread(target=close) for close in closes]
        for thread in closing:  # at once: each may take as long as the exit may wait
            thread.start()
        for thread in closing:
            thread.join()
