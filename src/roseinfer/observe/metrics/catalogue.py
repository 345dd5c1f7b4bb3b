"""The table of all metrics that roseinfer exposes.

A row says what a series means and which function of a fact gives its values. The collector, docs/metrics.md and the
dashboards are made from these rows, so a new metric is a new row and nothing else. Names are those of the field, in
base units; each HELP text states the two events of an interval and what is counted once. The functions give nothing
where a stamp is missing; nothing here is clamped, rounded or remembered.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from roseinfer.errors import (
    CapacityError,
    EngineDead,
    EngineError,
    QueueTimeout,
    RequestError,
    RoseinferError,
    SlowReader,
)
from roseinfer.observe.gaps import intervals
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.hub import Writes
from roseinfer.observe.metrics.histogram import HOST_S, REQUEST_S, SEQUENCES, TOKEN_S, TOKENS, WAIT_S
from roseinfer.observe.metrics.row import (
    DRAFT_OUTCOMES,
    AtExporter,
    AtFinish,
    AtScrape,
    AtStep,
    AtWrites,
    InfoAtScrape,
    Label,
    Row,
    ServerState,
    counter,
    gauge,
    histogram,
    info,
)
from roseinfer.records import Advanced, Api, FinishReason, Invariant, LifecycleState, RequestTimeline, StepRecord

# A divisor, since division rounds correctly and a product with 1e-9 does not: 2,500,000 ns is exactly the bound 0.0025.
NS_PER_S = 1e9


def _codes(root: type[RoseinferError]) -> Iterator[str]:
    if root.code is not None:
        yield root.code
    for leaf in root.__subclasses__():
        yield from _codes(leaf)


PHASES = ("prefill", "decode", "mixed")  # of a step that had rows
OTHER = "other"  # an error that was not foreseen
ERROR_TYPES = (*sorted({*_codes(EngineError)} - {EngineError.code}), OTHER)  # which is of `LLM` alone
# A slow reader has got a part of its answer; each of the others can be refused before the engine is asked.
_EARLY = (RequestError, CapacityError, EngineDead, QueueTimeout)
_REFUSALS = {code for root in _EARLY for code in _codes(root)} - {SlowReader.code}
REJECTION_CODES = (*sorted(_REFUSALS), OTHER)
MODEL_FIELDS = (
    *("model_type", "num_parameters", "vocab_size", "max_model_len"),
    *("device", "dtype", "kv_dtype", "attention", "linear", "num_threads"),
)


# --- of a step ------------------------------------------------------------------------------------------------------


def step_s(step: StepRecord, _: Advanced) -> Sequence[float]:
    return ((step.end_ns - step.start_ns) / NS_PER_S,) if step.kind in PHASES else ()


def batch_size(step: StepRecord, _: Advanced) -> Sequence[float]:
    return (step.num_decode_seqs + step.num_prefill_seqs,) if step.kind in PHASES else ()


def token_gaps_s(step: StepRecord, advanced: Advanced) -> list[float]:
    """Returns the inter-token latency of each of the step's tokens; none where it is the first of its request."""
    tokens_ns, stamps = step.tokens_ns, advanced.previous_ns
    first_ns = stamps[0] if stamps else 0
    if first_ns not in {0, tokens_ns} and stamps.count(first_ns) == len(stamps):
        return [(tokens_ns - first_ns) / NS_PER_S] * len(stamps)
    last_ns = advanced.last_ns(tokens_ns)
    num_shared, num_more = stamps.count(last_ns) if last_ns else 0, stamps.count(tokens_ns)
    if num_shared + num_more + advanced.num_newcomers == len(stamps):
        # Nearly always: all that go on were in the step before. The second of two tokens comes with the first.
        return [(tokens_ns - last_ns) / NS_PER_S] * num_shared + [0.0] * num_more
    return [(tokens_ns - previous_ns) / NS_PER_S for previous_ns in stamps if previous_ns]


def prefilled_tokens(_: StepRecord, advanced: Advanced) -> Sequence[float]:
    if not advanced.num_newcomers:
        return ()
    return (sum([timeline.num_prompt_tokens for timeline in advanced.newcomers]),)


def counted(count_of: Callable[[StepRecord], int]) -> Callable[[StepRecord, Advanced], Sequence[float]]:
    """Makes of a count a step's one value, or no value where it is 0, as most are."""

    def values(step: StepRecord, _: Advanced) -> Sequence[float]:
        count = count_of(step)
        return (count,) if count else ()

    return values


# --- of socket writes -----------------------------------------------------------------------------------------------


def stream_gaps_s(writes: Writes) -> npt.NDArray[np.float64]:
    """From each request's write before to this one; none where it is the first of its request. `(num_gaps,)`"""
    columns = writes.columns()
    start_ns = columns["start_ns"]
    gaps_ns = (columns["written_ns"] - start_ns)[start_ns > 0]
    return gaps_ns / NS_PER_S


# --- of a request that ended ----------------------------------------------------------------------------------------


def seconds(interval_ns: Callable[[RequestTimeline], float | None]) -> Callable[[RequestTimeline], Sequence[float]]:
    """Makes of an interval the one value of a request, in seconds, or no value."""

    def values(timeline: RequestTimeline) -> Sequence[float]:
        interval = interval_ns(timeline)
        return () if interval is None else (interval / NS_PER_S,)

    return values


def is_streamed(timeline: RequestTimeline) -> tuple[str]:
    """As a label's value."""
    return ("true" if timeline.is_streamed else "false",)


def api(timeline: RequestTimeline) -> tuple[str]:
    """As a label's value."""
    return (timeline.api,)


def client_lag_s(timeline: RequestTimeline) -> Sequence[float]:
    lag_s = timeline.client_submit_lag_s
    return () if lag_s is None or lag_s < 0 else (lag_s,)


def finish_reason(timeline: RequestTimeline) -> str:
    return timeline.finish_reason or FinishReason.ERROR


def server_faults(timeline: RequestTimeline) -> Sequence[float]:
    return (1,) if timeline.has_failed else ()


def error_type(timeline: RequestTimeline) -> tuple[str]:
    return (timeline.error_code if timeline.error_code in ERROR_TYPES else OTHER,)


# --- of the server's state ------------------------------------------------------------------------------------------


def kv_blocks(state: ServerState) -> dict[str, float]:
    step = state.last_step
    if step is None:
        total = state.engine.num_blocks if state.engine else 0
        return {"used": 0, "cached": 0, "free": total, "total": total}
    used, cached, total = step.num_used_blocks, step.num_cached_blocks, step.num_total_blocks
    return {"used": used, "cached": cached, "free": total - used - cached, "total": total}


def kv_usage(state: ServerState) -> dict[str, float]:
    blocks = kv_blocks(state)
    return {"": blocks["used"] / blocks["total"] if blocks["total"] else 0.0}


CACHE_CONFIG = InfoAtScrape(
    ("block_size", "num_gpu_blocks"),
    lambda state: (state.engine.block_size, state.engine.num_blocks) if state.engine else (),
)


def model(state: ServerState) -> Sequence[str | int]:
    return tuple(getattr(state.engine, name) for name in MODEL_FIELDS) if state.engine else ()


def dropped(state: ServerState) -> dict[str, float]:
    return {
        "interval": state.num_refused_intervals,
        "log_line": state.num_dropped_log_lines,
        "span": state.num_dropped_spans,
        "fact": state.num_dropped_facts,
    }


# --- the rows ---------------------------------------------------------------------------------------------------------

_Interval = Callable[[RequestTimeline], float | None]
# On how many requests ended, how, and how long they took, and on nothing else: what a step costs does not depend on the
# API, and the part of a first token that does is the request's own length.
_API = Label(name="api", values=tuple(Api))
_STREAMED = Label(name="streamed", values=("true", "false"))


def _latency(name: str, buckets: tuple[float, ...], interval_ns: _Interval, meaning: str) -> Row:
    """A histogram of one interval of each request that reached both of its ends."""
    return histogram(name, "seconds", buckets, AtFinish(seconds(interval_ns)), meaning)


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
        "Body validated (t_parsed) → prompt tokenized (t_tokenized); before that its grammar is checked, where it is "
        "new, and its chat template rendered. Once per tokenized request.",
    ),
    _latency(
        "roseinfer_submit_lag_seconds",
        HOST_S,
        intervals.submit_lag_ns,
        "Prompt tokenized (t_tokenized) → the engine loop takes the request from its inbox (t_inbox): the hand-off "
        "from event loop to engine. Once per request that reached the engine.",
    ),
    histogram(
        "roseinfer_client_submit_lag_seconds",
        "seconds",
        WAIT_S,
        AtFinish(client_lag_s),
        "When the client meant to send the request (header x-roseinfer-intended-time) → its head arrived: how late the "
        "load generator was, network included. Once per request with the header; not observed when negative, which "
        "means that the two hosts' clocks differ.",
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
        "First time in a batch (t_sched) → first token known on the host (t_tok[0]). Once per request with a token; "
        "waits after a preemption are in it.",
    ),
    histogram(
        "roseinfer_time_to_first_token_seconds",
        "seconds",
        WAIT_S,
        AtFinish(seconds(intervals.time_to_first_token_ns), is_streamed),
        "Request head parsed (t_recv) → the socket write that carried the first token returned (t_write[0]); for a "
        "response that is not streamed that is its only write, when all of it is made. Equal to receive + tokenize + "
        "submit lag + queue wait + prefill + first write. Once per request that wrote a token.",
        _STREAMED,
    ),
    _latency(
        "roseinfer_engine_time_to_first_token_seconds",
        WAIT_S,
        intervals.engine_time_to_first_token_ns,
        "Prompt tokenized (t_tokenized) → first token known on the host (t_tok[0]): time to first token without HTTP "
        "and text. Once per request that got a token.",
    ),
    histogram(
        "roseinfer_inter_token_latency_seconds",
        "seconds",
        TOKEN_S,
        AtStep(token_gaps_s),
        "Token known on the host (t_tok[i-1]) → next token of the request known (t_tok[i]). Once per token but the "
        "first of each request, observed as tokens come; a preemption while decoding is in it.",
    ),
    histogram(
        "roseinfer_stream_gap_seconds",
        "seconds",
        TOKEN_S,
        AtWrites(stream_gaps_s),
        "Socket write with tokens returned (t_write[i-1]) → next one of the request returned (t_write[i]): what the "
        "client sees. Once per write but the first of each request, observed as writes return.",
    ),
    _latency(
        "roseinfer_time_per_output_token_seconds",
        TOKEN_S,
        intervals.time_per_output_token_ns,
        "First token (t_tok[0]) → last token (t_tok[n-1]), divided by n-1. Once per request with n >= 2 tokens.",
    ),
    histogram(
        "roseinfer_request_duration_seconds",
        "seconds",
        REQUEST_S,
        AtFinish(seconds(intervals.request_duration_ns), api),
        "Request head parsed (t_recv) → the request ended (t_end). Once per request, whatever its finish reason.",
        _API,
    ),
)

_CAUSE = Label(name="cause", values=tuple(Cause))
_CAUSES = (
    counter(
        "roseinfer_gap_seconds_total",
        "seconds",
        AtScrape(lambda state: {cause: duration / NS_PER_S for cause, duration in state.gap_ns.items()}),
        "Time between two tokens of a request, by what it went to. What the engine did between two tokens adds up to "
        "the sum of roseinfer_inter_token_latency_seconds; on top of that comes, of streams, the time in which a known "
        "token was on its way to the socket and none before it was. docs/causes.md says what each cause is.",
        _CAUSE,
    ),
    counter(
        "roseinfer_slow_gaps_total",
        "gaps",
        AtScrape(lambda state: {str(cause): count for cause, count in state.num_slow_gaps.items()}),
        "Gaps that were longer than observe.slow_gap_factor times the recent median and than observe.slow_gap_min_ms, "
        "by the cause that was the furthest above what it usually is. Of streams the gaps between socket writes count, "
        "of other requests those between tokens.",
        _CAUSE,
    ),
)

_PHASE = Label(name="phase", values=PHASES)
_STEPS = (
    histogram(
        "roseinfer_step_seconds",
        "seconds",
        TOKEN_S,
        AtStep(step_s, lambda step: (step.kind,)),
        "Start of an engine step → its end. Once per step that had rows; phase says what the rows were.",
        _PHASE,
    ),
    histogram(
        "roseinfer_batch_size",
        "sequences",
        SEQUENCES,
        AtStep(batch_size, lambda step: (step.kind,)),
        "Sequences in an engine step. Once per step that had rows.",
        _PHASE,
    ),
    counter(
        "roseinfer_prompt_tokens_total",
        "tokens",
        AtStep(prefilled_tokens),
        "Prompt tokens of requests whose prefill has ended, cached ones too, counted once, at the first token.",
    ),
    counter(
        "roseinfer_generation_tokens_total",
        "tokens",
        AtStep(lambda _, advanced: (len(advanced),)),
        "Generated tokens, counted when each is known on the host and routed to its request.",
    ),
    counter(
        "roseinfer_draft_tokens_total",
        "tokens",
        AtScrape(lambda state: dict(state.num_drafts)),
        "Tokens that decoding rows drafted with scheduler.speculation, by what became of them: an accepted one is a "
        "generated token without a step of its own.",
        Label(name="outcome", values=DRAFT_OUTCOMES),
    ),
    counter(
        "roseinfer_preemptions_total",
        "preemptions",
        AtStep(counted(lambda step: step.num_preemptions)),
        "Times that a running sequence lost its KV blocks and has to compute them again.",
    ),
    counter(
        "roseinfer_prefix_cache_queries_total",
        "tokens",
        AtStep(counted(lambda step: step.num_prefix_queried_tokens)),
        "Prompt tokens that were looked up in the prefix cache.",
    ),
    counter(
        "roseinfer_prefix_cache_hits_total",
        "tokens",
        AtStep(counted(lambda step: step.num_prefix_hit_tokens)),
        "Prompt tokens that were found in the prefix cache; at most the tokens looked up.",
    ),
)

# A request here is a sequence: one HTTP request for several choices or prompts is as many.
_REQUESTS = (
    # Not `roseinfer_prompt_tokens`: OpenMetrics gives a counter's family its name without `_total`, so the two clash.
    histogram(
        "roseinfer_request_prompt_tokens",
        "tokens",
        TOKENS,
        AtFinish(lambda timeline: (timeline.num_prompt_tokens,) if timeline.tokenized_ns else ()),
        "Prompt tokens of a request. Once per tokenized request, when it ends.",
    ),
    histogram(
        "roseinfer_request_output_tokens",
        "tokens",
        TOKENS,
        AtFinish(lambda timeline: (len(timeline.token_ns),) if timeline.tokenized_ns else ()),
        "Generated tokens of a request, 0 included. Once per tokenized request, when it ends.",
    ),
    counter(
        "roseinfer_reasoning_tokens_total",
        "tokens",
        AtFinish(lambda timeline: (timeline.num_reasoning_tokens,)),
        "Generated tokens that were thoughts of the model, with the tags around them, counted at their request's end.",
    ),
    counter(
        "roseinfer_requests_received_total",
        "requests",
        AtScrape(lambda state: {"": state.num_received}),
        "Requests received, counted once the head is parsed; each generated sequence of one HTTP request counts.",
    ),
    counter(
        "roseinfer_requests_total",
        "requests",
        AtFinish(lambda _: (1,), lambda timeline: (finish_reason(timeline), timeline.api)),
        "Requests ended, each counted once at its end; the sum over reasons and APIs is requests received less in "
        "flight.",
        Label(name="finish_reason", values=tuple(FinishReason)),
        _API,
    ),
    counter(
        "roseinfer_requests_rejected_total",
        "requests",
        AtScrape(lambda state: {code: state.num_refusals[code] for code in REJECTION_CODES}),
        "HTTP requests that either port answered with an error before the engine heard of them, whatever they asked "
        "for but metrics that are not there, each counted once by the code of the error: overloaded is status 429, "
        "not_ready, engine_dead and queue_timeout are 503, other is an unforeseen 500, the rest are clients' mistakes. "
        "Those that asked for tokens have the finish reason rejected too. A connection that is closed without an "
        "answer is in the log alone.",
        Label(name="code", values=REJECTION_CODES),
    ),
    counter(
        "roseinfer_request_errors_total",
        "requests",
        AtFinish(server_faults, error_type),
        "Requests that ended by a fault of the server after the engine had heard of them: finish reasons error and "
        "timeout, by error code; queue_timeout is a deadline that passed before the engine had begun, which is a "
        "refusal where the engine had not yet heard of the request.",
        Label(name="error_type", values=ERROR_TYPES),
    ),
    counter(
        "roseinfer_client_disconnects_total",
        "requests",
        AtFinish(lambda timeline: (1,) if timeline.client_disconnected else ()),
        "Requests whose client went away before the response was complete, counted at their end.",
    ),
    gauge(
        "roseinfer_http_inflight_streams",
        "requests",
        lambda state: {"": state.num_received - state.num_finished},
        "Requests received and not yet ended, streamed or not. Each generated sequence of an HTTP request counts, so "
        "this may exceed server.max_inflight, which limits HTTP requests.",
    ),
)

START_TIME = "roseinfer_start_time_seconds"
_ENGINE = (
    gauge(
        "roseinfer_num_requests_running",
        "requests",
        lambda state: {"": state.last_step.num_running if state.last_step else 0},
        "Requests the scheduler has admitted and not ended, after the last step.",
    ),
    gauge(
        "roseinfer_num_requests_waiting",
        "requests",
        lambda state: {"": state.last_step.num_waiting if state.last_step else 0},
        "Requests that wait to be scheduled, after the last step.",
    ),
    gauge(
        "roseinfer_kv_cache_usage_ratio",
        "ratio",
        kv_usage,
        "KV blocks used by requests / all KV blocks, 0 to 1; those that only the prefix cache holds do not count.",
    ),
    gauge(
        "roseinfer_kv_cache_blocks",
        "blocks",
        kv_blocks,
        "KV blocks: used by requests, cached (held only for the prefix cache), free; together they are total.",
        Label(name="state", values=("used", "cached", "free", "total")),
    ),
    info(
        "roseinfer_cache_config_info",
        CACHE_CONFIG,
        "Always 1, once the engine is ready: tokens in a KV block, and how many blocks the device holds. "
        "num_gpu_blocks is the gateway protocol's name for that; on a CPU the blocks lie in main memory.",
    ),
    gauge(
        "roseinfer_lifecycle_state",
        "",
        lambda state: {value: float(value == state.lifecycle) for value in LifecycleState},
        "1 for the state the server is in, 0 for the others.",
        Label(name="state", values=tuple(LifecycleState)),
    ),
    gauge(
        "roseinfer_engine_up",
        "",
        lambda state: {"": float(state.lifecycle in {LifecycleState.READY, LifecycleState.DRAINING})},
        "1 from the engine's readiness until it fails, draining included; else 0.",
    ),
    counter(
        "roseinfer_engine_restarts_total",
        "",
        AtScrape(lambda state: {"": state.num_restarts}),
        "Starts of a new engine in the place of one that had died or hung (engine.on_failure).",
    ),
    gauge(
        START_TIME,
        "seconds",
        lambda state: {"": state.start_unix_s},
        "Unix time at which this server was started. Another value under the same labels is another process.",
    ),
    counter(
        "roseinfer_invariant_violations_total",
        "",
        AtScrape(lambda state: {str(name): count for name, count in state.num_violations.items()}),
        "Invariants that did not hold when the engine had nothing to do, once for each check and each way in which one "
        "was broken. Anything above 0 is a bug; GET /debug/invariants says what was found.",
        Label(name="name", values=tuple(Invariant)),
    ),
    gauge(
        "roseinfer_engine_last_step_timestamp_seconds",
        "seconds",
        lambda state: {"": state.last_step_unix_s},
        "Unix time at which the last engine step ended; 0 before the first. While requests run it must move.",
    ),
    gauge(
        "roseinfer_engine_stalled_seconds",
        "seconds",
        lambda state: {"": state.stalled_s},
        "For how long an engine that has work has made no step, from a second on; else 0. It keeps growing while a "
        "server that gave its engine up says so.",
    ),
    counter(
        "roseinfer_host_steal_seconds_total",
        "seconds",
        AtScrape(lambda state: {"": state.host.steal_s}),
        "Seconds in which a hypervisor gave cores of this host to others, of all its cores since its start (`steal` in "
        "/proc/stat). 0 where that cannot be read.",
    ),
    counter(
        "roseinfer_engine_major_page_faults_total",
        "",
        AtScrape(lambda state: {"": state.host.major_faults}),
        "Pages of the engine's process, weights and KV pool among them, that had to come from disk. 0 where that "
        "cannot be read.",
    ),
    gauge(
        "roseinfer_cpu_clock_hertz",
        "hertz",
        lambda state: {"lowest": state.host.lowest_hz, "highest": state.host.highest_hz},
        "The lowest and the highest clock, at the moment of the scrape, of the first 16 cores that this server may "
        "use. 0 where the system does not say, as in most virtual machines.",
        Label(name="of", values=("lowest", "highest")),
    ),
    gauge(
        "roseinfer_startup_seconds",
        "seconds",
        lambda state: state.engine.startup_s if state.engine else {},
        "What each stage of the engine's start took; present once it is ready. The stages add up to the whole.",
        Label(name="stage", values=()),
    ),
    info(
        "roseinfer_model_info",
        InfoAtScrape(MODEL_FIELDS, model),
        "Always 1, once the engine is ready: the model, and how it runs after every `auto` was resolved.",
    ),
)

# What pickers and routers that know vLLM read of a pod's own page, with its labels.
_VLLM = (
    gauge(
        "vllm:num_requests_running",
        "requests",
        lambda state: {"": state.last_step.num_running if state.last_step else 0},
        "roseinfer_num_requests_running under vLLM's name.",
    ),
    gauge(
        "vllm:num_requests_waiting",
        "requests",
        lambda state: {"": state.last_step.num_waiting if state.last_step else 0},
        "roseinfer_num_requests_waiting under vLLM's name.",
    ),
    gauge(
        "vllm:kv_cache_usage_perc",
        "",
        kv_usage,
        "roseinfer_kv_cache_usage_ratio under vLLM's name; 1 is all of the cache, despite the name.",
    ),
    info("vllm:cache_config_info", CACHE_CONFIG, "roseinfer_cache_config_info under vLLM's name."),
)

GC_PAUSE, SCRAPE_DURATION = "roseinfer_gc_pause_seconds", "roseinfer_scrape_duration_seconds"
_EXPORTER = tuple(
    replace(row, is_per_model=False)
    for row in (
        info(
            "roseinfer_build_info",
            InfoAtScrape(("version", "python"), lambda state: (state.version, platform.python_version())),
            "Always 1: the version of roseinfer and of the Python it runs on.",
        ),
        histogram(
            GC_PAUSE,
            "seconds",
            HOST_S,
            AtExporter(),
            "Start of a garbage collection in the front end → its end; nothing is read or written meanwhile. Once per "
            "collection, of any generation.",
        ),
        histogram(
            SCRAPE_DURATION,
            "seconds",
            HOST_S,
            AtExporter(),
            "Start of rendering this page → its bytes are ready. Once per scrape; the scrape under way is not in it.",
        ),
        counter(
            "roseinfer_observability_seconds_total",
            "seconds",
            AtScrape(lambda state: {"": state.observability_ns / NS_PER_S}),
            "Time the front end spent on telling observers of facts or on sending facts to the telemetry process; "
            "without one, on rendering this page too.",
        ),
        counter(
            "roseinfer_telemetry_dropped_total",
            "",
            AtScrape(dropped),
            "Facts that were lost: intervals refused because negative, which is a mistake in a stamp, log lines "
            "for which the queue had no room or the stream failed, spans likewise, and facts (steps, writes, begins "
            "and ends of requests) that the telemetry process did not take or that came while there was none. Counters "
            "of requests, tokens and errors hold those too.",
            Label(name="signal", values=("interval", "log_line", "span", "fact")),
        ),
        counter(
            "roseinfer_telemetry_restarts_total",
            "",
            AtScrape(lambda state: {"": state.num_telemetry_restarts}),
            "Starts of a new telemetry process in the place of one that had died; histograms begin again at 0 then.",
        ),
    )
)

GROUPS = {
    "Latency of a request": _LATENCIES,
    "Causes of gaps between tokens": _CAUSES,
    "Steps and tokens": _STEPS,
    "Requests": _REQUESTS,
    "Engine and server": _ENGINE,
    "Under vLLM's names": _VLLM,
    "The exporter itself": _EXPORTER,
}
CATALOGUE: tuple[Row, ...] = tuple(row for rows in GROUPS.values() for row in rows)

# What a picker or an autoscaler asks for many times a second: the rows of /metrics/load.
_LOAD_NAMES = {
    "roseinfer_http_inflight_streams",
    "roseinfer_num_requests_running",
    "roseinfer_num_requests_waiting",
    "roseinfer_kv_cache_usage_ratio",
    "roseinfer_kv_cache_blocks",
    "roseinfer_cache_config_info",
    "roseinfer_engine_up",
}
VLLM_NAMES = frozenset(row.name for row in _VLLM)
LOAD = tuple(row for row in CATALOGUE if row.name in _LOAD_NAMES | VLLM_NAMES)
