"""Decides of what a question to `/debug/*` may be made: names of its query, and a body or none. Knows no answer."""

from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from roseinfer.errors import InvalidRequest
from roseinfer.server.connection.body import refuse_body
from roseinfer.server.ops.debug_guard import PREFIX

QUERIES: Mapping[str, frozenset[str]] = {
    "/debug/steps": frozenset({"limit"}),
    "/debug/trace": frozenset({"limit"}),
    "/debug/timeline/data": frozenset({"limit", "since", "since_ns"}),
    "/debug/recording": frozenset({"since_ns"}),
    "/debug/profile": frozenset({"steps"}),
}
"""What each path may be asked in its query; the others are asked nothing there."""
WITH_BODY = frozenset({"/debug/recording/view"})


@web.middleware
async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raises InvalidRequest for what nobody would read."""
    resource = request.match_info.route.resource
    if resource is not None and resource.canonical.startswith(PREFIX):
        _check_query(request, QUERIES.get(resource.canonical, frozenset()))
        if resource.canonical not in WITH_BODY:
            await refuse_body(request)
    return await handler(request)


def _check_query(request: web.Request, names: frozenset[str]) -> None:
    given = dict.fromkeys(request.query)
    if unknown := [name for name in given if name not in names]:
        told = ", ".join(f"`{name}`" for name in unknown)
        known = ", ".join(f"`{name}`" for name in sorted(names)) or "nothing"
        raise InvalidRequest(f"Unknown in the query: {told}. This path takes {known} there.", param=unknown[0])
    if several := [name for name in given if len(request.query.getall(name)) > 1]:
        raise InvalidRequest(f"`{several[0]}` comes more than once.", param=several[0])


def integer_of(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    """A number of the query. Raises InvalidRequest that names it."""
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise InvalidRequest(f"`{name}` must be a whole number from {least} to {most}.", param=name)
    return int(text)
