"""Decides who may call `/debug/*`, and checks what a call holds: names of its query, and a body or none."""

import ipaddress
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from roseinfer.errors import CrossSite, InvalidRequest, Unauthorized, UnknownRoute
from roseinfer.server.connection.api_keys import NO_KEY
from roseinfer.server.connection.body import refuse_body
from roseinfer.server.port import PORT, Port

PREFIX = "/debug/"
_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}

QUERIES: Mapping[str, frozenset[str]] = {
    "/debug/steps": frozenset({"limit"}),
    "/debug/trace": frozenset({"limit"}),
    "/debug/timeline/data": frozenset({"limit", "since", "since_ns"}),
    "/debug/recording": frozenset({"since_ns"}),
    "/debug/profile": frozenset({"steps"}),
}
"""The names that each path takes in its query; the other paths take none."""
WITH_BODY = frozenset({"/debug/recording/view"})


def is_loopback(host: str) -> bool:
    """Whether an address, or `localhost`, can be reached from this host alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_off(port: Port) -> bool:
    """Whether `/debug/*` is off: the port is not on the loopback, and no key is configured."""
    return not is_loopback(port.config.ops_host) and port.api_keys is None


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a call of `/debug/*` that is not allowed, or that holds what no handler reads."""
    if request.path.startswith(PREFIX):
        _authorize(request)
        if (resource := request.match_info.route.resource) is not None:
            _check_query(request, QUERIES.get(resource.canonical, frozenset()))
            if resource.canonical not in WITH_BODY:
                await refuse_body(request)
    return await handler(request)


@web.middleware
async def point_elsewhere(request: web.Request, handler: Handler) -> web.StreamResponse:
    """On the API port, which has no `/debug/*`, name the port that has. Raises UnknownRoute."""
    if request.path.startswith(PREFIX):
        raise UnknownRoute(f"Not Found: {request.method} {request.path}. /debug/* is on the operations port.")
    return await handler(request)


@web.middleware
async def say_gone(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Say why there is no `/debug/*` any more, to a page that asks every second, for one. Raises UnknownRoute."""
    if request.path.startswith(PREFIX):
        raise UnknownRoute(
            "/debug/* has gone with the telemetry process, until the server's next start; the log says why."
        )
    return await handler(request)


def _authorize(request: web.Request) -> None:
    """Off the loopback a key is needed, and without configured keys `/debug/*` is off.

    On the loopback a browser is no way round: the Host header must be of the loopback too, so that no other site's name
    can point here, and another site's page can change nothing.
    """
    port = request.app[PORT]
    if is_off(port):
        raise UnknownRoute(
            "/debug/* is off: this port is not on the loopback and no API key is configured "
            "(server.ops_host, server.api_key_file)."
        )
    if is_loopback(port.config.ops_host):
        if not is_loopback(_host(request)):
            raise CrossSite("On the loopback the Host header must name it too.", param="Host")
    elif port.api_keys is not None and not port.api_keys.knows(request.headers):
        message = f"{NO_KEY}, or as the password of Basic."
        raise Unauthorized(message, challenge='Basic realm="roseinfer", charset="UTF-8"')
    site = request.headers.get("Sec-Fetch-Site", "none")
    if request.method not in _SAFE_METHODS and site not in {"same-origin", "none"}:
        raise CrossSite("Another site's page may not do this.", param="Sec-Fetch-Site")


def _host(request: web.Request) -> str:
    """The name in the Host header; empty where that names none."""
    try:
        return request.url.host or ""
    except ValueError:
        return ""


def _check_query(request: web.Request, names: frozenset[str]) -> None:
    given = dict.fromkeys(request.query)
    if unknown := [name for name in given if name not in names]:
        listed = ", ".join(f"`{name}`" for name in unknown)
        known = ", ".join(f"`{name}`" for name in sorted(names)) or "nothing"
        raise InvalidRequest(f"Unknown in the query: {listed}. This path takes {known} there.", param=unknown[0])
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
