"""Answers what an operator or an orchestrator asks: is it alive, ready, what is it. Knows no requests for tokens."""

import time

from aiohttp import web

from roseinfer import __version__
from roseinfer.records import LifecycleState
from roseinfer.server.service import SERVICE, Service

_CREATED = int(time.time())


async def livez(request: web.Request) -> web.Response:
    """503 tells the orchestrator to restart us: the engine is dead or makes no progress."""
    service = request.app[SERVICE]
    return _probe(service, service.state is not LifecycleState.FAILED and service.client.trouble is None)


async def readyz(request: web.Request) -> web.Response:
    """503 takes us out of the load balancer: starting, draining or in trouble. Load alone does not."""
    service = request.app[SERVICE]
    return _probe(service, service.is_ready)


async def startupz(request: web.Request) -> web.Response:
    """200 from the moment we were ready for the first time."""
    service = request.app[SERVICE]
    return _probe(service, service.has_been_ready)


def _probe(service: Service, is_well: bool) -> web.Response:
    body = {"status": "ok" if is_well else "unavailable", "state": service.state, "trouble": service.client.trouble}
    return web.json_response(body, status=200 if is_well else 503)


async def version(_request: web.Request) -> web.Response:
    return web.json_response({"version": __version__})


async def list_models(request: web.Request) -> web.Response:
    """The one model served, with the lengths of its context and its vocabulary. Raises NotReady before it is known."""
    service = request.app[SERVICE]
    model = {
        "id": service.model_name,
        "object": "model",
        "created": _CREATED,
        "owned_by": "roseinfer",
        "max_model_len": service.client.info.max_model_len,
        "vocab_size": service.client.info.vocab_size,
    }
    return web.json_response({"object": "list", "data": [model]})
