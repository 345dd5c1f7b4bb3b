"""Answers `GET /debug/invariants`: what must always hold, and how often it did not. Knows none of it."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web


def route(report: Callable[[], dict[str, Any]]) -> web.RouteDef:
    """For the operations port. `num_tasks` counts the front end's: with nothing to do it is the same day after day."""

    async def tell(_request: web.Request) -> web.Response:
        told = {**report(), "num_tasks": len(asyncio.all_tasks())}
        return web.json_response(told, headers={"Cache-Control": "no-store"})

    return web.get("/debug/invariants", tell)
