"""Clients that leave, engines that die, signals: what a real process does then."""

import asyncio
import json
import os
import signal
import socket
import struct
import time
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.conftest import StartServer
from tests.e2e.server import PATIENCE_S, Server, processor_s

pytestmark = pytest.mark.e2e


def send_request(server: Server, body: dict[str, object], receive_bytes: int = 0) -> socket.socket:
    """A connection with one request on it, as raw bytes; `receive_bytes`: how many of the answer wait unread here."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Everything until the stream's last chunk, or until the server closes."""
    text = b""
    with connection:
        while not text.endswith(b"\r\n0\r\n\r\n") and (piece := connection.recv(65536)):
            text += piece
    return text


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_two_hundred_disconnects_leave_nothing_behind(start_server: StartServer) -> None:
    server = start_server("--max-num-seqs", "16", "--server.max-inflight", "256")
    connections = []
    for index in range(200):
        body = {"prompt": f"Request {index} " * (1 + index % 30), "max_tokens": 800, "stream": index % 2 == 0}
        connections.append(send_request(server, {**body, "ignore_eos": True}))
        if index % 4 == 0 and index < 16:
            connections[-1].recv(64)  # mid-stream; the others leave queued, in prefill, or between
    for index, connection in enumerate(connections):
        reset(connection) if index % 5 == 0 else connection.close()
    samples = server.wait_metrics(
        roseinfer_http_inflight_streams=0, roseinfer_num_requests_running=0, roseinfer_num_requests_waiting=0
    )
    assert samples['roseinfer_kv_cache_blocks{state="used"}'] == 0
    num_aborted, num_done = (
        samples[f'roseinfer_requests_total{{api="completions",finish_reason="{end}"}}'] for end in ("abort", "length")
    )
    assert num_aborted + num_done == 200  # a fast engine is through with a few before their clients leave
    assert num_aborted >= 150
    assert num_aborted <= samples["roseinfer_client_disconnects_total"] <= 200
    assert samples["roseinfer_requests_received_total"] == 200
    status, reply = server.post("/v1/completions", {"prompt": "still here", "max_tokens": 3, "ignore_eos": True})
    assert (status, reply["usage"]["completion_tokens"]) == (200, 3)


def test_a_killed_engine_ends_every_stream_and_the_process(start_server: StartServer) -> None:
    server = start_server()
    streams = [
        send_request(server, {"prompt": "x", "max_tokens": 900, "stream": True, "ignore_eos": True}) for _ in range(4)
    ]
    for stream in streams:
        stream.recv(512)
    killed_at, killed_at_s = time.monotonic(), processor_s(server.process.pid)
    os.kill(server.engine_pid(), signal.SIGKILL)
    for stream in streams:
        text = read_all(stream)
        assert b'"code":"engine_dead"' in text.replace(b'": "', b'":"')
        assert b"[DONE]" not in text
    while server.status("/livez") == 200:
        time.sleep(0.02)
    assert processor_s(server.process.pid) - killed_at_s < 2.0, "of its own time, since the machine's may be others'"
    assert time.monotonic() - killed_at < 15.0, "two seconds are promised: room for a busy machine, not for a timer"
    assert server.status("/livez") == 503
    assert server.status("/readyz") == 503
    assert server.post("/v1/completions", {"prompt": "x"})[0] == 503
    assert server.process.wait(timeout=PATIENCE_S) == 70
    assert "signal 9" in server.log()


def test_sigterm_lets_streams_finish(start_server: StartServer) -> None:
    server = start_server()

    async def status(session: aiohttp.ClientSession, path: str) -> int:
        async with session.get(server.url + path) as response:
            return response.status

    async def scenario() -> list[str]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            body = {"prompt": "x", "max_tokens": 1000, "stream": True, "ignore_eos": True}
            responses = [await session.post(f"{server.url}/v1/completions", json=body) for _ in range(16)]
            server.process.send_signal(signal.SIGTERM)
            while await status(session, "/readyz") == 200:
                pass
            async with session.post(f"{server.url}/v1/completions", json=body) as late:
                assert late.status == 503
                assert late.headers["Retry-After"].isdigit()
                assert (await late.json())["error"]["code"] == "not_ready"
            return [await response.text() for response in responses]

    texts = asyncio.run(scenario())
    assert all(text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text for text in texts)
    assert server.process.wait(timeout=PATIENCE_S) == 0


def test_the_drain_is_bounded_and_a_second_signal_is_heeded(start_server: StartServer) -> None:
    server = start_server("--server.drain-timeout-s", "60")
    stream = send_request(server, {"prompt": "x", "max_tokens": 1000, "stream": True, "ignore_eos": True, "n": 8})
    stream.recv(512)
    server.process.send_signal(signal.SIGTERM)
    while server.status("/readyz") == 200:
        pass
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=30) == 0  # half of the drain
    text = read_all(stream)
    assert b'"error"' in text
    assert b"[DONE]" not in text


def test_an_idle_server_leaves_at_once_and_takes_its_engine_along(start_server: StartServer) -> None:
    server = start_server()
    engine_pid = server.engine_pid()
    assert server.stop(signal.SIGINT) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine_pid, 0)


def test_a_caller_that_ignores_the_ends_of_children_changes_nothing(start_server: StartServer) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which the server inherits
    try:
        server = start_server()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert server.stop() == 0, server.log()


def test_the_engine_dies_with_a_server_that_was_killed(start_server: StartServer) -> None:
    server = start_server()
    engine_pid = server.engine_pid()
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{engine_pid}/stat").exists() and " Z " not in Path(f"/proc/{engine_pid}/stat").read_text():
        assert time.monotonic() < deadline, "the engine outlives its server"
        time.sleep(0.05)
