"""The manifests for KServe: pods that Kubernetes accepts, whose command serves /mnt/models and answers its probes."""

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from roseinfer.bench.load.launcher import START_TIMEOUT_S, free_port
from roseinfer.config.flags import Parser, add_config_flags, values_given
from roseinfer.config.options import DEMO_MODEL, Config
from roseinfer.config.sources import build, gather
from roseinfer.model.weights.checkpoint import resolve_checkpoint
from tests.chart.helm_process import NEWEST, OLDEST, ROOT, HelmProcess, Object, Rendered

DEVICES = ("cpu", "gpu")
FILLED = {  # by KServe, for an InferenceService or LLMInferenceService of that name
    "{{.Name}}": "qwen3",
    "{{ .Spec.Model.Name }}": "qwen3",
    "{{ .ObjectMeta.Namespace }}": "serving",
    "{{ ChildName .ObjectMeta.Name `-kserve-self-signed-certs` }}": "qwen3-certificate",
}
IF_TLS = re.compile(r"\{\{ if \.GlobalConfig\.EnableTLS \}\}(.*?)\{\{ end \}\}")
KINDS = {
    "ClusterServingRuntime": "serving.kserve.io/v1alpha1",
    "LLMInferenceServiceConfig": "serving.kserve.io/v1alpha2",
}


def manifest(device: str, kind: str, *, with_tls: bool = False) -> Object:
    text = IF_TLS.sub(r"\1" if with_tls else "", (ROOT / "deploy" / "kserve" / f"{device}.yaml").read_text())
    for template, value in FILLED.items():
        text = text.replace(template, value)
    assert "{{" not in text
    (found,) = [each for each in yaml.safe_load_all(text) if each["kind"] == kind]
    manifest: Object = found
    return manifest


def pod_of(device: str, kind: str, **options: bool) -> Object:
    """The pod's spec as KServe makes it: the runtime's own fields are a pod's too."""
    spec = manifest(device, kind, **options)["spec"]
    found = spec.get("template", spec)
    return {name: found[name] for name in ("containers", "volumes", "terminationGracePeriodSeconds") if name in found}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_kubernetes_accepts_the_pod(helm: HelmProcess, device: str, kind: str) -> None:
    found = manifest(device, kind)
    assert found["apiVersion"] == KINDS[kind]
    pod: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod_of(device, kind)}
    for version in (OLDEST, NEWEST):
        assert helm.invalid(Rendered([pod], ""), version) == []
    (container,) = pod["spec"]["containers"]
    assert container["name"] == {"ClusterServingRuntime": "kserve-container"}.get(kind, "main"), "KServe looks for it"
    volumes = {each["name"] for each in pod["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (device == "gpu")


def configured(container: Object) -> Config:
    """What the command and its environment mean to the program. Raises what it would."""
    program, command, *flags = container["command"]
    assert (program, command) == ("roseinfer", "serve")
    parser = Parser()
    add_config_flags(parser)
    parsed = parser.parse_args(flags)
    environment = {each["name"]: each["value"] for each in container["env"]}
    return build(gather(values_given(parsed), environment, parsed.config)).config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_program_reads_the_command(device: str, kind: str) -> None:
    (container,) = pod_of(device, kind)["containers"]
    config = configured(container)
    assert config.model.path == "/mnt/models"
    assert config.runner.device == {"cpu": "cpu", "gpu": "cuda"}[device]
    names = ("qwen3",) if kind == "ClusterServingRuntime" else ("qwen3", "publishers/serving/models/qwen3")
    assert config.served_model_names == names
    assert not config.server.tls_cert_file
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert config.server.port == next(iter(ports.values()))
    assert ports.get("ops", config.server.ops_port) == config.server.ops_port
    grace = pod_of(device, "LLMInferenceServiceConfig")["terminationGracePeriodSeconds"]
    assert grace == 15 + config.server.drain_timeout_s + 2 + 5 + 5
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in {*ports, *ports.values()}


def test_the_page_gives_an_inference_service_the_time_that_its_streams_need() -> None:
    """A ServingRuntime has no such field, and Kubernetes' 30 seconds are less than the sleep and the drain."""
    page = (ROOT / "docs" / "deployment.md").read_text().partition("\n## KServe\n")[2]
    (block, *_) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    services = {each["kind"]: each["spec"] for each in yaml.safe_load_all(block)}
    (container,) = pod_of("cpu", "ClusterServingRuntime")["containers"]
    grace = services["InferenceService"]["predictor"]["terminationGracePeriodSeconds"]
    assert grace == 15 + configured(container).server.drain_timeout_s + 2 + 5 + 5


def test_where_kserve_has_certificates_the_api_and_the_probes_speak_tls() -> None:
    (container,) = pod_of("cpu", "LLMInferenceServiceConfig", with_tls=True)["containers"]
    config = configured(container)
    assert config.server.tls_cert_file == "/var/run/kserve/tls/tls.crt"
    assert config.server.tls_key_file == "/var/run/kserve/tls/tls.key"
    assert {each["name"]: each["mountPath"] for each in container["volumeMounts"]}["tls-certs"] == "/var/run/kserve/tls"
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http", "scheme": "HTTPS"}


@contextmanager
def running(container: Object, log_path: Path) -> Iterator[dict[str, int]]:
    """The container's command on the embedded model and free ports. Yields the ports by the container's."""
    ports = {"8000": free_port(), "8001": free_port(), "8080": free_port()}
    words = {"/mnt/models": str(resolve_checkpoint(DEMO_MODEL)), **{old: str(new) for old, new in ports.items()}}
    _, *arguments = [words.get(word, word) for word in container["command"]]
    environment = {each["name"]: each["value"] for each in container["env"]}
    command = [sys.executable, "-m", "roseinfer", *arguments, "--server.ops-port", str(ports["8001"])]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
    try:
        yield ports
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", KINDS)
def test_every_probe_is_answered(tmp_path: Path, kind: str) -> None:
    (container,) = pod_of("cpu", kind)["containers"]
    named = {each["name"]: str(each["containerPort"]) for each in container["ports"]}
    with running(container, tmp_path / "log") as ports:
        deadline = time.monotonic() + START_TIMEOUT_S
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            url = f"http://127.0.0.1:{ports[named.get(asked['port'], str(asked['port']))]}{asked['path']}"
            while not is_ok(url):
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.05)


def is_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
