"""What a telemetry process asks its front end, at both ends: probes, profiles, and refusals that are counted here."""

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from roseinfer.errors import NotReady
from roseinfer.messages import Profile, ProfileEnded
from roseinfer.records import Observer
from roseinfer.server.ops.debug_access import PREFIX
from roseinfer.server.ops.probes import Judgement, judge_of
from roseinfer.server.service import Service

TIMEOUT_S = 2.0  # for the front end to answer, after which a probe says 503
SYNC_TIMEOUT_S = 0.5  # for the newest facts, after which an answer is made without them

Reply = Callable[[bytes], bytes | Awaitable[bytes]]
"""Answers one kind of question of the telemetry process, at once or in a task. A RoseinferError is an answer too."""


def replies(service: Service) -> Mapping[str, Reply]:
    """Returns the front end's answers, by the names of the questions."""
    judge = judge_of(service)
    profiled: list[Awaitable[ProfileEnded]] = []  # the one under way

    async def probe(payload: bytes) -> bytes:
        return msgspec.msgpack.encode(await judge(payload.decode()))

    async def begin_profile(payload: bytes) -> bytes:
        wanted = msgspec.msgpack.decode(payload, type=Profile)
        profiled[:] = [service.client.profile(wanted.num_steps, wanted.directory)]
        return b""

    async def end_profile(_: bytes) -> bytes:
        return msgspec.msgpack.encode(await profiled[0])

    async def refusal(payload: bytes) -> bytes:
        service.observer.on_refusal(payload.decode())
        return b""

    return {"probe": probe, "begin_profile": begin_profile, "end_profile": end_profile, "refusal": refusal}


class Asks(Protocol):
    """The way to the front end."""

    async def ask(self, name: str, payload: bytes = b"", timeout_s: float | None = None) -> bytes:
        """Raises NotReady when there is no front end, TimeoutError, and what it raised."""

    def ask_then(self, name: str, timeout_s: float, take: Callable[[bytes | None], None]) -> None:
        """Asks, and calls `take` with the answer, or with None where there is none in time."""

    def notify(self, name: str, payload: bytes) -> None:
        """Asks, and waits for no answer."""


class Refusals(Observer):
    """The observer that has refused requests counted by the front end, which counts for good."""

    def __init__(self, link: Asks) -> None:
        self._link = link

    def on_refusal(self, code: str) -> None:
        self._link.notify("refusal", code.encode())


class FrontEnd:
    """The front end, as the telemetry process sees it."""

    def __init__(self, link: Asks, set_present: Callable[[bytes], None]) -> None:
        """`set_present` gets what the front end answers to `look`."""
        self._link = link
        self._set_present = set_present

    async def judge(self, path: str) -> Judgement:
        """Answers the probe with this path; 503 where the front end does not."""
        try:
            answer = await self._link.ask("probe", path.encode(), TIMEOUT_S)
        except (NotReady, TimeoutError):
            return Judgement(503, b'{"status":"unavailable","trouble":"the front end does not answer"}')
        return msgspec.msgpack.decode(answer, type=Judgement)

    def sync_then(self, go_on: Callable[[], None]) -> None:
        """Calls `go_on` when all facts so far are here, or when they do not come."""
        self._link.ask_then("sync", SYNC_TIMEOUT_S, lambda _: go_on())

    def load_then(self, go_on: Callable[[bytes | None], None]) -> None:
        """Calls `go_on` with what `/metrics/load` shows now, or with None when that does not come."""
        self._link.ask_then("load", SYNC_TIMEOUT_S, go_on)

    @web.middleware
    async def ask_first(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The middleware that has all facts so far here, before an answer is made of them."""
        is_debug = request.path.startswith(PREFIX)
        if is_debug or request.path.startswith("/metrics"):
            with contextlib.suppress(NotReady, TimeoutError):  # then of what is known
                present = await self._link.ask("look" if is_debug else "sync", b"", SYNC_TIMEOUT_S)
                if is_debug:
                    self._set_present(present)
        return await handler(request)

    async def profile(self, num_steps: int, directory: str) -> Awaitable[ProfileEnded]:
        """Begins a profile, and returns what waits for its end. Raises RoseinferError.

        However late the front end is: it would begin one that was given up, whose directory nothing names.
        """
        await self._link.ask("begin_profile", msgspec.msgpack.encode(Profile(num_steps, directory)))
        return self._profiled()

    async def _profiled(self) -> ProfileEnded:
        return msgspec.msgpack.decode(await self._link.ask("end_profile"), type=ProfileEnded)
