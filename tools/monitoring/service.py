"""The dashboard of what clients get: objectives, traffic, and the latency of requests."""

from monitoring.board import RECORDED, SHOWN, Board, one_of, quantiles
from monitoring.objectives import FAILED, ITL, OBJECTIVES, REFUSED_BY_US, TTFT, Objective, asked
from monitoring.panels import AMBER, GREEN, RED, Placed, Query, lines, number, percentages, seconds
from monitoring.promql import bound, nonzero

_WAIT_CHOICES = tuple(bound(target) for target in (0.08, 0.16, 0.25, 0.5, 1.0, 2.5, 5.0))
_TOKEN_CHOICES = tuple(bound(target) for target in (0.01, 0.02, 0.025, 0.03, 0.05, 0.1, 0.25))

VARIABLES = (
    one_of("ttft", "TTFT target, s", _WAIT_CHOICES, TTFT.threshold, "A first token is good when it is there by then"),
    one_of("itl", "ITL target, s", _TOKEN_CHOICES, ITL.threshold, "A gap between two tokens is good up to this"),
)

PARTS = ("receive", "tokenize", "submit_lag", "queue_wait", "prefill")


def board() -> Board:
    return Board(
        "service",
        "Service",
        "What clients get: objectives and budgets, traffic, and the latency of requests. Why gaps between tokens are "
        "long is told by roseinfer / Jitter, why requests wait by roseinfer / Engine.",
        {
            "Objectives": _objectives(),
            "Traffic": _traffic(),
            "Time to first token": _first_token(),
            "Tokens of a stream": _tokens(),
            "Requests that did not end well": _ends(),
            "What is asked": _sizes(),
        },
        VARIABLES,
    )


def _good(objective: Objective, expression: str, advice: str) -> Placed:
    wanted = float(objective.wanted)
    steps = ((None, RED), (1 - 14.4 * (1 - wanted), AMBER), (wanted, GREEN))
    return number(
        f"{objective.title}: good", advice, Query(expression), *steps, height=8, decimals=2, unit="percentunit"
    )


def _within(name: str, variable: str, **matchers: str) -> str:
    good = SHOWN.total(f"{name}_bucket", le=variable, **matchers)
    return (
        f"{good} / {SHOWN.total(f'{name}_count', **matchers)} >= 0"  # without traffic: nothing, rather than no number
    )


def _objectives() -> list[Placed]:
    failed = f"{SHOWN.total('requests_total', finish_reason=FAILED)}"
    refused = f"{SHOWN.total('requests_rejected_total', code=REFUSED_BY_US)}"
    return [
        _good(
            TTFT,
            _within("time_to_first_token_seconds", "$ttft", streamed="true"),
            "Share of streams' first tokens that were written within the target. Red is a budget of 30 days gone "
            "in two: see *Time to first token by part* below for which part grew.",
        ),
        _good(
            ITL,
            _within("inter_token_latency_seconds", "$itl"),
            "Share of gaps between tokens up to the target. When it falls, open roseinfer / Jitter: it names the "
            "cause.",
        ),
        _good(
            OBJECTIVES[2],
            f"1 - ({failed} + {refused}) / {nonzero(asked(SHOWN, by=''))} >= 0",
            "Share of requests that neither failed nor were refused for a reason of the server's. When it falls, "
            "look at *Refused* and *Requests by end* for which.",
        ),
        _budget(),
        _burn(),
    ]


def _budget() -> Placed:
    queries = []
    for each in OBJECTIVES:
        rates = (f"roseinfer:{each.key}_{kind}:rate5m{RECORDED}" for kind in ("good", "all"))
        good, every = (f"sum(sum_over_time({rate}[30d]))" for rate in rates)
        queries.append(Query(f"1 - (1 - {good} / {every}) / (1 - {_wanted(each)})", each.title))
    advice = (
        "What is left of the error budget of 30 days, of all servers that the recording rules see; empty without "
        "them. Below half with weeks to go, look for the days that took it. Below 0, stop changing things and remove "
        "the largest cause on roseinfer / Jitter."
    )
    return percentages("Budget left", advice, *queries, width=6)


def _burn() -> Placed:
    queries = []
    for each in OBJECTIVES:
        good, every = (f"sum(roseinfer:{each.key}_{kind}:rate5m{RECORDED})" for kind in ("good", "all"))
        queries.append(Query(f"(1 - {good} / {every}) / (1 - {_wanted(each)})", each.title))
    advice = (
        "How many times faster than allowed the budget goes, over five minutes, by the recording rules. At 1 it lasts "
        "30 days. The line is 14.4, from which on, held for an hour, the alert pages: read its section in "
        "docs/operations.md."
    )
    return lines("Burn rate", advice, *queries, width=6, limit=14.4)


def _wanted(objective: Objective) -> str:
    chosen = RECORDED.replace("{", f'{{objective="{objective.key}",')
    return f"scalar(max(roseinfer:objective:ratio{chosen}))"


def _traffic() -> list[Placed]:
    return [
        lines(
            "Requests by end",
            "Requests by how they ended. `error` and `timeout` are the server's: look into its log for them. "
            "`abort` are clients that went away, or stop strings; `rejected` has its reasons in the next panel.",
            Query(SHOWN.total("requests_total", "finish_reason"), "{{finish_reason}}"),
            is_stacked=True,
            unit="reqps",
        ),
        lines(
            "Refused",
            "Refused requests by code, whatever they asked for. `overloaded`: add replicas, or raise "
            "server.max_inflight. `not_ready` during a rollout: the grace or the drain is too short. "
            "`engine_dead`: a pod restarts. The others are clients' mistakes: talk to them.",
            Query(f"{SHOWN.total('requests_rejected_total', 'code')} > 0 or on () vector(0)", "{{code}}"),
            unit="reqps",
        ),
        lines(
            "Tokens",
            "Tokens a second, generated and read. Generated tokens that no longer rise with requests mean that "
            "the servers are full: compare with running and waiting.",
            Query(SHOWN.total("generation_tokens_total"), "generated"),
            Query(SHOWN.total("prompt_tokens_total"), "prompt"),
            unit="none",
        ),
        lines(
            "In flight",
            "Requests received and not ended, those of them that wait to be scheduled, and those that compute. "
            "Waiting for minutes: more replicas, or roseinfer / Engine for what keeps the queue back.",
            Query(SHOWN.sum("http_inflight_streams"), "in flight"),
            Query(SHOWN.sum("num_requests_running"), "running"),
            Query(SHOWN.sum("num_requests_waiting"), "waiting"),
            width=12,
        ),
        seconds(
            "Request duration",
            "First byte to end. It follows the number of generated tokens: compare with *Output tokens*. A point "
            "with a diamond is a trace that was kept.",
            *quantiles("request_duration_seconds", 0.5, 0.95, 0.99, exemplar=0.99),
            width=12,
        ),
    ]


def _first_token() -> list[Placed]:
    name = "time_to_first_token_seconds"
    parts = [Query(SHOWN.mean(f"{part}_seconds"), part.replace("_", " ")) for part in PARTS]
    named = " - ".join(f"({SHOWN.mean(f'{part}_seconds')})" for part in PARTS)
    rest = Query(f"clamp_min({SHOWN.mean(name)} - {named}, 0)", "first write")
    return [
        seconds(
            "Time to first token",
            "First byte in to first token out, of streams, as their clients see it; an answer that is not streamed "
            "is written when it is complete, see *Request duration*. When it jumps, click a diamond for the trace "
            "of a slow request, and see the next panel for the part that grew.",
            *quantiles(name, 0.5, 0.95, 0.99, exemplar=0.99, streamed="true"),
            width=12,
        ),
        seconds(
            "Time to first token by part",
            "Means of the parts, which add up to it. Queue wait: more replicas or scheduler.max_active_seqs. Prefill: "
            "shorter prompts, a larger scheduler.max_prefill_tokens, the prefix cache. Submit lag or first write: the "
            "front end is busy. The first write is what is left, so it is of requests with a token.",
            *parts,
            rest,
            width=12,
            is_stacked=True,
        ),
    ]


def _tokens() -> list[Placed]:
    itl, tpot, gap = "inter_token_latency_seconds", "time_per_output_token_seconds", "stream_gap_seconds"
    return [
        seconds(
            "Inter-token latency",
            "Gaps between tokens in the engine. A p99 that leaves p50 is jitter: roseinfer / Jitter has the "
            "cause. If p50 rises too, the batch is larger or the device slower: roseinfer / Engine.",
            *quantiles(itl, 0.5, 0.99, 0.999, exemplar=0.99),
        ),
        seconds(
            "Time per output token",
            "Mean gap of each request, so one request is one value: what a reader feels as speed. Sustained "
            "growth is load: fewer scheduler.max_num_seqs or more replicas.",
            *quantiles(tpot, 0.5, 0.99),
        ),
        seconds(
            "Gaps that clients see",
            "Between two writes to the socket, told when a request ends. Above the inter-token latency is the front "
            "end, or a client that reads slowly: see event_loop and client_backpressure on roseinfer / Jitter.",
            *quantiles(gap, 0.5, 0.99),
        ),
    ]


def _ends() -> list[Placed]:
    return [
        lines(
            "Clients that went away",
            "Requests whose client left before the end. A rise together with time to first token is impatience: "
            "make the first token faster. A rise alone is often a proxy's time-out.",
            Query(SHOWN.total("client_disconnects_total"), "disconnects"),
            width=12,
            unit="reqps",
        ),
        lines(
            "Faults",
            "Requests that a fault of the server ended, by code. `engine_failed`: a step raised, and the process "
            "ends; its log has the reason. `timeout`: the deadline is shorter than the answer is long.",
            Query(f"{SHOWN.total('request_errors_total', 'error_type')} > 0 or on () vector(0)", "{{error_type}}"),
            width=12,
            unit="reqps",
        ),
    ]


def _sizes() -> list[Placed]:
    tokens = [
        lines(
            f"{title} tokens",
            f"{title} tokens of a request; bounds are powers of four, so values between them are a guess. {advice}",
            *quantiles(name, 0.5, 0.95),
        )
        for title, name, advice in (
            ("Prompt", "request_prompt_tokens", "Longer prompts explain a longer time to first token."),
            ("Output", "request_output_tokens", "Longer answers explain longer requests and more in flight."),
        )
    ]
    return [
        *tokens,
        seconds(
            "Lateness of the load generator",
            "How late requests arrived, of clients that send x-roseinfer-intended-time. While it is more than a "
            "few milliseconds a load test measures its own generator: give that more cores.",
            Query(SHOWN.quantile(0.99, "client_submit_lag_seconds"), "p99"),
        ),
    ]
