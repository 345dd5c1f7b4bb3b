"""Several models in one release: each as a release of its own, behind one route that chooses by the model's name."""

import pytest
import yaml

from tests.chart.checks import configured, selects
from tests.chart.helm_process import NEWEST, OLDEST, HelmProcess, Refused, Rendered

VALUES = yaml.safe_load("""
apiKeys: {existingSecret: keys}
httpRoute: {enabled: true, parentRefs: [{name: public}]}
prometheusRule: {enabled: true}
models:
  - {name: small, model: {source: "hf://a/small"}, httpRoute: {weight: 9}}
  - {name: canary, model: {source: "hf://a/small@v2"}}
  - name: large
    model: {source: "s3://models/large"}
    gpu: {count: 1}
    resources: {limits: {memory: 32Gi}}
    config: {server: {served_model_name: [large, big]}}
""")


def part(release: Rendered, name: str) -> Rendered:
    """The objects of one model, as a release that has no other."""
    instance = f"demo-{name}"
    return Rendered(
        [each for each in release.objects if each["metadata"]["labels"]["app.kubernetes.io/instance"] == instance], ""
    )


@pytest.fixture(scope="module")
def release(helm: HelmProcess) -> Rendered:
    return helm.render(VALUES)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid(helm: HelmProcess, version: str) -> None:
    assert helm.invalid(helm.render(VALUES, version=version), version) == []


def test_a_model_is_what_a_release_of_its_own_would_be(helm: HelmProcess, release: Rendered) -> None:
    own = {**VALUES, **VALUES["models"][2], "httpRoute": {"enabled": False}}
    del own["models"], own["name"]
    alone = helm.render(own, release="demo-large")
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in part(release, "large").objects}
    assert by_name == {(each["kind"], each["metadata"]["name"]): each for each in alone.objects}


def test_models_have_the_releases_values_and_their_own(release: Rendered) -> None:
    small, large = part(release, "small"), part(release, "large")
    assert (
        configured(small).server.api_key_file == configured(large).server.api_key_file == "/etc/roseinfer/keys/api-keys"
    )
    assert configured(large).runner.device == "cuda"
    assert "nvidia.com/gpu" not in small.server["resources"]["limits"]
    assert large.server["resources"]["limits"]["memory"] == "32Gi"


def test_nothing_is_shared(release: Rendered) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in release.objects]
    assert len(set(names)) == len(names)
    labels = part(release, "canary").pod["metadata"]["labels"]
    for found in (*part(release, "small").of("Service"), *part(release, "small").of("Deployment")):
        selector = found["spec"]["selector"]
        assert not selects(selector.get("matchLabels", selector), labels)


def test_the_route_chooses_by_the_models_name(release: Rendered) -> None:
    rules = release.one("HTTPRoute")["spec"]["rules"]
    found = {}
    for rule in rules:
        (match,) = rule["matches"]
        assert match["path"] == {"type": "PathPrefix", "value": "/v1"}
        (header,) = match["headers"]
        assert header["name"] == "X-Gateway-Model-Name"
        found[header["value"]] = {each["name"]: each["weight"] for each in rule["backendRefs"]}
    assert found == {
        "small": {"demo-small-roseinfer": 9, "demo-canary-roseinfer": 1},
        "large": {"demo-large-roseinfer": 1},
        "big": {"demo-large-roseinfer": 1},
    }
    services = {each["metadata"]["name"] for each in release.of("Service")}
    assert {name for backends in found.values() for name in backends} <= services
    for name, backends in found.items():
        served = {
            each for each in ("small", "canary", "large") if name in configured(part(release, each)).served_model_names
        }
        assert {f"demo-{each}-roseinfer" for each in served} == set(backends)


def test_a_name_may_have_anything_in_it(helm: HelmProcess) -> None:
    names = ["a model", "[b]"]
    values = {**VALUES, "models": [{"name": "a", "config": {"server": {"served_model_name": names}}}]}
    rules = helm.render(values).one("HTTPRoute")["spec"]["rules"]
    assert [rule["matches"][0]["headers"][0]["value"] for rule in rules] == names


def test_pools_are_the_backends_where_there_are_pickers(helm: HelmProcess) -> None:
    values = {
        **VALUES,
        "apiKeys": {"existingSecret": ""},
        "inferencePool": {"enabled": True, "endpointPickerRef": {"name": "picker"}},
    }
    release = helm.render(values)
    pools = {each["metadata"]["name"] for each in release.of("InferencePool")}
    backends = [each for rule in release.one("HTTPRoute")["spec"]["rules"] for each in rule["backendRefs"]]
    assert {each["kind"] for each in backends} == {"InferencePool"}
    assert {each["name"] for each in backends} == pools
    assert len(pools) == 3


def test_the_notes_are_about_all(release: Rendered) -> None:
    assert "is being started for 3 models" in release.notes
    assert "rollout status deployment -l app.kubernetes.io/instance=demo-canary" in release.notes


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("{models: [{}]}", "at '/models/0': missing property 'name'"),
        ("{models: [{name: A}]}", "at '/models/0/name'"),
        ("{models: [{name: a, gpu: {cuont: 1}}]}", "at '/models/0/gpu': additional properties 'cuont'"),
        ("{models: [{name: a, config: {server: {prot: 1}}}]}", "at '/models/0/config/server': additional properties"),
        ("{models: [{name: a, shm: {enabled: null}}]}", "at '/models/0/shm/enabled': got null"),
        ("{models: [{name: a, models: []}]}", "at '/models/0': additional properties 'models'"),
        (
            "{models: [{name: a, httpRoute: {enabled: true}}]}",
            "at '/models/0/httpRoute': additional properties 'enabled'",
        ),
        (
            "{models: [{name: a}, {name: a-roseinfer}]}",
            "models[1].name is a-roseinfer, whose objects would be called demo",
        ),
        (
            "{models: [{name: a-roseinfer-ops}, {name: a}]}",
            "models[1].name is a, whose objects would be called demo-a-",
        ),
        (
            "{models: [{name: a, serviceAccount: {name: c}}, {name: b, serviceAccount: {name: c}}]}",
            "models[1].serviceAccount.name is c, which another entry makes",
        ),
        ("{models: [{name: a}, {name: a}]}", "models[1].name is a, which another entry has"),
        ("{models: [{name: abcdefghijklmnopqrstuvwxyzabcdefghijkl}]}", "models[0].name is abc"),
        ("{models: [{name: a}], fullnameOverride: b}", "fullnameOverride is given beside models"),
        ("{models: [{name: a}], ingress: {enabled: true, hosts: [b]}}", "ingress.enabled beside models"),
        ("{models: [{name: a}], serviceAccount: {name: b}}", "serviceAccount.name is given beside models"),
        ("{models: [{name: a}], httpRoute: {extraBackendRefs: [{name: b, port: 1}]}}", "httpRoute.extraBackendRefs is"),
        ("{models: [{name: a, config: {server: {port: 8001}}}]}", "config.server.port and config.server.ops_port are"),
    ],
)
def test_what_cannot_be_is_named(helm: HelmProcess, values: str, words: str) -> None:
    with pytest.raises(Refused) as refused:
        helm.render(yaml.safe_load(values))
    assert words in str(refused.value)
