"""Makes Prometheus's alerts; each has a runbook and a dashboard."""

from typing import NamedTuple

from monitoring.objectives import BY, Objective
from monitoring.promql import Queries, bound, foreign
from monitoring.rules import Group, Parameters, Rule

PAGE, TICKET, INFO = "page", "ticket", "info"

# Two windows must burn at once: the long one says that it matters, the short one that it has not stopped.
BURNS = (
    ("Fast", "1h", "5m", "14.4", "2m", PAGE, "A budget of 30 days lasts two days at this rate."),
    ("Slow", "6h", "30m", "6", "15m", PAGE, "A budget of 30 days lasts five days at this rate."),
    ("Ticket", "3d", "6h", "1", "1h", TICKET, "The budget of 30 days will be gone before they are over."),
)
TRAFFIC_WINDOWS = {"Fast": "", "Slow": "[30m]", "Ticket": "[6h]"}

# The cause of most slow gaps, looked up when the alert is sent.
TOP_CAUSE = (
    "{{{{ with printf \"topk(1, sum by (cause) (increase(roseinfer_slow_gaps_total{{model_name='%s'}}[10m])))\" "
    '$labels.model_name | query }}}}{before}{{{{ . | first | label "cause" }}}}{after}{{{{ end }}}}'
)


class Handling(NamedTuple):
    """How long the condition holds before the alert is sent, its severity, and the dashboard that explains it."""

    wait: str
    severity: str
    dashboard: str


class Alert(NamedTuple):
    """A condition and its words; `name` is without the prefix."""

    name: str
    expression: str
    handling: Handling
    summary: str
    text: str

    def rule(self, parameters: Parameters) -> Rule:
        name = f"Roseinfer{self.name}"
        return {
            "alert": name,
            "expr": self.expression,
            "for": self.handling.wait,
            "labels": {"severity": self.handling.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.text,
                "runbook_url": f"{parameters.runbook}#{name.lower()}",
                "dashboard_url": f"{parameters.grafana}/d/roseinfer-{self.handling.dashboard}",
            },
        }


def alert_groups(parameters: Parameters) -> list[Group]:
    groups = {
        "objectives": [alert for objective in parameters.objectives for alert in _burn(objective, parameters)],
        "engine": _engine(parameters),
        "latency": _latency(parameters),
        "lifecycle": _lifecycle(parameters),
        "gpu": [_xid(parameters)],
    }
    return [
        {"name": f"roseinfer-{name}", "rules": [alert.rule(parameters) for alert in alerts]}
        for name, alerts in groups.items()
    ]


def _burn(objective: Objective, parameters: Parameters) -> list[Alert]:
    alerts = []
    late = f" {objective.threshold} s" if objective.threshold else ""
    for name, long, short, factor, wait, severity, meaning in BURNS:
        allowed = f"{factor} * (1 - {objective.wanted})"
        ratios = (parameters.recorded(f"{objective.key}_good:ratio_rate{window}") for window in (long, short))
        bad = [f"1 - {ratio} > {allowed}" for ratio in ratios]
        traffic = parameters.recorded(f"{objective.key}_all:rate5m")
        if TRAFFIC_WINDOWS[name]:
            traffic = f"avg_over_time({traffic}{TRAFFIC_WINDOWS[name]})"
        alerts.append(
            Alert(
                f"{objective.name}BudgetBurn{name}",
                "\nand ".join([*bad, f"{traffic} > {objective.min_per_second}"]),
                Handling(wait, severity, "service"),
                summary=f"{objective.title}: the error budget burns at {factor} times the allowed pace",
                text=f"{{{{ $value | humanizePercentage }}}} of the last {long}'s {objective.bad}{late} "
                f"(model {{{{ $labels.model_name }}}}; wanted are {objective.wanted} good). {meaning}"
                + (TOP_CAUSE.format(before=" Most slow gaps: ", after=".") if objective.key == "itl" else ""),
            )
        )
    return alerts


def _engine(parameters: Parameters) -> list[Alert]:
    over = parameters.over("10m")
    last, running = over.series("engine_last_step_timestamp_seconds"), over.series("num_requests_running")
    growing = f"sum by ({BY}) (deriv({over.series('num_requests_waiting')}[10m])) > 0"
    full = f"max_over_time({over.series('kv_cache_usage_ratio')}[10m]) > 0.95"
    return [
        Alert(
            "EngineStalled",
            # Against the moment of the scrape, not of the rule: a step of half of what the engine's own watchdog allows
            # (engine.step_timeout_s, 30 s) is seen by a scrape every 15 s, and before the engine is ended for it.
            f"timestamp({last}) - {last} > 15\nand {running} > 0",
            Handling("0m", PAGE, "engine"),
            summary="An engine with running requests makes no steps",
            text="The last step of {{ $labels.instance }} {{ $labels.pod }} was {{ $value | humanizeDuration }} ago, "
            "and requests are running.",
        ),
        Alert(
            "QueueGrowing",
            f"{growing}\nand {parameters.recorded('queue_wait:p95_rate5m')} > {bound(5.0)}",
            Handling("10m", TICKET, "engine"),
            summary="More requests come than are served",
            text="The queue of model {{ $labels.model_name }} grows by {{ $value | humanize }} requests a second, and "
            "one in twenty waits for more than 5 s.",
        ),
        Alert(
            "KVCacheSaturated",
            f"{full}\nand {over.rate('preemptions_total')} > 0",
            Handling("10m", TICKET, "engine"),
            summary="The KV cache is full, and requests are preempted",
            text="{{ $value | humanizePercentage }} of the KV blocks of {{ $labels.instance }} {{ $labels.pod }} were "
            "in use, and sequences lost theirs.",
        ),
        Alert(
            "TelemetryDropped",
            f"sum by (namespace, job, signal) (increase({over.series('telemetry_dropped_total')}[15m])) > 0",
            Handling("15m", INFO, "engine"),
            summary="Spans, log lines or intervals are lost",
            text="{{ $value | humanize }} facts of kind {{ $labels.signal }} were lost in 15 minutes.",
        ),
    ]


def _share(over: Queries, causes: str) -> str:
    part = over.total("gap_seconds_total", BY, cause=causes)
    return f"{part} / {over.total('gap_seconds_total', BY)}"


def _latency(parameters: Parameters) -> list[Alert]:
    over = parameters.over("10m")
    p50, p99 = (parameters.recorded(f"itl:{name}_rate5m") for name in ("p50", "p99"))
    model = "model {{ $labels.model_name }}"
    return [
        Alert(
            "Jitter",
            f"{p99} / {p50} > 5\nand {p99} > {bound(0.025)}",
            Handling("10m", TICKET, "jitter"),
            summary="The slowest gaps between tokens are far above the usual ones",
            text=f"p99 of the inter-token latency is {{{{ $value | humanize }}}} times p50 ({model})."
            + TOP_CAUSE.format(before=" Most slow gaps: ", after="."),
        ),
        Alert(
            "H2DSlow",
            f"{_share(over, 'h2d_copy')} > 0.1",
            Handling("10m", TICKET, "jitter"),
            summary="Streams wait for copies to the GPU",
            text=f"{{{{ $value | humanizePercentage }}}} of the time between tokens goes to copies to the device "
            f"({model}).",
        ),
        Alert(
            "EventLoopLag",
            f"{_share(over, 'event_loop|detokenize|engine_outbox')} > 0.2\n"
            f"and {parameters.recorded('stream_gap:p99_rate5m')} > {bound(0.025)}",
            Handling("10m", TICKET, "jitter"),
            summary="Streams wait for the front end",
            text=f"{{{{ $value | humanizePercentage }}}} of the time between tokens goes to the front end ({model}).",
        ),
    ]


def _lifecycle(parameters: Parameters) -> list[Alert]:
    over = parameters.over("5m")
    starting = over.series("lifecycle_state", state="starting|loading|warmup")
    draining = over.series("lifecycle_state", state="draining")
    targets = f"{foreign('up')}{{{parameters.targets}}}"
    pod = "{{ $labels.instance }} {{ $labels.pod }}"
    return [
        Alert(
            "StuckStarting",
            f"sum without (state) ({starting}) == 1",
            Handling(f"{parameters.start_s}s", TICKET, "rollout"),
            summary="A server takes long to become ready",
            text=f"{pod} has been starting for more than {parameters.start_s} s, half of what a start may take.",
        ),
        Alert(
            "StuckDraining",
            f"{draining} == 1",
            Handling(f"{parameters.drain_s}s", TICKET, "rollout"),
            summary="A server takes long to drain, and may cut streams",
            text=f"{pod} has been draining for more than {parameters.drain_s} s, half of what a drain may take.",
        ),
        Alert(
            "TargetMissing",
            f"{targets} == 0\nor absent({targets})",
            Handling("5m", PAGE, "rollout"),
            summary="Prometheus does not reach a server, or knows none",
            text="Target {{ $labels.job }} {{ $labels.instance }} does not answer, or there is no target of that job.",
        ),
    ]


def _xid(parameters: Parameters) -> Alert:
    code = foreign("DCGM_FI_DEV_XID_ERRORS") + (f"{{{parameters.gpu_selector}}}" if parameters.gpu_selector else "")
    return Alert(
        "GPUXid",
        f"{code} != 0\nunless {code} == ({code} offset 15m)",
        Handling("0m", TICKET, "gpu"),
        summary="A GPU reported an error",
        text="GPU {{ $labels.gpu }} of {{ $labels.Hostname }} reported XID {{ $value }}.",
    )
