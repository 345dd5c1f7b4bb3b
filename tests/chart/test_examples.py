"""Every example is valid for the oldest and newest Kubernetes, sound as a whole, and shows what it is there for."""

import json
import re
import tarfile
from pathlib import Path

import pytest
import yaml

from monitoring import scaling
from roseinfer.config.flags import Parser, add_config_flags, values_given
from roseinfer.config.options import DEMO_MODEL, options
from roseinfer.config.sources import build, gather
from roseinfer.observe.metrics.catalogue import CATALOGUE
from tests.chart.checks import CHECKS, Check, configured
from tests.chart.conftest import ExampleOf
from tests.chart.helm_process import CHART, NEWEST, OLDEST, ROOT, HelmProcess, Object, Rendered, examples

NAMES = [path.name.removesuffix("-values.yaml") for path in examples()]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_valid(helm: HelmProcess, example: ExampleOf, name: str, version: str) -> None:
    assert helm.invalid(example(name, version), version) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: str(check.__name__))
@pytest.mark.parametrize("name", NAMES)
def test_the_release_is_sound(example: ExampleOf, name: str, check: Check) -> None:
    assert check(example(name)) == []


def test_the_oldest_version_is_the_charts(helm: HelmProcess) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"


def test_the_versions_are_the_programs() -> None:
    from roseinfer import __version__

    for path in (ROOT / "deploy" / "kserve").iterdir():
        assert set(re.findall(r"image: roseinfer:(.*)-(?:cpu|cuda)", path.read_text())) == {__version__}

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_nothing_to_complain_of(helm: HelmProcess) -> None:
    assert helm.lint() == []


def test_the_package_is_whole(helm: HelmProcess, tmp_path: Path) -> None:
    with tarfile.open(helm.package(tmp_path)) as archive:
        names = set(archive.getnames())
    wanted = {"values.schema.json", "templates/deployment.yaml", "files/picker.yaml", "files/rules.yaml", "README.md"}
    assert {f"roseinfer/{name}" for name in wanted} <= names
    assert not [name for name in names if "/ci/" in name]


def test_before_kubernetes_sleeps_the_image_does(example: ExampleOf) -> None:
    assert example("default", OLDEST).server["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", "15"]}}
    assert example("default", NEWEST).server["lifecycle"]["preStop"] == {"sleep": {"seconds": 15}}


def test_another_configuration_is_another_pod(example: ExampleOf) -> None:
    sums = [example(name).pod["metadata"]["annotations"]["checksum/config"] for name in ("default", "gpu", "mig")]
    assert len(set(sums)) == 3


def test_a_gpu(example: ExampleOf) -> None:
    release = example("gpu")
    config = configured(release)
    assert release.server["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert config.runner.device == "cuda"
    assert config.server.max_body_bytes == 16 * 2**20  # a number that Go likes to write as 1.6777216e+07
    assert release.one("Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert release.pod["spec"]["runtimeClassName"] == "nvidia"
    assert release.pod["spec"]["terminationGracePeriodSeconds"] == 15 + 300 + 2 + 5 + 5


def test_the_image_is_the_one_for_the_device(example: ExampleOf) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert example("default").server["image"] == f"roseinfer:{version}-cpu"
    assert example("gpu").server["image"] == f"roseinfer:{version}-cuda"


def test_without_a_gpu_threads_are_as_many_as_cores(helm: HelmProcess, example: ExampleOf) -> None:
    def num_threads(**values: object) -> int | None:
        return configured(helm.render({"config": {"model": {"path": "gpt2"}}, **values})).runner.num_threads

    assert num_threads() == 2  # of the request
    assert num_threads(resources={"limits": {"cpu": "3500m", "memory": "6Gi"}}) == 3
    assert num_threads(config={"model": {"path": "gpt2"}, "runner": {"num_threads": 1}}) == 1
    assert num_threads(config={"model": {"path": DEMO_MODEL}}) is None
    assert configured(example("default")).runner.num_threads is None  # the embedded model is too small for two
    assert configured(example("gpu")).runner.num_threads is None


def test_pods_wait_for_what_the_job_fetches(example: ExampleOf) -> None:
    release = example("model-cache")
    job = release.one("Job")["spec"]["template"]["spec"]["containers"][0]
    (waiting,) = release.pod["spec"]["initContainers"]
    mark = job["command"][4]
    assert mark.startswith("/models/.roseinfer/")
    assert waiting["command"] == ["python", "/scripts/prefetch.py", "wait", mark, "3600"]
    assert release.one("Job")["spec"]["activeDeadlineSeconds"] == 3600
    assert release.one("Deployment")["spec"]["progressDeadlineSeconds"] > 3600
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "hf"}}}
    assert token in job["env"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in release.server["env"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} not in job["env"]


def test_scripts_arrive_as_they_are(example: ExampleOf) -> None:
    data = example("default").one("ConfigMap", "-scripts")["data"]
    assert {name: text.rstrip() for name, text in data.items()} == {
        path.name: path.read_text().rstrip() for path in (CHART / "files").glob("*.py")
    }


def test_another_model_is_another_job(helm: HelmProcess, example: ExampleOf) -> None:
    values = yaml.safe_load((CHART / "ci" / "model-cache-values.yaml").read_text())
    values["config"]["model"]["revision"] = "other"
    other = helm.render(values).one("Job")
    assert other["metadata"]["name"] != example("model-cache").one("Job")["metadata"]["name"]


def test_the_trigger_counts_this_releases_requests(example: ExampleOf) -> None:
    demand, wait = example("keda").one("ScaledObject")["spec"]["triggers"]
    selector = 'namespace="serving",pod=~"demo-roseinfer-[a-z0-9]{1,10}-[a-z0-9]{5}"'
    assert selector in demand["metadata"]["query"]
    assert "$" not in demand["metadata"]["query"] + wait["metadata"]["query"]
    assert demand["metadata"]["threshold"] == "11"  # 0.7 of 17, rounded down
    pattern = re.search(r'pod=~"([^"]+)"', demand["metadata"]["query"])
    assert pattern
    assert re.fullmatch(pattern.group(1), "demo-roseinfer-5d8f9c7b6-x2x4z")
    assert not re.fullmatch(pattern.group(1), "demo-roseinfer-canary-5d8f9c7b6-x2x4z")


def test_an_empty_answer_is_an_error_and_no_zero(example: ExampleOf) -> None:
    """Where all targets are lost, KEDA counts towards the fallback; the queries make no 0 of nothing."""
    triggers = example("keda").one("ScaledObject")["spec"]["triggers"]
    assert [each["metadata"]["ignoreNullValues"] for each in triggers] == ["false", "false"]
    assert not [each for each in triggers if "vector(" in each["metadata"]["query"]]


@pytest.mark.parametrize("behavior", ["", "currentReplicasIfHigher"])
def test_the_fallbacks_behavior_is_for_kedas_that_know_it(helm: HelmProcess, behavior: str) -> None:
    values = yaml.safe_load((CHART / "ci" / "keda-values.yaml").read_text())
    values["autoscaling"]["keda"]["fallback"] = {"behavior": behavior}
    release = helm.render(values)
    expected = {"failureThreshold": 3, "replicas": 2} | ({"behavior": behavior} if behavior else {})
    assert release.one("ScaledObject")["spec"]["fallback"] == expected
    assert helm.invalid(release, NEWEST) == []


def test_the_hpa_asks_for_the_same_demand(example: ExampleOf) -> None:
    external = example("hpa").one("HorizontalPodAutoscaler")["spec"]["metrics"][0]["external"]
    assert external["target"] == {"type": "AverageValue", "averageValue": "32"}
    assert external["metric"]["selector"]["matchLabels"] == {"job": "demo-roseinfer"}


def test_both_autoscalers_act_as_the_replayed_one(example: ExampleOf) -> None:
    """A ramp was replayed through the autoscaler's formula with these numbers, and neither flapped nor came late."""
    behaviors = [
        example("hpa").one("HorizontalPodAutoscaler")["spec"]["behavior"],
        example("keda").one("ScaledObject")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
    ]
    for behavior in behaviors:
        (up,), (down,) = behavior["scaleUp"]["policies"], behavior["scaleDown"]["policies"]
        assert behavior["scaleUp"]["stabilizationWindowSeconds"] == scaling.SCALE_UP_WINDOW_S
        assert up == {"type": "Percent", "value": scaling.SCALE_UP_PERCENT, "periodSeconds": scaling.SCALE_UP_PERIOD_S}
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] == scaling.SCALE_DOWN_WINDOW_S
        assert down == {"type": "Pods", "value": scaling.SCALE_DOWN_PODS, "periodSeconds": scaling.SCALE_DOWN_PERIOD_S}
    demand, _ = example("keda").one("ScaledObject")["spec"]["triggers"]
    assert float(demand["metadata"]["threshold"]) == scaling.DEMAND_THRESHOLD


def test_the_picker_reads_series_that_exist(example: ExampleOf) -> None:
    release = example("inference-pool")
    picker = yaml.safe_load(release.one("ConfigMap", "-picker")["data"]["picker.yaml"])
    (extractor,) = [plugin for plugin in picker["plugins"] if plugin["type"] == "core-metrics-extractor"]
    (engine,) = extractor["parameters"]["engineConfigs"]
    named = {value for name, value in engine.items() if name.endswith("Spec")}
    assert named <= {
        f"roseinfer_{row.name}" if not row.name.startswith("roseinfer_") else row.name for row in CATALOGUE
    }
    label = extractor["parameters"]["engineLabelKey"]
    assert release.pod["metadata"]["labels"][label] == engine["name"]
    (source,) = [plugin for plugin in picker["plugins"] if plugin["type"] == "metrics-data-source"]
    assert source["parameters"] == {"interval": "500ms", "path": "/metrics/load"}
    defined = {plugin.get("name", plugin["type"]) for plugin in picker["plugins"]}
    assert {each["pluginRef"] for each in picker["schedulingProfiles"][0]["plugins"]} <= defined
    (backend,) = release.one("HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert backend["kind"] == "InferencePool"
    assert backend["name"] == release.one("InferencePool")["metadata"]["name"]


def test_dashboards_are_the_files(example: ExampleOf) -> None:
    """But for what is this release's own; what the plain files have in its place is in dashboards/."""
    maps = [found for found in example("dashboards").of("ConfigMap") if "-dashboard-" in found["metadata"]["name"]]
    shown = {name: json.loads(text) for found in maps for name, text in found["data"].items()}
    plain = {path.name: json.loads(path.read_text()) for path in (ROOT / "dashboards").glob("*.json")}
    assert {name.removeprefix("serving-demo-roseinfer-") for name in shown} == set(plain)
    for name, board in shown.items():
        assert "@" not in re.sub("@[a-z]", "", json.dumps(board))
        titles = [panel["title"] for panel in board["panels"]]
        assert titles == [panel["title"] for panel in plain[name.removeprefix("serving-demo-roseinfer-")]["panels"]]
    assert all(found["metadata"]["labels"]["grafana_dashboard"] == "1" for found in maps)


def dashboards(release: Rendered) -> dict[str, Object]:
    maps = [found for found in release.of("ConfigMap") if "-dashboard-" in found["metadata"]["name"]]
    return {name: json.loads(text) for found in maps for name, text in found["data"].items()}


def test_dashboards_follow_the_values(helm: HelmProcess) -> None:
    values = {
        "dashboards": {"enabled": True},
        "autoscaling": {"kneeConcurrency": 96},
        "prometheusRule": {"enabled": True, "slo": {"ttft": {"thresholdSeconds": 0.32}}},
    }
    release = helm.render(values)
    boards = dashboards(release)
    panels = {each["title"]: each for each in boards["serving-demo-roseinfer-rollout.json"]["panels"]}
    steps = panels["Demand of a replica"]["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert steps[-1]["value"] == 67  # 0.7 of 96, rounded down
    service = boards["serving-demo-roseinfer-service.json"]
    variables = {each["name"]: each for each in service["templating"]["list"]}
    assert variables["ttft"]["current"]["value"] == "0.32"
    assert "0.32" in variables["ttft"]["query"].split(",")
    assert variables["itl"]["current"]["value"] == "0.05"
    assert variables["namespace"]["current"]["value"] == ["serving"]
    assert re.fullmatch(variables["pod"]["allValue"], "demo-roseinfer-5d8f9c7b6-x2x4z")
    (rules,) = release.of("PrometheusRule")
    links = {
        rule["annotations"]["dashboard_url"]
        for group in rules["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert {link.rpartition("/")[2] for link in links} <= {board["uid"] for board in boards.values()}


def test_two_releases_have_dashboards_of_their_own(helm: HelmProcess) -> None:
    """A Grafana that finds one address in two files shows neither, and one file name of two releases is one file."""
    values = {"dashboards": {"enabled": True}}
    one, other = dashboards(helm.render(values, release="one")), dashboards(helm.render(values, release="other"))
    elsewhere = dashboards(helm.render(values, release="one", namespace="staging"))
    assert not set(one) & set(other)
    uids = [board["uid"] for boards in (one, other, elsewhere) for board in boards.values()]
    assert len(set(uids)) == len(uids)
    assert all(len(uid) <= 40 for uid in uids)


def test_with_a_certificate_the_api_and_the_probes_speak_tls(example: ExampleOf) -> None:
    release = example("tls")
    assert configured(release).server.tls_cert_file == "/etc/roseinfer/tls/tls.crt"
    assert release.one("Service", "demo-roseinfer")["spec"]["ports"][0]["name"] == "https"
    assert release.server["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http", "scheme": "HTTPS"}
    assert release.one("Pod")["spec"]["containers"][0]["command"][2].startswith("https:")


def test_a_certificate_of_the_programs_own_options_is_one_too(helm: HelmProcess) -> None:
    files = {"tls_cert_file": "/tls/a.crt", "tls_key_file": "/tls/a.key"}
    release = helm.render({"config": {"server": files}})
    assert release.one("Service", "demo-roseinfer")["spec"]["ports"][0]["name"] == "https"
    assert "curl -N -k https:" in release.notes


def test_the_gateway_asks_pods_for_the_certificates_name(helm: HelmProcess, example: ExampleOf) -> None:
    validation = example("http-route-tls").one("BackendTLSPolicy")["spec"]["validation"]
    authority = {"group": "", "kind": "ConfigMap", "name": "example-authority"}
    assert validation == {"hostname": "llm.example.com", "caCertificateRefs": [authority]}
    values = yaml.safe_load((CHART / "ci" / "http-route-tls-values.yaml").read_text())
    del values["httpRoute"]["backendTLS"]["caConfigMap"]
    policy = helm.render(values).one("BackendTLSPolicy")["spec"]["validation"]
    assert policy == {"hostname": "llm.example.com", "wellKnownCACertificates": "System"}


def test_values_win_over_what_the_image_has_in_its_environment(helm: HelmProcess, tmp_path: Path) -> None:
    """The image's variables are stronger than the file, so the command has to repeat what the file says of them."""
    variables = re.findall(r"(ROSEINFER_\w+)=(\S+)", (ROOT / "Dockerfile").read_text())
    by_variable = {option.variable: path for path, option in options().items()}
    paths = [by_variable[name] for name, _ in variables]
    assert "runner.kernels_dir" in paths
    config: Object = {}
    for index, path in enumerate(paths):
        section, name = path.split(".")
        config.setdefault(section, {})[name] = f"192.0.2.{index}"
    release = helm.render({"config": config})
    file = tmp_path / "config.yaml"
    file.write_text(release.config_text)
    _, command, *flags = [
        str(file) if word == "/etc/roseinfer/config.yaml" else word for word in release.server["command"]
    ]
    parser = Parser()
    add_config_flags(parser)
    parsed = parser.parse_args(flags)
    found = build(gather(values_given(parsed), dict(variables), parsed.config)).config
    assert command == "serve"
    assert [getattr(getattr(found, path.split(".")[0]), path.split(".")[1]) for path in paths] == [
        f"192.0.2.{index}" for index in range(len(paths))
    ]


def test_under_nsight_the_server_is_what_it_runs(example: ExampleOf) -> None:
    release = example("profiling")
    command = release.server["command"]
    assert command[0] == "/nsight/target-linux-x64/nsys"
    assert "--capture-range=cudaProfilerApi" in command
    assert command[command.index("roseinfer") :][:2] == ["roseinfer", "serve"]
    config = configured(release)
    assert config.observe.nvtx
    assert config.observe.capture_dir == "/captures"
    assert config.server.api_key_file == "/etc/roseinfer/keys/api-keys"


def test_templates_in_values_are_filled_in(example: ExampleOf) -> None:
    release = example("extras")
    assert release.pod["metadata"]["annotations"]["example.com/release"] == "demo"
    assert release.one("ConfigMap", "demo-proxies")["data"] == {"NO_PROXY": "localhost"}
    assert release.one("Secret")["metadata"]["name"] == "demo-empty"
    assert release.pod["spec"]["serviceAccountName"] == "serving"
    assert release.of("ServiceAccount") == []
    assert release.server["image"].startswith("registry.example.com/serving/roseinfer@sha256:")


def test_a_long_name_is_cut(helm: HelmProcess) -> None:
    values = {"enabled": True, "accessModes": ["ReadWriteMany"], "prefetchJob": {"enabled": True}}
    release = helm.render({"modelCache": values}, release="a" * 53)
    assert all(len(found["metadata"]["name"]) <= 63 for found in release.objects)


def test_notes_have_the_command(example: ExampleOf) -> None:
    assert "curl -N http://127.0.0.1:8000/v1/completions" in example("default").notes
    assert "get secret roseinfer-keys -o jsonpath='{.data.keys\\.txt}'" in example("api-keys").notes
    assert "port-forward service/demo-roseinfer 8000:8080" in example("load-balancer").notes
    assert "curl -N -k https://127.0.0.1:8000" in example("tls").notes
    assert "names no monitor" not in example("service-monitor").notes
    assert "Nothing scrapes it yet" in example("default").notes
    assert "Nothing scrapes it yet" not in example("keda").notes


def test_notes_say_what_a_cpu_limit_does(helm: HelmProcess, example: ExampleOf) -> None:
    assert "CPU" not in example("default").notes, "there is none"

    def notes(request: object, limit: object) -> str:
        memory = {"memory": "4Gi"}
        resources = {"requests": {"cpu": request, **memory}, "limits": {"cpu": limit, **memory}}
        return helm.render({"resources": resources}).notes

    assert "The CPU limit of 4 stops the server" in notes(4, 4)
    assert "the pod has these 4 cores to itself" in notes("4", 4)
    for request, limit in ((2, 4), ("1500m", "1500m"), (0.5, 0.5)):
        assert "Leave resources.limits.cpu out, or make it" in notes(request, limit)


def test_notes_say_which_links_of_alerts_lead_nowhere(helm: HelmProcess, example: ExampleOf) -> None:
    rules = {"enabled": True, "grafana": "https://example.com/grafana"}
    assert "Links of alerts" not in example("default").notes
    told = helm.render({"prometheusRule": {"enabled": True}}).notes
    assert "Links of alerts lead nowhere: prometheusRule.runbook and prometheusRule.grafana are no address" in told
    assert "nowhere: prometheusRule.runbook is no address" in helm.render({"prometheusRule": rules}).notes
    rules["runbook"] = "https://example.com/operations"
    assert "Links of alerts" not in helm.render({"prometheusRule": rules}).notes


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        ("http://collector:4318", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ("http://$(NODE_IP):4318", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ("http://collector:4318/v1/traces", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
    ],
)
def test_spans_go_where_a_variable_says(helm: HelmProcess, endpoint: str, name: str) -> None:
    """In the file of the program `$(NODE_IP)` would be a host of that name; in a variable Kubernetes fills it in."""
    release = helm.render({"tracing": {"enabled": True, "endpoint": endpoint}})
    env = {each["name"]: each for each in release.server["env"]}
    assert env[name]["value"] == endpoint
    assert ("NODE_IP" in env) == ("NODE_IP" in endpoint)
    if "NODE_IP" in env:
        names = list(env)
        assert names.index("NODE_IP") < names.index(name), "it is filled in by those before it"
        assert env["NODE_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.hostIP"
        assert "$(" not in release.config_text
    assert helm.invalid(release, NEWEST) == []


def test_a_variable_of_the_values_takes_the_place_of_ours(helm: HelmProcess) -> None:
    """An API server refuses two of one name."""
    given = [
        {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://other:4318"},
        {"name": "HF_HOME", "value": "/other"},
        {"name": "HF_TOKEN", "value": "a"},
    ]
    values = {
        "env": given,
        "hfToken": {"existingSecret": "hub"},
        "tracing": {"enabled": True, "endpoint": "http://collector:4318"},
    }
    assert helm.render(values).server["env"] == given
