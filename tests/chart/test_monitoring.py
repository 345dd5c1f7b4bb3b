"""The rules of a release as Prometheus reads them: its own series, its own objectives, and promtool's verdict."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from roseinfer.observe.metrics.catalogue import CATALOGUE
from tests.chart.conftest import ExampleOf
from tests.chart.helm_process import HelmProcess, Object
from tests.conftest import require_tool

SELECTOR = 'namespace="serving",pod=~"demo-roseinfer-[a-z0-9]{1,10}-[a-z0-9]{5}"'


def rules_of(spec: Object) -> dict[str, Object]:
    """Name of the series or alert -> rule; the last of those that share one."""
    return {rule.get("record") or rule["alert"]: rule for group in spec["groups"] for rule in group["rules"]}


@pytest.fixture(scope="module")
def spec(example: ExampleOf) -> Object:
    found: Object = example("prometheus-rule").one("PrometheusRule")["spec"]
    return found


def promtool_accepts(spec: Object, file: Path) -> bool:
    file.write_text(yaml.safe_dump(spec))
    command = [require_tool("promtool"), "check", "rules", str(file)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_promtool_accepts_the_rules(spec: Object, tmp_path: Path) -> None:
    assert promtool_accepts(spec, tmp_path / "rules.yaml")
    broken = yaml.safe_load(yaml.safe_dump(spec).replace("rate(", "rat("))
    assert not promtool_accepts(broken, tmp_path / "rules.yaml"), "it would accept anything"


def test_no_placeholder_is_left(spec: Object) -> None:
    assert "@" not in yaml.safe_dump(spec)


def test_objectives_are_those_of_the_values(spec: Object) -> None:
    rules = rules_of(spec)
    assert f'le="1.0",streamed="true",{SELECTOR}' in rules["roseinfer:ttft_good:rate5m"]["expr"]
    assert f'le="0.1",{SELECTOR}' in rules["roseinfer:itl_good:rate5m"]["expr"]
    burns = {key: rules[f"Roseinfer{key}BudgetBurnFast"]["expr"] for key in ("TTFT", "ITL", "Availability")}
    assert "(1 - 0.95)" in burns["TTFT"]
    assert "(1 - 0.999)" in burns["ITL"]
    assert "(1 - 0.9995)" in burns["Availability"]


def test_alerts_come_before_kubernetes_ends_a_long_start_or_drain(helm: HelmProcess) -> None:
    lifecycle = {"drainTimeoutSeconds": 90}
    values = {"prometheusRule": {"enabled": True}, "probes": {"startup": {"periodSeconds": 2}}, "lifecycle": lifecycle}
    release = helm.render(values)
    rules = rules_of(release.one("PrometheusRule")["spec"])
    assert rules["RoseinferStuckStarting"]["for"] == "600s", "of 1200"
    assert rules["RoseinferStuckDraining"]["for"] == "45s", "of 90"
    assert release.pod["spec"]["terminationGracePeriodSeconds"] > 90


def test_a_release_has_its_objectives_and_its_knee_on_its_dashboards(helm: HelmProcess) -> None:
    slo = {"ttft": {"thresholdSeconds": 2.5, "objective": 0.95}, "availability": {"objective": 0.9995}}
    values = {
        "dashboards": {"enabled": True},
        "prometheusRule": {"slo": slo},
        "autoscaling": {"kneeConcurrency": 96, "targetShare": 1},
    }
    release = helm.render(values)
    boards = {
        kind: json.loads(next(iter(release.one("ConfigMap", f"-dashboard-{kind}")["data"].values())))
        for kind in ("service", "rollout")
    }
    panels = {panel["title"]: panel for board in boards.values() for panel in board["panels"]}

    def steps_of(title: str) -> list[float]:
        return [step["value"] for step in panels[title]["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]]

    assert steps_of("Time to first token: good") == [pytest.approx(1 - 14.4 * 0.05), 0.95]
    assert steps_of("Inter-token latency: good") == [pytest.approx(1 - 14.4 * 0.01), 0.99]
    assert steps_of("Availability: good") == [pytest.approx(1 - 14.4 * 0.0005), 0.9995]
    assert steps_of("Demand of a replica") == [96]
    chosen = {each["name"]: each.get("current") for each in boards["service"]["templating"]["list"]}
    assert chosen["ttft"]["value"] == "2.5"


@pytest.mark.parametrize(("timeout_s", "stalled"), [(None, "5"), (240, "40"), (1.5, "0.25")])
def test_a_stall_is_a_share_of_what_a_step_may_take(helm: HelmProcess, timeout_s: float | None, stalled: str) -> None:
    engine = {} if timeout_s is None else {"step_timeout_s": timeout_s}
    release = helm.render({"prometheusRule": {"enabled": True}, "config": {"engine": engine}})
    expression = rules_of(release.one("PrometheusRule")["spec"])["RoseinferEngineStalled"]["expr"]
    assert expression.endswith(f"> {stalled}")


def test_every_rule_is_about_this_release(spec: Object) -> None:
    """Series of the servers are selected by pod; what is recorded of them by namespace."""
    for rule in rules_of(spec).values():
        if rule.get("record") != "ours:generated:rate5m":  # the example's own
            assert "serving" in rule["expr"], rule


def pod_of(deployment: str, hash_length: int) -> str:
    """A pod's name as Kubernetes makes it from its ReplicaSet's: cut at 58, and 5 characters at random behind it."""
    replica_set = f"{deployment}-{'5d8f9c7b6x'[:hash_length]}"
    return f"{replica_set}-"[: 63 - 5] + "x2x4z"


HASH_LENGTHS = range(1, 11)  # a number of 32 bits in decimal digits, each written as another character


@pytest.mark.parametrize("length", range(1, 64))
def test_pods_are_selected_whatever_their_names_length(helm: HelmProcess, length: int) -> None:
    """By each rule and by the autoscaler; the pods of a release whose name only begins so are not."""
    values = {
        "fullnameOverride": ("roseinfer-" + "name" * 20)[:length],
        "metrics": {"scrapedElsewhere": True, "compat": "vllm"},
        "networkPolicy": {"enabled": False},
        "prometheusRule": {"enabled": True},
        "autoscaling": {"type": "keda", "keda": {"serverAddress": "http://prometheus:9090"}},
    }
    release = helm.render(values)
    expressions = [rule["expr"] for rule in rules_of(release.one("PrometheusRule")["spec"]).values()]
    expressions += [each["metadata"]["query"] for each in release.one("ScaledObject")["spec"]["triggers"]]
    (pattern,) = {found for text in expressions for found in re.findall(r'pod=~"([^"]+)"', text)}
    name = release.one("Deployment")["metadata"]["name"]
    pods = [pod_of(name, hash_length) for hash_length in HASH_LENGTHS]
    assert [pod for pod in pods if not re.fullmatch(pattern, pod)] == []
    others = [f"{name}{more}" for more in ("-b", "-blue", "-blue-2", "b") if len(name + more) <= 50]
    neighbours = [pod_of(other, hash_length) for other in others for hash_length in HASH_LENGTHS]
    assert [pod for pod in neighbours if re.fullmatch(pattern, pod)] == []


@pytest.mark.parametrize("monitor", ["serviceMonitor", "podMonitor"])
def test_missing_targets_are_missed_by_their_job(helm: HelmProcess, monitor: str) -> None:
    values = {
        "metrics": {monitor: {"enabled": True}},
        "networkPolicy": {"enabled": False},
        "prometheusRule": {"enabled": True},
    }
    release = helm.render(values)
    rules = rules_of(release.one("PrometheusRule")["spec"])
    (found,) = [*release.of("ServiceMonitor"), *release.of("PodMonitor")]
    (endpoint,) = found["spec"].get("endpoints") or found["spec"]["podMetricsEndpoints"]
    (job,) = [each["replacement"] for each in endpoint["relabelings"] if each.get("targetLabel") == "job"]
    waiting = {"action": "drop", "sourceLabels": ["__meta_kubernetes_pod_phase"], "regex": "Pending"}
    assert waiting in endpoint["relabelings"], "a pod that waits for its model would page as missing"
    missing = rules["RoseinferTargetMissing"]["expr"]
    assert f'up{{namespace="serving",job="{job}"}}' in missing
    assert f"kube_pod_init_container_status_running{{{SELECTOR}}} == 1" in missing
    assert f"time() - kube_pod_created{{{SELECTOR}}} < 3600" in missing, "model.timeoutSeconds"


def test_two_releases_record_and_judge_their_own(helm: HelmProcess) -> None:
    """Scraped by one job and with one model, they would else record the same series twice, which Prometheus drops."""
    values = {
        "metrics": {"scrapedElsewhere": True},
        "networkPolicy": {"enabled": False},
        "prometheusRule": {"enabled": True},
    }
    for name in ("one", "other"):
        release = helm.render(values, release=name)
        groups = release.one("PrometheusRule")["spec"]["groups"]
        recorded = [rule for group in groups for rule in group["rules"] if "record" in rule]
        assert recorded
        assert {rule["labels"]["release"] for rule in recorded} == {f"{name}-roseinfer"}
        reading = [
            rule["expr"] for group in groups for rule in group["rules"] if re.search("roseinfer:[a-z]", rule["expr"])
        ]
        assert reading
        for expression in reading:
            for found in re.findall(r"roseinfer:[a-z0-9_:]+(\{[^}]*\})?", expression):
                assert f'release="{name}-roseinfer"' in found


def test_vllms_latencies_are_recorded_from_ours(spec: Object) -> None:
    """And its gauges are not: the pods' pages have them, and Prometheus keeps one sample of a series."""
    rules = rules_of(spec)
    theirs = {name for name in rules if name.startswith("vllm:")}
    assert not theirs & {row.name for row in CATALOGUE}
    assert rules["vllm:time_to_first_token_seconds_sum"]["expr"] == (
        f"roseinfer_engine_time_to_first_token_seconds_sum{{{SELECTOR}}}"
    )
    parts = {name.rpartition("_")[2] for name in theirs if name.startswith("vllm:time_to_first_token_seconds")}
    assert parts == {"bucket", "sum", "count"}


def test_links_lead_to_grafana_and_the_runbook(spec: Object) -> None:
    annotations = rules_of(spec)["RoseinferTTFTBudgetBurnFast"]["annotations"]
    assert annotations["dashboard_url"] == "https://example.com/grafana/d/roseinfer-service"
    assert annotations["runbook_url"].endswith("operations.md#roseinferttftbudgetburnfast")


def test_a_dashboard_of_a_release_shows_what_the_rules_recorded_of_it(helm: HelmProcess) -> None:
    """Another release in the namespace has budgets of its own; rules that name no release are read, too."""
    boards = [
        json.loads(text)
        for each in helm.render({"dashboards": {"enabled": True}}).of("ConfigMap")
        if "-dashboard-" in each["metadata"]["name"]
        for text in each["data"].values()
    ]
    panels = [panel for board in boards for panel in board["panels"]]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    expressions += [each["expr"] for board in boards for each in board["annotations"]["list"]]
    found = [each for text in expressions for each in re.findall(r"(?:roseinfer:[a-z0-9_:]+|ALERTS)\{[^}]*\}", text)]
    assert len(found) >= 20
    assert [each for each in found if 'release=~"demo-roseinfer|"' not in each] == []
