"""The rendered command starts with the rendered file, and the scripts of the chart do on it what they are for."""

import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import zmq

from roseinfer.bench.load.launcher import START_TIMEOUT_S, free_port
from roseinfer.config.options import DEMO_MODEL
from tests.chart.helm_process import CHART, HelmProcess
from tests.conftest import require_tool

STREAM_ONE = CHART / "files" / "stream_one.py"
PREFETCH = CHART / "files" / "prefetch.py"
KEY = "a-key-of-the-test"


@dataclass(frozen=True)
class Pod:
    """A server that runs as the chart says, on the ports and files of this test."""

    process: "subprocess.Popen[bytes]"
    api_port: int
    ops_port: int
    replay_port: int
    key_file: Path
    log_path: Path
    notes: str

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.api_port}"

    def status(self, path: str, key: str = "") -> int:
        """Of the operations port, which is plain; 0: nobody listens."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.ops_port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                status: int = answer.status
                return status
        except urllib.error.HTTPError as error:
            return error.code
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0


def write_certificate(directory: Path) -> None:
    """What a Secret of the type kubernetes.io/tls holds."""
    directory.mkdir()
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=example.com"
    files = ["-keyout", f"{directory}/tls.key", "-out", f"{directory}/tls.crt"]
    subprocess.run([require_tool("openssl"), *request.split(), *files], check=True, capture_output=True)


@pytest.fixture(scope="module")
def pod(helm: HelmProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    directory = tmp_path_factory.mktemp("pod")
    keys = directory / "keys" / "api-keys"
    keys.parent.mkdir()
    keys.write_text(f"{KEY}\n")
    values = {
        "config": {"server": {"port": free_port(), "ops_port": free_port()}, "runner": {"num_threads": 1}},
        "apiKeys": {"existingSecret": "keys"},
        "tls": {"existingSecret": "certificate"},
        "kvEvents": {"enabled": True, "port": free_port(), "replayPort": free_port()},
        "networkPolicy": {"kvEventsFrom": [{"podSelector": {}}]},
    }
    release = helm.render(values)
    config = directory / "config.yaml"
    write_certificate(directory / "tls")
    text = release.config_text.replace("/etc/roseinfer/keys", str(keys.parent))
    config.write_text(text.replace("/etc/roseinfer/tls", str(directory / "tls")))
    files = {"/etc/roseinfer/config.yaml": str(config)}
    words = [files.get(word, word) for word in release.server["command"]]
    program, *arguments = [word.replace("$(POD_IP)", "127.0.0.1") for word in words]  # as Kubernetes fills it in
    assert program == "roseinfer"
    # What Kubernetes would add for a Service of that name where links are on, and what the image has of its own.
    links = {"ROSEINFER_PORT": "tcp://10.0.0.1:80", "ROSEINFER_SERVICE_HOST": "10.0.0.1"}
    traps = links | {"ROSEINFER_SERVER__HOST": "192.0.2.1", "ROSEINFER_SERVER__OPS_HOST": "192.0.2.1"}
    log_path = directory / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", program, *arguments], stdout=log, stderr=log, env=os.environ | traps
        )
    ports = {port["name"]: port["containerPort"] for port in release.server["ports"]}
    started = Pod(process, ports["http"], ports["ops"], ports["kv-replay"], keys, log_path, release.notes)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while started.status(release.server["readinessProbe"]["httpGet"]["path"]) != 200:
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.05)
        yield started
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def run(*command: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False, timeout=60)


def test_every_probe_is_answered_on_the_operations_port(pod: Pod) -> None:
    assert [pod.status(path) for path in ("/startupz", "/readyz", "/livez")] == [200] * 3


def test_the_health_check_of_the_image_follows_the_server(pod: Pod) -> None:
    """Its ports are of a file, and its API port speaks TLS."""
    assert run("-m", "roseinfer.cli.health_check", pod.process.pid).returncode == 0


def test_the_helm_test_streams_a_completion(pod: Pod) -> None:
    result = run(STREAM_ONE, pod.url, pod.key_file)
    assert result.returncode == 0, result.stderr
    assert re.search("finish reason (length|stop)$", result.stdout.strip()), "the sampled text ends when it does"


def test_the_notes_command_is_exact(pod: Pod) -> None:
    """Address, headers and body of the `curl` that is shown; the key is what `kubectl` would print."""
    (line,) = [line for line in pod.notes.splitlines() if line.strip().startswith("curl -N ")]
    words = shlex.split(re.sub(r"\$\(kubectl .*?\)\"", f'{KEY}"', line))
    url = next(word for word in words if word.startswith("http")).replace(":8000", f":{pod.api_port}")
    headers = dict(words[at + 1].split(": ") for at, word in enumerate(words) if word == "-H")
    request = urllib.request.Request(url, words[words.index("-d") + 1].encode(), headers)
    assert "-k" in words, "the certificate is not for the loopback"
    context = ssl.create_default_context(cafile=pod.key_file.parents[1] / "tls" / "tls.crt")
    context.check_hostname = False
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_the_helm_test_fails_when_the_server_refuses(pod: Pod) -> None:
    assert run(STREAM_ONE, pod.url).returncode != 0


def test_a_router_hears_of_the_cache_under_the_pods_address(pod: Pod) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.setsockopt(zmq.LINGER, 0)
        replay.setsockopt(zmq.RCVTIMEO, 60_000)
        replay.connect(f"tcp://127.0.0.1:{pod.replay_port}")
        replay.send_multipart((b"", bytes(8)))
        _, topic, number, payload = replay.recv_multipart()
    assert topic.decode() == f"kv@127.0.0.1:{pod.api_port}@roseinfer-demo"
    assert (number, msgspec.msgpack.decode(payload)[1]) == (bytes(8), [["AllBlocksCleared"]])


def test_what_may_be_debugged_needs_a_key(pod: Pod) -> None:
    assert pod.status("/debug/steps") == 401
    assert pod.status("/debug/steps", KEY) == 200
    assert pod.status("/metrics") == 200


def test_the_model_is_fetched_and_marked(helm: HelmProcess, tmp_path: Path) -> None:
    release = helm.render({})
    (tmp_path / "config.yaml").write_text(release.config_text)
    mark = tmp_path / ".roseinfer" / "mark"
    result = run(PREFETCH, "fetch", tmp_path / "config.yaml", mark, 60)
    assert result.returncode == 0, result.stderr
    assert DEMO_MODEL in result.stdout
    assert (Path(mark.read_text().strip()) / "config.json").exists()
    assert run(PREFETCH, "wait", mark, 0).returncode == 0


def test_nothing_is_marked_when_nothing_was_fetched(helm: HelmProcess, tmp_path: Path) -> None:
    release = helm.render({"config": {"model": {"path": "/no/such/directory"}}})
    (tmp_path / "config.yaml").write_text(release.config_text)
    assert run(PREFETCH, "fetch", tmp_path / "config.yaml", tmp_path / "mark", 60).returncode == 1
    assert not (tmp_path / "mark").exists()
    waited = run(PREFETCH, "wait", tmp_path / "mark", 0.1)
    assert waited.returncode == 1
    assert "has not fetched the model in 0.1 s; its last attempt failed" in waited.stderr
    assert "/no/such/directory" in waited.stderr


def test_a_drained_server_exits_with_0(pod: Pod) -> None:
    """The last test of the file: SIGTERM is what the kubelet sends after the sleep."""
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(timeout=30) == 0, pod.log_path.read_text()
