"""The Dockerfile is clean, builds without a registry or an index, and its image serves with nothing but a /tmp."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from roseinfer import __version__
from roseinfer.model.kernels.library import levels_here, levels_of, machine
from tests.deploy.container import Container
from tests.deploy.image import BuildError, ImageStore
from tests.repo.tree import ROOT

pytestmark = pytest.mark.timeout(600)  # the first test to ask for the image waits until it is built

COMPLETION = """
import json, urllib.request
body = json.dumps({"model": "roseinfer-demo", "prompt": "Once", "max_tokens": 8, "temperature": 0, "stream": True})
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body.encode())
request.add_header("Content-Type", "application/json")
for line in urllib.request.urlopen(request, timeout=60):
    print(line.decode(), end="")
"""
STATUS = "print(open('/proc/1/status').read())"
PORTS = """
import urllib.request
for port, path in ((8000, "/readyz"), (8001, "/metrics")):
    print(urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60).status)
"""


def test_the_linter_finds_nothing() -> None:
    hadolint = str(Path(sys.executable).with_name("hadolint"))
    command = [hadolint, "--failure-threshold", "style", "Dockerfile"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_image_says_how_it_is_run(image_store: ImageStore, image: str) -> None:
    config = image_store.config(image)
    assert config["Entrypoint"] == ["roseinfer"]
    assert config["Cmd"] == ["serve"]
    assert config["User"] == "10001:10001"
    assert set(config["ExposedPorts"]) == {"8000/tcp", "8001/tcp"}
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    assert labels["version"] == __version__
    assert re.fullmatch("[0-9a-f]{40}", labels["revision"])
    assert labels["licenses"] == "Apache-2.0"
    assert {"title", "description"} <= set(labels)


def test_a_container_serves_without_root_and_without_a_writable_root(
    image_store: ImageStore, image: str, container: Container
) -> None:
    kind, *health_check = image_store.config(image)["Healthcheck"]["Test"]
    assert kind == "CMD"
    assert container.execute(*health_check).returncode, "healthy before it could be"
    container.wait_until_succeeds(*health_check)

    status = dict(re.findall(r"^(\w+):\s*(.*)$", container.execute("python", "-c", STATUS).stdout, re.MULTILINE))
    assert (status["Uid"].split(), status["Gid"].split()) == (["10001"] * 4, ["10001"] * 4)
    assert (int(status["CapEff"], 16), status["NoNewPrivs"]) == (0, "1")
    refused = container.execute("touch", "/opt/roseinfer/kernels/new", "/models/new")
    assert refused.stderr.count("Read-only file system") == 2, refused

    assert container.execute("python", "-c", PORTS).stdout.split() == ["200", "200"]
    answer = container.execute("python", "-c", COMPLETION)
    *chunks, last = re.findall(r"^data: (.+)$", answer.stdout, re.MULTILINE)
    assert last == "[DONE]", answer
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)

    # As the service `locust` of deploy/compose, and headless.
    once = ["--headless", "--run-time", "4s", "--only-summary", "--host", "http://127.0.0.1:8000"]
    loaded = container.execute("locust", "--locustfile", "/loadtest/locustfile.py", *once)
    assert loaded.returncode == 0, loaded
    assert re.search(r"POST .* [1-9]\d* +0\(0.00%\)", loaded.stderr + loaded.stdout), loaded

    container.signal("TERM")
    assert container.wait() == 0, container.log_path.read_text()
    ready = re.search(r"^.*\bready on http.*$", container.log_path.read_text(), re.MULTILINE)
    assert ready
    assert json.loads(ready[0])["kernels"] == (levels_here()[-1].name if levels_here() else "off")


def test_the_kernels_of_every_level_are_inside(container: Container) -> None:
    listed = container.execute("roseinfer", "kernels", "list").stdout
    found = re.findall(r"^(\w+) .* /opt/roseinfer/kernels/(\w+)-", listed, re.MULTILINE)
    assert found == [(level.name, level.name) for level in levels_of(machine())]


def test_an_unknown_device_ends_the_build(image_store: ImageStore, image: str) -> None:
    with pytest.raises(BuildError, match="DEVICE is cpu or cuda, and not abacus"):
        image_store.build("abacus")
