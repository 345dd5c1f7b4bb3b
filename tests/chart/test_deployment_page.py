"""What docs/deployment.md tells people to give is accepted, and what it promises is so."""

import re

import pytest
import yaml

from tests.chart.checks import CHECKS, configured
from tests.chart.helm_process import CHART, NEWEST, OLDEST, ROOT, HelmProcess, Object, Rendered
from tests.chart.policy import Source, admits

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
def whole(helm: HelmProcess) -> Rendered:
    """What the whole way installs, on the page's own terms: the release is `demo`, the namespace `serving`."""
    (values,) = [block for block in VALUES if "inferencePool" in block]
    return helm.render(values, namespace="serving", release="demo")


def test_the_whole_way_is_valid_and_sound(helm: HelmProcess, whole: Rendered) -> None:
    assert helm.invalid(whole, NEWEST) == []
    assert [complaint for check in CHECKS for complaint in check(whole)] == []
    kinds = {each["kind"] for each in whole.objects}
    assert {"InferencePool", "HTTPRoute", "ScaledObject", "ServiceMonitor", "PrometheusRule", "Job"} <= kinds


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
