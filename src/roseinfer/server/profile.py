"""Turns `POST /debug/profile?steps=K` into a profile of the engine's next steps. Knows not what is recorded.

It answers at once with the directory: the trace is there when so many steps have run.
"""

from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from roseinfer.errors import InvalidRequest
from roseinfer.messages import MAX_PROFILE_STEPS
from roseinfer.server.service import SERVICE

DEFAULT_STEPS = 20


def route(new_directory: Callable[[], Path]) -> web.RouteDef:
    """For the operations port; `new_directory` names one that does not exist yet."""

    async def create_profile(request: web.Request) -> web.Response:
        num_steps, directory = _steps(request), new_directory()
        request.app[SERVICE].client.profile(num_steps, str(directory))
        return web.json_response({"directory": str(directory), "num_steps": num_steps}, status=202)

    return web.post("/debug/profile", create_profile)


def _steps(request: web.Request) -> int:
    text = request.query.get("steps", str(DEFAULT_STEPS))
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= MAX_PROFILE_STEPS):
        raise InvalidRequest(f"`steps` must be a whole number from 1 to {MAX_PROFILE_STEPS}.", param="steps")
    return int(text)
