"""Serves `/debug/*`: recent steps and requests, the timeline page, and the invariants.

The answers come from a `FlightView`, which the wiring hands over; the server itself remembers nothing.
"""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from typing import Any, Protocol

from aiohttp import web

from roseinfer.errors import UnknownRequest
from roseinfer.server.connection.body import read_bytes
from roseinfer.server.ops.debug_access import integer_of
from roseinfer.server.port import PORT

DEFAULT_STEPS = 500
MAX_NEW_STEPS = 1500  # for a page that asks every second: more than nearly any engine makes meanwhile
MAX_RECORDING_BYTES = 64 * 1024 * 1024  # of a recording that a client sends to view
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE = resources.files("roseinfer.observe.recorder") / "page"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


class FlightView(Protocol):
    """The steps and requests that are remembered, as JSON values or bytes.

    The methods copy on the event loop; the callables that some return may run in any thread.
    """

    @property
    def max_steps(self) -> int:
        """The most steps that are remembered."""

    def steps(self, limit: int) -> Callable[[], bytes]:
        """The last steps, as JSON."""

    def recording(self, since_ns: int) -> Callable[[], bytes]:
        """Everything that ended after a moment of the monotonic clock, as a file."""

    def trace(self, limit: int) -> Callable[[], bytes]:
        """The last steps and their requests in Chrome's trace format."""

    def timeline(self, limit: int, since_step: int, since_ns: int) -> Callable[[], bytes]:
        """The page's data: what is newer than a step and a moment, of a number of steps at most."""

    def view(self, content: bytes) -> bytes:
        """The same of a saved recording. Raises InvalidRequest for bytes that are none."""

    def requests(self) -> dict[str, Any]: ...

    def request(self, request_id: str) -> dict[str, Any] | None:
        """None for an id that is not remembered."""


def routes(view: FlightView) -> list[web.RouteDef]:
    """The routes of the operations port that show a flight view."""
    handlers = _Handlers(view)
    scripts_and_styles = [re.escape(file.name) for file in _PAGE.iterdir() if file.name.endswith((".css", ".js"))]
    return [
        web.get("/debug/steps", handlers.steps),
        web.get("/debug/recording", handlers.recording),
        web.post("/debug/recording/view", handlers.view_recording),
        web.get("/debug/trace", handlers.trace),
        web.get("/debug/requests", handlers.requests),
        web.get("/debug/requests/{id:.+}", handlers.request),
        web.get("/debug/timeline", _page),
        web.get("/debug/timeline/data", handlers.timeline),
        web.get(f"/debug/timeline/{{file:{'|'.join(sorted(scripts_and_styles))}}}", _page),
    ]


def num_tasks() -> int:
    return len(asyncio.all_tasks())


def invariants_route(report: Callable[[], dict[str, Any]], count_tasks: Callable[[], int] = num_tasks) -> web.RouteDef:
    """`GET /debug/invariants`: how often each invariant was checked and violated.

    `count_tasks` counts the front end's tasks: a server that rests has the same number day after day.
    """

    async def invariants(_request: web.Request) -> web.Response:
        content = {**report(), "num_tasks": count_tasks()}
        return web.json_response(content, headers={"Cache-Control": "no-store"})

    return web.get("/debug/invariants", invariants)


class _Handlers:
    def __init__(self, view: FlightView) -> None:
        self._view = view
        # However many pages are open, the threads for large bodies and metrics stay free.
        self._thread = ThreadPoolExecutor(1, "roseinfer-debug")

    async def _off_loop(self, work: Callable[..., bytes], *arguments: object) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def steps(self, request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(self._view.steps(self._limit(request, 100))))

    async def recording(self, request: web.Request) -> web.Response:
        content = await self._off_loop(self._view.recording(_since_ns(request)))
        return _download(content, "application/octet-stream", "roseinfer-recording.npz")

    async def trace(self, request: web.Request) -> web.Response:
        content = await self._off_loop(self._view.trace(self._limit(request, DEFAULT_STEPS)))
        return _download(content, "application/json", "roseinfer-trace.json")

    async def timeline(self, request: web.Request) -> web.Response:
        limit = self._limit(request, MAX_NEW_STEPS if "since" in request.query else DEFAULT_STEPS)
        since = (integer_of(request, "since", 0, 0, 2**62), _since_ns(request))
        return _json(await self._off_loop(self._view.timeline(limit, *since)))

    async def view_recording(self, request: web.Request) -> web.Response:
        timeout_s = request.app[PORT].config.body_timeout_s
        content = await read_bytes(request, MAX_RECORDING_BYTES, timeout_s, "recording")
        return _json(await self._off_loop(self._view.view, bytes(content)))

    async def requests(self, _request: web.Request) -> web.Response:
        return web.json_response(self._view.requests())

    async def request(self, request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        found = self._view.request(request_id)
        if found is None:
            raise UnknownRequest(f"No request {request_id!r} is in flight or remembered.", param="id")
        return web.json_response(found)

    def _limit(self, request: web.Request, default: int) -> int:
        return integer_of(request, "limit", min(default, self._view.max_steps), 1, self._view.max_steps)


def _since_ns(request: web.Request) -> int:
    return integer_of(request, "since_ns", 0, 0, 2**62)


def _json(content: bytes) -> web.Response:
    response = web.Response(body=content, content_type="application/json", headers={"Cache-Control": "no-store"})
    response.enable_compression()
    return response


def _download(content: bytes, content_type: str, name: str) -> web.Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    return web.Response(body=content, content_type=content_type, headers=headers)


async def _page(request: web.Request) -> web.Response:
    """The page or one of its files."""
    name = request.match_info.get("file", "index.html")
    headers = {
        "Content-Security-Policy": _PAGE_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    content_type = _TYPES[name.rpartition(".")[2]]
    return web.Response(text=_asset(name), content_type=content_type, charset="utf-8", headers=headers)


@cache
def _asset(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")
