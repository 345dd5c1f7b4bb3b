"""The rules under promtool: every alert fires on one history and not on one near it, and ratios are what they say."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from monitoring import queries
from monitoring.outputs import FOLDER, ROOT
from tests.conftest import require_tool
from tests.monitoring.alert_cases import CASES, POD, SERVICE, AlertCase, History, series

RULES = ROOT / FOLDER / "rules"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}

PromTest = dict[str, Any]


def run(directory: Path, rule_files: list[str], tests: list[PromTest], evaluation_interval: str = "1m") -> None:
    path = directory / "tests.json"
    files = [str(RULES / name) for name in rule_files]
    content = {"rule_files": files, "evaluation_interval": evaluation_interval, "tests": tests}
    path.write_text(json.dumps(content))  # JSON is YAML
    done = subprocess.run(
        [require_tool("promtool"), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def inputs(history: History) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in history.items()]


def alert_test(case: AlertCase, history: History, *, fires: bool) -> PromTest:
    rule = ALERTS[case.alert]
    fired = {
        "exp_labels": {**case.labels, **rule["labels"]},
        "exp_annotations": {**rule["annotations"], "description": case.told},
    }
    expected = {"eval_time": f"{case.at}m", "alertname": case.alert, "exp_alerts": [fired] if fires else []}
    return {
        "name": f"{case.alert} {'fires' if fires else 'is silent'}",
        "interval": "1m",
        "input_series": inputs(history),
        "alert_rule_test": [expected],
    }


def test_every_alert_has_its_histories() -> None:
    assert sorted(case.alert for case in CASES) == sorted(ALERTS)


def test_every_alert_fires_and_says_what_is_wrong(tmp_path: Path) -> None:
    run(tmp_path, ["alerts.yaml"], [alert_test(case, case.fires, fires=True) for case in CASES])


def test_every_alert_is_silent_when_it_is_nearly_wrong(tmp_path: Path) -> None:
    run(tmp_path, ["alerts.yaml"], [alert_test(case, case.silent, fires=False) for case in CASES])


def no_target_test(history: History, *, fires: bool, at: int = 12) -> PromTest:
    """What RoseinferTargetMissing says where no target of ours is known."""
    name = "RoseinferTargetMissing"
    told = "Target   does not answer, or there is no target of that job."
    annotations = {**ALERTS[name]["annotations"], "description": told}
    fired = [{"exp_labels": ALERTS[name]["labels"], "exp_annotations": annotations}]
    expected = {"eval_time": f"{at}m", "alertname": name, "exp_alerts": fired if fires else []}
    others = {series("up", {"job": "node"}): "1x200"}
    return {"interval": "1m", "input_series": inputs(others | history), "alert_rule_test": [expected]}


def test_an_unknown_target_counts_as_missing(tmp_path: Path) -> None:
    run(tmp_path, ["alerts.yaml"], [no_target_test({}, fires=True)])


def test_no_target_is_missing_while_the_model_is_fetched(tmp_path: Path) -> None:
    def pod(name: str, running: str) -> History:
        labels = {"namespace": "demo", "pod": name}
        return {
            series("kube_pod_created", labels): "0x200",  # promtool's clock begins at 0
            series("kube_pod_init_container_status_running", labels, container="fetch-model"): running,
            series("kube_pod_init_container_status_running", labels, container="istio-init"): "0x200",
        }

    tests = [
        no_target_test(pod("roseinfer-0", "1x200"), fires=False),
        no_target_test(pod("roseinfer-0", "1x200"), fires=False, at=62),
        no_target_test(pod("roseinfer-0", "1x200"), fires=True, at=70),  # it takes longer than it may
        no_target_test(pod("roseinfer-0", "1x3 0x200"), fires=True, at=12),  # it ended, and there is still no target
        no_target_test(pod("other-0", "1x200"), fires=True),
    ]
    run(tmp_path, ["alerts.yaml"], tests)


def ratio(name: str, value: float) -> PromTest:
    labels = ",".join(f'{label}="{text}"' for label, text in SERVICE.items())
    return {
        "expr": f"round(roseinfer:{name}, 0.001)",
        "eval_time": "110m",
        "exp_samples": [{"labels": f"{{{labels}}}", "value": value}],
    }


def test_good_shares_are_recorded_for_every_window(tmp_path: Path) -> None:
    """Nine of ten streams begin in time; of 40 requests 30 are served, and 5 of the others are clients' mistakes."""
    history = {
        series("roseinfer_time_to_first_token_seconds_bucket", POD, le="0.5", streamed="true"): "0+9x120",
        # Answers that are not streamed are written when they are complete, and late by no promise.
        series("roseinfer_time_to_first_token_seconds_bucket", POD, le="0.5", streamed="false"): "0+0x120",
        series("roseinfer_time_to_first_token_seconds_count", POD, streamed="false"): "0+50x120",
        series("roseinfer_time_to_first_token_seconds_count", POD, streamed="true"): "0+10x120",
        series("roseinfer_requests_total", POD, finish_reason="stop"): "0+20x120",
        series("roseinfer_requests_total", POD, finish_reason="abort"): "0+10x120",
        series("roseinfer_requests_total", POD, finish_reason="error"): "0+1x120",
        series("roseinfer_requests_total", POD, finish_reason="rejected"): "0+9x120",
        series("roseinfer_requests_rejected_total", POD, code="overloaded"): "0+4x120",
        series("roseinfer_requests_rejected_total", POD, code="invalid_value"): "0+5x120",
    }
    windows = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
    expected = [ratio(f"ttft_good:ratio_rate{window}", 0.9) for window in windows]
    expected += [ratio(f"avail_good:ratio_rate{window}", 0.857) for window in windows]  # 30 of 35
    run(
        tmp_path,
        ["recording.yaml"],
        [{"interval": "1m", "input_series": inputs(history), "promql_expr_test": expected}],
    )


def test_a_long_window_is_weighted_by_traffic(tmp_path: Path) -> None:
    """An hour with 600 gaps a minute, all good, then one with 60 a minute, half of them good."""
    history = {
        series("roseinfer_inter_token_latency_seconds_bucket", POD, le="0.05"): "0+600x60 36030+30x60",
        series("roseinfer_inter_token_latency_seconds_count", POD): "0+600x60 36060+60x60",
    }
    day = {
        "expr": "roseinfer:itl_good:ratio_rate1d > 0.94 < 0.97",  # 0.95; the mean of the ratios would be 0.75
        "eval_time": "120m",
        "exp_samples": [],
    }
    tests = [{"interval": "1m", "input_series": inputs(history), "promql_expr_test": [counted(day)]}]
    run(tmp_path, ["recording.yaml"], tests)


def counted(test: PromTest) -> PromTest:
    """How many elements an expression has instead of their values."""
    return {**test, "expr": f"count({test['expr']})", "exp_samples": [{"labels": "{}", "value": 1}]}


def test_an_alert_names_the_cause_of_its_own_service_and_none_where_no_gap_is_slow(tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.alert == "RoseinferJitter"]
    slow, sentence = "roseinfer_slow_gaps_total", " Most slow gaps: prefill_of_others."
    others = {series(slow, {**POD, "namespace": "other"}, cause="gc"): "0+99x60"}
    rest = {name: values for name, values in case.fires.items() if not name.startswith(slow)}
    none = {series(slow, POD, cause=cause): "7x60" for cause in ("decode", "gc")}
    assert case.told.endswith(sentence)
    tests = [
        alert_test(case, case.fires | others, fires=True),
        alert_test(replace(case, told=case.told.removesuffix(sentence)), rest | none | others, fires=True),
    ]
    run(tmp_path, ["alerts.yaml"], tests)


def test_failed_servers_that_are_no_pods_are_named_by_their_instances(tmp_path: Path) -> None:
    name, instances = "RoseinferLivezFailing", ("10.0.0.7:8001", "10.0.0.8:8001")
    labels = {"job": "roseinfer", "model_name": "tiny", "state": "failed"}
    history = {series("roseinfer_lifecycle_state", labels, instance=each): "0x10 1x5" for each in instances}
    fired = [
        {
            "exp_labels": {"instance": each, **ALERTS[name]["labels"]},
            "exp_annotations": {
                **ALERTS[name]["annotations"],
                "description": f"/livez of  {each} failed within the last 3 minutes.",
            },
        }
        for each in instances
    ]
    expected = {"eval_time": "12m", "alertname": name, "exp_alerts": fired}
    run(
        tmp_path,
        ["alerts.yaml"],
        [{"interval": "1m", "input_series": inputs(history), "alert_rule_test": [expected]}],
    )


def test_the_age_of_the_last_step_is_not_that_of_the_scrape(tmp_path: Path) -> None:
    """A server that is busy and scraped every 15 s has made a step just before each scrape."""
    (panel,) = [each for each in queries.panels(queries.dashboards()["engine"]) if each["title"] == "Last step"]
    (target,) = queries.targets(panel, "1m", "1h")
    history = {
        series("roseinfer_engine_last_step_timestamp_seconds", POD): "0+15x20",  # promtool's clock begins at 0
        series("roseinfer_num_requests_running", POD): "3x20",
    }
    samples = [{"labels": "{}", "value": 0}]
    expected = {"expr": target.expression, "eval_time": "74s", "exp_samples": samples}
    test = {"interval": "15s", "input_series": inputs(history), "promql_expr_test": [expected]}
    run(tmp_path, ["recording.yaml"], [test])


def test_tokens_of_drafts_that_come_together_are_no_jitter(tmp_path: Path) -> None:
    """Each step makes three tokens of a stream, two of them in no time, and takes as long as the step before."""
    (case,) = [case for case in CASES if case.alert == "RoseinferJitter"]
    even = {"roseinfer_stream_gap_seconds": (0, 60), "roseinfer_inter_token_latency_seconds": (120, 180)}
    history = {}
    for name, (at_once, whole) in even.items():
        for bound, count in (("0.0005", at_once), ("0.05", at_once), ("0.075", whole), ("+Inf", whole)):
            history[series(f"{name}_bucket", POD, le=bound)] = f"0+{count}x60"
    run(tmp_path, ["recording.yaml", "alerts.yaml"], [alert_test(case, history, fires=False)])
