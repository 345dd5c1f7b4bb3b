"""What docs/deployment.md tells people to give is accepted, and what it promises is so."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.chart.checks import CHECKS, configured
from tests.chart.helm_process import CHART, NEWEST, OLDEST, ROOT, HelmProcess, Object, Rendered
from tests.chart.policy import Source, admits
from tests.chart.test_monitoring import promtool_accepts

PAGE = (ROOT / "docs" / "deployment.md").read_text()
BLOCKS: list[Object] = [
    found for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) for found in yaml.safe_load_all(block)
]
OBJECTS = [block for block in BLOCKS if "kind" in block]
VALUES = [block for block in BLOCKS if not {"kind", "rules", "spec"} & set(block)]  # without the adapter's and Argo's
OF_KSERVE = {"InferenceService", "LLMInferenceService"}


def test_every_block_of_values_is_accepted(helm: HelmProcess) -> None:
    assert len(VALUES) >= 4
    for block in VALUES:
        assert helm.render(block).of("Deployment")


def test_the_adapter_asks_what_the_trigger_asks() -> None:
    (adapter,) = [block for block in BLOCKS if "rules" in block and "kind" not in block]
    query = adapter["rules"]["external"][0]["metricsQuery"].replace("<<.LabelMatchers>>", "$selector")
    assert query == (CHART / "files" / "autoscaling.promql").read_text().strip()
    (name,) = {each["name"]["as"] for each in adapter["rules"]["external"]}
    assert name == yaml.safe_load((CHART / "values.yaml").read_text())["autoscaling"]["hpa"]["metricName"]


def test_the_grace_period_is_the_pages(helm: HelmProcess) -> None:
    (grace,) = re.findall(r"the sum \| \*\*(\d+) s\*\*", PAGE)
    assert helm.render({}).pod["spec"]["terminationGracePeriodSeconds"] == int(grace)
    parts = re.findall(r"\| (\d+) s \|$", PAGE, re.MULTILINE)
    assert sum(map(int, parts)) == int(grace)


def test_the_pickers_signals_are_the_files() -> None:
    rows = dict(re.findall(r"`(\w+Spec)` \| `(\w+)` \|", PAGE))
    extractor = next(
        plugin
        for plugin in yaml.safe_load((CHART / "files" / "picker.yaml").read_text())["plugins"]
        if plugin["type"] == "core-metrics-extractor"
    )
    (engine,) = extractor["parameters"]["engineConfigs"]
    assert rows == {name: series for name, series in engine.items() if name.endswith("Spec")}


def test_kserve_finds_what_the_objects_name() -> None:
    services = {block["kind"]: block["spec"] for block in BLOCKS if "serving.kserve.io" in block.get("apiVersion", "")}
    manifests = list(yaml.safe_load_all((ROOT / "deploy" / "kserve" / "cpu.yaml").read_text()))
    runtime, config = (each["metadata"]["name"] for each in manifests)
    model = services["InferenceService"]["predictor"]["model"]
    assert model["runtime"] == runtime
    assert model["modelFormat"]["name"] in {each["name"] for each in manifests[0]["spec"]["supportedModelFormats"]}
    assert services["LLMInferenceService"]["baseRefs"] == [{"name": config}]


def test_every_object_is_valid(helm: HelmProcess) -> None:
    ours = [each for each in OBJECTS if each["kind"] not in OF_KSERVE]
    assert len(ours) > 5
    for version in (OLDEST, NEWEST):
        assert helm.invalid(Rendered(ours, ""), version) == []


@pytest.fixture(scope="module")
def whole_values() -> Object:
    (values,) = [block for block in VALUES if "inferencePool" in block]
    return values


@pytest.fixture(scope="module")
def whole(helm: HelmProcess, whole_values: Object) -> Rendered:
    """What the whole way installs, on the page's own terms: the release is `demo`, the namespace `serving`."""
    return helm.render(whole_values, namespace="serving", release="demo")


def test_the_whole_way_is_valid_and_sound(helm: HelmProcess, whole: Rendered) -> None:
    assert helm.invalid(whole, NEWEST) == []
    assert [complaint for check in CHECKS for complaint in check(whole)] == []
    kinds = {each["kind"] for each in whole.objects}
    assert {"InferencePool", "HTTPRoute", "ScaledObject", "ServiceMonitor", "PrometheusRule", "Job"} <= kinds


def test_prometheus_and_grafana_read_what_the_whole_way_gives_them(whole: Rendered, tmp_path: Path) -> None:
    assert promtool_accepts(whole.one("PrometheusRule")["spec"], tmp_path / "rules.yaml")
    boards = [each["data"] for each in whole.of("ConfigMap") if "-dashboard-" in each["metadata"]["name"]]
    assert len(boards) == 5
    for (text,) in map(dict.values, boards):
        assert json.loads(text)["panels"]


def test_a_picker_that_hears_of_blocks_fits_into_the_whole_way(helm: HelmProcess, whole_values: Object) -> None:
    """With keys it asks the container beside it for tokens, as the page says."""
    (events,) = [block for block in VALUES if "kvEvents" in block]
    url, name = re.findall(r"`kvEvents.renderURL:\s+(\S+)`|`config.server.served_model_name: (\S+)`", PAGE)
    values = {**whole_values, "config": {"server": {"served_model_name": name[1]}}}
    values["kvEvents"] = events["kvEvents"] | {"renderURL": url[0]}
    values["networkPolicy"] = whole_values["networkPolicy"] | events["networkPolicy"]
    release = helm.render(values, namespace="serving", release="demo")
    assert helm.invalid(release, NEWEST) == []
    assert [complaint for check in CHECKS for complaint in check(release)] == []
    (picker,) = [each["spec"]["template"]["metadata"] for each in OBJECTS if each["kind"] == "Deployment"]
    assert admits(release, Source(picker["labels"]), "kv-events")
    assert not admits(release, Source({}, "gateways"), "kv-events")
    config = yaml.safe_load(release.one("ConfigMap", "-picker")["data"]["picker.yaml"])
    (tokens,) = [each["parameters"] for each in config["plugins"] if each["type"] == "token-producer"]
    assert tokens == {"modelName": "Qwen/Qwen3-0.6B", "vllm": {"url": "http://localhost:8000"}}


def test_the_whole_way_fits_together(whole: Rendered) -> None:
    objects = {each["kind"]: each for each in OBJECTS}
    (parent,) = whole.one("HTTPRoute")["spec"]["parentRefs"]
    assert parent == objects["Gateway"]["metadata"]
    (listener,) = objects["Gateway"]["spec"]["listeners"]
    assert [listener["hostname"]] == whole.one("HTTPRoute")["spec"]["hostnames"]
    picker = objects["Deployment"]["spec"]["template"]
    (container,) = picker["spec"]["containers"]
    pool = whole.one("InferencePool")
    assert f"--pool-name={pool['metadata']['name']}" in container["args"]
    assert pool["spec"]["endpointPickerRef"]["name"] == objects["Service"]["metadata"]["name"]
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] == objects["Service"]["spec"]["ports"][0]["port"]
    service = objects["Service"]["metadata"]
    assert objects["DestinationRule"]["spec"]["host"] == f"{service['name']}.{service['namespace']}.svc.cluster.local"
    assert objects["Service"]["spec"]["selector"] == picker["metadata"]["labels"]
    (volume,) = picker["spec"]["volumes"]
    config = whole.one("ConfigMap", volume["configMap"]["name"])["data"]["picker.yaml"]
    (source,) = [each for each in yaml.safe_load(config)["plugins"] if each["type"] == "metrics-data-source"]
    assert source["parameters"]["port"] == 8001, "the API port wants a key"
    assert admits(whole, Source(picker["metadata"]["labels"]), "ops")
    assert admits(whole, Source({}, "monitoring"), "ops")
    assert admits(whole, Source({}, "gateways"), "http")
    assert not admits(whole, Source({}, "gateways"), "ops")
    assert configured(whole).server.api_key_file


def test_the_commands_are_about_these_names(whole: Rendered) -> None:
    secrets = set(re.findall(r"create secret (?:generic|tls) ([\w-]+)", PAGE))
    mounted = {each["secret"]["secretName"] for each in whole.pod["spec"]["volumes"] if "secret" in each}
    (gateway,) = [each for each in OBJECTS if each["kind"] == "Gateway"]
    certificates = {each["name"] for each in gateway["spec"]["listeners"][0]["tls"]["certificateRefs"]}
    assert mounted | certificates <= secrets
