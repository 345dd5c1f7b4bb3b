"""Facts in, a Prometheus page out; knows nothing of HTTP, and which metrics there are is the catalogue's matter.

Facts come on the event loop, a page may be rendered in any thread. One lock covers each fact and the copy that a scrape
takes, so a page shows one moment: every histogram's count is its +Inf bucket, and the series agree with each other. It
is held for some microseconds; formatting, which takes milliseconds, happens on the copy, outside of it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from roseinfer.messages import EngineInfo
from roseinfer.observe.catalogue import CATALOGUE, GROUPS
from roseinfer.observe.exposition import Values, family
from roseinfer.observe.histogram import Histogram
from roseinfer.observe.measures import NS_PER_S
from roseinfer.observe.series import AtFinish, AtScrape, AtStep, InfoAtScrape, Row, ServerState
from roseinfer.records import LifecycleState, RequestTimeline, StepRecord

_DOCS_HEAD = """# Metrics

Generated from `src/roseinfer/observe/catalogue.py` by `make docs`; edit that file, not this one.

`/metrics` answers in the Prometheus text format, or in OpenMetrics when the Accept header asks for it. Every series
with a closed set of label values exists at 0 before the first request.

## Time

All stamps are `time.monotonic_ns()`, on Linux one clock for every process of a host. A request passes them in this
order: `t_recv` request head parsed, `t_parsed` body read and validated, `t_tokenized` prompt tokenized, `t_inbox` taken
from its inbox by the engine loop, `t_sched` first time in a batch, `t_tok[0]` first token known on the host, …
`t_tok[n-1]`; `t_write[i]` a socket write that carried tokens returned; `t_end` the end.

receive + tokenize + submit lag + queue wait + prefill + first write = time to first token, exactly; first write is
t_tok[0] → t_write[0]. A request has only the parts of which it reached both ends. Nothing is clamped: a negative
interval is a mistake in a stamp, is not observed, and counts in
`roseinfer_telemetry_dropped_total{signal="interval"}`.
"""

_DOCS_TAIL = """
## What always holds

Each is a test, and each holds on every single page, since a page shows one moment:

- `roseinfer_inter_token_latency_seconds_count` = `roseinfer_generation_tokens_total` − requests that have a token
- sum over reasons of `roseinfer_requests_total` + `roseinfer_http_inflight_streams` =
  `roseinfer_requests_received_total`
- `roseinfer_request_duration_seconds_count` = sum over reasons of `roseinfer_requests_total`
- `roseinfer_time_to_first_token_seconds_count` ≤ requests that have a token
- a histogram's `_count` is its `+Inf` bucket; counters and buckets never fall; nothing observed is negative
- used + cached + free = total KV blocks; exactly one lifecycle state is 1
- with nothing in flight, running and waiting are 0, and the sum of `roseinfer_request_output_tokens` is
  `roseinfer_generation_tokens_total`

## Under other names

| elsewhere | here |
|---|---|
| Gateway API inference extension: TotalQueuedRequests | `roseinfer_num_requests_waiting` |
| Gateway API inference extension: TotalRunningRequests | `roseinfer_num_requests_running` |
| Gateway API inference extension: KVCacheUtilization | `roseinfer_kv_cache_usage_ratio` |
| OpenTelemetry `gen_ai.server.request.duration` | `roseinfer_request_duration_seconds` |
| OpenTelemetry `gen_ai.server.time_to_first_token` | `roseinfer_time_to_first_token_seconds` |
| OpenTelemetry `gen_ai.server.time_per_output_token` | `roseinfer_time_per_output_token_seconds` |
"""


class Metrics(Collector):
    """The observer that counts, and the collector that tells. Every series exists at 0 before the first request."""

    def __init__(
        self,
        model_name: str,
        version: str,
        registry: CollectorRegistry,
        num_dropped_log_lines: Callable[[], int] = lambda: 0,
    ) -> None:
        self._model_name = model_name
        self._registry = registry
        self._num_dropped_log_lines = num_dropped_log_lines
        self._lock = threading.Lock()
        self._state = ServerState(version=version)
        # A counter is a histogram without bounds: it takes the same values, and nothing negative.
        self._cells = {
            row.name: {child: Histogram(row.buckets) for child in (row.label.values if row.label else ("",))}
            for row in CATALOGUE
            if not isinstance(row.source, AtScrape | InfoAtScrape)
        }
        self._at_step = [(row.source, self._cells[row.name]) for row in CATALOGUE if isinstance(row.source, AtStep)]
        self._at_finish = [(row.source, self._cells[row.name]) for row in CATALOGUE if isinstance(row.source, AtFinish)]
        registry.register(self)

    def set_engine_info(self, info: EngineInfo) -> None:
        """The engine is ready: what it turned out to be."""
        with self._lock:
            self._state.engine = info

    def on_lifecycle(self, state: LifecycleState) -> None:
        with self._lock:
            self._state.lifecycle = state
            if state is LifecycleState.FAILED:
                self._state.last_step = None  # a dead engine runs nothing, whatever its last step said

    def on_start(self, timeline: RequestTimeline) -> None:  # noqa: ARG002 - that it came is all that is told
        with self._lock:
            self._state.num_received += 1

    def on_step(self, record: StepRecord, advanced: Sequence[RequestTimeline]) -> None:
        with self._lock:
            self._state.last_step = record
            self._state.last_step_end_ns = record.end_ns
            for source, cells in self._at_step:
                if values := source.values(record, advanced):
                    self._state.num_refused_intervals += cells[source.label(record)].add(values)

    def on_finish(self, timeline: RequestTimeline) -> None:
        with self._lock:
            self._state.num_finished += 1
            for source, cells in self._at_finish:
                if values := source.values(timeline):
                    self._state.num_refused_intervals += cells[source.label(timeline)].add(values)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page in the format that the Accept header asks for, OpenMetrics or Prometheus text, and its content type.

        May be called in any thread; two at once are allowed, if wasteful.
        """
        start_ns = time.monotonic_ns()
        encode, content_type = choose_encoder(accept)
        page = encode(self._registry)
        with self._lock:
            self._cells["roseinfer_scrape_duration_seconds"][""].add([(time.monotonic_ns() - start_ns) / NS_PER_S])
        return page, content_type

    def collect(self) -> Iterator[Metric]:
        """One family after the other, all of one moment."""
        for row, values in self._snapshot():
            yield family(row, values, self._model_name)
            # Offers the interpreter to the event loop. Under endless scrapes another thread woke 5 ms late at p99 with
            # this line and 11 ms without; one scrape takes about 10 ms.
            time.sleep(0)

    def _snapshot(self) -> list[tuple[Row, Values]]:
        with self._lock:
            state = self._state
            state.num_dropped_log_lines = self._num_dropped_log_lines()
            if state.last_step_end_ns:
                age_s = (time.monotonic_ns() - state.last_step_end_ns) / NS_PER_S
                state.last_step_unix_s = time.time() - age_s
            return [(row, self._values(row)) for row in CATALOGUE]

    def _values(self, row: Row) -> Values:
        match row.source:
            case AtScrape(values=values):
                return dict(values(self._state))
            case InfoAtScrape(labels=labels):
                return labels(self._state)
        cells = self._cells[row.name]
        if row.kind == "counter":
            return {child: cell.total for child, cell in cells.items()}
        return {child: cell.copy() for child, cell in cells.items()}


def render_docs() -> str:
    """docs/metrics.md: the catalogue for people. A test fails when the committed file differs."""
    ladders = list(dict.fromkeys(row.buckets for row in CATALOGUE if row.buckets))
    parts = [_DOCS_HEAD]
    for title, rows in GROUPS.items():
        parts.append(f"## {title}\n\n| metric | kind | unit | labels | meaning |\n|---|---|---|---|---|")
        parts.extend(_docs_line(row, ladders) for row in rows)
        parts.append("")
    parts.append("## Buckets\n\nUpper bounds, inclusive; an unbounded bucket follows each ladder.\n")
    parts.extend(f"- **B{i}**: {', '.join(f'{bound:g}' for bound in ladder)}" for i, ladder in enumerate(ladders, 1))
    parts.append(_DOCS_TAIL)
    return "\n".join(parts)


def _docs_line(row: Row, ladders: list[tuple[float, ...]]) -> str:
    labels = ["`model_name`"] if row.is_per_model else []
    if row.label:
        values = ", ".join(f"`{value}`" for value in row.label.values)
        labels.append(f"`{row.label.name}`" + (f" = {values}" if values else ""))
    kind = f"{row.kind}, B{ladders.index(row.buckets) + 1}" if row.buckets else row.kind
    return f"| `{row.name}` | {kind} | {row.unit or '1'} | {'; '.join(labels)} | {row.help} |"
