"""Makes Prometheus's recording rules from the objectives.

Each promise is recorded as two rates over five minutes, of good events and of all, and as their ratio over seven
windows. Ratios of up to six hours are of the raw counters; those of a day and longer are of the recorded rates,
weighted by traffic, so that no query reads three days of every server's buckets.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from monitoring.objectives import BY, OBJECTIVES, Objective
from monitoring.promql import Queries

RAW_WINDOWS = ("5m", "30m", "1h", "2h", "6h")
LONG_WINDOWS = ("1d", "3d")

QUANTILES: tuple[tuple[float, str, str, dict[str, str]], ...] = (
    (0.5, "inter_token_latency_seconds", "itl:p50", {}),
    (0.99, "inter_token_latency_seconds", "itl:p99", {}),
    (0.99, "stream_gap_seconds", "stream_gap:p99", {}),
    (0.95, "time_to_first_token_seconds", "ttft:p95", {"streamed": "true"}),
    (0.95, "queue_wait_seconds", "queue_wait:p95", {}),
)

Rule = dict[str, Any]
Group = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What differs from one installation to another, as text: a chart puts placeholders here."""

    selector: str = ""  # matchers of the servers' series
    recorded_selector: str = ""  # of the series that these rules record, by namespace, job and model_name
    targets: str = 'job=~".*roseinfer.*"'  # matchers of the targets that must be there
    gpu_selector: str = ""  # matchers of the GPUs' series
    runbook: str = "docs/operations.md"
    grafana: str = ""  # what stands before /d/roseinfer-…
    start_s: str = "300"  # half of what a start may take: when all of it is over, the server is ended, and starts again
    drain_s: str = "60"  # half of what a drain may take
    objectives: tuple[Objective, ...] = field(default=OBJECTIVES)

    def over(self, window: str) -> Queries:
        return Queries(window, pods=self.selector)

    def recorded(self, name: str) -> str:
        """A recorded series, of these servers alone."""
        return f"roseinfer:{name}" + (f"{{{self.recorded_selector}}}" if self.recorded_selector else "")


def with_targets(objectives: tuple[Objective, ...], **targets: tuple[str, str]) -> tuple[Objective, ...]:
    """The objectives with other thresholds and wanted shares: `ttft=("0.25", "0.995")`."""
    return tuple(
        replace(each, threshold=targets[each.key][0], wanted=targets[each.key][1]) if each.key in targets else each
        for each in objectives
    )


def recorded(name: str, expression: str, **labels: str) -> Rule:
    return {"record": f"roseinfer:{name}", "expr": expression, **({"labels": labels} if labels else {})}


def recording_groups(parameters: Parameters) -> list[Group]:
    groups = [_objective(each, parameters) for each in parameters.objectives]
    over = parameters.over("5m")
    quantiles = [
        recorded(f"{name}_rate5m", over.quantile(share, metric, BY, **matchers))
        for share, metric, name, matchers in QUANTILES
    ]
    return [*groups, {"name": "roseinfer-quantiles", "rules": quantiles}]


def _objective(objective: Objective, parameters: Parameters) -> Group:
    """Rates come first: the rules of a group are evaluated in their order, and the long ratios read them."""
    key, over = objective.key, parameters.over("5m")
    rules = [
        recorded(f"{key}_good:rate5m", objective.good_rate(over)),
        recorded(f"{key}_all:rate5m", objective.all(over)),
        # With the labels of its servers: two installations may want different shares.
        recorded(
            "objective:ratio", f"0 * {parameters.recorded(f'{key}_all:rate5m')} + {objective.wanted}", objective=key
        ),
    ]
    for window in RAW_WINDOWS:
        over = parameters.over(window)
        rules.append(
            recorded(f"{key}_good:ratio_rate{window}", f"({objective.good_rate(over)}) / ({objective.all(over)})")
        )
    for window in LONG_WINDOWS:
        rates = (parameters.recorded(f"{key}_{kind}:rate5m") for kind in ("good", "all"))
        good, every = (f"sum_over_time({rate}[{window}])" for rate in rates)
        rules.append(recorded(f"{key}_good:ratio_rate{window}", f"{good} / {every}"))
    return {"name": f"roseinfer-{key}", "rules": rules}
