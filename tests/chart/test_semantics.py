"""Every check refuses a release that was doctored against it, and the network policy lets in whom it names alone."""

import copy
from collections.abc import Callable

import pytest
import yaml

from tests.chart import checks
from tests.chart.checks import CHECKS, Check
from tests.chart.conftest import ExampleOf
from tests.chart.helm_process import NEWEST, HelmProcess, Object, Rendered
from tests.chart.policy import Source, admits

Doctor = Callable[[Rendered], object]


def edit_config(release: Rendered, section: str, **options: object) -> None:
    """Change the program's file, as a template that computes it wrongly would."""
    data = release.one("ConfigMap", "demo-roseinfer")["data"]
    tree = yaml.safe_load(data["config.yaml"])
    tree.setdefault(section, {}).update(options)
    data["config.yaml"] = yaml.safe_dump(tree)


def service(release: Rendered, suffix: str = "demo-roseinfer") -> Object:
    spec: Object = release.one("Service", suffix)["spec"]
    return spec


def limits(release: Rendered) -> Object:
    found: Object = release.server["resources"]["limits"]
    return found


def selector(release: Rendered, kind: str) -> Object:
    labels: Object = release.one(kind)["spec"]["selector"]["matchLabels"]
    return labels


DOCTORED: list[tuple[Check, str, Doctor]] = [
    (checks.the_program_reads_its_configuration, "default", lambda r: edit_config(r, "server", prot=1)),
    (checks.the_program_reads_its_configuration, "default", lambda r: edit_config(r, "cache", block_size=7)),
    (checks.the_program_reads_its_configuration, "default", lambda r: edit_config(r, "server", port=8080)),
    (checks.grace_outlasts_the_stop, "default", lambda r: r.pod["spec"].update(terminationGracePeriodSeconds=141)),
    (checks.grace_outlasts_the_stop, "default", lambda r: edit_config(r, "server", drain_timeout_s=127)),
    (checks.grace_outlasts_the_stop, "default", lambda r: r.server["lifecycle"]["preStop"]["sleep"].update(seconds=25)),
    (
        checks.grace_outlasts_the_stop,
        "default",
        lambda r: r.server.update(lifecycle={"preStop": {"exec": {"command": ["sleep", "25"]}}}),
    ),
    (
        checks.a_rollout_may_take_as_long_as_a_start,
        "default",
        lambda r: r.one("Deployment")["spec"].update(progressDeadlineSeconds=600),
    ),
    (checks.selectors_match, "default", lambda r: service(r)["selector"].update({"app.kubernetes.io/name": "other"})),
    (checks.selectors_match, "default", lambda r: service(r).update(selector={})),
    (checks.selectors_match, "default", lambda r: selector(r, "Deployment").update(extra="label")),
    (
        checks.selectors_match,
        "default",
        lambda r: selector(r, "PodDisruptionBudget").pop("app.kubernetes.io/component"),
    ),
    (checks.selectors_match, "model-cache", lambda r: selector(r, "Deployment").pop("app.kubernetes.io/component")),
    (checks.selectors_match, "inference-pool", lambda r: selector(r, "InferencePool").update(extra="label")),
    (checks.selectors_match, "pod-monitor", lambda r: selector(r, "PodMonitor").update(extra="label")),
    (
        checks.selectors_match,
        "default",
        lambda r: r.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"].update(extra="label"),
    ),
    (
        checks.selectors_match,
        "default",
        lambda r: r.pod["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(a="b"),
    ),
    (
        checks.probes_ask_the_front_end,
        "default",
        lambda r: r.server["livenessProbe"]["httpGet"].update(port="ops"),
    ),
    (
        checks.probes_ask_the_front_end,
        "default",
        lambda r: r.server["startupProbe"]["httpGet"].update(path="/livez"),
    ),
    (checks.probes_ask_the_front_end, "default", lambda r: r.server["ports"].pop(0)),
    (checks.services_lead_to_ports, "default", lambda r: service(r)["ports"][0].update(targetPort="https")),
    (checks.the_operations_port_stays_inside, "default", lambda r: service(r, "-ops").update(type="NodePort")),
    (
        checks.the_operations_port_stays_inside,
        "default",
        lambda r: service(r)["ports"].append({"name": "ops", "port": 1, "targetPort": 8001}),
    ),
    (checks.a_gpu_is_requested_and_limited, "gpu", lambda r: limits(r).pop("nvidia.com/gpu")),
    (checks.a_gpu_is_requested_and_limited, "mig", lambda r: limits(r).update({"nvidia.com/mig-1g.10gb": 2})),
    (checks.one_owner_of_the_replicas, "hpa", lambda r: r.one("Deployment")["spec"].update(replicas=1)),
    (checks.one_owner_of_the_replicas, "keda", lambda r: r.one("Deployment")["spec"].update(replicas=1)),
    (checks.one_owner_of_the_replicas, "default", lambda r: r.one("Deployment")["spec"].pop("replicas")),
    (
        checks.one_owner_of_the_replicas,
        "keda",
        lambda r: r.one("ScaledObject")["spec"]["scaleTargetRef"].update(name="other"),
    ),
    (checks.a_node_can_be_drained, "hpa", lambda r: r.one("PodDisruptionBudget")["spec"].update(minAvailable=2)),
    (checks.a_node_can_be_drained, "default", lambda r: r.one("PodDisruptionBudget")["spec"].update(maxUnavailable=0)),
    (
        checks.monitors_find_their_port,
        "service-monitor",
        lambda r: r.one("ServiceMonitor")["spec"]["endpoints"][0].update(port="metrics"),
    ),
    (
        checks.monitors_find_their_port,
        "service-monitor",
        lambda r: selector(r, "ServiceMonitor").pop("app.kubernetes.io/component"),
    ),
    (
        checks.monitors_find_their_port,
        "pod-monitor",
        lambda r: r.one("PodMonitor")["spec"]["podMetricsEndpoints"][0].update(port="metrics"),
    ),
    (checks.pods_are_restricted, "default", lambda r: r.pod["spec"]["securityContext"].pop("runAsNonRoot")),
    (checks.pods_are_restricted, "default", lambda r: r.pod["spec"].pop("enableServiceLinks")),
    (checks.pods_are_restricted, "default", lambda r: r.pod["spec"].update(automountServiceAccountToken=True)),
    (
        checks.pods_are_restricted,
        "default",
        lambda r: r.server["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    (
        checks.pods_are_restricted,
        "model-cache",
        lambda r: r.one("Job")["spec"]["template"]["spec"]["containers"][0].pop("securityContext"),
    ),
    (checks.mounts_have_volumes, "default", lambda r: r.pod["spec"]["volumes"].pop()),
    (checks.mounts_have_volumes, "default", lambda r: r.objects.remove(r.one("ConfigMap", "-scripts"))),
    (checks.mounts_have_volumes, "api-keys", lambda r: edit_config(r, "server", api_key_file="/elsewhere")),
    (
        checks.lists_have_no_twins,
        "default",
        lambda r: r.server["volumeMounts"].append({"name": "tmp", "mountPath": "/models"}),
    ),
    (checks.lists_have_no_twins, "default", lambda r: r.server["env"].append({"name": "HF_HOME", "value": "/a"})),
    (checks.lists_have_no_twins, "default", lambda r: r.pod["spec"]["volumes"].append({"name": "tmp", "emptyDir": {}})),
    (checks.lists_have_no_twins, "profiling", lambda r: r.pod["spec"]["initContainers"][0].update(name="server")),
    (
        checks.pods_are_restricted,
        "profiling",
        lambda r: r.pod["spec"]["initContainers"][0].pop("securityContext"),
    ),
    (
        checks.any_keda_accepts_the_fallback,
        "keda",
        lambda r: r.one("ScaledObject")["spec"]["triggers"][1].update(metricType="Value"),
    ),
    (checks.routes_speak_as_pods_do, "http-route-tls", lambda r: r.objects.remove(r.one("BackendTLSPolicy"))),
    (
        checks.routes_speak_as_pods_do,
        "http-route-tls",
        lambda r: r.one("BackendTLSPolicy")["spec"]["targetRefs"][0].update(sectionName="http"),
    ),
    (checks.routes_speak_as_pods_do, "ingress-tls", lambda r: r.one("Ingress")["metadata"].pop("annotations")),
    (checks.routes_speak_as_pods_do, "ingress", lambda r: edit_config(r, "server", tls_cert_file="/a")),
    (checks.names_fit, "default", lambda r: r.one("Service", "-ops")["metadata"].update(name="a" * 64)),
]


@pytest.mark.parametrize(
    ("check", "name", "doctor"), DOCTORED, ids=[f"{row[0].__name__}-{index}" for index, row in enumerate(DOCTORED)]
)
def test_a_doctored_release_is_refused(example: ExampleOf, check: Check, name: str, doctor: Doctor) -> None:
    release = copy.deepcopy(example(name))
    assert check(release) == []
    doctor(release)
    assert check(release) != []


def test_every_check_has_been_seen_to_refuse() -> None:
    assert {check for check, *_ in DOCTORED} == set(CHECKS)


def test_an_unknown_field_is_refused(helm: HelmProcess, example: ExampleOf) -> None:
    release = copy.deepcopy(example("keda"))
    release.server["resourcez"] = {}
    release.one("ScaledObject")["spec"]["triggers"][0]["metadata"]["threshold"] = 32
    errors = helm.invalid(release, NEWEST)
    assert len(errors) == 2
    assert "resourcez" in errors[0] + errors[1]


def test_an_object_without_a_schema_is_refused(helm: HelmProcess, example: ExampleOf) -> None:
    release = Rendered([{"apiVersion": "example.com/v1", "kind": "Gadget", "metadata": {"name": "a"}}], "")
    assert helm.invalid(release, NEWEST) == ["Gadget/a: there is no Gadget.json"]


PROMETHEUS = Source({"app.kubernetes.io/name": "prometheus"}, "monitoring")
GATEWAY = Source({"app": "gateway"}, "gateways")
NEIGHBOUR = Source({"app": "neighbour"}, "serving")
OTHER_IN_MONITORING = Source({"app.kubernetes.io/name": "grafana"}, "monitoring")
KUBELET = Source(address="10.0.0.7")
STRANGER = Source(address="192.0.2.1")
HELM_TEST = Source({"app.kubernetes.io/instance": "demo", "app.kubernetes.io/component": "test"}, "serving")


@pytest.mark.parametrize(
    ("port", "admitted", "refused"),
    [
        ("ops", [PROMETHEUS], [KUBELET, GATEWAY, NEIGHBOUR, OTHER_IN_MONITORING, STRANGER, HELM_TEST]),
        ("http", [GATEWAY, HELM_TEST, KUBELET], [PROMETHEUS, NEIGHBOUR, STRANGER]),
    ],
)
def test_each_port_is_for_whom_it_was_meant(
    example: ExampleOf, port: str, admitted: list[Source], refused: list[Source]
) -> None:
    release = example("service-monitor")
    assert [admits(release, source, port) for source in admitted] == [True] * len(admitted)
    assert [admits(release, source, port) for source in refused] == [False] * len(refused)


def test_by_default_nobody_reaches_the_operations_port(example: ExampleOf) -> None:
    everybody = [PROMETHEUS, GATEWAY, NEIGHBOUR, STRANGER]
    assert [admits(example("default"), source, "ops") for source in everybody] == [False] * 4
    assert [admits(example("default"), source, "http") for source in everybody] == [True] * 4
    assert admits(example("pod-monitor"), NEIGHBOUR, "ops"), "without a policy everybody does"


def test_a_rule_without_peers_would_let_everybody_in(example: ExampleOf) -> None:
    """What the template must not render for an empty `metricsFrom`, and the reading of policies above would notice."""
    release = copy.deepcopy(example("default"))
    release.one("NetworkPolicy")["spec"]["ingress"].append({"ports": [{"port": "ops"}], "from": []})
    assert admits(release, STRANGER, "ops")


def test_egress_is_what_was_named(example: ExampleOf) -> None:
    spec = example("tracing").one("NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    ports = [sorted({port["port"] for port in rule["ports"]}) for rule in spec["egress"]]
    assert ports == [[53], [4318], [443]]
    assert "Egress" not in example("default").one("NetworkPolicy")["spec"]["policyTypes"]


def test_no_key_is_there_twice(helm: HelmProcess) -> None:
    """Argo CD and kubectl refuse such a manifest, which is what the engine of these tests does too; the values win."""
    values = yaml.safe_load("""
podAnnotations: {kubectl.kubernetes.io/default-container: other}
podLabels: {llm-d.ai/engine-type: other}
topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule, labelSelector: null}]
inferencePool: {enabled: true, endpointPickerRef: {name: picker}}
metrics: {serviceMonitor: {enabled: true}, labels: {app.kubernetes.io/name: other}}
networkPolicy: {enabled: false}
prometheusRule: {enabled: true, labels: {app.kubernetes.io/name: other}}
dashboards: {enabled: true, label: app.kubernetes.io/version}
""")
    release = helm.render(values)
    metadata = release.pod["metadata"]
    assert metadata["annotations"]["kubectl.kubernetes.io/default-container"] == "other"
    assert metadata["labels"]["llm-d.ai/engine-type"] == "other"
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert release.one(kind)["metadata"]["labels"]["app.kubernetes.io/name"] == "other"
    assert release.one("ConfigMap", "jitter")["metadata"]["labels"]["app.kubernetes.io/version"] == "1"
