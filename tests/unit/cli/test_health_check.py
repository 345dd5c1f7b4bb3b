"""The health check asks where the server's own file, environment and flags say that it listens, TLS or not."""

import json
import os
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from roseinfer.cli import health_check as probe
from tests.conftest import require_tool
from tests.repo.tree import ROOT


class Listening(HTTPServer):
    """Answers every path with one status, and remembers which was asked."""

    def __init__(self, status: int, context: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.asked: list[str] = []
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Listening)
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening(status: int = 200, context: ssl.SSLContext | None = None) -> Iterator[Listening]:
    with Listening(status, context) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


Started = Callable[..., int]


@pytest.fixture
def started() -> Iterator[Started]:
    """Words and variables of a process -> its id. It does nothing, and what listens is in this one."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*words: object, **variables: object) -> int:
        command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)", *map(str, words)]
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()  # before a program runs, its words are not there to be read
        return process.pid

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def check(pid: int) -> int:
    return probe.main([str(pid)])


def test_a_flag_wins_over_the_environment_and_that_over_the_file(started: Started, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    with listening() as ready, listening(503) as busy:
        file.write_text(f"server: {{ops_host: 0.0.0.0, ops_port: {ready.server_port}}}")
        assert check(started("serve", "--config", file)) == 0
        file.write_text(f"server: {{ops_port: {busy.server_port}}}")
        assert check(started("serve", "--config", file)) == 1
        variables = {"ROSEINFER_SERVER__OPS_PORT": ready.server_port}
        assert check(started("serve", "--config", file, **variables)) == 0
        variables = {"ROSEINFER_SERVER__OPS_PORT": busy.server_port}
        assert check(started("serve", f"--ops-port={ready.server_port}", **variables)) == 0
    assert {*ready.asked, *busy.asked} == {"/readyz"}


def test_without_an_operations_port_the_other_is_asked_over_tls(
    started: Started, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=example.com"
    files = ["-keyout", f"{tmp_path}/tls.key", "-out", f"{tmp_path}/tls.crt"]
    subprocess.run([require_tool("openssl"), *request.split(), *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    with listening(context=context) as server:
        words = ["serve", "--ops-port", 0, "--port", server.server_port]
        pair = ["--server.tls-cert-file", tmp_path / "tls.crt", "--server.tls-key-file", tmp_path / "tls.key"]
        assert check(started(*words, *pair)) == 0
        assert check(started(*words)) == 1, "plain HTTP, which this port does not speak"
    assert "not ready: 127.0.0.1:" in capsys.readouterr().err


def test_a_server_that_does_not_listen_is_not_ready(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    with listening() as server:
        port = server.server_port
    assert check(started("serve", "--ops-port", port)) == 1
    assert f"not ready: 127.0.0.1:{port}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["generate", "x"], "is no `roseinfer serve`"),
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--ops-port", "0", "--port", "0"], "server.port: is 0"),
    ],
)
def test_what_is_no_server_is_named(
    started: Started, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(started(*words)) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["one"], ["1", "2"], ["-1"]])
def test_it_wants_one_process(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main(arguments) == 2
    assert "usage" in capsys.readouterr().err


def test_a_process_that_is_gone_is_named(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert check(gone.pid) == 2
    assert f"process {gone.pid}: cannot be read: No such file" in capsys.readouterr().err


def test_it_imports_nothing_heavy() -> None:
    """It runs every few seconds beside what serves."""
    heavy = "{'torch', 'numpy', 'aiohttp', 'jinja2', 'tokenizers'}"
    script = f"import sys, roseinfer.cli.health_check; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_image_asks_its_first_process() -> None:
    (words,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert json.loads(words) == ["python", "-m", probe.__name__, "1"]
