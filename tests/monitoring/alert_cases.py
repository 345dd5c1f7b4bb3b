"""For each alert a history that must fire it, and one near it that must not; knows Prometheus's notation for series.

`a+bxn` is n+1 values from a in steps of b, one a minute; `axn` is n+1 times a.
"""

from dataclasses import dataclass

from monitoring.objectives import OBJECTIVES, Objective

SERVICE = {"namespace": "demo", "job": "roseinfer", "model_name": "tiny"}
POD = {**SERVICE, "instance": "10.0.0.7:8001", "pod": "roseinfer-0"}
TARGET = {"job": "roseinfer", "namespace": "demo", "instance": "10.0.0.7:8001", "pod": "roseinfer-0"}
OTHER_TARGET = {**TARGET, "instance": "10.0.0.8:8001", "pod": "roseinfer-1"}
KUBELET = {"namespace": "demo", "pod": "roseinfer-0", "container": "server", "probe_type": "Liveness"}
GPU = {"Hostname": "node-1", "gpu": "3"}

MINUTES = {"Fast": 8, "Slow": 25, "Ticket": 75}  # a little longer than what each is held for

History = dict[str, str]
"""Series -> its values, one a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertCase:
    """Evaluated at minute `at`. `labels` are those of the alert beside its severity; `told` is its description."""

    alert: str
    fires: History
    silent: History
    at: int
    labels: dict[str, str]
    told: str


def series(name: str, labels: dict[str, str], **more: str) -> str:
    matchers = ",".join(f'{label}="{value}"' for label, value in {**labels, **more}.items())
    return f"{name}{{{matchers}}}"


def _burn(objective: Objective, name: str, windows: tuple[str, str], shares: tuple[str, str], told: str) -> AlertCase:
    """Silent when the short window has recovered: what burnt has stopped."""

    def history(long: str, short: str) -> History:
        good, traffic = f"roseinfer:{objective.key}_good:ratio_rate", f"roseinfer:{objective.key}_all:rate5m"
        return {
            series(good + windows[0], SERVICE): f"{long}x90",
            series(good + windows[1], SERVICE): f"{short}x90",
            series(traffic, SERVICE): "5x90",
        }

    return AlertCase(
        alert=f"Roseinfer{objective.name}BudgetBurn{name}",
        fires=history(shares[0], shares[0]),
        silent=history(*shares),
        at=MINUTES[name],
        labels=SERVICE,
        told=told,
    )


_LATE = "first tokens came later than 0.5 s (model tiny; wanted are 0.99 good)."
_LONG = "gaps between tokens were longer than 0.05 s (model tiny; wanted are 0.99 good)."
_LOST = "requests failed or were refused (model tiny; wanted are 0.999 good)."
_TWO, _FIVE = "A budget of 30 days lasts two days at this rate.", "A budget of 30 days lasts five days at this rate."
_GONE = "The budget of 30 days will be gone before they are over."
FAST, SLOW, TICKET = ("1h", "5m"), ("6h", "30m"), ("3d", "6h")

TTFT, ITL, AVAILABILITY = OBJECTIVES
BURNS = (
    _burn(TTFT, "Fast", FAST, ("0.8", "0.995"), f"20% of the last 1h's {_LATE} {_TWO}"),
    _burn(TTFT, "Slow", SLOW, ("0.9", "0.995"), f"10% of the last 6h's {_LATE} {_FIVE}"),
    _burn(TTFT, "Ticket", TICKET, ("0.98", "0.995"), f"2% of the last 3d's {_LATE} {_GONE}"),
    _burn(ITL, "Fast", FAST, ("0.75", "0.995"), f"25% of the last 1h's {_LONG} {_TWO}"),
    _burn(ITL, "Slow", SLOW, ("0.9", "0.995"), f"10% of the last 6h's {_LONG} {_FIVE}"),
    _burn(ITL, "Ticket", TICKET, ("0.98", "0.995"), f"2% of the last 3d's {_LONG} {_GONE}"),
    _burn(AVAILABILITY, "Fast", FAST, ("0.95", "0.9995"), f"5% of the last 1h's {_LOST} {_TWO}"),
    _burn(AVAILABILITY, "Slow", SLOW, ("0.99", "0.9995"), f"1% of the last 6h's {_LOST} {_FIVE}"),
    _burn(AVAILABILITY, "Ticket", TICKET, ("0.998", "0.9995"), f"0.2% of the last 3d's {_LOST} {_GONE}"),
)


def _quantile(name: str, value: str) -> History:
    return {series(f"roseinfer:{name}_rate5m", SERVICE): f"{value}x60"}


def _gaps(cause: str, seconds: int) -> History:
    """Of sixty seconds of gaps in a minute, so many with that cause."""
    return {
        series("roseinfer_gap_seconds_total", POD, cause="decode"): f"0+{60 - seconds}x60",
        series("roseinfer_gap_seconds_total", POD, cause=cause): f"0+{seconds}x60",
    }


def _kept(usage: str, preemptions: str) -> History:
    return {
        series("roseinfer_kv_cache_usage_ratio", POD): f"{usage}x60",
        series("roseinfer_preemptions_total", POD): preemptions,
    }


def _queued(waiting: str, wait_s: str) -> History:
    return {series("roseinfer_num_requests_waiting", POD): waiting, **_quantile("queue_wait:p95", wait_s)}


def _state(**values: str) -> History:
    return {series("roseinfer_lifecycle_state", POD, state=state): value for state, value in values.items()}


OTHERS = (
    AlertCase(
        alert="RoseinferEngineStalled",
        fires={series("roseinfer_engine_stalled_seconds", POD): "0x10 27 stale"},  # and the process ended
        silent={series("roseinfer_engine_stalled_seconds", POD): "0x10 4 0x20"},  # a long step
        at=12,
        labels=POD,
        told="The engine of 10.0.0.7:8001 roseinfer-0 had work and made no step for 27s.",
    ),
    AlertCase(
        alert="RoseinferEngineRestarted",
        fires={series("roseinfer_start_time_seconds", POD): "100x10 _ 760x20"},
        silent={  # a rollout: another pod, with a start of its own
            series("roseinfer_start_time_seconds", POD): "100x10 stale",
            series("roseinfer_start_time_seconds", {**POD, "pod": "roseinfer-1"}): "_x9 640x20",
        },
        at=14,
        labels=POD,
        told="10.0.0.7:8001 roseinfer-0 was started again within the last 10 minutes; its requests were lost.",
    ),
    AlertCase(
        alert="RoseinferLivezFailing",
        fires={series("prober_probe_total", KUBELET, result="failed"): "0x10 1+1x10"},
        silent={
            series("prober_probe_total", KUBELET, result="failed"): "3x30",
            series("prober_probe_total", KUBELET, result="successful"): "0+6x30",
        },
        at=12,
        labels={"namespace": "demo", "pod": "roseinfer-0"},
        told="/livez of demo roseinfer-0 failed within the last 3 minutes.",
    ),
    AlertCase(
        alert="RoseinferQueueGrowing",
        fires=_queued("0+60x60", "10"),
        silent=_queued("0+60x60", "5"),  # it grows, and no request waits long
        at=30,
        labels=SERVICE,
        told="The queue of model tiny grows by 1 requests a second, and one in twenty waits for more than 5 s.",
    ),
    AlertCase(
        alert="RoseinferKVCacheSaturated",
        fires=_kept("0.98", "0+1x60"),
        silent=_kept("0.98", "7x60"),  # full, and no sequence is preempted
        at=30,
        labels=POD,
        told="98% of the KV blocks of 10.0.0.7:8001 roseinfer-0 were in use, and sequences lost theirs.",
    ),
    AlertCase(
        alert="RoseinferTelemetryDropped",
        fires={series("roseinfer_telemetry_dropped_total", TARGET, signal="span"): "0+2x60"},
        silent={series("roseinfer_telemetry_dropped_total", TARGET, signal="span"): "0x10 9x50"},  # once, and no more
        at=40,
        labels={"namespace": "demo", "job": "roseinfer", "signal": "span"},
        told="30 facts of kind span were lost in 15 minutes.",
    ),
    AlertCase(
        alert="RoseinferJitter",
        fires={
            **_quantile("itl:p99", "0.06"),
            **_quantile("stream_gap:p50", "0.01"),
            series("roseinfer_slow_gaps_total", POD, cause="prefill_of_others"): "0+9x60",
            series("roseinfer_slow_gaps_total", POD, cause="gc"): "0+1x60",
        },
        silent={
            **_quantile("itl:p99", "0.02"),
            **_quantile("stream_gap:p50", "0.002"),
        },  # ten times, and still too short to see
        at=30,
        labels=SERVICE,
        told="p99 of the inter-token latency is 6 times the usual gap of a stream (model tiny). Most slow gaps: "
        "prefill_of_others.",
    ),
    AlertCase(
        alert="RoseinferH2DSlow",
        fires=_gaps("h2d_copy", 12),
        silent=_gaps("h2d_copy", 3),
        at=30,
        labels=SERVICE,
        told="20% of the time between tokens goes to copies to the device (model tiny).",
    ),
    AlertCase(
        alert="RoseinferEventLoopLag",
        fires={**_gaps("event_loop", 15), **_quantile("stream_gap:p99", "0.08")},
        silent={**_gaps("event_loop", 15), **_quantile("stream_gap:p99", "0.02")},  # much of very little
        at=30,
        labels=SERVICE,
        told="25% of the time between tokens goes to the front end (model tiny).",
    ),
    AlertCase(
        alert="RoseinferStuckStarting",
        fires=_state(loading="1x8 0x60", warmup="0x8 1x60", ready="0x60"),  # from stage to stage, and never ready
        silent=_state(loading="1x8 0x60", ready="0x8 1x60"),
        at=14,
        labels=POD,
        told="10.0.0.7:8001 roseinfer-0 has been starting for more than 300 s, half of what a start may take.",
    ),
    AlertCase(
        alert="RoseinferStuckDraining",
        fires=_state(draining="1x60"),
        silent=_state(draining="0x3 1x0 0x60"),
        at=5,
        labels={**POD, "state": "draining"},
        told="10.0.0.7:8001 roseinfer-0 has been draining for more than 60 s, half of what a drain may take.",
    ),
    AlertCase(
        alert="RoseinferTargetsVanished",
        fires={series("up", TARGET): "1x10 stale", series("up", OTHER_TARGET): "1x10 0x20"},
        silent={series("up", TARGET): "1x10 stale", series("up", OTHER_TARGET): "1x30"},  # an autoscaler took one away
        at=14,
        labels={"namespace": "demo", "job": "roseinfer"},
        told="100% of the servers of job roseinfer that answered within the last 10 minutes do not answer, or are no "
        "targets any more.",
    ),
    AlertCase(
        alert="RoseinferTargetMissing",
        fires={series("up", TARGET): "1x3 0x60"},
        silent={series("up", TARGET): "1x3 0x1 1x60"},
        at=12,
        labels=TARGET,
        told="Target roseinfer 10.0.0.7:8001 does not answer, or there is no target of that job.",
    ),
    AlertCase(
        alert="RoseinferGPUXid",
        fires={series("DCGM_FI_DEV_XID_ERRORS", GPU): "0x20 79x20"},
        silent={series("DCGM_FI_DEV_XID_ERRORS", GPU): "79x40"},  # of long ago
        at=25,
        labels=GPU,
        told="GPU 3 of node-1 reported XID 79.",
    ),
)
CASES = (*BURNS, *OTHERS)
