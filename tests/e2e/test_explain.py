"""A real server: what it remembers is explained, a breach is captured, its steps are profiled, and no text gets out."""

import json
import time
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from roseinfer.bench.load.launcher import free_port
from roseinfer.cli.main import main
from roseinfer.observe.recorder.recording import Recording
from tests.e2e.conftest import StartServer
from tests.e2e.server import Server

WORDS = "xylophone quartz"


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def contents(file: Path) -> list[bytes]:
    """What was written, uncompressed."""
    if file.suffix != ".npz":
        return [file.read_bytes()]
    with zipfile.ZipFile(file) as archive:
        return [archive.read(name) for name in archive.namelist()]


def stream(server: Server, request_id: str, max_tokens: int = 40) -> None:
    body = {"prompt": WORDS, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "x-request-id": request_id}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.e2e
def test_a_server_explains_itself(
    start_server: StartServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captures, ops_port = tmp_path / "captures", free_port()
    server = start_server(
        *("--ops-port", str(ops_port), "--observe.capture-dir", str(captures)),
        *("--observe.capture-rules", "1 ttft over 0.001 ms in 10 s", "--observe.capture-profile-steps", "3"),
    )
    url = f"http://127.0.0.1:{ops_port}"
    streams = ["first"]
    stream(server, "first")

    def is_captured() -> bool:
        """A profile is of the steps that come behind the breach."""
        streams.append(f"later {len(streams)}")
        stream(server, streams[-1])
        return bool([*captures.glob("*/manifest.json")])

    until(is_captured)
    [capture] = captures.iterdir()
    manifest = json.loads((capture / "manifest.json").read_text())
    assert [request["request_id"] for request in manifest["requests"]] == ["first"]
    assert manifest["profile"] == {"num_steps": 3, "trace": "trace.json"}
    recording = Recording.load(capture / "recording.npz")
    assert recording.requests[0].request_id == "first"
    assert recording.meta.trigger == "1 ttft over 0.001 ms in 10 s"
    trace = json.loads((capture / "trace.json").read_text())
    assert any(event.get("name", "").startswith("aten::") for event in trace["traceEvents"])

    capsys.readouterr()
    assert main(["explain", url, "--json", "--clock", "engine"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_gaps"] == len(streams) * 39
    assert sum(cause["share"] for cause in found["causes"]) == pytest.approx(1)
    assert main(["explain", str(capture)]) == 0
    assert "saved by the rule: 1 ttft over 0.001 ms in 10 s" in capsys.readouterr().out
    assert main(["top", url, "--once", "--interval", "0.1"]) == 0
    assert capsys.readouterr().out.startswith("roseinfer top  roseinfer-demo  ready")

    with urllib.request.urlopen(urllib.request.Request(f"{url}/debug/profile?steps=2", method="POST")) as response:
        assert response.status == 202
        directory = Path(json.loads(response.read())["directory"])
    stream(server, "third", max_tokens=5)
    until((directory / "manifest.json").exists)
    assert (directory / "trace.json").exists()
    assert directory.parent == captures

    written = [content for file in captures.rglob("*") if file.is_file() for content in contents(file)]
    assert len(written) == 4 + 5, "two manifests and two traces, and the arrays of the recording"
    assert not any(word.encode() in content for content in written for word in WORDS.split())
