"""Answers `GET /debug/invariants`: what must always hold, and how often it did not. Knows none of it."""

from collections.abc import Callable
from typing import Any

from aiohttp import web


def route(report: Callable[[], dict[str, Any]]) -> web.RouteDef:
    """For the operations port."""

    async def tell(_request: web.Request) -> web.Response:
        return web.json_response(report(), headers={"Cache-Control": "no-store"})

    return web.get("/debug/invariants", tell)
