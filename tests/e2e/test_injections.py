"""Faults of the engine, injected into a real server: what its clients, its probes and its operator then see."""

import json
import os
import shutil
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roseinfer.bench.load.launcher import START_TIMEOUT_S
from tests.e2e.conftest import StartServer
from tests.e2e.server import PATIENCE_S, Server, processor_s
from tests.e2e.test_faults import read_all, reset, send_request

pytestmark = pytest.mark.e2e

DEMO = Path(__file__).parents[2] / "src" / "roseinfer" / "demo"
POISONED_POSITION = 300  # the row that computes this position computes no numbers from there on


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def stream_of(server: Server, max_tokens: int = 900, prompt: str = "x", *, usage: bool = False) -> socket.socket:
    body: dict[str, object] = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    connection = send_request(server, body)
    connection.recv(512)
    return connection


def assert_well_ended(connection: socket.socket) -> None:
    text = b""
    while b"data: [DONE]" not in text:
        piece = connection.recv(65536)
        assert piece, text[-500:]
        text += piece
    connection.close()


def last_event(text: bytes) -> dict[str, Any]:
    events = [line.removeprefix(b"data: ") for line in text.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] != b"[DONE]"
    found: dict[str, Any] = json.loads(events[-1])
    return found


def text_of(stream: bytes) -> str:
    """The text of the whole events; an event carries as many tokens as were due when it was written."""
    events = [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in event.get("choices", []))


def answers(server: Server) -> bool:
    status, reply = server.post("/v1/completions", {"prompt": "still here", "max_tokens": 3, "ignore_eos": True})
    return (status, reply.get("usage", {}).get("completion_tokens")) == (200, 3)


def probe(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(server.url + "/livez", timeout=PATIENCE_S) as response:
        body: dict[str, Any] = json.loads(response.read())
        return body


def niceness(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def test_an_engine_that_dies_is_started_again_once(start_server: StartServer) -> None:
    server = start_server("--engine.on-failure", "restart")
    first, nice = server.engine_pid(), niceness(server.engine_pid())
    streams = [stream_of(server) for _ in range(4)]
    os.kill(first, signal.SIGKILL)
    for stream in streams:
        assert last_event(read_all(stream))["error"]["code"] == "engine_dead"
    until(lambda: server.status("/livez") == 200, "a kill would end a restart now")
    until(lambda: server.status("/readyz") == 200, "it never came back")
    assert server.engine_pid() != first
    assert niceness(server.engine_pid()) == nice, "the second engine is nicer than the first"
    assert answers(server)
    samples = server.metrics()
    assert samples["roseinfer_engine_restarts_total"] == 1
    assert samples["roseinfer_num_requests_running"] == 0
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert server.process.wait(timeout=PATIENCE_S) == 70


def test_a_hung_engine_is_noticed_ended_and_started_again(start_server: StartServer) -> None:
    server = start_server("--engine.on-failure", "restart", "--engine.step-timeout-s", "1")
    first, stream = server.engine_pid(), stream_of(server)
    stopped_at = time.monotonic()
    os.kill(first, signal.SIGSTOP)
    error = last_event(read_all(stream))["error"]
    assert time.monotonic() - stopped_at < 1 + 5, "a second after the limit is the aim, and the rest is room"
    assert error["code"] == "engine_dead"
    assert "no engine step for 1 s" in error["message"]
    until(lambda: server.status("/readyz") == 200, "it never came back")
    assert server.engine_pid() != first
    assert answers(server)


def test_an_idle_engine_is_never_hung(start_server: StartServer) -> None:
    server = start_server("--engine.step-timeout-s", "1")
    assert answers(server)
    until(lambda: bool(probe(server)["engine"]["activity"] == "idle"), "it has answered, and says so a moment later")
    os.kill(server.engine_pid(), signal.SIGSTOP)
    time.sleep(2.5)  # more than twice the limit, without a request
    assert probe(server)["engine"]["activity"] == "idle"
    os.kill(server.engine_pid(), signal.SIGCONT)
    assert answers(server)
    assert server.process.poll() is None


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with one position that is not a number."""
    directory = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(DEMO, directory)
    weights = load_file(directory / "model.safetensors")
    [name] = [name for name in weights if name.endswith("wpe.weight")]
    weights[name] = weights[name].clone()
    weights[name][POISONED_POSITION] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_request_without_numbers_fails_and_its_neighbours_do_not(start_server: StartServer, poisoned: Path) -> None:
    server = start_server("--model", str(poisoned), "--server.served-model-name", "roseinfer-demo")
    alone = server.post("/v1/completions", neighbour(0))[1]["choices"][0]["text"]
    doomed = [stream_of(server, prompt=f"Once upon a time {i}") for i in range(3)]
    beside = [send_request(server, neighbour(i)) for i in (0, 0, 0)]
    for connection in beside:
        reply = connection.recv(65536)
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == alone
        connection.close()
    keeper = stream_of(server, max_tokens=250)  # somebody is sound in every step
    for connection in doomed:
        text = read_all(connection)
        assert last_event(text)["error"]["code"] == "sequence_failed"
        assert len(text_of(text)) > POISONED_POSITION // 2, "what it had was delivered"
    assert_well_ended(keeper)
    assert answers(server)
    samples = server.wait_metrics(roseinfer_num_requests_running=0)
    assert samples['roseinfer_requests_total{api="completions",finish_reason="error"}'] == 3
    assert samples['roseinfer_kv_cache_blocks{state="used"}'] == 0
    failed, body = server.post("/v1/completions", {"prompt": "y " * 400, "max_tokens": 1})
    assert (failed, body["error"]["code"]) == (500, "sequence_failed")


def neighbour(seed: int) -> dict[str, Any]:
    return {"prompt": "The sea", "max_tokens": 40, "temperature": 0.8, "seed": seed, "ignore_eos": True}


def test_a_full_disk_stops_no_stream(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No home, no temporary directory, no cache: /proc takes no file, not even from root."""
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, "/proc/nowhere")
    server = start_server()
    assert answers(server)
    for pid in (server.process.pid, server.engine_pid()):
        assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()  # noqa: S108
        assert written_files(pid) <= {str(server.log_path)}


def written_files(pid: int) -> set[str]:
    """Files of the file system that the process has open to write."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            path = os.readlink(entry)
            flags = int(Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text().split("flags:")[1].split()[0], 8)
        except FileNotFoundError:  # it was a connection, and is closed by now
            continue
        if path.startswith("/") and not path.startswith(("/dev/", "/memfd:")) and flags & (os.O_WRONLY | os.O_RDWR):
            found.add(path)
    return found


def test_a_thousand_clients_that_leave_hold_nothing_soon_after(start_server: StartServer) -> None:
    """Every fifth with a reset; queued, reading their prompt, streaming, or waiting for the whole."""
    server = start_server("--max-num-seqs", "16", "--server.max-inflight", "1024", "--server.max-queue-wait-s", "3600")
    for _ in range(4):
        connections = []
        for index in range(250):
            body = {"prompt": f"Client {index} " * (1 + index % 30), "max_tokens": 800, "stream": index % 2 == 0}
            connections.append(send_request(server, {**body, "ignore_eos": True}))
        connections[0].recv(64)
        for index, connection in enumerate(connections):
            reset(connection) if index % 5 == 0 else connection.close()
    pids = server.process.pid, server.engine_pid()
    left_at, left_at_s = time.monotonic(), processor_s(*pids)
    samples = server.wait_metrics(
        roseinfer_http_inflight_streams=0, roseinfer_num_requests_running=0, roseinfer_num_requests_waiting=0
    )
    freed_s = time.monotonic() - left_at
    assert freed_s < 10.0, "two are the aim, on a machine that is not slower than usual"
    assert processor_s(*pids) - left_at_s < 2.0, "of its own time, since the machine's may be others'"
    assert samples['roseinfer_kv_cache_blocks{state="used"}'] == 0
    assert samples["roseinfer_requests_received_total"] == 1000
    aborted = 'roseinfer_requests_total{api="completions",finish_reason="abort"}'
    until(lambda: server.metrics()[aborted] >= 900, "few were aborted")
    num_aborted = server.metrics()[aborted]
    print(f"1000 clients left, {num_aborted:.0f} before their end: 0 blocks and 0 requests {freed_s:.2f} s later")
    assert answers(server)
    assert not [name for name, value in server.metrics().items() if "invariant_violations" in name and value]


def test_a_drain_of_sixty_four_streams_loses_no_token(start_server: StartServer) -> None:
    server = start_server("--max-num-seqs", "64")
    streams = [stream_of(server, max_tokens=120, prompt=f"{i}", usage=True) for i in range(64)]
    server.process.send_signal(signal.SIGTERM)
    signalled_at = time.monotonic()
    until(lambda: server.status("/readyz") != 200, "still ready")
    unready_s = time.monotonic() - signalled_at
    assert unready_s < 5.0, "half a second is the aim, on a machine that is not slower than usual"
    texts = [read_all(stream) for stream in streams]
    assert all(b"data: [DONE]" in text and b'"finish_reason":"length"' in text for text in texts)
    num_tokens = sum(text.count(b'"completion_tokens":120') * 120 for text in texts)
    exit_code = server.process.wait(timeout=PATIENCE_S)
    print(f"64 streams: {num_tokens} of {64 * 120} tokens, unready after {unready_s:.2f} s, exit {exit_code}")
    assert (num_tokens, exit_code) == (64 * 120, 0)


def test_a_signal_while_loading_is_heeded(tmp_path: Path) -> None:
    server = Server(tmp_path / "log")
    try:
        until(lambda: server.status("/livez") == 200, "no port")
        assert server.status("/readyz") == 503
        assert server.stop() == 0
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def test_a_reader_that_is_stuck_holds_the_exit_no_longer_than_the_drain(start_server: StartServer) -> None:
    """14 MB are due to it, three times what the kernel takes, and its own deadline is far away."""
    server = start_server("--server.drain-timeout-s", "1", "--server.write-timeout-s", "600")
    body = {"prompt": ["x"] * 3, "n": 8, "logprobs": 20, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with send_request(server, body, receive_bytes=4096) as stuck:
        stuck.recv(64)
        samples = server.wait_metrics(
            START_TIMEOUT_S, roseinfer_num_requests_running=0, roseinfer_num_requests_waiting=0
        )
        assert samples['roseinfer_requests_total{api="completions",finish_reason="length"}'] == 0, (
            "the reader was never stuck"
        )
        assert samples["roseinfer_http_inflight_streams"] == 24, "all is generated, and no sequence is delivered whole"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=20) == 0  # less than the drain's default
    assert "drain timeout after 1 s: 1 request was cut" in server.log()
