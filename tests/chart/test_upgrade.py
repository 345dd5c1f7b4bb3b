"""A release can become any other: no field that Kubernetes does not let anybody change differs, and replicas stay."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.conftest import ExampleOf
from tests.chart.helm_process import CHART, HelmProcess, Object, Refused, Rendered, examples

# What an API server compares with the object that is there, by kind; below `spec`.
IMMUTABLE: dict[str, list[tuple[str, ...]]] = {
    "Deployment": [("selector",)],
    "Job": [("template",), ("selector",), ("completions",), ("completionMode",)],
    "PersistentVolumeClaim": [("accessModes",), ("storageClassName",), ("volumeName",), ("selector",)],
    "Service": [("clusterIP",)],
}

JOB = {"modelCache": {"enabled": True, "accessModes": ["ReadWriteMany"], "prefetchJob": {"enabled": True}}}

CHANGES = [  # of the values above, one release to the next
    "{image: {tag: other}}",
    "{image: {pullPolicy: Always}}",
    "{imagePullSecrets: [{name: registry}]}",
    "{config: {model: {path: gpt2}}}",
    "{config: {model: {revision: other}}}",
    "{config: {server: {port: 9000}}}",
    "{env: [{name: HTTPS_PROXY, value: 'http://proxy:3128'}]}",
    "{envFrom: [{configMapRef: {name: proxies}}]}",
    "{hfToken: {existingSecret: hub}}",
    "{modelCache: {mountPath: /cache}}",
    "{modelCache: {size: 80Gi}}",
    "{modelCache: {readOnly: true}}",
    "{modelCache: {prefetchJob: {image: other}}}",
    "{modelCache: {prefetchJob: {timeoutSeconds: 60}}}",
    "{gpu: {count: 1}}",
    "{gpu: {count: 1, runtimeClassName: nvidia}}",
    "{nodeSelector: {disk: ssd}}",
    "{tolerations: [{key: spot, operator: Exists}]}",
    "{affinity: {nodeAffinity: {}}}",
    "{priorityClassName: high}",
    "{schedulerName: kai-scheduler}",
    "{podSecurityContext: {runAsNonRoot: true, runAsUser: 2000}}",
    "{securityContext: {readOnlyRootFilesystem: true}}",
    "{serviceAccount: {name: other}}",
    "{serviceAccount: {automount: true}}",
    "{extraVolumes: [{name: ca, configMap: {name: ca}}], extraVolumeMounts: [{name: ca, mountPath: /ca}]}",
    "{podLabels: {team: serving}}",
    "{podAnnotations: {a: b}}",
    "{service: {type: NodePort, port: 81}}",
    "{strategy: {type: Recreate}}",
    "{autoscaling: {type: hpa}, metrics: {scrapedElsewhere: true}, networkPolicy: {enabled: false}}",
    "{prometheusRule: {enabled: true}, dashboards: {enabled: true}}",
]


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


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_value_changes_nothing_that_may_not_change(helm: HelmProcess, change: str) -> None:
    old = helm.render(JOB)
    new = helm.render(merged(JOB, yaml.safe_load(change)))
    assert forbidden_changes(old, new) == []
    assert forbidden_changes(new, old) == [], "and back"


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
        "apiVersion": {"Deployment": "apps/v1", "PersistentVolumeClaim": "v1"}[kind],
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"storageClass": "fast"}, "modelCache.storageClass is fast and the claim demo-roseinfer-models has slow"),
        ({"accessModes": ["ReadWriteMany"]}, "modelCache.accessModes is ReadWriteMany and the claim"),
    ],
)
def test_a_claim_that_cannot_be_changed_is_named(helm: HelmProcess, change: Object, words: str) -> None:
    spec = {"storageClassName": "slow", "accessModes": ["ReadWriteOnce"]}
    live = owned("PersistentVolumeClaim", "demo-roseinfer-models", spec)
    assert helm.render({"modelCache": {"enabled": True, "storageClass": "slow"}}, live=[live]).objects
    with pytest.raises(Refused, match=words):
        helm.render({"modelCache": {"enabled": True, **change}}, live=[live])


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
