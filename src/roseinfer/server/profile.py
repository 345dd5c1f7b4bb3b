"""Turns `POST /debug/profile?steps=K` into a profile of the engine's next steps. Knows not what is recorded.

It answers at once with the directory: the trace is there when so many steps have run. The log says when, or why not.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from aiohttp import web

from roseinfer.messages import MAX_PROFILE_STEPS, ProfileEnded
from roseinfer.server.debug import integer_of
from roseinfer.server.service import SERVICE

DEFAULT_STEPS = 20

_log = logging.getLogger(__name__)


def route(new_directory: Callable[[], Path]) -> web.RouteDef:
    """For the operations port; `new_directory` names one that does not exist yet, in a thread: it may delete others."""

    async def create_profile(request: web.Request) -> web.Response:
        num_steps = integer_of(request, "steps", DEFAULT_STEPS, 1, MAX_PROFILE_STEPS)
        directory = await asyncio.to_thread(new_directory)
        ended = asyncio.ensure_future(request.app[SERVICE].client.profile(num_steps, str(directory)))
        ended.add_done_callback(partial(_log_end, directory))
        return web.json_response({"directory": str(directory), "num_steps": num_steps}, status=202)

    return web.post("/debug/profile", create_profile)


def _log_end(directory: Path, ended: asyncio.Future[ProfileEnded]) -> None:
    if ended.cancelled():
        return
    if error := ended.result().error:
        _log.error("a profile could not be made: %s", error, extra={"directory": str(directory)})
    else:
        _log.info("a profile was written", extra={"directory": str(directory)})
