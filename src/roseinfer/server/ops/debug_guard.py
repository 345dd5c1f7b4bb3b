"""Decides who may ask `/debug/*`. Knows no answer."""

import ipaddress

from aiohttp import web
from aiohttp.typedefs import Handler

from roseinfer.errors import CrossSite, Unauthorized, UnknownRoute
from roseinfer.server.service import SERVICE, Service

PREFIX = "/debug/"
_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}


def is_loopback(host: str) -> bool:
    """Whether an address, or `localhost`, can be reached from this host alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_off(service: Service) -> bool:
    """Nobody can be told from anybody else: not on the loopback, and no keys."""
    return not is_loopback(service.config.ops_host) and service.api_keys is None


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """For `/debug/*`: off loopback a key is needed, and without configured keys it is off.

    A browser is no way round: on loopback the Host header must be of loopback too, so that no other site's name can be
    pointed here, and another site's page can change nothing.
    """
    if request.path.startswith(PREFIX):
        service = request.app[SERVICE]
        if is_off(service):
            raise UnknownRoute(
                "/debug/* is off: this port is not on the loopback and no API key is configured "
                "(server.ops_host, server.api_key_file)."
            )
        if is_loopback(service.config.ops_host):
            if not is_loopback(_host(request)):
                raise CrossSite("On the loopback the Host header must name it too.", param="Host")
        elif service.api_keys is not None and not service.api_keys.knows(request.headers.get("Authorization", "")):
            message = "A valid API key is needed: `Authorization: Bearer <key>`, or as the password of Basic."
            raise Unauthorized(message, challenge='Basic realm="roseinfer", charset="UTF-8"')
        if request.method not in _SAFE_METHODS:
            _refuse_other_sites(request)
    return await handler(request)


@web.middleware
async def point_elsewhere(request: web.Request, handler: Handler) -> web.StreamResponse:
    """For the API port, which has no `/debug/*`: a word on who has. Raises UnknownRoute."""
    if request.path.startswith(PREFIX):
        raise UnknownRoute(f"Not Found: {request.method} {request.path}. /debug/* is on the operations port.")
    return await handler(request)


def _host(request: web.Request) -> str:
    """The name in the Host header; empty where that names none."""
    try:
        return request.url.host or ""
    except ValueError:  # of whatever is no name and no port
        return ""


def _refuse_other_sites(request: web.Request) -> None:
    if request.headers.get("Sec-Fetch-Site", "none") not in {"same-origin", "none"}:
        raise CrossSite("Another site's page may not do this.", param="Sec-Fetch-Site")
