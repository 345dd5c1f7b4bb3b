"""What docs/deployment.md tells people to give is accepted, and what it promises is so."""

import re

import yaml

from tests.chart.helm_process import CHART, ROOT, HelmProcess, Object

PAGE = (ROOT / "docs" / "deployment.md").read_text()
BLOCKS: list[Object] = [
    found for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) for found in yaml.safe_load_all(block)
]
VALUES = [block for block in BLOCKS if not {"rules", "spec"} & set(block)]  # the adapter's, and whole objects


def test_every_block_of_values_is_accepted(helm: HelmProcess) -> None:
    assert len(VALUES) >= 4
    for block in VALUES:
        assert helm.render(block).of("Deployment")


def test_the_adapter_asks_what_the_trigger_asks() -> None:
    (adapter,) = [block for block in BLOCKS if "rules" in block]
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
