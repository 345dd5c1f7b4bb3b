"""Serves `POST /debug/profile?steps=K`: a profile of the engine's next K steps.

The answer comes at once with the directory; the trace is there after its steps. The log says when, or why not.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from roseinfer.messages import MAX_PROFILE_STEPS, BeginProfile, ProfileEnded
from roseinfer.server.ops.debug_access import integer_of

DEFAULT_STEPS = 20

_log = logging.getLogger(__name__)


def route(
    profile: BeginProfile, new_directory: Callable[[], Path], write_manifest: Callable[[Path, int], None]
) -> web.RouteDef:
    """The route; the last two functions run in a thread.

    `new_directory` names one that does not exist yet, for which it may delete others. `write_manifest` writes into it
    what was profiled and for how many steps, and raises OSError.
    """
    tasks: set[asyncio.Task[None]] = set()  # running: the event loop itself holds them weakly

    async def create_profile(request: web.Request) -> web.Response:
        num_steps = integer_of(request, "steps", DEFAULT_STEPS, 1, MAX_PROFILE_STEPS)
        directory = await asyncio.to_thread(new_directory)
        ended = await profile(num_steps, str(directory))
        task = asyncio.create_task(_finish(ended, directory, write_manifest), name="profile")
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return web.json_response({"directory": str(directory), "num_steps": num_steps}, status=202)

    return web.post("/debug/profile", create_profile)


async def _finish(
    profiled: Awaitable[ProfileEnded], directory: Path, write_manifest: Callable[[Path, int], None]
) -> None:
    """Write the manifest of a profile, and log its end."""
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
