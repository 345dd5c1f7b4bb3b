"""Who reaches a release, and by which addresses; and what else a cluster asks of its objects."""

import pytest
import yaml

from tests.chart.helm_process import NEWEST, HelmProcess, Object, Refused
from tests.chart.policy import Source, admits

HBONE = 15008  # the port of a node's proxy in an ambient mesh, to which everything for a pod of the mesh comes
GATEWAY = Source({"app": "gateway"}, "gateways")
PROMETHEUS = Source({"app": "prometheus"}, "monitoring")
NEIGHBOUR = Source({"app": "neighbour"}, "serving")
HELM_TEST = Source({"app.kubernetes.io/instance": "demo", "app.kubernetes.io/component": "test"}, "serving")
PROBES = [Source(address="169.254.7.127"), Source(address="fd16:9254:7127:1337:ffff:ffff:ffff:ffff")]
NAMED: Object = {
    "ingressFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}],
    "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
}


def refusal(helm: HelmProcess, values: Object) -> str:
    """Why the chart refuses these values."""
    with pytest.raises(Refused) as refused:
        helm.render(values)
    return str(refused.value)


def test_an_ambient_mesh_reaches_its_members(helm: HelmProcess) -> None:
    """Its proxy's port is for those who may send to any of ours, and the kubelet's probes come from its address."""
    without = helm.render({"networkPolicy": NAMED})
    assert [admits(without, source, HBONE) for source in (GATEWAY, PROMETHEUS, NEIGHBOUR)] == [False] * 3
    assert [admits(without, source, "http") for source in PROBES] == [False] * 2
    release = helm.render({"networkPolicy": {**NAMED, "ambientMesh": True}})
    assert [admits(release, source, HBONE) for source in (GATEWAY, PROMETHEUS, HELM_TEST)] == [True] * 3
    assert [admits(release, source, "http") for source in PROBES] == [True] * 2
    assert not admits(release, NEIGHBOUR, HBONE)
    assert [admits(release, source, "ops") for source in PROBES] == [False] * 2
    assert helm.invalid(release, NEWEST) == []


def test_an_ambient_mesh_without_named_clients_is_open_as_the_api_is(helm: HelmProcess) -> None:
    release = helm.render({"networkPolicy": {"ambientMesh": True}})
    assert admits(release, NEIGHBOUR, HBONE)
    assert not admits(release, NEIGHBOUR, "ops"), "which is still for those who are named"


def test_rules_may_be_added(helm: HelmProcess) -> None:
    rule = {"ports": [{"port": 9999}], "from": [{"podSelector": {"matchLabels": NEIGHBOUR.labels}}]}
    release = helm.render({"networkPolicy": {"extraIngress": [rule]}})
    assert admits(release, NEIGHBOUR, 9999)
    assert not admits(release, HELM_TEST, 9999)
    assert helm.invalid(release, NEWEST) == []


@pytest.mark.parametrize(
    ("policy", "families"),
    [("", []), ("SingleStack", ["IPv6"]), ("PreferDualStack", ["IPv6", "IPv4"]), ("RequireDualStack", [])],
)
def test_both_services_have_the_families_that_were_asked_for(
    helm: HelmProcess, policy: str, families: list[str]
) -> None:
    release = helm.render({"service": {"ipFamilyPolicy": policy, "ipFamilies": families}})
    services = [found["spec"] for found in release.of("Service")]
    assert len(services) == 2
    for spec in services:
        assert spec.get("ipFamilyPolicy", "") == policy
        assert spec.get("ipFamilies", []) == families
    assert helm.invalid(release, NEWEST) == []


def test_a_pod_listens_on_the_addresses_of_both_families(helm: HelmProcess) -> None:
    """The kubelet asks at the pod's address, which is one of IPv6 alone on some clusters."""
    release = helm.render({})
    server = yaml.safe_load(release.config_text)["server"]
    assert (server["host"], server["ops_host"]) == ("", "")
    command = release.server["command"]
    for flag in ("--host", "--server.ops-host"):
        assert command[command.index(flag) + 1] == "", "an image's variables are stronger than the file"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert "host" not in release.server[probe]["httpGet"]


RANGES = {"loadBalancerSourceRanges": ["10.0.0.0/8"]}


@pytest.mark.parametrize(
    "values",
    [
        {"apiKeys": {"existingSecret": "keys"}},
        {"config": {"server": {"api_key_file": "/etc/keys"}}},
        {"env": [{"name": "ROSEINFER_API_KEYS", "value": "a"}]},
        {"service": RANGES},
        {"service": {"withoutKeys": True}},
    ],
)
def test_a_load_balancer_is_guarded_or_said_to_be_open(helm: HelmProcess, values: Object) -> None:
    service = {"type": "LoadBalancer", "loadBalancerClass": "internal", "nodePort": 30080}
    assert "service.type is LoadBalancer and there are no keys" in refusal(helm, {"service": service})
    release = helm.render({**values, "service": {**service, **values.get("service", {})}})
    spec = release.one("Service", "demo-roseinfer")["spec"]
    assert (spec["type"], spec["loadBalancerClass"]) == ("LoadBalancer", "internal")
    assert [port["nodePort"] for port in spec["ports"]] == [30080]
    assert spec.get("loadBalancerSourceRanges") == values.get("service", {}).get("loadBalancerSourceRanges")
    assert release.one("Service", "-ops")["spec"]["type"] == "ClusterIP"
    assert helm.invalid(release, NEWEST) == []


@pytest.mark.parametrize(
    "keys",
    [
        {"apiKeys": {"existingSecret": "keys"}},
        {"config": {"server": {"api_key_file": "/etc/keys"}}},
        {"env": [{"name": "ROSEINFER_API_KEYS", "value": "a"}]},
    ],
)
def test_a_picker_reads_the_operations_port_where_the_other_wants_a_key(helm: HelmProcess, keys: Object) -> None:
    """From wherever the keys come: without one it is answered 401, and sees no load."""
    pool = {"inferencePool": {"enabled": True, "endpointPickerRef": {"name": "picker"}}}
    assert "the picker, which has none, reads the operations port" in refusal(helm, {**keys, **pool})
    release = helm.render({**keys, **pool, "networkPolicy": {"metricsFrom": [{"podSelector": {}}]}})
    picker = yaml.safe_load(release.one("ConfigMap", "-picker")["data"]["picker.yaml"])
    (source,) = [each for each in picker["plugins"] if each["type"] == "metrics-data-source"]
    assert source["parameters"]["port"] == 8001


def test_an_open_one_among_several_models_is_found(helm: HelmProcess) -> None:
    models = [{"name": "small"}, {"name": "large", "service": {"type": "LoadBalancer"}}]
    assert "service.type is LoadBalancer and there are no keys" in refusal(helm, {"models": models})


@pytest.mark.parametrize(
    ("service", "words"),
    [
        ({"nodePort": 30080}, "service.nodePort is given and service.type is ClusterIP"),
        ({"loadBalancerClass": "a"}, "service.loadBalancerClass is given and service.type is ClusterIP"),
        ({"type": "NodePort", **RANGES}, "service.loadBalancerSourceRanges is given and service.type is NodePort"),
        ({"externalTrafficPolicy": "Local"}, "service.externalTrafficPolicy is given and service.type is ClusterIP"),
    ],
)
def test_what_a_type_of_service_has_not_is_named(helm: HelmProcess, service: Object, words: str) -> None:
    assert words in refusal(helm, {"service": service})


def test_labels_by_which_pods_are_found_are_the_charts(helm: HelmProcess) -> None:
    labels = helm.render({"podLabels": {"team": "serving"}}).pod["metadata"]["labels"]
    assert labels["team"] == "serving"
    (selector,) = [each["spec"]["selector"]["matchLabels"] for each in helm.render({}).of("Deployment")]
    assert selector
    for name in selector:
        assert f"podLabels.{name} is one of the labels by which" in refusal(helm, {"podLabels": {name: "other"}})


@pytest.mark.parametrize("share", ["100%", "67%"])
def test_a_disruption_budget_that_ends_no_pod_is_refused(helm: HelmProcess, share: str) -> None:
    """Kubernetes rounds a share up, so that 67% of three are all of them."""
    values: Object = {"replicaCount": 3, "pdb": {"minAvailable": share, "maxUnavailable": None}}
    assert f"pdb.minAvailable is {share} of 3 replicas: no node could ever be drained" in refusal(helm, values)
    values["pdb"]["minAvailable"] = "66%"
    assert helm.render(values).one("PodDisruptionBudget")["spec"]["minAvailable"] == "66%"


def test_pods_without_a_gpu_stay_off_nodes_for_gpus(helm: HelmProcess) -> None:
    assert "tolerations" not in helm.render({}).pod["spec"]
    (toleration,) = helm.render({"gpu": {"count": 1}}).pod["spec"]["tolerations"]
    assert (toleration["key"], toleration["effect"]) == ("nvidia.com/gpu", "NoSchedule")


def test_what_else_clusters_ask_for_is_where_it_belongs(helm: HelmProcess) -> None:
    container = {"name": "sidecar", "image": "example.com/{{ .Release.Name }}:1"}
    relabeling = {"sourceLabels": ["__name__"], "regex": "roseinfer_step_.*", "action": "drop"}
    header = {"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["x-debug"]}}
    canary = {"name": "{{ .Release.Name }}-canary", "port": 80, "weight": 10}
    values: Object = {
        "extraContainers": [container],
        "deploymentAnnotations": {"example.com/owner": "serving"},
        "schedulerName": "kai-scheduler",
        "networkPolicy": {"metricsFrom": [{"podSelector": {}}]},
        "metrics": {"serviceMonitor": {"enabled": True}, "metricRelabelings": [relabeling]},
        "httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "public"}],
            "hostnames": ["{{ .Release.Name }}.example.com"],
            "filters": [header],
            "weight": 90,
            "extraBackendRefs": [canary],
        },
    }
    release = helm.render(values)
    (sidecar,) = [each for each in release.pod["spec"]["containers"] if each["name"] != "server"]
    assert sidecar == {"name": "sidecar", "image": "example.com/demo:1"}
    assert release.one("Deployment")["metadata"]["annotations"] == {"example.com/owner": "serving"}
    assert release.pod["spec"]["schedulerName"] == "kai-scheduler"
    (endpoint,) = release.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["metricRelabelings"] == [relabeling]
    route = release.one("HTTPRoute")["spec"]
    assert route["hostnames"] == ["demo.example.com"]
    (rule,) = route["rules"]
    assert rule["filters"] == [header]
    assert [(each["name"], each["weight"]) for each in rule["backendRefs"]] == [
        ("demo-roseinfer", 90),
        ("demo-canary", 10),
    ]
    assert helm.invalid(release, NEWEST) == []
