"""More than 400 bad inputs of more than 24 classes: each is a 4xx with the error object, and none costs much."""

import contextlib
import gzip
import http.client
import io
import json
import socket
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.bad_inputs import BASE, Case, cases
from tests.e2e.server import Server
from tests.integration.test_http_connections import ODD_HEADS

pytestmark = pytest.mark.e2e


def ask(connection: http.client.HTTPConnection, case: Case) -> tuple[int, bytes]:
    connection.putrequest(case.method, case.path, skip_accept_encoding=True)
    for name, value in case.headers.items():
        connection.putheader(name, value)
    connection.putheader("Content-Length", str(len(case.body)))
    connection.endheaders()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before it was sent to its end
        connection.send(case.body)
    response = connection.getresponse()
    return response.status, response.read()


def fault_of(status: int, content: bytes) -> str | None:
    """What is wrong with an answer to a bad input."""
    if not 400 <= status < 500:
        return f"status {status}"
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return f"no error object: {content[:200]!r}"
    if set(error) != {"message", "type", "param", "code"} or not error["message"] or not error["code"]:
        return f"another shape: {content[:200]!r}"
    return "an answer of kilobytes" if len(content) > 2000 else None


def test_each_is_refused_with_the_error_object(server: Server) -> None:
    faults: list[str] = []
    kinds: Counter[str] = Counter()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for case in cases():
        kinds[case.kind] += 1
        try:
            fault = fault_of(*ask(connection, case))
        except (OSError, http.client.HTTPException) as error:
            fault = repr(error)
            connection.close()
        if fault is not None:
            faults.append(f"{case.kind}: {case.method} {case.path} {case.body[:120]!r} {case.headers}: {fault}")
    connection.close()
    assert faults == []
    assert len(kinds) >= 24
    assert kinds.total() >= 400
    assert server.status("/livez") == 200
    status, body = server.post("/v1/completions", BASE["/v1/completions"])
    assert (status, len(body["choices"])) == (200, 1), "the engine never heard of any of it"
    assert "Traceback" not in server.log()


def test_odd_heads_reach_a_real_process_too(server: Server) -> None:
    for name, (content, status, code) in ODD_HEADS.items():
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(content)
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert (response.status, json.loads(response.read())["error"]["code"]) == (status, code), name
    assert "Traceback" not in server.log()


def memory_kib(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])


def test_a_bomb_is_refused_unread(server: Server) -> None:
    """256 MiB in 256 KiB. What a bomb costs shows in the highest water mark of memory, which never falls."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=9) as file:
        for _ in range(256):
            file.write(bytes(1 << 20))
    bomb = buffer.getvalue()
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    server.post("/v1/completions", {"prompt": ""})  # the paths of an error are warm
    before = memory_kib(server)
    for path in BASE:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        status, content = ask(connection, Case("bomb", "POST", path, bomb, headers))
        connection.close()
        assert (status, json.loads(content)["error"]["code"]) == (415, "unsupported_media_type")
    assert memory_kib(server) - before < 16 * 1024


def test_the_series_do_not_grow_with_what_strangers_send(server: Server) -> None:
    def names() -> set[str]:
        return {line.rpartition(" ")[0] for line in server.page().splitlines() if not line.startswith("#")}

    server.status("/nowhere")
    before = names()
    for i in range(60):
        server.status(f"/nowhere-{i}?canary-{i}=1")
        server.post("/v1/completions", {"prompt": "a", "model": f"canary-{i}"}, **{"x-request-id": f"canary-{i}"})
        server.post("/v1/completions", {"prompt": "a", f"canary-{i}": 1}, **{"User-Agent": f"canary-{i}"})
    new = names() - before
    assert len(new) <= 20, new
    assert "canary" not in server.page()
