"""A release can become any other: no field that Kubernetes does not let anybody change differs, and replicas stay."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.conftest import ExampleOf
from tests.chart.helm_process import CHART, NEWEST, HelmProcess, Object, Refused, Rendered, examples
from tests.chart.test_values_fuzz import PATHS, complaint, nested

# What an API server compares with the object that is there, by kind; below `spec`.
IMMUTABLE: dict[str, list[tuple[str, ...]]] = {
    "Deployment": [("selector",)],
    "Job": [("template",), ("selector",), ("completions",), ("completionMode",)],
    "PersistentVolumeClaim": [("accessModes",), ("storageClassName",), ("volumeName",), ("selector",)],
    "Service": [("clusterIP",), ("loadBalancerClass",)],
}
# What Kubernetes cannot change at all: with Helm the chart refuses it by name, since it sees what is there.
FIXED = {
    "modelCache.accessModes": ("PersistentVolumeClaim", "accessModes"),
    "modelCache.storageClass": ("PersistentVolumeClaim", "storageClassName"),
    "service.loadBalancerClass": ("Service", "loadBalancerClass"),
}

JOB = {"modelCache": {"enabled": True, "accessModes": ["ReadWriteMany"], "prefetchJob": {"enabled": True}}}

EVERYTHING = {  # a release with an object of every kind, of which any value may change
    **JOB,
    "fullnameOverride": "stays",
    "hfToken": {"existingSecret": "hub"},
    "service": {"type": "LoadBalancer", "loadBalancerClass": "inner", "loadBalancerSourceRanges": ["10.0.0.0/8"]},
    "autoscaling": {"type": "keda", "keda": {"serverAddress": "http://prometheus:9090"}},
    "metrics": {"serviceMonitor": {"enabled": True}},
    "networkPolicy": {"metricsFrom": [{"podSelector": {}}], "kvEventsFrom": [{"podSelector": {}}]},
    "kvEvents": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "ingress": {"enabled": True, "hosts": ["example.com"]},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    "inferencePool": {"enabled": True, "endpointPickerRef": {"name": "picker"}},
    "tracing": {"enabled": True, "endpoint": "http://collector:4318"},
}


def merged(values: Object, more: Object) -> Object:
    found = {**values}
    for name, value in more.items():
        found[name] = merged(found.get(name, {}), value) if isinstance(value, dict) else value
    return found


def forbidden_changes(old: Rendered, new: Rendered) -> list[str]:
    """What an API server would refuse of the step from one release to the next."""
    before = {(found["kind"], found["metadata"]["name"]): found for found in old.objects}
    return [
        f"{kind}/{name}: {'.'.join(path)}"
        for found in new.objects
        for kind, name in [(found["kind"], found["metadata"]["name"])]
        if (kind, name) in before
        for path in IMMUTABLE.get(kind, [])
        if field(found["spec"], path) != field(before[kind, name]["spec"], path)
    ]


def field(spec: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        spec = (spec or {}).get(name)
    return spec


@pytest.fixture(scope="module")
def next_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same chart in another version."""
    copy = tmp_path_factory.mktemp("next") / "roseinfer"
    shutil.copytree(CHART, copy)
    text = re.sub(r"(?m)^(version|appVersion): .*$", r"\1: 99.0.0", (copy / "Chart.yaml").read_text())
    (copy / "Chart.yaml").write_text(text)
    return copy


PLAIN = {
    **JOB,
    "fullnameOverride": "stays",
    "metrics": {"scrapedElsewhere": True},
    "networkPolicy": {"enabled": False},
    "apiKeys": {"existingSecret": "keys"},
    "profiling": {"enabled": True},
    "pdb": {"maxUnavailable": None, "minAvailable": 1},
    "replicaCount": 3,
}
WITH_TLS = {
    "fullnameOverride": "stays",
    "tls": {"existingSecret": "certificate"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "backendTLS": {"hostname": "example.com"}},
}


def value_at(values: Object, path: tuple[str, ...]) -> Any:
    for name in path:
        values = (values or {}).get(name)  # type: ignore[assignment]
    return values


def others(schema: Object, now: Any) -> list[Any]:
    """What a value may become: something of each type that its schema allows, and nothing that it is."""
    kinds = schema.get("type", "object")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    low, high = schema.get("minimum", 1), schema.get("maximum", schema.get("exclusiveMaximum", 2))
    words = ["other", "1Gi", "100Gi", "30s", "/other", "10.1.0.0/16", "https://example.com", "sha256:" + "a" * 64]
    words += ["example.com/other", "25%", "Local", "currentReplicas", "5s"]
    found: list[Any] = list(schema.get("enum", []))
    if not found:
        by_kind: dict[str, list[Any]] = {
            "boolean": [True, False],
            "integer": [2, 5, 40, 30000, low],
            "number": [(low + high) / 2, 0.5],
            "string": [each for each in words if re.search(schema.get("pattern", ""), each)],
            "array": [[each] for each in others(schema.get("items", {}), None)] if "items" in schema else [[]],
            "object": [{"other": "value"}],
        }
        found = [each for kind in kinds for each in by_kind.get(kind, [])]
    return [each for each in found if each != now]


LEAVES = {
    path: child
    for path, child in PATHS.items()
    if "properties" not in child and path[0] not in {"config", "global", "enabled", "models"}
}
SECTIONS = sorted({path[0] for path in LEAVES})
LISTS = {  # of Kubernetes' own objects, which the schema does not know
    "imagePullSecrets": [{"name": "registry"}],
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "envFrom": [{"configMapRef": {"name": "proxies"}}],
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "tmp", "mountPath": "/other"}],
    "strategy.rollingUpdate": {"maxSurge": 2},
    "extraContainers": [{"name": "other", "image": "other"}],
    "initContainers": [{"name": "other", "image": "other"}],
    "extraManifests": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "other"}}],
    "resources.requests": {"cpu": "3"},
    "resources.limits": {"memory": "6Gi"},
    "topologySpreadConstraints": [],
    "httpRoute.parentRefs": [{"name": "other"}],
    "networkPolicy.metricsFrom": [{"namespaceSelector": {}}],
    "networkPolicy.kvEventsFrom": [{"namespaceSelector": {}}],
    "networkPolicy.kubeletFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    "networkPolicy.ingressFrom": [{"namespaceSelector": {}}],
    "httpRoute.extraBackendRefs": [{"name": "canary", "port": 80}],
    "prometheusRule.extra": [{"name": "other", "rules": []}],
}


@pytest.fixture(scope="module")
def bases(helm: HelmProcess) -> list[tuple[Object, Rendered]]:
    return [(values, helm.render(values)) for values in (EVERYTHING, PLAIN, {"fullnameOverride": "stays"}, WITH_TLS)]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_changed_value_changes_nothing_that_may_not_change(
    helm: HelmProcess, bases: list[tuple[Object, Rendered]], section: str
) -> None:
    """Each value that the schema knows, as Argo CD renders it: nothing looks up what is there."""
    for path, child in LEAVES.items():
        if path[0] == section:
            old, new = one_changed(helm, bases, path, child)
            kind, name = FIXED.get(".".join(path), ("none", ""))
            found = forbidden_changes(old, new) + forbidden_changes(new, old)
            assert [each for each in found if not (each.startswith(kind) and each.endswith(f": {name}"))] == [], path


def one_changed(
    helm: HelmProcess, bases: list[tuple[Object, Rendered]], path: tuple[str, ...], schema: Object
) -> tuple[Rendered, Rendered]:
    """A release, and one in which that value alone is another: the first other one that the chart accepts."""
    name = ".".join(path)
    for values, old in bases:
        for candidate in [LISTS[name]] if name in LISTS else others(schema, value_at(values, path))[:6]:
            try:
                return old, helm.render(merged(values, nested(path, candidate)))
            except Refused:
                pass
    pytest.fail(f"{name} can become nothing else")


def test_models_come_and_go(helm: HelmProcess) -> None:
    models = [{"name": "small", **JOB}, {"name": "large"}]
    both = helm.render({"models": models})
    for fewer in ([models[0]], [models[1]], [{"name": "small", **JOB, "image": {"tag": "other"}}, models[1]]):
        assert forbidden_changes(both, helm.render({"models": fewer})) == []


def test_a_new_version_changes_nothing_that_may_not_change(helm: HelmProcess, next_chart: Path) -> None:
    for path in examples():
        values = yaml.safe_load(path.read_text()) or {}
        assert forbidden_changes(helm.render(values), helm.render(values, chart=next_chart)) == [], path.name


def test_a_new_version_with_the_same_image_is_no_rollout(helm: HelmProcess, next_chart: Path) -> None:
    """Each restart of a pod with a GPU costs its requests a drain and everybody a warm-up."""
    values = merged(JOB, {"image": {"tag": "pinned"}})
    old, new = helm.render(values), helm.render(values, chart=next_chart)
    assert old.one("Deployment")["metadata"]["labels"] != new.one("Deployment")["metadata"]["labels"]
    assert old.pod == new.pod
    assert old.one("Job")["metadata"]["name"] == new.one("Job")["metadata"]["name"]


def test_a_forbidden_change_is_found(helm: HelmProcess) -> None:
    """The check itself: a job of the same name with another image."""
    old, new = helm.render(JOB), helm.render(JOB)
    new.one("Job")["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    assert forbidden_changes(old, new) == [f"Job/{new.one('Job')['metadata']['name']}: template"]


def test_two_items_that_a_patch_would_mix_up_are_found(helm: HelmProcess) -> None:
    """The check itself: a patch of a client's takes them for one, and the server's refuses them."""
    release = helm.render({})
    ports, env = release.server["ports"], release.server["env"]
    ports.append({"name": "other", "containerPort": ports[0]["containerPort"], "protocol": "UDP"})
    env.append(env[0])
    lists = "Deployment/demo-roseinfer: .spec.template.spec.containers.0"
    assert set(helm.invalid(release, NEWEST)) == {
        f"{lists}.ports: two of ({ports[0]['containerPort']},)",
        f"{lists}.env: two of ('{env[0]['name']}',)",
    }


@pytest.mark.parametrize("path", ["/tmp", "/scripts/", "/dev/shm", "/etc/roseinfer/keys"])  # noqa: S108 - a mount
def test_the_cache_is_mounted_where_nothing_else_is(helm: HelmProcess, path: str) -> None:
    with pytest.raises(Refused, match=r"modelCache\.mountPath is .*, where something else is mounted"):
        helm.render({"modelCache": {"mountPath": path}})


def test_the_job_has_what_the_pod_has(helm: HelmProcess) -> None:
    """A mirror, a proxy, an authority, an account: a download needs them as much as the server does."""
    values = merged(
        JOB,
        {
            "env": [{"name": "HF_ENDPOINT", "value": "https://example.com"}],
            "envFrom": [{"configMapRef": {"name": "proxies"}}],
            "extraVolumes": [{"name": "ca", "configMap": {"name": "{{ .Release.Name }}-ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ssl/certs"}],
            "serviceAccount": {"name": "downloads"},
            "nodeSelector": {"zone": "a"},
            "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "schedulerName": "kai-scheduler",
            "priorityClassName": "high",
            "hfToken": {"existingSecret": "hub"},
        },
    )
    release = helm.render(values)
    job = release.one("Job")["spec"]["template"]["spec"]
    (container,) = job["containers"]
    for name in ("serviceAccountName", "nodeSelector", "affinity", "tolerations", "schedulerName", "priorityClassName"):
        assert job[name] == release.pod["spec"][name], name
    assert container["envFrom"] == release.server["envFrom"]
    assert [each for each in release.server["env"] if each not in container["env"]] == []
    assert {"name": "ca", "configMap": {"name": "demo-ca"}} in job["volumes"]
    assert {"name": "ca", "mountPath": "/etc/ssl/certs"} in container["volumeMounts"]


def owned(kind: str, name: str, spec: Object) -> Object:
    """An object that a release of Helm's owns, as the API server has it."""
    return {
        "apiVersion": "apps/v1" if kind == "Deployment" else "v1",
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "serving",
            "labels": {"app.kubernetes.io/managed-by": "Helm"},
            "annotations": {"meta.helm.sh/release-name": "demo", "meta.helm.sh/release-namespace": "serving"},
        },
        "spec": spec,
    }


def test_replicas_stay_when_an_autoscaler_takes_over(helm: HelmProcess, example: ExampleOf) -> None:
    """Four replicas of `replicaCount: 4` would become one: a field that is taken away gets Kubernetes' default."""
    values = yaml.safe_load((CHART / "ci" / "hpa-values.yaml").read_text())
    live = owned("Deployment", "demo-roseinfer", {"replicas": 4})
    assert helm.render(values, live=[live]).one("Deployment")["spec"]["replicas"] == 4
    assert "replicas" not in example("hpa").one("Deployment")["spec"], (
        "a first installation leaves it to the autoscaler"
    )
    assert helm.render({"replicaCount": 2}, live=[live]).one("Deployment")["spec"]["replicas"] == 2


def test_keda_waits_until_our_own_autoscaler_is_gone(helm: HelmProcess) -> None:
    """Helm makes what is new before it deletes what is old, and KEDA's webhook refuses a second autoscaler."""
    values = yaml.safe_load((CHART / "ci" / "keda-values.yaml").read_text())
    live = owned("HorizontalPodAutoscaler", "demo-roseinfer", {}) | {"apiVersion": "autoscaling/v2"}
    with pytest.raises(Refused, match=r"the HorizontalPodAutoscaler demo-roseinfer is still there"):
        helm.render(values, live=[live])


CLAIM = owned(
    "PersistentVolumeClaim",
    "demo-roseinfer-models",
    {
        "storageClassName": "slow",
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "50Gi"}},
    },
)
SERVICE = owned(
    "Service",
    "demo-roseinfer",
    {"type": "LoadBalancer", "loadBalancerClass": "inner", "ipFamilies": ["IPv4", "IPv6"]},
)
BALANCED = {"type": "LoadBalancer", "loadBalancerClass": "inner", "withoutKeys": True, "ipFamilies": ["IPv4"]}


@pytest.mark.parametrize(
    ("live", "change", "words"),
    [
        (CLAIM, "{storageClass: fast}", "modelCache.storageClass is fast and the claim demo-roseinfer-models has slow"),
        (CLAIM, "{accessModes: [ReadWriteMany]}", "modelCache.accessModes is ReadWriteMany and the claim"),
        (CLAIM, "{size: 40Gi}", "modelCache.size is 40Gi and the claim demo-roseinfer-models has 50Gi, which can grow"),
        (CLAIM, "{size: 53000M}", "modelCache.size is 53000M"),
        (CLAIM, "{size: 1Ti}", ""),
        (CLAIM, "{size: 0.05Ti}", ""),
        (SERVICE, "{loadBalancerClass: outer}", 'service.loadBalancerClass is "outer" and the Service demo-roseinfer'),
        (SERVICE, "{loadBalancerClass: ''}", 'has "inner", which cannot be changed'),
        (SERVICE, "{ipFamilies: [IPv6]}", "service.ipFamilies begins with IPv6 and the Service demo-roseinfer with"),
        (SERVICE, "{type: ClusterIP, loadBalancerClass: ''}", ""),
        (SERVICE, "{ipFamilies: []}", ""),
    ],
)
def test_what_kubernetes_cannot_change_is_named(helm: HelmProcess, live: Object, change: str, words: str) -> None:
    unchanged = {"modelCache": {"enabled": True, "storageClass": "slow"}, "service": BALANCED}
    section = "service" if live is SERVICE else "modelCache"
    assert helm.render(unchanged, live=[live]).objects
    values = merged(unchanged, {section: yaml.safe_load(change)})
    if words:
        with pytest.raises(Refused, match=words):
            helm.render(values, live=[live])
    else:
        assert helm.render(values, live=[live]).objects


@pytest.mark.parametrize("length", range(1, 64))
def test_names_of_every_length(helm: HelmProcess, length: int) -> None:
    """Objects of one kind have different names, which Kubernetes takes; those of hosts and of pods are DNS labels."""
    dashboards = {"enabled": length % 8 == 7}  # which are most of the work
    values = merged(JOB, {"fullnameOverride": ("release" + "-x" * 30)[:length], "dashboards": dashboards})
    release = helm.render(values)
    names = [(found["kind"], found["metadata"]["name"]) for found in release.objects]
    assert len(set(names)) == len(names)
    for kind, name in names:
        longest = 63 if kind in {"Service", "Deployment", "Job", "Pod"} else 253
        assert len(name) <= longest, (kind, name)
        assert re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", name), (kind, name)


def test_a_release_whose_name_has_dots_has_services(helm: HelmProcess) -> None:
    release = helm.render(JOB, release="my.release")
    assert {found["metadata"]["name"] for found in release.of("Service")} == {
        "my-release-roseinfer",
        "my-release-roseinfer-ops",
    }
    with pytest.raises(
        Refused, match="the release would be called 1st-roseinfer, and the name of a Service begins with"
    ):
        helm.render(JOB, release="1st")


def test_two_releases_side_by_side_share_nothing(helm: HelmProcess) -> None:
    """In one namespace: no object of the same name, and no selector that finds the other's pods."""
    values = merged(JOB, {"dashboards": {"enabled": True}, "prometheusRule": {"enabled": True}})
    one, other = helm.render(values, release="one"), helm.render(values, release="other")
    names = [{(each["kind"], each["metadata"]["name"]) for each in release.objects} for release in (one, other)]
    assert not names[0] & names[1]
    labels = other.pod["metadata"]["labels"]
    for found in (*one.of("Service"), *one.of("Deployment"), *one.of("PodDisruptionBudget"), *one.of("NetworkPolicy")):
        selector = found["spec"].get("selector") or found["spec"]["podSelector"]
        selector = selector.get("matchLabels", selector)
        assert not selector.items() <= labels.items(), found["kind"]


@pytest.mark.parametrize("section", sorted({path[0] for path in PATHS}))
def test_a_null_beside_everything_is_a_default_or_is_named(helm: HelmProcess, section: str) -> None:
    """What a template reads only where a feature is on may be null too."""
    for path in (path for path in PATHS if path[0] == section):
        assert complaint(helm, merged(EVERYTHING, nested(path, None))) is None, path


@pytest.mark.parametrize("text", ["10", "true"])
def test_a_text_that_looks_like_something_else_stays_a_text(helm: HelmProcess, text: str) -> None:
    """A class of priority may be called 10, and YAML would read a number."""
    texts = [path for path, child in LEAVES.items() if child.get("type") == "string" and "enum" not in child]
    for path in texts:
        if re.search(LEAVES[path].get("pattern", ""), text):
            assert complaint(helm, merged(EVERYTHING, nested(path, text))) is None, path
