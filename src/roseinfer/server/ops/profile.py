"""Turns `POST /debug/profile?steps=K` into a profile of the engine's next steps. Knows not what is recorded.

It answers at once with the directory: the trace is there when so many steps have run. The log says when, or why not.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from roseinfer.messages import MAX_PROFILE_STEPS, ProfileEnded
from roseinfer.server.ops.debug_question import integer_of
from roseinfer.server.service import SERVICE

DEFAULT_STEPS = 20

_log = logging.getLogger(__name__)


def route(new_directory: Callable[[], Path], write_manifest: Callable[[Path, int], None]) -> web.RouteDef:
    """For the operations port. Both run in a thread: `new_directory` names one that does not exist yet, for which it
    may delete others, and `write_manifest` says in it what was profiled, and for how many steps; it raises OSError.
    """
    tasks: set[asyncio.Task[None]] = set()  # those under way, since the event loop itself holds them weakly

    async def create_profile(request: web.Request) -> web.Response:
        num_steps = integer_of(request, "steps", DEFAULT_STEPS, 1, MAX_PROFILE_STEPS)
        directory = await asyncio.to_thread(new_directory)
        ended = request.app[SERVICE].client.profile(num_steps, str(directory))
        task = asyncio.create_task(_finish(ended, directory, write_manifest), name="profile")
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return web.json_response({"directory": str(directory), "num_steps": num_steps}, status=202)

    return web.post("/debug/profile", create_profile)


async def _finish(
    profiled: Awaitable[ProfileEnded], directory: Path, write_manifest: Callable[[Path, int], None]
) -> None:
    """Its manifest, and a word in the log."""
    ended = await profiled
    error = ended.error
    if not error:
        try:
            await asyncio.to_thread(write_manifest, directory, ended.num_steps)
        except OSError as failure:
            error = f"its manifest cannot be written: {failure.strerror}"
    if error:
        _log.error("a profile could not be made: %s", error, extra={"directory": str(directory)})
    else:
        _log.info("a profile was written", extra={"directory": str(directory)})
