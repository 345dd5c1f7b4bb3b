"""Serves the probes, the model list, the version, the list of paths, and the abort of a request."""

import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime

import msgspec
from aiohttp import web

from roseinfer import __version__
from roseinfer.errors import UnknownModel, UnknownRequest
from roseinfer.records import LifecycleState
from roseinfer.server.connection.body import refuse_body
from roseinfer.server.middleware import CALLER
from roseinfer.server.ops import debug_access
from roseinfer.server.port import PORT
from roseinfer.server.service import SERVICE, Service

_CREATED = int(time.time())


class Judgement(msgspec.Struct, frozen=True):
    """The answer to a probe: its status and its body, as JSON."""

    status: int
    body: bytes


Judge = Callable[[str], Awaitable[Judgement]]
"""Answers the probe with this path."""


def routes(judge: Judge) -> list[web.RouteDef]:
    """The probes and the load, which the front end alone can answer, wherever they are asked."""

    async def handle(request: web.Request) -> web.Response:
        judgement = await judge(request.path)
        return web.Response(status=judgement.status, body=judgement.body, content_type="application/json")

    return [web.get(path, handle) for path in _JUDGED]


def judge_of(service: Service) -> Judge:
    """The judge who looks at the service itself."""

    async def judge(path: str) -> Judgement:
        return _JUDGED[path](service)

    return judge


def _livez(service: Service) -> Judgement:
    """503, upon which an orchestrator restarts the process, if the engine is dead or makes no progress."""
    is_serving = service.state in {LifecycleState.READY, LifecycleState.DRAINING}
    is_in_trouble = is_serving and service.client.trouble is not None  # else of the engine before
    return _judgement(service, service.state is not LifecycleState.FAILED and not is_in_trouble)


def _readyz(service: Service) -> Judgement:
    """503, upon which a load balancer sends nothing here, while starting, draining or in trouble. Load is no reason."""
    return _judgement(service, service.is_ready)


def _startupz(service: Service) -> Judgement:
    """200 once the server has been ready."""
    return _judgement(service, service.has_been_ready)


def _judgement(service: Service, is_well: bool) -> Judgement:
    activity, since_ns = service.client.account
    body = {
        "status": "ok" if is_well else "unavailable",
        "state": service.state,
        "trouble": service.client.trouble,
        "engine": {"activity": activity, "for_s": round((time.monotonic_ns() - since_ns) / 1e9, 3)},
    }
    return Judgement(200 if is_well else 503, msgspec.json.encode(body))


def _load(service: Service) -> Judgement:
    """The number of requests for tokens in flight, under vLLM's name, and how long one more would wait."""
    wait_s = service.client.queue_estimate.predict_wait_s(priority=0)  # the usual one
    load = {"server_load": service.num_exchanges, "predicted_wait_s": round(wait_s, 3)}
    return Judgement(200, msgspec.json.encode(load))


_JUDGED: Mapping[str, Callable[[Service], Judgement]] = {
    "/livez": _livez,
    "/readyz": _readyz,
    "/health": _readyz,
    "/ping": _readyz,
    "/load": _load,
    "/startupz": _startupz,
}


async def version(_request: web.Request) -> web.Response:
    return web.json_response({"version": __version__})


async def list_paths(request: web.Request) -> web.Response:
    """A line for each route of the operations port, as text, without those that are off."""
    is_off = debug_access.is_off(request.app[PORT])
    lines = [
        f"{route.method:<4} {route.resource.canonical}\n"
        for route in request.app.router.routes()
        if route.method != "HEAD" and route.resource is not None
        if not (is_off and route.resource.canonical.startswith(debug_access.PREFIX))
    ]
    return web.Response(text="".join(lines))


async def list_models(request: web.Request) -> web.Response:
    """The model under each of its names, with the sizes of context and vocabulary. Raises NotReady."""
    service = request.app[SERVICE]
    names = service.model_names
    models = [_model(service, name) for name in names]
    pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return web.json_response({"object": "list", "data": models, **pages})


async def get_model(request: web.Request) -> web.Response:
    """The model by one of its names, which may hold slashes. Raises UnknownModel or NotReady."""
    service, name = request.app[SERVICE], request.match_info["id"]
    if not name:  # the list, with a slash behind
        return await list_models(request)
    if name not in service.model_names:
        raise UnknownModel(f"There is no such model here; this is {' or '.join(service.model_names)}.", param="id")
    return web.json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, object]:
    """The model as the clients of OpenAI and of Anthropic read it."""
    return {
        "id": name,
        "object": "model",
        "created": _CREATED,
        "owned_by": "roseinfer",
        "max_model_len": service.client.info.max_model_len,
        "vocab_size": service.client.info.vocab_size,
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created_at": datetime.fromtimestamp(_CREATED, UTC).isoformat(),
        "max_input_tokens": service.client.info.max_model_len - 1,
    }


async def abort_request(request: web.Request) -> web.Response:
    """End a request that is being answered, by its `x-request-id` or the id in its answer.

    Raises UnknownRequest, and InvalidRequest or BodyTimeout where a body comes with it. A request that came with
    another API key is as unknown as one that never was.
    """
    await refuse_body(request)
    request_id, caller = request.match_info["id"], request.get(CALLER)
    if not request.app[SERVICE].abort(request_id, caller):
        raise UnknownRequest("No request with this id is being answered.", param="id")
    return web.json_response({"id": request_id, "object": "request", "aborted": True})
