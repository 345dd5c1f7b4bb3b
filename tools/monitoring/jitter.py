"""The dashboard that leads from a jump of the 99th percentile to its cause, its step and its trace."""

from monitoring.board import SHOWN, Board, text_box
from monitoring.panels import Placed, Query, heat, lines, percentages, prose, rows, seconds
from roseinfer.observe.gaps.causes import CAUSES, Place

TIMELINE = ("Timeline of the server", "${operations}/debug/timeline")
LINKS = (TIMELINE, ("Requests in flight", "${operations}/debug/requests"))

ITL, GAP = "inter_token_latency_seconds", "stream_gap_seconds"

VARIABLES = (
    text_box(
        "operations",
        "Operations port",
        "http://127.0.0.1:8001",
        "Where links to the timeline lead: the operations port of one server, as your browser reaches it, for "
        "instance after `kubectl port-forward pod/… 8001`",
    ),
)

WAY = """\
1. **Is it the engine or the way out?** The first panel is the engine's clock, the second the client's.
2. **What did the slow gaps go to?** The tallest colour in *Slow gaps by cause* at the time of the jump. What changes it
   is in the table below.
3. **Which step, which request?** A diamond is an exemplar: its `trace_id` opens the trace, its `step_id` is the step's
   number in the trace, on the timeline and in a profile.
4. **See it:** [timeline of the server](${operations}/debug/timeline), key `w` for the widest gap. In words:
   `roseinfer explain ${operations}`. To keep the next one: `observe.capture_rules`.
"""


def board() -> Board:
    return Board(
        "jitter",
        "Jitter",
        "From a jump of p99 to its cause, its step and its trace. Read it from top to bottom.",
        {
            "1. Is there a jump?": _jump(),
            "2. What did the time go to?": _causes(),
            "3. Which step, which request?": _which(),
            "4. Suspects, on the same axis of time": _suspects(),
        },
        VARIABLES,
    )


def _jump() -> list[Placed]:
    p50, p99 = SHOWN.quantile(0.5, ITL), SHOWN.quantile(0.99, ITL)
    return [
        seconds(
            "Inter-token latency",
            "Gaps between tokens in the engine. p99 leaves p50: go on to 2. Both rise: load or a slower device, "
            "see roseinfer / Engine. Diamonds are kept traces; the menu of a point opens the timeline.",
            Query(p50, "p50"),
            Query(p99, "p99", exemplar=True),
            Query(SHOWN.quantile(0.999, ITL), "p99.9"),
            width=12,
            links=LINKS,
        ),
        seconds(
            "What clients see beyond it",
            "p99 of gaps between socket writes, less p99 in the engine. Above 0, the way out jitters: event_loop, "
            "detokenize or client_backpressure. Below 0, tokens that were due together share a write.",
            Query(f"{SHOWN.quantile(0.99, GAP)} - {p99}", "p99 of writes - p99 of tokens"),
            width=6,
            links=LINKS,
        ),
        lines(
            "p99 / p50",
            "How many times the usual gap the slowest hundredth is. The alert starts at 5. Compare servers and "
            "days with it: it does not depend on the model's speed.",
            Query(f"{p99} / {p50}", "inter-token latency"),
            width=6,
            limit=5,
            links=LINKS,
        ),
    ]


def _causes() -> list[Placed]:
    table = "\n".join(f"| `{cause}` | {cause.row.remedy} |" for cause in CAUSES)
    slow = SHOWN.series("slow_gaps_total")
    return [
        lines(
            "Slow gaps by cause",
            "Gaps a second that were several times the usual length, by the cause that was the furthest above "
            "what it usually is. The colour that grows with p99 is the answer; what changes it stands below.",
            Query(f"{SHOWN.total('slow_gaps_total', 'cause')} > 0 or on () vector(0)", "{{cause}}"),
            width=12,
            is_stacked=True,
            are_bars=True,
            links=LINKS,
            unit="ops",
        ),
        lines(
            "Streams waiting, by cause",
            "Seconds of all gaps for each second: how many streams wait for a cause at any moment. decode is the "
            "work itself. Any other colour of the same size is time that could be saved.",
            Query(f"{SHOWN.total('gap_seconds_total', 'cause')} > 0 or on () vector(0)", "{{cause}}"),
            width=12,
            is_stacked=True,
            links=LINKS,
        ),
        rows(
            "Slow gaps in this range",
            "How many in the whole range that is shown, the most frequent cause first. Begin with the first line.",
            Query(f"sort_desc(round(sum by (cause) (increase({slow}[$__range])), 1) > 0 or on () vector(0))"),
            width=8,
        ),
        prose("What changes it", f"| cause | what changes it |\n|---|---|\n{table}\n", width=16),
    ]


def _which() -> list[Placed]:
    return [
        heat(
            "Every gap",
            "s",
            "How many gaps of which length. A second band is a kind of step that is slower: its distance from the "
            "first is what its cause costs. Diamonds are kept traces.",
            Query(SHOWN.increase_by_bucket(ITL), exemplar=True),
            links=LINKS,
        ),
        prose("From a jump to its cause", WAY),
    ]


def _suspects() -> list[Placed]:
    def shares(place: Place) -> list[Query]:
        causes = [cause for cause in CAUSES if cause.row.place == place]
        total = SHOWN.total("gap_seconds_total")
        return [Query(f"{SHOWN.total('gap_seconds_total', cause=cause)} / {total}", cause) for cause in causes]

    return [
        percentages(
            "Prompts of others",
            "Share of all gaps that went to prompts of newcomers and to growing batches. It follows prompt "
            "tokens: a lower scheduler.max_prefill_tokens spreads them.",
            *shares("prompts"),
        ),
        percentages(
            "Memory",
            "Share of all gaps that went to preemption or to waiting for a turn. Above 0: more KV blocks, or "
            "fewer scheduler.max_active_seqs.",
            *shares("memory"),
        ),
        percentages(
            "Host and copies",
            "Share of all gaps that went to the engine's host: bookkeeping, copies, graphs, sampling. What "
            "changes each stands in the table above.",
            *shares("host"),
        ),
        percentages(
            "The way out",
            "Share of all gaps that went to the front end or to clients. client_backpressure alone: the client, "
            "or a proxy that buffers.",
            *shares("delivery"),
        ),
        percentages(
            "Unexplained",
            "Share of all gaps that nothing recorded explains: most often another process had the processor. Look "
            "at CPU throttling on roseinfer / Rollout, at pinning and at neighbours.",
            *shares("other"),
        ),
        lines(
            "Newcomers",
            "Prompt tokens a second and new requests a second, for comparison with the first two panels.",
            Query(SHOWN.total("prompt_tokens_total"), "prompt tokens"),
            Query(SHOWN.total("requests_received_total"), "requests"),
            unit="none",
        ),
    ]
