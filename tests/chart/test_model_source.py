"""`model.source` brings the model to the pod: by an init container, a job or a volume."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roseinfer.config.options import DEMO_MODEL
from roseinfer.model.weights.checkpoint import resolve_checkpoint
from tests.chart.checks import configured
from tests.chart.helm_process import CHART, NEWEST, HelmProcess, Object, Refused
from tests.integration.object_store import running_store

PREFETCH = CHART / "files" / "prefetch.py"
JOB = {"modelCache": {"enabled": True, "accessModes": ["ReadWriteMany"], "prefetchJob": {"enabled": True}}}
OF_DOWNLOADS: Object = {
    "env": [{"name": "AWS_CA_BUNDLE", "value": "/ca/ca.crt"}],
    "envFrom": [{"secretRef": {"name": "keys-of-the-store"}}],
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"}},
}


def with_source(source: str, **more: Any) -> Object:
    return {"model": {"source": source}, **more}


@pytest.mark.parametrize(
    ("source", "path", "revision", "name"),
    [
        ("hf://Qwen/Qwen3-8B", "Qwen/Qwen3-8B", None, "Qwen3-8B"),
        ("hf://Qwen/Qwen3-8B@v1.0", "Qwen/Qwen3-8B", "v1.0", "Qwen3-8B"),
        ("s3://models/team/qwen3/", "s3://models/team/qwen3", None, "qwen3"),
        ("gs://models/qwen3", "gs://models/qwen3", None, "qwen3"),
        ("oci://registry.example.com:5000/models/qwen3:8b", "/mnt/models/qwen3", None, "qwen3"),
        (f"oci://models/qwen3@sha256:{'a' * 64}", "/mnt/models/qwen3", None, "qwen3"),
        ("pvc://shared/team/qwen3", "/mnt/models/shared/team/qwen3", None, "qwen3"),
        ("pvc://qwen3", "/mnt/models/qwen3", None, "qwen3"),
        ("/opt/models/qwen3", "/opt/models/qwen3", None, "qwen3"),
    ],
)
def test_the_environment_tells_the_program_where_it_is(
    helm: HelmProcess, source: str, path: str, revision: str | None, name: str
) -> None:
    release = helm.render(with_source(source))
    config = configured(release)
    assert (config.model.path, config.model.revision, config.served_model_name) == (path, revision, name)
    assert config.runner.num_threads == 2, "of the pod's cores, as for any model but the embedded one"
    assert helm.invalid(release, NEWEST) == []


@pytest.mark.parametrize("source", ["hf://Qwen/Qwen3-8B", "s3://models/qwen3", "gs://models/qwen3"])
def test_what_fetches_has_what_the_server_has(helm: HelmProcess, source: str) -> None:
    """As an init container, and as the job: environment, authority, account; nothing is asked for again afterwards."""
    alone = helm.render(with_source(source, **OF_DOWNLOADS))
    (fetching,) = alone.pod["spec"]["initContainers"]
    job = helm.render(with_source(source, **OF_DOWNLOADS, **JOB))
    (in_job,) = job.one("Job")["spec"]["template"]["spec"]["containers"]
    assert fetching == in_job
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in job.server["env"]
    assert fetching["command"][:4] == ["python", "/scripts/prefetch.py", "fetch", "/etc/roseinfer/config.yaml"]
    assert fetching["command"][5] == "3600"
    for name in ("env", "envFrom"):
        assert [each for each in alone.server[name] if each not in fetching[name]] == (
            [{"name": "HF_HUB_OFFLINE", "value": "1"}] if name == "env" else []
        )
    assert {"name": "ca", "mountPath": "/ca"} in fetching["volumeMounts"]
    assert fetching["terminationMessagePolicy"] == "FallbackToLogsOnError", "`kubectl describe` shows why"
    assert job.one("Job")["spec"]["template"]["spec"]["serviceAccountName"] == alone.pod["spec"]["serviceAccountName"]
    assert alone.one("Deployment")["spec"]["progressDeadlineSeconds"] > 3600


def test_without_a_source_the_server_fetches_itself(helm: HelmProcess) -> None:
    release = helm.render({"config": {"model": {"path": "Qwen/Qwen3-8B"}}})
    assert "initContainers" not in release.pod["spec"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} not in release.server["env"]


def test_another_image_fetches_where_it_is_given(helm: HelmProcess) -> None:
    values = with_source("s3://models/qwen3", **JOB)
    values["model"]["image"] = "registry.example.com/roseinfer-s3:1"
    release = helm.render(values)
    (container,) = release.one("Job")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.com/roseinfer-s3:1"
    assert release.server["image"] != container["image"]


def test_an_image_and_a_claim_are_volumes(helm: HelmProcess) -> None:
    release = helm.render(with_source("oci://registry.example.com/models/qwen3:8b"))
    volumes = {each["name"]: each for each in release.pod["spec"]["volumes"]}
    reference = "registry.example.com/models/qwen3:8b"
    assert volumes["source"]["image"] == {"reference": reference, "pullPolicy": "IfNotPresent"}
    mount = {"name": "source", "mountPath": "/mnt/models/qwen3", "readOnly": True}
    assert mount in release.server["volumeMounts"]
    assert "initContainers" not in release.pod["spec"]
    release = helm.render(with_source("pvc://shared/qwen3"))
    volumes = {each["name"]: each for each in release.pod["spec"]["volumes"]}
    assert volumes["source"]["persistentVolumeClaim"] == {"claimName": "shared", "readOnly": True}
    assert {**mount, "mountPath": "/mnt/models/shared"} in release.server["volumeMounts"]


@pytest.mark.parametrize(
    ("values", "version", "words"),
    [
        ("{model: {source: Qwen/Qwen3-8B}}", NEWEST, "model.source is Qwen/Qwen3-8B: it begins with hf://"),
        ("{model: {source: 'http://example.com/a'}}", NEWEST, "model.source is http://example.com/a: it begins"),
        (
            "{model: {source: 'hf://'}}",
            NEWEST,
            "model.source is hf://, which is not of the form hf://OWNER/NAME or hf://",
        ),
        (
            "{model: {source: 'hf://a/b/c'}}",
            NEWEST,
            "model.source is hf://a/b/c, which is not of the form hf://OWNER/NAME",
        ),
        ("{model: {source: 's3://a'}}", NEWEST, "model.source is s3://a, which is not of the form s3://BUCKET/FOLDER"),
        (
            "{model: {source: 'gs://a/'}}",
            NEWEST,
            "model.source is gs://a/, which is not of the form gs://BUCKET/FOLDER",
        ),
        (
            "{model: {source: 'pvc://A'}}",
            NEWEST,
            "model.source is pvc://A, which is not of the form pvc://CLAIM or pvc",
        ),
        ("{model: {source: 'pvc://a/../b'}}", NEWEST, "model.source is pvc://a/../b: it has .. in it"),
        ("{model: {source: 'oci://a:b:c'}}", NEWEST, "model.source is oci://a:b:c: an image has a tag or a digest"),
        ("{model: {source: 'oci://models/qwen3'}}", NEWEST, "an image has a tag or a digest"),
        ("{model: {source: 'oci://models/qwen3:8b/folder'}}", NEWEST, "an image has a tag or a digest"),
        ("{model: {source: 'oci://models/qwen3:8b'}}", "1.30", "image volumes came with 1.31"),
        (
            "{model: {source: 'hf://a/b'}, config: {model: {path: c/d}}}",
            NEWEST,
            "config.model.path is c/d, and model.sou",
        ),
        (
            "{model: {source: 'hf://a/b@v1'}, config: {model: {revision: v2}}}",
            NEWEST,
            "config.model.revision is v2, and",
        ),
        (
            "{model: {source: 'pvc://a'}, modelCache: {enabled: true, prefetchJob: {enabled: true}}}",
            NEWEST,
            "modelCache.prefetchJob.enabled and model.source is pvc://a: there is nothing to fetch",
        ),
    ],
)
def test_a_source_that_cannot_be_is_named(helm: HelmProcess, values: str, version: str, words: str) -> None:
    with pytest.raises(Refused) as refused:
        helm.render(yaml.safe_load(values), version=version)
    assert words in str(refused.value)


def prefetch(environment: dict[str, str], *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(PREFETCH), *map(str, arguments)]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_init_container_fetches_from_s3(helm: HelmProcess, tmp_path: Path) -> None:
    """What the server then serves without the store."""
    release = helm.render(with_source("s3://models/demo"))
    (tmp_path / "config.yaml").write_text(release.config_text)
    mark = tmp_path / "models" / "mark"
    environment = {"HF_HOME": str(tmp_path / "models")}
    with running_store() as store:
        store.fill(
            "models", {f"demo/{file.name}": file.read_bytes() for file in resolve_checkpoint(DEMO_MODEL).iterdir()}
        )
        done = prefetch(environment | store.environment, "fetch", tmp_path / "config.yaml", mark, 60)
    assert done.returncode == 0, done.stderr
    assert "s3://models/demo: " in done.stderr
    code = (
        "import sys; sys.modules['botocore'] = None; "  # the server's image need not have the extra
        "from roseinfer.model.weights.checkpoint import resolve_checkpoint as r, Checkpoint; "
        "Checkpoint(r('s3://models/demo'))"
    )
    served = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment | {"HF_HUB_OFFLINE": "1"}, check=False
    )
    assert served.returncode == 0


def test_a_fetch_ends_in_time_and_says_why(tmp_path: Path) -> None:
    """A store that accepts connections and answers nothing."""
    (tmp_path / "config.yaml").write_text("model: {path: 's3://models/demo'}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            "HF_HOME": str(tmp_path),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
        }
        done = prefetch(environment, "fetch", tmp_path / "config.yaml", tmp_path / "mark", 2.5)
    assert done.returncode == 1
    assert "s3://models/demo has not been fetched in 2.5 s" in done.stderr
    assert "Traceback" not in done.stderr
    assert prefetch({}, "wait", tmp_path / "mark", 0).stderr.count("has not been fetched in 2.5 s") == 1
