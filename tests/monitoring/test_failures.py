"""The alerts of failures fire on what `failures.py` recorded of servers that hang and die, whenever Prometheus scrapes.

A scrape every 15 s may come in any of 15 seconds, and a stalled server is ended soon, so each of them is tried.
"""

from pathlib import Path

import msgspec
import pytest

from tests.monitoring.alert_cases import POD, TARGET, series
from tests.monitoring.failures import ABSENT_S, FAILED, RECORDED, STAMP, STRUCK_S, Record
from tests.monitoring.test_rules import PromTest, inputs, run

RECORDS = msgspec.json.decode(RECORDED.read_bytes(), type=dict[str, Record])
STALLED, RESTARTED, VANISHED, LIVEZ = (
    f"Roseinfer{name}" for name in ("EngineStalled", "EngineRestarted", "TargetsVanished", "LivezFailing")
)
INTERVALS = [(15, 15), (15, 30), (30, 30)]  # of scrapes and of evaluations, in seconds


def scraped(record: Record, interval: int, phase: int) -> dict[str, str]:
    """The series of a server that is scraped in second `phase` and each `interval` after it, in promtool's notation."""
    pages = [record.at(second) for second in range(phase, record.num_seconds, interval)]
    history = {series("up", TARGET): " ".join("0" if page is None else "1" for page in pages)}
    for name in record.changes:
        labels = {**POD, "state": FAILED[1]} if name == FAILED[0] else POD
        values, was_there = [], False
        for page in pages:
            value = None if page is None else page[name]
            if value is not None and name == STAMP:
                value -= phase  # promtool's clock begins with the first scrape
            values.append(f"{value:.2f}" if value is not None else "stale" if was_there else "_")
            was_there = value is not None
        history[series(name, labels)] = " ".join(values)
    return history


def has_fired(alert: str, at_s: int) -> PromTest:
    """Whether an alert has fired by then."""
    fired = f'count_over_time(ALERTS{{alertname="{alert}",alertstate="firing"}}[1h])'
    return {"expr": f"count({fired}) or vector(0)", "eval_time": f"{at_s}s"}


def replay(directory: Path, name: str, interval: int, evaluation: int, expected: dict[tuple[str, int], bool]) -> None:
    """Checks which alerts have fired by a second of the record, for every second in which scrapes may begin."""
    tests = []
    for phase in range(interval):
        outcomes = [
            {**has_fired(alert, at_s - phase), "exp_samples": [{"labels": "{}", "value": int(fires)}]}
            for (alert, at_s), fires in expected.items()
        ]
        history = inputs(scraped(RECORDS[name], interval, phase))
        tests.append(
            {
                "name": f"{name}, from second {phase}",
                "interval": f"{interval}s",
                "input_series": history,
                "promql_expr_test": outcomes,
            }
        )
    run(directory, ["alerts.yaml"], tests, evaluation_interval=f"{evaluation}s")


@pytest.mark.parametrize(("interval", "evaluation"), INTERVALS)
def test_an_alert_fires_before_a_hanging_server_is_gone_for_long(
    interval: int, evaluation: int, tmp_path: Path
) -> None:
    struck, late = STRUCK_S, 36 + interval + evaluation  # the end of the server, and what a scrape and a rule may take
    expected = {
        (STALLED, struck): False,
        (STALLED, struck + late): True,
        (VANISHED, struck + 36): False,
        (VANISHED, struck + late + 60 + evaluation): True,
        (RESTARTED, struck + 36 + ABSENT_S - 2): False,
        (RESTARTED, RECORDS["hang"].num_seconds): True,
    }
    replay(tmp_path, "hang", interval, evaluation, expected)


@pytest.mark.parametrize(("interval", "evaluation"), INTERVALS)
def test_a_death_is_no_stall_and_is_logged(interval: int, evaluation: int, tmp_path: Path) -> None:
    struck, end = STRUCK_S, RECORDS["death"].num_seconds
    expected = {
        (VANISHED, struck): False,
        (VANISHED, struck + 6 + interval + 60 + 2 * evaluation): True,
        (RESTARTED, struck): False,
        (RESTARTED, end): True,
        (STALLED, end): False,
    }
    replay(tmp_path, "death", interval, evaluation, expected)


@pytest.mark.parametrize(("interval", "evaluation"), INTERVALS)
def test_an_alert_names_an_engine_that_is_started_again_in_its_process(
    interval: int, evaluation: int, tmp_path: Path
) -> None:
    struck, late = STRUCK_S, 15 + interval + evaluation
    expected = {(RESTARTED, struck - 1): False, (RESTARTED, struck + late): True, (VANISHED, struck + late): False}
    replay(tmp_path, "death, restart", interval, evaluation, expected)
