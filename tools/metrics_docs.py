"""Turns the catalogue of metrics into docs/metrics.md. Knows no metric by name but those its prose explains."""

from roseinfer.observe.metrics.catalogue import CATALOGUE, GROUPS, InfoAtScrape, Row
from roseinfer.observe.metrics.exemplars import WITH_EXEMPLARS

HEAD = """\
# Metrics

Generated from `src/roseinfer/observe/metrics/catalogue.py` by `make docs`; edit that file, not this one.

`/metrics` answers in the Prometheus text format, or in OpenMetrics when the Accept header asks for it. Every series
with a closed set of label values exists at 0 before the first request. In OpenMetrics, and where
[tracing](tracing.md) is on, a bucket of a histogram marked *exemplars* shows the newest of its values whose trace was
kept, with `trace_id` and `step_id`.

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

TAIL = """
## What always holds

Each is a test, and each holds on every single page, since a page shows one moment:

- `roseinfer_inter_token_latency_seconds_count` = `roseinfer_generation_tokens_total` − requests that have a token
- sum over reasons of `roseinfer_requests_total` + `roseinfer_http_inflight_streams` =
  `roseinfer_requests_received_total`
- sum over codes of `roseinfer_requests_rejected_total` ≥ `roseinfer_requests_total{finish_reason="rejected"}`: what
  asked for no tokens counts in the first alone
- `roseinfer_request_duration_seconds_count` = sum over reasons of `roseinfer_requests_total`
- sum over `streamed` of `roseinfer_time_to_first_token_seconds_count` ≤ requests that have a token
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
| Gateway API inference extension: CacheInfo (BlockSize, NumGPUBlocks) | `roseinfer_cache_config_info` |
| OpenTelemetry `gen_ai.server.request.duration` | `roseinfer_request_duration_seconds` |
| OpenTelemetry `gen_ai.server.time_to_first_token` | `roseinfer_time_to_first_token_seconds` |
| OpenTelemetry `gen_ai.server.time_per_output_token` | `roseinfer_time_per_output_token_seconds` |
"""


def page() -> str:
    ladders = list(dict.fromkeys(row.buckets for row in CATALOGUE if row.buckets))
    parts = [HEAD]
    for title, rows in GROUPS.items():
        parts.append(f"## {title}\n\n| metric | kind | unit | labels | meaning |\n|---|---|---|---|---|")
        parts.extend(_line(row, ladders) for row in rows)
        parts.append("")
    parts.append("## Buckets\n\nUpper bounds, inclusive; an unbounded bucket follows each ladder.\n")
    parts.extend(f"- **B{i}**: {', '.join(f'{bound:g}' for bound in ladder)}" for i, ladder in enumerate(ladders, 1))
    parts.append(TAIL)
    return "\n".join(parts)


def _line(row: Row, ladders: list[tuple[float, ...]]) -> str:
    labels = ["`model_name`"] if row.is_per_model else []
    if row.label:
        values = ", ".join(f"`{value}`" for value in row.label.values)
        labels.append(f"`{row.label.name}`" + (f" = {values}" if values else ""))
    if isinstance(row.source, InfoAtScrape):
        labels.extend(f"`{name}`" for name in row.source.names)
    kind = f"{row.kind}, B{ladders.index(row.buckets) + 1}" if row.buckets else row.kind
    kind += ", exemplars" if row.name in WITH_EXEMPLARS else ""
    return f"| `{row.name}` | {kind} | {row.unit or '1'} | {'; '.join(labels)} | {row.help} |"
