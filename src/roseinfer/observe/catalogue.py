"""Every metric that roseinfer exposes, as one table; knows nothing of registries, formats or threads.

A row says what a series means and which function of a fact gives its values. The collector, docs/metrics.md and the
dashboards are made from these rows, so a new metric is a new row and nothing else. Names are those of the field, in
base units; each HELP text states the two events of an interval and what is counted once.
"""

import platform
from collections.abc import Callable

from roseinfer.observe import intervals, measures
from roseinfer.observe.series import AtFinish, AtScrape, AtStep, InfoAtScrape, Label, OfScrapes, Row
from roseinfer.records import FinishReason, LifecycleState, RequestTimeline

# Upper bounds. Each agreed threshold of a service level is a bound, so its share of good events is exact.
HOST_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
WAIT_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.32, 0.5, 0.64),
    *(1.0, 1.28, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0),
)
TOKEN_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
)
REQUEST_S = (*(round(0.01 * 2**i, 2) for i in range(14)), 120.0, 240.0, 480.0, 960.0)
TOKENS = tuple(float(4**i) for i in range(10))
SEQUENCES = tuple(float(2**i) for i in range(10))


def _latency(
    name: str, buckets: tuple[float, ...], interval_ns: Callable[[RequestTimeline], float | None], meaning: str
) -> Row:
    """A histogram of one interval of each request that reached both of its ends."""
    source = AtFinish(measures.seconds(interval_ns))
    return Row(name=name, kind="histogram", unit="seconds", buckets=buckets, help=meaning, source=source)


_LATENCIES = (
    _latency(
        "roseinfer_receive_seconds",
        HOST_S,
        intervals.receive_ns,
        "Request head parsed (t_recv) → body read and validated (t_parsed). Once per request that was valid.",
    ),
    _latency(
        "roseinfer_tokenize_seconds",
        HOST_S,
        intervals.tokenize_ns,
        "Body validated (t_parsed) → prompt tokenized (t_tokenized). Once per tokenized request.",
    ),
    _latency(
        "roseinfer_submit_lag_seconds",
        HOST_S,
        intervals.submit_lag_ns,
        "Prompt tokenized (t_tokenized) → the engine loop takes the request from its inbox (t_inbox): the hand-off "
        "from event loop to engine. Once per request that reached the engine.",
    ),
    Row(
        name="roseinfer_client_submit_lag_seconds",
        kind="histogram",
        unit="seconds",
        buckets=WAIT_S,
        help="When the client meant to send the request (header x-roseinfer-intended-time) → its head arrived: how "
        "late the load generator was, network included. Once per request with the header; not observed when "
        "negative, which means that the two hosts' clocks differ.",
        source=AtFinish(measures.client_lag_s),
    ),
    _latency(
        "roseinfer_queue_wait_seconds",
        WAIT_S,
        intervals.queue_wait_ns,
        "The engine loop takes the request from its inbox (t_inbox) → first time in a batch (t_sched). Once per "
        "request that was scheduled; waits after a preemption are not in it.",
    ),
    _latency(
        "roseinfer_prefill_seconds",
        WAIT_S,
        intervals.prefill_ns,
        "First time in a batch (t_sched) → first token known on the host (t_tok[0]). Once per request with a token.",
    ),
    _latency(
        "roseinfer_time_to_first_token_seconds",
        WAIT_S,
        intervals.time_to_first_token_ns,
        "Request head parsed (t_recv) → the socket write that carried the first token returned (t_write[0]); for a "
        "response that is not streamed that is its only write. Equal to receive + tokenize + submit lag + queue wait "
        "+ prefill + first write. Once per request that wrote a token.",
    ),
    _latency(
        "roseinfer_engine_time_to_first_token_seconds",
        WAIT_S,
        intervals.engine_time_to_first_token_ns,
        "Prompt tokenized (t_tokenized) → first token known on the host (t_tok[0]): time to first token without HTTP "
        "and text. Once per request that got a token.",
    ),
    Row(
        name="roseinfer_inter_token_latency_seconds",
        kind="histogram",
        unit="seconds",
        buckets=TOKEN_S,
        help="Token known on the host (t_tok[i-1]) → next token of the request known (t_tok[i]). Once per token but "
        "the first of each request, observed as tokens come; a preemption while decoding is in it.",
        source=AtStep(measures.newest_token_gaps_s),
    ),
    Row(
        name="roseinfer_stream_gap_seconds",
        kind="histogram",
        unit="seconds",
        buckets=TOKEN_S,
        help="Socket write with tokens returned (t_write[i-1]) → next one of the request returned (t_write[i]): what "
        "the client sees. Once per write but the first, when the request ends.",
        source=AtFinish(measures.stream_gaps_s),
    ),
    _latency(
        "roseinfer_time_per_output_token_seconds",
        TOKEN_S,
        intervals.time_per_output_token_ns,
        "First token (t_tok[0]) → last token (t_tok[n-1]), divided by n-1. Once per request with n >= 2 tokens.",
    ),
    _latency(
        "roseinfer_request_duration_seconds",
        REQUEST_S,
        intervals.request_duration_ns,
        "Request head parsed (t_recv) → the request ended (t_end). Once per request, whatever its finish reason.",
    ),
)

_STEPS = (
    Row(
        name="roseinfer_step_seconds",
        kind="histogram",
        unit="seconds",
        label=Label(name="phase", values=measures.PHASES),
        buckets=TOKEN_S,
        help="Start of an engine step → its end. Once per step that had rows; phase says what the rows were.",
        source=AtStep(measures.step_s, label=lambda step: step.kind),
    ),
    Row(
        name="roseinfer_batch_size",
        kind="histogram",
        unit="sequences",
        label=Label(name="phase", values=measures.PHASES),
        buckets=SEQUENCES,
        help="Sequences in an engine step. Once per step that had rows.",
        source=AtStep(measures.batch_size, label=lambda step: step.kind),
    ),
    Row(
        name="roseinfer_prompt_tokens_total",
        kind="counter",
        unit="tokens",
        help="Prompt tokens of requests whose prefill has ended, cached ones too, counted once, at the first token.",
        source=AtStep(measures.prefilled_tokens),
    ),
    Row(
        name="roseinfer_generation_tokens_total",
        kind="counter",
        unit="tokens",
        help="Generated tokens, counted when each is known on the host and routed to its request.",
        source=AtStep(lambda _, advanced: (len(advanced),)),
    ),
    Row(
        name="roseinfer_preemptions_total",
        kind="counter",
        unit="preemptions",
        help="Times that a running sequence lost its KV blocks and has to compute them again.",
        source=AtStep(lambda step, _: (step.num_preemptions,)),
    ),
    Row(
        name="roseinfer_prefix_cache_queries_total",
        kind="counter",
        unit="tokens",
        help="Prompt tokens that were looked up in the prefix cache.",
        source=AtStep(lambda step, _: (step.num_prefix_queried_tokens,)),
    ),
    Row(
        name="roseinfer_prefix_cache_hits_total",
        kind="counter",
        unit="tokens",
        help="Prompt tokens that were found in the prefix cache; at most the tokens looked up.",
        source=AtStep(lambda step, _: (step.num_prefix_hit_tokens,)),
    ),
)

_REQUESTS = (
    # Not `roseinfer_prompt_tokens`: OpenMetrics gives a counter's family its name without `_total`, so the two clash.
    Row(
        name="roseinfer_request_prompt_tokens",
        kind="histogram",
        unit="tokens",
        buckets=TOKENS,
        help="Prompt tokens of a request. Once per tokenized request, when it ends.",
        source=AtFinish(lambda timeline: (timeline.num_prompt_tokens,) if timeline.tokenized_ns else ()),
    ),
    Row(
        name="roseinfer_request_output_tokens",
        kind="histogram",
        unit="tokens",
        buckets=TOKENS,
        help="Generated tokens of a request, 0 included. Once per tokenized request, when it ends.",
        source=AtFinish(lambda timeline: (len(timeline.token_ns),) if timeline.tokenized_ns else ()),
    ),
    Row(
        name="roseinfer_requests_received_total",
        kind="counter",
        unit="requests",
        help="Requests received, counted once the head is parsed; each generated sequence of one HTTP request counts.",
        source=AtScrape(lambda state: {"": state.num_received}),
    ),
    Row(
        name="roseinfer_requests_total",
        kind="counter",
        unit="requests",
        label=Label(name="finish_reason", values=tuple(FinishReason)),
        help="Requests ended, each counted once at its end; the sum over reasons is requests received less in flight.",
        source=AtFinish(lambda _: (1,), label=measures.finish_reason),
    ),
    Row(
        name="roseinfer_request_errors_total",
        kind="counter",
        unit="requests",
        label=Label(name="error_type", values=measures.ERROR_TYPES),
        help="Requests that ended by a fault of the server: finish reasons error and timeout, by error code.",
        source=AtFinish(measures.server_faults, label=measures.error_type),
    ),
    Row(
        name="roseinfer_client_disconnects_total",
        kind="counter",
        unit="requests",
        help="Requests whose client went away before the response was complete, counted at their end.",
        source=AtFinish(lambda timeline: (1,) if timeline.client_disconnected else ()),
    ),
    Row(
        name="roseinfer_http_inflight_streams",
        kind="gauge",
        unit="requests",
        help="Requests received and not yet ended, streamed or not.",
        source=AtScrape(lambda state: {"": state.num_received - state.num_finished}),
    ),
)

_ENGINE = (
    Row(
        name="roseinfer_num_requests_running",
        kind="gauge",
        unit="requests",
        help="Requests the scheduler has admitted and not ended, after the last step.",
        source=AtScrape(lambda state: {"": state.last_step.num_running if state.last_step else 0}),
    ),
    Row(
        name="roseinfer_num_requests_waiting",
        kind="gauge",
        unit="requests",
        help="Requests that wait to be scheduled, after the last step.",
        source=AtScrape(lambda state: {"": state.last_step.num_waiting if state.last_step else 0}),
    ),
    Row(
        name="roseinfer_kv_cache_usage_ratio",
        kind="gauge",
        unit="ratio",
        help="KV blocks used by requests / all KV blocks, 0 to 1; those that only the prefix cache holds do not count.",
        source=AtScrape(measures.kv_usage),
    ),
    Row(
        name="roseinfer_kv_cache_blocks",
        kind="gauge",
        unit="blocks",
        label=Label(name="state", values=("used", "cached", "free", "total")),
        help="KV blocks: used by requests, cached (held only for the prefix cache), free; together they are total.",
        source=AtScrape(measures.kv_blocks),
    ),
    Row(
        name="roseinfer_cache_config_info",
        kind="info",
        help="Always 1, once the engine is ready: tokens in a KV block, and how many blocks there are on the device.",
        source=InfoAtScrape(measures.cache_config),
    ),
    Row(
        name="roseinfer_lifecycle_state",
        kind="gauge",
        label=Label(name="state", values=tuple(LifecycleState)),
        help="1 for the state the server is in, 0 for the others.",
        source=AtScrape(lambda state: {value: float(value == state.lifecycle) for value in LifecycleState}),
    ),
    Row(
        name="roseinfer_engine_up",
        kind="gauge",
        help="1 from the engine's readiness until it fails, draining included; else 0.",
        source=AtScrape(lambda state: {"": float(state.lifecycle in {LifecycleState.READY, LifecycleState.DRAINING})}),
    ),
    Row(
        name="roseinfer_engine_last_step_timestamp_seconds",
        kind="gauge",
        unit="seconds",
        help="Unix time at which the last engine step ended; 0 before the first. While requests run it must move.",
        source=AtScrape(lambda state: {"": state.last_step_unix_s}),
    ),
    Row(
        name="roseinfer_startup_seconds",
        kind="gauge",
        unit="seconds",
        label=Label(name="stage", values=()),
        help="What each stage of the engine's start took; present once it is ready. The stages add up to the whole.",
        source=AtScrape(lambda state: state.engine.startup_s if state.engine else {}),
    ),
    Row(
        name="roseinfer_model_info",
        kind="info",
        help="Always 1, once the engine is ready: the model, and how it runs after every `auto` was resolved.",
        source=InfoAtScrape(measures.model),
    ),
)

_EXPORTER = (
    Row(
        name="roseinfer_build_info",
        kind="info",
        is_per_model=False,
        help="Always 1: the version of roseinfer and of the Python it runs on.",
        source=InfoAtScrape(lambda state: {"version": state.version, "python": platform.python_version()}),
    ),
    Row(
        name="roseinfer_scrape_duration_seconds",
        kind="histogram",
        unit="seconds",
        buckets=HOST_S,
        is_per_model=False,
        help="Start of rendering this page → its bytes are ready. Once per scrape; the scrape under way is not in it.",
        source=OfScrapes(),
    ),
    Row(
        name="roseinfer_telemetry_dropped_total",
        kind="counter",
        label=Label(name="signal", values=("interval", "log_line")),
        is_per_model=False,
        help="Facts that were not told: intervals refused because negative, which is a mistake in a stamp, and log "
        "lines for which the queue had no room or the stream failed.",
        source=AtScrape(measures.dropped),
    ),
)

GROUPS = {
    "Latency of a request": _LATENCIES,
    "Steps and tokens": _STEPS,
    "Requests": _REQUESTS,
    "Engine and server": _ENGINE,
    "The exporter itself": _EXPORTER,
}
CATALOGUE: tuple[Row, ...] = tuple(row for rows in GROUPS.values() for row in rows)
