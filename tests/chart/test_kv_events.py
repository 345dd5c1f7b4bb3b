"""KV events in the chart: ports, network policy, model name, and the configuration of the picker."""

import re

import pytest
import yaml

from tests.chart.checks import configured, container_ports
from tests.chart.conftest import ExampleOf
from tests.chart.helm_process import CHART, HelmProcess, Object, Rendered
from tests.chart.policy import Source, admits

PICKER = Source({"app": "roseinfer-picker"}, "serving")
STRANGERS = [
    Source({"app": "other"}, "serving"),
    Source({"app": "roseinfer-picker"}, "other"),
    Source(address="192.0.2.1"),
]
READERS: Object = {"kvEventsFrom": [{"podSelector": {}}]}


def plugins(release: Rendered) -> dict[str, Object]:
    """Type -> parameters of the picker's plugins."""
    content = yaml.safe_load(release.one("ConfigMap", "-picker")["data"]["picker.yaml"])
    return {plugin["type"]: plugin.get("parameters", {}) for plugin in content["plugins"]}


def topic(release: Rendered) -> str:
    command = release.server["command"]
    found: str = command[command.index("--kv-events.topic") + 1]
    return found


def test_by_default_nothing_is_published(example: ExampleOf) -> None:
    release = example("inference-pool")
    assert configured(release).kv_events.endpoint is None
    assert "--kv-events.topic" not in release.server["command"]
    assert set(container_ports(release)) == {"http", "ops"}
    assert "precise-prefix-cache-producer" not in plugins(release)


def test_the_picker_reads_the_ports_that_the_pods_open(example: ExampleOf) -> None:
    release = example("kv-events")
    config, ports = configured(release).kv_events, container_ports(release)
    assert config.endpoint == f"tcp://*:{ports['kv-events']}"
    assert config.replay_endpoint == f"tcp://*:{ports['kv-replay']}"
    assert config.form == "array"
    reading = plugins(release)["precise-prefix-cache-producer"]
    events = reading["kvEventsConfig"]
    assert topic(release).startswith(events["topicFilter"])
    found = events["podDiscoveryConfig"]
    assert (found["socketPort"], found["replaySocketPort"]) == (ports["kv-events"], ports["kv-replay"])
    assert reading["tokenProcessorConfig"]["blockSize"] == configured(release).cache.block_size


def test_a_pod_is_called_by_the_address_that_the_picker_sends_to(example: ExampleOf) -> None:
    release = example("kv-events")
    (port,) = release.one("InferencePool")["spec"]["targetPorts"]
    assert topic(release) == f"kv@$(POD_IP):{port['number']}@roseinfer-demo"
    (address,) = [each for each in release.server["env"] if each["name"] == "POD_IP"]
    assert address["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert "$(" not in release.config_text, "nothing would fill it in there"


def test_the_events_are_for_those_who_are_named(example: ExampleOf) -> None:
    """They have the tokens of everybody's prompts."""
    for port in ("kv-events", "kv-replay"):
        assert admits(example("kv-events"), PICKER, port)
        assert [admits(example("kv-events"), source, port) for source in STRANGERS] == [False] * len(STRANGERS)
    assert not admits(example("kv-events"), PICKER, "ops")


def test_the_token_producer_asks_the_releases_service_or_another(helm: HelmProcess, example: ExampleOf) -> None:
    release = example("kv-events")
    (service,) = [each for each in release.of("Service") if each["metadata"]["name"] == "demo-roseinfer"]
    host, port = f"{service['metadata']['name']}.serving", service["spec"]["ports"][0]["port"]
    url = f"http://{host}:{port}"
    assert plugins(release)["token-producer"] == {"modelName": "roseinfer-demo", "vllm": {"url": url}}
    values = yaml.safe_load((CHART / "ci" / "kv-events-values.yaml").read_text())
    values["kvEvents"]["renderURL"] = "http://localhost:8000/"
    assert plugins(helm.render(values))["token-producer"]["vllm"] == {"url": "http://localhost:8000"}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model": {"path": "Qwen/Qwen3-0.6B"}}, "Qwen3-0.6B"),
        ({"model": {"path": "Qwen/Qwen3-0.6B"}, "server": {"served_model_name": "small"}}, "small"),
        ({"server": {"served_model_name": ["one", "two"]}}, "one"),
        ({"server": {"served_model_name": 'a "model" <1>: #'}}, 'a "model" <1>: #'),
    ],
)
def test_the_model_has_the_name_that_the_server_tells(helm: HelmProcess, config: Object, name: str) -> None:
    values = yaml.safe_load((CHART / "ci" / "kv-events-values.yaml").read_text()) | {"config": config}
    release = helm.render(values)
    assert configured(release).served_model_name == name
    assert topic(release).rpartition("@")[2] == name
    assert plugins(release)["token-producer"]["modelName"] == name


def test_another_size_of_blocks_and_another_topic(helm: HelmProcess) -> None:
    values = yaml.safe_load((CHART / "ci" / "kv-events-values.yaml").read_text())
    values["config"] = {"cache": {"block_size": 64}, "kv_events": {"topic": "kv@mine@model"}}
    release = helm.render(values)
    assert plugins(release)["precise-prefix-cache-producer"]["tokenProcessorConfig"] == {"blockSize": 64}
    assert topic(release) == "kv@mine@model"


def test_what_is_wired_is_there(example: ExampleOf) -> None:
    content = yaml.safe_load(example("kv-events").one("ConfigMap", "-picker")["data"]["picker.yaml"])
    defined = {plugin["type"] for plugin in content["plugins"]}
    (profile,) = content["schedulingProfiles"]
    wired = {each["pluginRef"] for each in profile["plugins"]}
    for source in content["dataLayer"]["sources"]:
        wired |= {source["pluginRef"], *(each["pluginRef"] for each in source["extractors"])}
    assert wired <= defined
    assert plugins(example("kv-events"))["prefix-cache-scorer"]["prefixMatchInfoProducerName"] in defined
    assert "@" not in re.sub("kv@", "", yaml.safe_dump(content)), "a placeholder is left"


def test_prefixes_weigh_the_same_wherever_they_are_known_from(example: ExampleOf) -> None:
    def profiles(name: str) -> Object:
        content = yaml.safe_load(example(name).one("ConfigMap", "-picker")["data"]["picker.yaml"])
        found: Object = content["schedulingProfiles"]
        return found

    assert profiles("kv-events") == profiles("inference-pool")


def test_routers_without_a_pool_hear_them_too(helm: HelmProcess) -> None:
    release = helm.render({"kvEvents": {"enabled": True}, "networkPolicy": READERS})
    assert configured(release).kv_events.endpoint == "tcp://*:5557"
    assert not release.of("InferencePool")
