"""`POST /debug/profile`: answered at once with the directory, refused out of range and while another one runs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from roseinfer.messages import ProfileEnded
from roseinfer.server.middleware import answer_errors, identify
from roseinfer.server.ops.front_end import FrontEnd
from roseinfer.server.ops.profile import route
from roseinfer.server.port import PORT
from tests.unit.server.harness import Answer, ScriptedEngine, Server, answering, serving


@asynccontextmanager
async def profiling(write_manifest: Callable[[Path, int], None] = lambda _path, _steps: None) -> AsyncIterator[Server]:
    """A server whose port answers `/debug/profile` alone."""
    async with serving(ScriptedEngine()) as server:
        app = web.Application(middlewares=[identify, answer_errors])
        app[PORT] = server.service

        async def begin_profile(num_steps: int, path: str) -> Awaitable[ProfileEnded]:
            return server.engine.profile(num_steps, path)

        app.add_routes([route(begin_profile, lambda: Path("traces") / "new", write_manifest)])
        async with answering(app) as (url, runner):
            yield Server(server.engine, server.service, url, server.session, runner)


async def profile(server: Server, query: str = "") -> Answer:
    return await server.request("POST", f"/debug/profile{query}")


@pytest.mark.parametrize(("query", "num_steps"), [("", 20), ("?steps=1", 1), ("?steps=200", 200)])
async def test_it_answers_at_once_with_the_directory(query: str, num_steps: int) -> None:
    async with profiling() as server:
        answer = await profile(server, query)
    assert (answer.status, answer.json) == (202, {"directory": "traces/new", "num_steps": num_steps})
    assert [profile[:2] for profile in server.engine.profiles] == [(num_steps, "traces/new")]


class LateFrontEnd:
    """Answers after any time that one would wait."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask(self, name: str, payload: bytes = b"", timeout_s: float | None = None) -> bytes:
        self.asked.append(name)
        if timeout_s is not None:
            raise TimeoutError
        return msgspec.msgpack.encode(ProfileEnded(20, "")) if name == "end_profile" else b""

    def ask_then(self, name: str, timeout_s: float, take: Callable[[bytes | None], None]) -> None:
        raise AssertionError(name)

    def notify(self, name: str, payload: bytes) -> None:
        raise AssertionError(name)


async def test_a_front_end_that_is_late_begins_the_profile_that_is_answered() -> None:
    """Given up, it would begin all the same, in a directory that no answer has named."""
    late = LateFrontEnd()
    ended = await FrontEnd(late, lambda _: None).profile(20, "new")
    assert (await ended).num_steps == 20
    assert late.asked == ["begin_profile", "end_profile"]


@pytest.mark.parametrize("steps", ["0", "201", "-1", "1.5", "many", "", "9" * 5000])
async def test_steps_out_of_range_are_refused(steps: str) -> None:
    async with profiling() as server:
        answer = await profile(server, f"?steps={steps}")
    assert (answer.status, answer.error["param"]) == (400, "steps")
    assert server.engine.profiles == []


async def test_the_log_says_what_became_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async with profiling() as server:
        with caplog.at_level(logging.INFO, "roseinfer.server.ops.profile"):
            for error in ("", "OSError: no space"):
                await profile(server)
                await end_profile(server, error)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "a profile was written"),
        ("ERROR", "a profile could not be made: OSError: no space"),
    ]


async def end_profile(server: Server, error: str = "") -> None:
    """The engine says so, and all that follows from it has happened."""
    server.engine.profiles[-1][2].set_result(ProfileEnded(20, error))
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "profile"))


async def test_a_trace_gets_its_manifest_and_a_failure_none(caplog: pytest.LogCaptureFixture) -> None:
    written: list[tuple[Path, int]] = []

    def write_manifest(directory: Path, num_steps: int) -> None:
        written.append((directory, num_steps))
        if len(written) == 2:
            raise OSError(28, "No space left on device")

    async with profiling(write_manifest) as server:
        for error in ("", "OSError: no trace", ""):
            await profile(server)
            await end_profile(server, error)
    assert written == [(Path("traces") / "new", 20)] * 2
    assert "its manifest cannot be written: No space left on device" in caplog.text


async def test_one_at_a_time() -> None:
    async with profiling() as server:
        assert (await profile(server)).status == 202
        answer = await profile(server)
        assert (answer.status, answer.error["code"]) == (409, "conflict")
        server.engine.profiles[0][2].set_result(ProfileEnded(20))
        assert (await profile(server)).status == 202
