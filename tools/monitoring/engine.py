"""The dashboard of the engine: queue, batch, memory and steps, and the host that feeds it."""

from monitoring.board import SHOWN, Board, quantiles
from monitoring.panels import AMBER, GREEN, RED, Placed, Query, heat, lines, number, percentages, rows, seconds
from monitoring.promql import nonzero
from roseinfer.observe.metrics.catalogue import PHASES


def board() -> Board:
    return Board(
        "engine",
        "Engine",
        "Why requests wait and what the device does: queue, batch, KV cache, steps, and the host around them.",
        {
            "Now": _now(),
            "Queue": _queue(),
            "KV cache": _memory(),
            "Steps": _steps(),
            "Host": _host(),
            "What runs": _facts(),
        },
    )


def _now() -> list[Placed]:
    usage = SHOWN.series("kv_cache_usage_ratio")
    return [
        number(
            "Servers up",
            "Engines that are ready. Fewer than replicas: see roseinfer / Rollout for the state of each pod.",
            Query(SHOWN.sum("engine_up")),
            (None, RED),
            (1, GREEN),
        ),
        number(
            "Running",
            "Sequences that the schedulers have admitted. At scheduler.max_active_seqs times the servers, "
            "newcomers wait.",
            Query(SHOWN.sum("num_requests_running")),
        ),
        number(
            "Waiting",
            "Requests in the queues. Zero is normal. A number that stays needs more replicas, or a look at what "
            "blocks: `/debug/requests` of the operations port says which limit does.",
            Query(SHOWN.sum("num_requests_waiting")),
            (None, GREEN),
            (1, AMBER),
        ),
        number(
            "Fullest KV cache",
            "The largest share of blocks that requests hold on any server. Near 1 requests are preempted: more "
            "blocks (cache.*), or fewer scheduler.max_active_seqs.",
            Query(f"max({usage})"),
            *((None, GREEN), (0.8, AMBER), (0.95, RED)),
            decimals=1,
            unit="percentunit",
        ),
        number(
            "Generated",
            "Tokens a second of all servers. Flat while running grows: the batch no longer pays.",
            Query(SHOWN.total("generation_tokens_total")),
            decimals=0,
            unit="none",
        ),
        number(
            "Last step",
            "Age of the oldest last step among servers with running requests. More than a second or two: that "
            "engine hangs; take its log and delete the pod.",
            Query(
                f"max((time() - {SHOWN.series('engine_last_step_timestamp_seconds')}) * "
                f"({SHOWN.series('num_requests_running')} > bool 0))"
            ),
            *((None, GREEN), (5, AMBER), (30, RED)),
            decimals=1,
            unit="s",
        ),
    ]


def _queue() -> list[Placed]:
    return [
        lines(
            "Running and waiting by pod",
            "Uneven pods: the balancer counts connections; a picker that reads these gauges does better. All "
            "wait: scale out, or raise scheduler.max_active_seqs while the KV cache has room.",
            Query(SHOWN.sum("num_requests_running", "pod, instance"), "running {{pod}} {{instance}}"),
            Query(SHOWN.sum("num_requests_waiting", "pod, instance"), "waiting {{pod}} {{instance}}"),
        ),
        seconds(
            "Queue wait",
            "Inbox to first batch. p50 near 0 and a high p99 is a burst; both high is too little capacity. The "
            "autoscaler's guard looks at p95.",
            *quantiles("queue_wait_seconds", 0.5, 0.95, 0.99),
        ),
        seconds(
            "Submit lag",
            "Prompt tokenised to taken by the engine's loop: at most one step when all is well. Beyond, the "
            "engine's loop was busy: compare with the longest step.",
            *quantiles("submit_lag_seconds", 0.5, 0.99),
        ),
    ]


def _memory() -> list[Placed]:
    usage = SHOWN.series("kv_cache_usage_ratio")
    hits, asked = (SHOWN.total(f"prefix_cache_{what}_total") for what in ("hits", "queries"))
    return [
        percentages(
            "KV cache use",
            "Share of blocks that requests hold: the fullest server and the mean, never a sum. The fullest at 1 "
            "while the mean is low: requests are placed unevenly.",
            Query(f"max({usage})", "fullest"),
            Query(f"avg({usage})", "mean"),
            limit=0.95,
        ),
        lines(
            "Blocks",
            "Blocks by who holds them. Cached ones are given up when requests need them, so free near 0 is fine "
            "while cached is large.",
            Query(SHOWN.sum("kv_cache_blocks", "state", state="used|cached|free"), "{{state}}"),
            is_stacked=True,
        ),
        lines(
            "Preemptions",
            "Sequences that lost their blocks, a second; each computes again what it had. More than one in a "
            "while: more blocks, or fewer scheduler.max_active_seqs.",
            Query(SHOWN.total("preemptions_total"), "preemptions"),
            unit="ops",
        ),
        percentages(
            "Prefix cache hit rate",
            "Share of prompt tokens that were found. Low although prompts share a beginning: their salts differ, "
            "blocks are evicted, or a balancer spreads what belongs together.",
            Query(f"{hits} / {nonzero(asked)}", "hits"),
        ),
        seconds(
            "Prefill",
            "First batch to first token. Compare with prompt tokens; much above what they need, prompts wait for "
            "the token budget: scheduler.max_num_batched_tokens.",
            *quantiles("prefill_seconds", 0.5, 0.99),
        ),
        seconds(
            "First token in the engine",
            "Tokenised to first token, without HTTP and text. Time to first token above it is the front end's.",
            *quantiles("engine_time_to_first_token_seconds", 0.5, 0.99),
        ),
    ]


def _steps() -> list[Placed]:
    step, batch = "step_seconds", "batch_size"
    busy = SHOWN.total(f"{step}_sum", "pod, instance")
    return [
        heat(
            "Step time",
            "s",
            "How long steps took. Two bands: with and without prompts. A third one far above belongs to a cause: "
            "roseinfer / Jitter.",
            Query(SHOWN.increase_by_bucket(step)),
        ),
        heat(
            "Batch size",
            "short",
            "Sequences in a step. Mostly 1 while requests wait: something else than slots is short. At "
            "scheduler.max_num_seqs for minutes: full.",
            Query(SHOWN.increase_by_bucket(batch)),
        ),
        seconds(
            "Step time by phase",
            "p99 of steps that only decode, only read prompts, or both. `mixed` far above `decode` is what "
            "streams wait for when somebody's prompt is read: a lower scheduler.max_prefill_tokens.",
            *(Query(SHOWN.quantile(0.99, step, phase=phase), f"{phase} p99") for phase in PHASES),
        ),
        lines(
            "Steps a second",
            "Steps by phase. Many `mixed` ones: newcomers all the time.",
            Query(SHOWN.total(f"{step}_count", "phase"), "{{phase}}"),
            is_stacked=True,
            unit="ops",
        ),
        percentages(
            "Busy",
            "Share of the time that an engine spends in steps. At 1 it never waits for work; below, with requests "
            "waiting, the host is slow between steps.",
            Query(busy, "{{pod}} {{instance}}"),
        ),
    ]


def _host() -> list[Placed]:
    return [
        seconds(
            "Front end",
            "p99 of reading a request and of tokenising it. Long prompts explain both; else the event loop is "
            "busy: fewer streams a server, or a larger server.stream_interval.",
            Query(SHOWN.quantile(0.99, "receive_seconds"), "receive"),
            Query(SHOWN.quantile(0.99, "tokenize_seconds"), "tokenize"),
            width=6,
        ),
        seconds(
            "Stops of the front end",
            "p99 of garbage collections and of rendering the page of metrics. More than a few milliseconds is "
            "worth a report.",
            Query(SHOWN.quantile(0.99, "gc_pause_seconds"), "collection"),
            Query(SHOWN.quantile(0.99, "scrape_duration_seconds"), "scrape"),
            width=6,
        ),
        percentages(
            "Observing",
            "Share of one core that the front end spends on telling observers and rendering metrics. Above 0.05: "
            "fewer scrapes, or a lower tracing.ratio.",
            Query(SHOWN.total("observability_seconds_total", "pod, instance"), "{{pod}} {{instance}}"),
            width=6,
        ),
        lines(
            "Facts not told",
            "Lost spans and log lines, a second, and intervals refused because negative. Spans: the collector is "
            "slow or gone. Intervals: report it.",
            Query(SHOWN.total("telemetry_dropped_total", "signal"), "{{signal}}"),
            width=6,
            unit="ops",
        ),
    ]


def _facts() -> list[Placed]:
    return [
        rows(
            "Models",
            "How each server's model runs, after every `auto` was resolved. Servers behind one name should agree.",
            Query(SHOWN.series("model_info")),
            hidden=("Value", "__name__", "job"),
            width=16,
        ),
        rows(
            "KV cache",
            "Tokens in a block and blocks of each server. Unequal numbers: unequal memory, or another model.",
            Query(SHOWN.series("cache_config_info")),
            hidden=("Value", "__name__", "job"),
            width=8,
        ),
    ]
