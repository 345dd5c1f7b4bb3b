"""What `/debug/*` answers, to whom, and that bad questions are refused by name."""

import asyncio
import base64
import io
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from roseinfer.messages import ProfileEnded
from roseinfer.observe.recorder.flight import Flight
from roseinfer.observe.recorder.recording import Recording
from roseinfer.server.app import build_ops_app
from roseinfer.server.ops import debug, debug_access, profile
from roseinfer.server.ops.debug_access import is_loopback
from roseinfer.server.ops.probes import judge_of
from tests.unit.observe.flights import make_flight
from tests.unit.server.harness import Answer, ScriptedEngine, answering, ops_app, pages, serving


class Operations:
    """The operations port, and questions to it."""

    def __init__(self, url: str, session: aiohttp.ClientSession, app: web.Application) -> None:
        self.url = url
        self.app = app
        self._session = session

    async def ask(self, path: str, method: str = "GET", **options: object) -> Answer:
        async with self._session.request(method, self.url + path, **options) as response:  # type: ignore[arg-type]
            return Answer(response.status, response.headers, await response.read())


@asynccontextmanager
async def operations(
    flight: Flight | None = None, *, ops_host: str = "127.0.0.1", keys: list[str] | None = None, **config: Any
) -> AsyncIterator[Operations]:
    async with serving(ScriptedEngine(), keys=keys, ops_host=ops_host, **config) as server:

        async def begin_profile(num_steps: int, path: str) -> Awaitable[ProfileEnded]:
            return server.engine.profile(num_steps, path)

        routes = [*debug.routes(flight or make_flight()), debug.invariants_route(dict)]
        routes.append(profile.route(begin_profile, lambda: Path("new"), lambda *_: None))
        app = ops_app(server.service, routes)
        async with answering(app) as (url, _), aiohttp.ClientSession() as session:
            yield Operations(url, session, app)


async def test_the_last_steps() -> None:
    async with operations() as port:
        steps = (await port.ask("/debug/steps?limit=3")).json["steps"]
        all_steps = (await port.ask("/debug/steps?limit=8192")).json["steps"]
    assert [step["step_id"] for step in steps] == [124, 125, 126]
    assert [step["step_id"] for step in all_steps] == list(range(1, 127))
    assert (steps[0]["kind"], steps[0]["num_decode_seqs"], steps[0]["blocked_by"]) == ("decode", 7, "")
    assert set(steps[0]["phases"]) >= {"schedule", "launch", "wait", "commit"}


async def test_the_recording_can_be_read(tmp_path: Path) -> None:
    async with operations() as port:
        answer = await port.ask("/debug/recording")
    assert "roseinfer-recording.npz" in answer.headers["Content-Disposition"]
    assert len(np.load(io.BytesIO(answer.body))["steps"]) == 126
    path = tmp_path / "a.npz"
    path.write_bytes(answer.body)
    recording = Recording.load(path)
    assert [request.request_id for request in recording.requests][-1] == "long-prompt"
    assert recording.requests[0].end_ns
    assert not recording.requests[1].end_ns


async def test_the_trace_is_in_chromes_format() -> None:
    async with operations() as port:
        trace = (await port.ask("/debug/trace?limit=60")).json
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
    names = {event["name"] for event in events}
    assert {"stream-1", "long-prompt", "prefill", "decode", "schedule", "gap: prefill_of_others"} <= names
    [gap, *_] = [event for event in events if event["name"] == "gap: prefill_of_others"]
    assert gap["args"]["prefill_of_others_ms"] > 30
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert {"pid", "tid", "ts", "args"} <= set(event)
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            by_track.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for track, spans in by_track.items():
        assert_nested(track, spans)


def assert_nested(track: tuple[int, int], spans: list[tuple[float, float]]) -> None:
    """Of two spans on one track, one holds the other or they are apart: what the format asks for."""
    open_ends: list[float] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= start + 0.001:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 0.001, track
        open_ends.append(end)


async def test_the_page_gets_everything_and_then_what_is_new() -> None:
    flight = make_flight()
    async with operations(flight) as port:
        first = (await port.ask("/debug/timeline/data?limit=8192")).json
        cursor = "since={since}&since_ns={since_ns}".format(**first["next"])
        second = (await port.ask(f"/debug/timeline/data?limit=500&{cursor}")).json
    assert len(first["steps"]) == 126
    assert [request["id"] for request in first["requests"]] == [*(f"stream-{n}" for n in range(6)), "long-prompt"]
    assert first["requests"][0]["num_tokens"] == len(first["requests"][0]["token_ns"]) == 126
    rows = [dict(zip(first["gap_fields"], row, strict=True)) for row in first["gaps"]]
    slow = [row for row in rows if row["is_slow"]]
    assert {first["meta"]["causes"][row["cause"]] for row in slow} == {"prefill_of_others"}
    assert len(slow) == 6
    for row in rows:
        assert sum(row["parts"][1::2]) == row["end_ns"] - row["start_ns"]
    assert (second["steps"], second["gaps"]) == ([], [])
    assert all(request["token_ns"] == [] for request in second["requests"])
    assert second["next"]["since"] == 126


async def test_a_limit_shows_the_newest_steps() -> None:
    async with operations() as port:
        told = (await port.ask("/debug/timeline/data?limit=10")).json
    assert [row[0] for row in told["steps"]] == list(range(117, 127))
    request = told["requests"][1]
    assert (request["tokens_from"], len(request["token_ns"]), request["num_tokens"]) == (115, 10, 125)
    assert min(row[4] for row in told["gaps"]) == 117


async def test_a_saved_recording_can_be_looked_at() -> None:
    async with operations() as port:
        saved = (await port.ask("/debug/recording")).body
        answer = await port.ask("/debug/recording/view", "POST", data=saved)
    told = answer.json
    assert (told["meta"]["is_live"], len(told["steps"]), len(told["requests"])) == (False, 126, 7)
    assert sum(row[6] for row in told["gaps"]) == 6


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04"])
async def test_what_is_no_recording_is_refused(content: bytes) -> None:
    async with operations() as port:
        answer = await port.ask("/debug/recording/view", "POST", data=content)
    assert (answer.status, answer.error["param"]) == (400, "recording")
    assert "/tmp" not in answer.error["message"]  # noqa: S108 - clients do not learn where it was put


async def test_too_long_a_recording_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "MAX_RECORDING_BYTES", 1000)
    async with operations() as port:
        answer = await port.ask("/debug/recording/view", "POST", data=b"x" * 1001)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("steps?limit=x", "limit"),
        ("steps?limit=0", "limit"),
        ("steps?limit=-1", "limit"),
        ("steps?limit=8193", "limit"),
        ("steps?limit=", "limit"),
        ("steps?limit=1e3", "limit"),
        ("steps?limit=٣", "limit"),
        ("trace?limit=99999999999999999999999", "limit"),
        ("timeline/data?since=new", "since"),
        ("timeline/data?since_ns=-5", "since_ns"),
        ("steps?limit=1&limit=2", "limit"),
    ],
)
async def test_bad_questions_are_refused_by_name(path: str, param: str) -> None:
    async with operations() as port:
        answer = await port.ask(f"/debug/{path}")
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_what_a_path_would_not_read_is_refused() -> None:
    async with operations() as port:
        routes = [(route.method, route.resource.canonical) for route in port.app.router.routes() if route.resource]
        asked = [(method, path) for method, path in routes if method != "HEAD" and path.startswith("/debug/")]
        assert {("POST", "/debug/profile"), ("GET", "/debug/invariants"), ("GET", "/debug/timeline/{file}")} <= {*asked}
        for method, path in asked:
            url = path.format(id="stream-1", file="main.js")
            unknown = await port.ask(f"{url}?Limit=3&verbose", method)
            assert (unknown.status, unknown.error["param"]) == (400, "Limit")
            assert "`Limit`, `verbose`" in unknown.error["message"]
            if path not in debug_access.WITH_BODY:
                answer = await port.ask(url, method, data=b"x")
                assert (answer.status, answer.error["param"]) == (400, "body")


async def test_a_body_that_turns_out_empty_is_none() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in list[bytes]():
            yield piece

    async with operations() as port:
        answer = await port.ask("/debug/steps", data=pieces())
    assert answer.status == 200


async def test_a_request_in_flight_and_one_that_ended() -> None:
    async with operations() as port:
        listed = (await port.ask("/debug/requests")).json["requests"]
        running = (await port.ask("/debug/requests/stream-1")).json
        ended = (await port.ask("/debug/requests/stream-0")).json
        unknown = await port.ask("/debug/requests/nobody")
    assert [(one["id"], one["stage"]) for one in listed][:2] == [("stream-1", "decoding"), ("stream-2", "decoding")]
    assert (running["stage"], running["waiting"], running["num_generated_tokens"]) == ("decoding", None, 125)
    assert running["longest_write_gap_ms"] == pytest.approx(40.4, abs=0.5)
    assert "under_way" in running["times_ms"]
    assert (ended["stage"], ended["finish_reason"]) == ("finished", "length")
    parts = ("receive", "tokenize", "submit_lag", "queue_wait", "prefill", "first_write")
    assert sum(ended["times_ms"][part] for part in parts) == pytest.approx(ended["time_to_first_token_ms"])
    assert (unknown.status, unknown.error["code"]) == (404, "request_not_found")


async def test_the_id_of_a_further_choice_is_found() -> None:
    async with operations(make_flight(stream_id="several/{}")) as port:
        assert (await port.ask("/debug/requests/several/1")).json["id"] == "several/1"


async def test_the_page_and_its_parts_are_served() -> None:
    async with operations() as port:
        page = await port.ask("/debug/timeline")
        names = [name.decode() for name in (b"main.js", b"page.css") if name in page.body]
        parts = {name: await port.ask(f"/debug/timeline/{name}") for name in (*names, "chart.js", "data.js")}
        nothing = await port.ask("/debug/timeline/../debug.py")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert len(parts) == 4
    assert {part.status for part in parts.values()} == {200}
    assert nothing.status == 404


KEYS = ["first-key"]


def basic(key: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anybody:{key}".encode()).decode()}


PATHS = ("steps", "timeline", "timeline/main.js", "timeline/data", "recording", "trace", "requests", "nowhere")


async def test_off_loopback_without_keys_it_is_off() -> None:
    async with operations(ops_host="0.0.0.0") as port:  # noqa: S104 - what the test is about
        answers = [await port.ask(f"/debug/{path}") for path in PATHS]
        probe, metrics = await port.ask("/livez"), await port.ask("/metrics")
    assert {answer.status for answer in answers} == {404}
    assert "api_key_file" in answers[0].error["message"]
    assert (probe.status, metrics.status) == (200, 200)


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, basic("wrong"), {"Authorization": "Basic %%%"}, basic("")]
)
async def test_off_loopback_it_needs_a_key(headers: dict[str, str]) -> None:
    async with operations(ops_host="::", keys=KEYS) as port:
        answers = [await port.ask(f"/debug/{path}", headers=headers) for path in PATHS]
        probe, metrics = await port.ask("/livez"), await port.ask("/metrics")
    assert {answer.status for answer in answers} == {401}
    assert answers[0].headers["WWW-Authenticate"].startswith("Basic ")
    assert (probe.status, metrics.status) == (200, 200)


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer first-key"}, basic("first-key")])
async def test_off_loopback_a_key_opens_it(headers: dict[str, str]) -> None:
    async with operations(ops_host="0.0.0.0", keys=KEYS) as port:  # noqa: S104 - what the test is about
        assert (await port.ask("/debug/steps", headers=headers)).status == 200


async def test_on_loopback_it_needs_no_key_but_a_host_of_the_loopback() -> None:
    """Else a site could have its own name resolve to 127.0.0.1 and read through the visitor's browser."""
    async with operations(keys=KEYS) as port:
        for host in ("localhost:8001", "127.0.0.1", "[::1]:8001"):
            assert (await port.ask("/debug/steps", headers={"Host": host})).status == 200
        refused = await port.ask("/debug/steps", headers={"Host": "attacker.example.com"})
        probe = await port.ask("/livez", headers={"Host": "attacker.example.com"})
    assert (refused.status, refused.error["code"]) == (403, "cross_site")
    assert probe.status == 200


async def test_another_sites_page_changes_nothing() -> None:
    async with operations() as port:
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 400), ("none", 400)):
            headers = {"Sec-Fetch-Site": site}
            answer = await port.ask("/debug/recording/view", "POST", data=b"no recording", headers=headers)
            assert answer.status == status


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("LocalHost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.com", "", "localhost.example.com")],  # noqa: S104
)
def test_what_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


async def test_json_answers_are_json() -> None:
    async with operations() as port:
        for path in ("steps", "requests", "trace", "timeline/data"):
            answer = await port.ask(f"/debug/{path}")
            assert answer.headers["Content-Type"].startswith("application/json")
            json.loads(answer.body)


async def test_pages_that_wait_leave_other_threads_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large bodies and metrics wait for the event loop's own threads, of which there are 32 at most."""
    flight, asked, is_over = make_flight(), asyncio.Semaphore(0), threading.Event()

    def timeline(*_: int) -> Callable[[], bytes]:
        asked.release()
        return lambda: b"{}" if is_over.wait(60) else b""

    monkeypatch.setattr(flight, "timeline", timeline)
    async with operations(flight) as port:
        pages = [asyncio.create_task(port.ask("/debug/timeline/data")) for _ in range(40)]
        try:
            for _ in pages:
                await asked.acquire()
            await asyncio.wait_for(asyncio.to_thread(int), 30)
        finally:
            is_over.set()
        assert {(await page).body for page in pages} == {b"{}"}


async def test_without_a_telemetry_process_it_is_said_why_there_is_none() -> None:
    async with serving(ScriptedEngine()) as server:
        app = build_ops_app(server.service, pages, judge_of(server.service), (), [debug_access.say_gone])
        async with answering(app) as (url, _), aiohttp.ClientSession() as session:
            port = Operations(url, session, app)
            for path in ("timeline", "timeline/data?since=4", "requests"):
                answer = await port.ask(f"/debug/{path}")
                assert answer.status == 404
                assert "gone with the telemetry process" in answer.json["error"]["message"]
            assert (await port.ask("/livez")).status == 200


async def test_the_operations_port_lists_each_of_its_routes() -> None:
    async with operations() as server:
        told = (await server.ask("/")).body.decode().splitlines()
        routes = [route for route in server.app.router.routes() if route.method != "HEAD"]
    assert [line.split() for line in told] == [
        [route.method, route.resource.canonical] for route in routes if route.resource is not None
    ]
    assert {"GET  /livez", "GET  /debug/timeline/data", "POST /debug/recording/view"} <= set(told)
    async with operations(ops_host="0.0.0.0") as server:  # noqa: S104 - what it is about
        without_debug = (await server.ask("/")).body.decode().splitlines()
    assert without_debug == [line for line in told if "/debug/" not in line]
