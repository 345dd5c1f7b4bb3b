"""The demand query is no 0 where targets are lost, and following it replicas rise in time and fall slowly."""

import itertools
import json
import math
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monitoring import scaling
from monitoring.outputs import FOLDER, ROOT
from tests.conftest import require_tool
from tests.monitoring.alert_cases import POD, series
from tests.monitoring.autoscaler import SYNC_PERIOD_S, TOLERANCE, Autoscaler

TARGET = scaling.DEMAND_THRESHOLD
BUSY, IDLE = 300.0, 20.0
RAMP_S, HOLD_S = 600.0, 1800.0  # up within ten minutes, busy for half an hour, then idle
END_S = RAMP_S + HOLD_S + 10_800.0

Load = Callable[[float], float]
"""Seconds -> requests at once."""


def query(name: str) -> str:
    return (ROOT / FOLDER / name).read_text().splitlines()[-1]


def ramp(at_s: float) -> float:
    if at_s < RAMP_S:
        return IDLE + (BUSY - IDLE) * at_s / RAMP_S
    return BUSY if at_s < RAMP_S + HOLD_S else IDLE


def noisy(load: Load, share: float) -> Load:
    """As gauges are: each look is a little off."""
    source = random.Random(7)
    return lambda at_s: load(at_s) * source.uniform(1 - share, 1 + share)


def replay(load: Load, least: int = 1, most: int = 32) -> tuple[Autoscaler, list[tuple[float, int]]]:
    scaler = Autoscaler(TARGET, least, most, replicas=least)
    looks = [float(at_s) for at_s in range(0, int(END_S), SYNC_PERIOD_S)]
    return scaler, [(at_s, scaler.look(at_s, load(at_s))) for at_s in looks]


def directions(scaler: Autoscaler) -> list[int]:
    """+1 and -1 for each run of changes of one direction."""
    signs = [1 if change > 0 else -1 for _, change in scaler.changes]
    return [sign for sign, _ in itertools.groupby(signs)]


def test_replicas_follow_a_ramp_in_time() -> None:
    """Two minutes after a demand there are replicas for it, within the autoscaler's tolerance."""
    _, replicas = replay(ramp)
    late_s = 2 * scaling.SCALE_UP_PERIOD_S
    for at_s, count in replicas:
        if late_s <= at_s < RAMP_S + HOLD_S:
            assert count * TARGET * (1 + TOLERANCE) >= ramp(at_s - late_s), f"{count} replicas at {at_s} s"


def test_a_burst_is_met_by_doubling() -> None:
    scaler, replicas = replay(lambda _: BUSY)
    assert [count for _, count in replicas[:: scaling.SCALE_UP_PERIOD_S // SYNC_PERIOD_S]][:6] == [2, 4, 8, 16, 28, 28]
    assert directions(scaler) == [1]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_replicas_do_not_flap(share: float) -> None:
    """Up with the ramp, down after it, and never up and down between, however the gauges tremble."""
    scaler, _ = replay(noisy(ramp, share))
    assert directions(scaler) == [1, -1]


def test_replicas_go_late_and_one_by_one() -> None:
    scaler, replicas = replay(ramp)
    falls = [(at_s, change) for at_s, change in scaler.changes if change < 0]
    assert {change for _, change in falls} == {-scaling.SCALE_DOWN_PODS}
    assert falls[0][0] >= RAMP_S + HOLD_S + scaling.SCALE_DOWN_WINDOW_S
    pauses = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(falls)]
    assert min(pauses) >= scaling.SCALE_DOWN_PERIOD_S
    assert replicas[-1][1] == math.ceil(IDLE / TARGET)


def test_a_short_pause_costs_no_replica() -> None:
    """Five minutes without requests, as when clients restart: all that is there stays."""

    def paused(at_s: float) -> float:
        return 0.0 if RAMP_S + 600 <= at_s < RAMP_S + 900 else max(ramp(at_s), IDLE)

    scaler, _ = replay(lambda at_s: paused(at_s) if at_s < RAMP_S + HOLD_S else BUSY)
    assert directions(scaler) == [1]


def test_the_limits_hold() -> None:
    scaler, replicas = replay(ramp, least=2, most=5)
    assert (min(count for _, count in replicas), max(count for _, count in replicas)) == (2, 5)
    assert scaler.replicas == 2


def evaluate(directory: Path, tests: list[dict[str, Any]]) -> None:
    path = directory / "tests.json"
    path.write_text(json.dumps({"evaluation_interval": "1m", "tests": tests}))  # JSON is YAML
    done = subprocess.run(
        [require_tool("promtool"), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def case(name: str, inputs: dict[str, str], minutes_and_values: dict[int, float | None]) -> dict[str, Any]:
    """None is no element at all."""
    return {
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each, values in inputs.items()],
        "promql_expr_test": [
            {
                "expr": query(name),
                "eval_time": f"{minute}m",
                "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
            }
            for minute, value in minutes_and_values.items()
        ],
    }


def test_the_demand_is_one_element_of_all_pods(tmp_path: Path) -> None:
    """A pod that comes and one that goes included: each series ends where its pod does."""
    waiting, running = "roseinfer_num_requests_waiting", "roseinfer_num_requests_running"
    pods = {
        series(waiting, POD): "0+3x10",
        series(running, POD): "0+8x10",
        series(waiting, {**POD, "pod": "roseinfer-1"}): "_ _ _ 1x7",
        series(running, {**POD, "pod": "roseinfer-1"}): "_ _ _ 8x7",
        series(running, {**POD, "pod": "roseinfer-2"}): "5x4 stale",
    }
    lost = {each: f"{values.removesuffix(' stale')} stale" for each, values in pods.items()}
    idle = {series(waiting, POD): "0x10", series(running, POD): "0x10"}
    evaluate(
        tmp_path,
        [
            case("autoscaling.promql", pods, {0: 5.0, 2: 27.0, 4: 58.0, 6: 75.0}),
            case("autoscaling.promql", idle, {0: 0.0, 5: 0.0}),
            case("autoscaling.promql", lost, {4: 58.0, 11: None, 15: None}),
            case("autoscaling.promql", {}, {0: None, 5: None}),
            case("autoscaling.promql", {series("up", POD): "0x10"}, {3: None}),
        ],
    )


def test_the_guard_is_one_element_too(tmp_path: Path) -> None:
    name = "roseinfer_queue_wait_seconds_bucket"
    ready = {
        series("roseinfer_lifecycle_state", {**POD, "pod": f"roseinfer-{pod}"}, state=state): f"{int(state == now)}x10"
        for pod, now in enumerate(["ready", "ready", "loading"])
        for state in ("loading", "ready")
    }
    waits = ready | {
        series(name, POD, le="1.0"): "0+0x10",
        series(name, POD, le="2.5"): "0+60x10",
        series(name, POD, le="+Inf"): "0+60x10",
    }
    idle = ready | {each: "60x10" for each in waits if each not in ready}  # no request came, so there is no quantile
    lost = {each: f"{values} stale" for each, values in waits.items()}
    evaluate(
        tmp_path,
        [
            case("queue_wait.promql", waits, {5: 2 * 2.425}),  # the replica that loads takes no part
            case("queue_wait.promql", idle, {5: 0.0}),
            case("queue_wait.promql", lost, {11: None, 12: None}),
            case("queue_wait.promql", {}, {5: None}),
        ],
    )
