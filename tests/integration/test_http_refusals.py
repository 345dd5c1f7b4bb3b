"""Every error of the documented table: told once, and counted once under its own code."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from roseinfer.errors import NotReady, SlowReader
from roseinfer.messages import ProfileEnded, Request, TokenOutput
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.records import EngineTimes, FinishReason, RequestTimeline
from roseinfer.server.ops import debug, profile
from tests.integration.test_http_connections import HEAD, connected
from tests.unit.observe.facts import Page, make_metrics
from tests.unit.observe.flights import make_flight
from tests.unit.server.harness import INSTRUMENTS, ScriptedEngine, Server, answering, ops_app, says, serving

TABLE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
DOCUMENTED = {
    (int(status), code) for status, code in re.findall(r"^\| (\d{3}) \| `\w+` \| `(\w+)` \|", TABLE, re.MULTILINE)
}

REFUSED, FAILED, ENDED = (f"roseinfer_{name}_total" for name in ("requests_rejected", "request_errors", "requests"))
Ask = Callable[[Server], Awaitable[int]]


class CountedEngine(ScriptedEngine):
    """Its timelines are told as the real client tells them."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics

    def open_timeline(self, timeline: RequestTimeline) -> None:
        super().open_timeline(timeline)
        self._metrics.on_start(timeline)

    def close_timeline(self, timeline: RequestTimeline) -> None:
        super().close_timeline(timeline)
        self._metrics.on_finish(timeline)


def counted(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """What was counted of requests that were refused, failed or were cut, by series and label."""
    return {
        (name, *(text for label, text in labels if label != "api")): value
        for (name, labels), value in Page(metrics).samples.items()
        if value and (name in {REFUSED, FAILED} or (name == ENDED and ("finish_reason", "abort") in labels))
    }


def asks(method: str, path: str, **options: Any) -> Ask:
    async def ask(server: Server) -> int:
        return (await server.request(method, path, **options)).status

    return ask


def completes(reply: Callable[[Request], Any] | None = None, **body: Any) -> Ask:
    """A completion, and what the engine says to it."""

    async def ask(server: Server) -> int:
        server.engine.reply = reply
        return (await server.complete(**body)).status

    return ask


def sends(content: bytes) -> Ask:
    """Bytes over a socket of their own."""

    async def ask(server: Server) -> int:
        async with connected(server) as (reader, writer):
            writer.write(content)
            return int((await reader.readline()).split()[1])

    return ask


def waits_in_vain(request: Request) -> list[TokenOutput]:
    never_scheduled = EngineTimes(inbox_ns=1, scheduled_ns=0, num_cached_tokens=0, num_preemptions=0)
    return [TokenOutput(request.request_id, [], None, FinishReason.TIMEOUT, None, never_scheduled)]


def is_broken(_: Request) -> list[TokenOutput]:
    raise ZeroDivisionError


async def aborts_what_is_still_coming(server: Server) -> int:
    async with connected(server) as (reader, writer):
        writer.write(HEAD + b"X-Request-Id: mine\r\nContent-Length: 99\r\n\r\n{")
        while not server.service.num_exchanges:  # noqa: ASYNC110  # the server's, without an event
            await asyncio.sleep(0.01)
        assert (await server.request("POST", "/v1/requests/mine/abort")).status == 200
        return int((await reader.readline()).split()[1])


async def finds_it_full(server: Server) -> int:
    first = asyncio.create_task(server.complete())
    await server.engine.received()
    status = (await server.complete()).status
    server.engine.say("a", FinishReason.LENGTH)
    await first
    return status


async def reads_slowly(server: Server) -> int:
    """The status line of a stream is out by then."""
    asked = asyncio.create_task(server.open())
    await server.engine.received()
    server.engine.say("a")
    async with await asked as response:
        server.engine.fail(SlowReader("too slow"))
        assert b'"slow_reader"' in await response.read()
    return SlowReader.status


async def is_in_trouble(server: Server) -> int:
    server.engine.trouble = "no engine step for 30 s"
    return (await server.complete()).status


async def profiles_twice(server: Server) -> int:
    async with operations(server) as port:
        assert await asks("POST", "/debug/profile")(port) == 202
        status = await asks("POST", "/debug/profile")(port)
        server.engine.profiles[0][2].set_result(ProfileEnded(20))
        return status


async def asks_for_another_site(server: Server) -> int:
    async with operations(server) as port:
        return await asks("GET", "/debug/steps", headers={"Host": "other.example"})(port)


@asynccontextmanager
async def operations(server: Server) -> AsyncIterator[Server]:
    """The same server's operations port."""

    async def begin_profile(num_steps: int, path: str) -> Awaitable[ProfileEnded]:
        return server.engine.profile(num_steps, path)

    routes = [*debug.routes(make_flight()), profile.route(begin_profile, lambda: Path("new"), lambda *_: None)]
    async with answering(ops_app(server.service, routes)) as (url, runner):
        yield Server(server.engine, server.service, url, server.session, runner)


@dataclass(frozen=True)
class Case:
    """How to get an error, and which series counts it."""

    ask: Ask
    server: dict[str, Any] = field(default_factory=dict)
    series: str = REFUSED
    label: str = ""  # empty: the code


def fails(ask: Ask, label: str = "") -> Case:
    return Case(ask, series=FAILED, label=label)


SLOW = HEAD.replace(b"/v1/completions", b"/tokenize") + b"Content-Length: 99\r\n\r\n{"
CASES = {
    (400, "context_length_exceeded"): Case(completes(prompt=[1] * 100, max_tokens=29)),
    (400, "invalid_value"): Case(asks("POST", "/tokenize", json={"prompt": 5})),
    (400, "malformed_request"): Case(sends(b"hello\r\n\r\n")),
    (401, "invalid_api_key"): Case(asks("GET", "/v1/models"), {"keys": ["a-key"]}),
    (403, "cross_site"): Case(asks_for_another_site),
    (404, "model_not_found"): Case(asks("GET", "/v1/models/none")),
    (404, "request_not_found"): Case(asks("POST", "/v1/requests/none/abort")),
    (404, "unknown_route"): Case(asks("GET", "/nowhere")),
    (405, "method_not_allowed"): Case(asks("GET", "/v1/completions")),
    (408, "body_timeout"): Case(sends(SLOW), {"body_timeout_s": 0.2}),
    (408, "slow_reader"): Case(reads_slowly, series=ENDED, label="abort"),
    (409, "conflict"): Case(profiles_twice),
    (413, "body_too_large"): Case(asks("POST", "/tokenize", json={"prompt": "x" * 2000}), {"max_body_bytes": 1024}),
    (415, "unsupported_media_type"): Case(asks("POST", "/detokenize", data="hello")),
    (417, "malformed_request"): Case(sends(HEAD + b"Expect: a miracle\r\nContent-Length: 2\r\n\r\n{}")),
    (429, "overloaded"): Case(finds_it_full, {"max_inflight": 1}),
    (431, "head_too_large"): Case(sends(b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")),
    (499, "aborted"): Case(aborts_what_is_still_coming),
    (500, "engine_failed"): fails(completes(says("a", FinishReason.ABORT))),
    (500, "internal_error"): fails(completes(is_broken), label="other"),
    (500, "sequence_failed"): fails(completes(says("a", FinishReason.ERROR))),
    (503, "engine_dead"): Case(is_in_trouble),
    (503, "not_ready"): Case(asks("GET", "/v1/models"), {"is_ready": False}),
    (503, "queue_timeout"): fails(completes(waits_in_vain)),
    (504, "timeout"): fails(completes(says("a", FinishReason.TIMEOUT))),
}


def test_the_documented_codes_are_all_here() -> None:
    assert set(CASES) == DOCUMENTED


@pytest.mark.parametrize(("status", "code"), CASES)
async def test_an_error_is_counted_once_under_its_code(status: int, code: str) -> None:
    case, metrics = CASES[status, code], make_metrics()
    async with serving(CountedEngine(metrics), observer=metrics, **case.server) as server:
        assert await case.ask(server) == status
        await server.service.wait_idle()
    assert counted(metrics) == {(case.series, case.label or code): 1}


async def test_a_mistake_of_ours_before_the_engine_heard_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = make_metrics()
    async with serving(CountedEngine(metrics), observer=metrics) as server:
        monkeypatch.delattr(server.service, "api_keys")
        assert (await server.complete()).status == 500
    assert counted(metrics) == {(REFUSED, "other"): 1}


async def test_what_is_answered_well_and_the_probes_of_a_server_that_is_not_ready_count_nothing() -> None:
    metrics = make_metrics()
    async with serving(CountedEngine(metrics), observer=metrics, is_ready=False) as server:
        assert {(await server.get(path)).status for path in ("/readyz", "/startupz", "/health")} == {503}
    async with serving(CountedEngine(metrics), observer=metrics) as server:
        server.engine.reply = says("a")
        assert {(await server.complete()).status, (await server.get("/v1/models")).status} == {200}
    assert counted(metrics) == {}


async def test_metrics_that_are_not_there_are_no_refused_request() -> None:
    """While the telemetry process starts again: pickers that ask for them would use up the budget of availability."""
    metrics = make_metrics()

    async def pages(*_: object, **__: object) -> Any:
        raise NotReady("The telemetry process, which has the metrics, is not running.")

    instruments = replace(INSTRUMENTS, pages=pages)
    async with serving(CountedEngine(metrics), observer=metrics, instruments=instruments) as server:
        assert {(await server.get(path)).status for path in ("/metrics", "/metrics/load")} == {503}
    assert counted(metrics) == {}
