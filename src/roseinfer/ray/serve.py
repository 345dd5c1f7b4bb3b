"""A Ray Serve application whose replicas are servers of ours, scaled by the wait that they predict.

Each replica runs `roseinfer serve` as a child on a port of the loopback, and hands requests and answers through as they
are: the routes, streams, errors and limits are the server's own.
"""

import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import httpx2
import msgspec
from pydantic import ValidationError
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from roseinfer.bench.load import launcher
from roseinfer.config import sources
from roseinfer.config.options import Config, options
from roseinfer.config.values import shown
from roseinfer.errors import ConfigError, EngineDead
from roseinfer.ray.resources import resources_of
from roseinfer.server.api.errors import error_body

START_TIMEOUT_S = 3600.0  # a large model may be fetched first; Ray Serve says meanwhile that it waits
DEFAULT_TARGET_WAIT_S = 2.0
PLANNED_SHARE = 0.7  # of the places of an engine; the rest is for bursts, and while a replica starts

_STAT = "predicted_wait_s"
_OF_RAY = {b"date", b"server", b"x-request-id"}  # in answers: it adds its own, with the id that the server was given
_OF_ONE_CONNECTION = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade"}


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Build the application: `serve run roseinfer.ray:build_app model.path=... max_replicas=4`.

    `args` are options by their paths, such as `model.path`, above those of the environment; `target_wait_s`, a wait
    above which replicas are added; and fields of Ray's `AutoscalingConfig`. Raises ConfigError that names the argument.
    """
    given = {path: sources.Given(value, path) for path, value in args.items() if "." in path}
    for path in given.keys() - options().keys():
        raise ConfigError(f"names no option{sources.closest(path, options())}", param=path)
    config = sources.load(given, os.environ).config
    if config.server.tls_cert_file is not None:
        raise ConfigError("clients speak to Ray Serve's proxy: give it the certificate", param="server.tls_cert_file")
    deployment = serve.deployment(
        Replica,
        ray_actor_options=resources_of(config),
        max_ongoing_requests=config.server.max_inflight,  # else 5, and the server would never have a queue
        autoscaling_config=_autoscaling({name: value for name, value in args.items() if "." not in name}, config),
        graceful_shutdown_timeout_s=config.server.drain_timeout_s + launcher.STOP_TIMEOUT_S,
    )
    return deployment.bind(config)


def __getattr__(name: str) -> serve.Application:
    """`app`: the application by the environment alone, for `serve run roseinfer.ray:app`."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build_app({})


def _autoscaling(fields: Mapping[str, Any], config: Config) -> AutoscalingConfig:
    given = dict(fields)
    policy = AutoscalingPolicy(
        policy_function=WaitPolicy,
        policy_kwargs={"target_wait_s": _target_wait_s(given.pop("target_wait_s", DEFAULT_TARGET_WAIT_S))},
    )
    for name in given.keys() - (AutoscalingConfig.model_fields.keys() - {"policy"}):
        known = {*AutoscalingConfig.model_fields, "target_wait_s"}
        raise ConfigError(f"is no field of Ray's AutoscalingConfig{sources.closest(name, known)}", param=name)
    given.setdefault("target_ongoing_requests", PLANNED_SHARE * config.scheduler.limits.max_active_seqs)
    try:
        return AutoscalingConfig(**given, policy=policy)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"])) or "autoscaling"
        raise ConfigError(first["msg"], param=param) from None


def _target_wait_s(given: object) -> float:
    try:
        target_s = msgspec.convert(given, float, strict=False)
    except msgspec.ValidationError:
        target_s = 0.0
    if target_s > 0:
        return target_s
    raise ConfigError(f"expected seconds above 0, got {shown(given)}", param="target_wait_s")


class WaitPolicy:
    """An autoscaling policy of Ray Serve: adds replicas until the predicted wait is at the target.

    A request that comes now would wait `wait` seconds for its first batch, and half of that with twice the replicas.
    A wait of 0 says nothing of how many are needed, so below the target the requests under way decide, as in Ray's
    own policy, by `target_ongoing_requests`.
    """

    def __init__(self, target_wait_s: float) -> None:
        self._target_wait_s = target_wait_s

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The number of replicas; Ray keeps it between the least and the most, and waits before it acts."""
        num_replicas = context.total_num_requests / context.config.get_target_ongoing_requests()
        waits = list((context.aggregated_metrics or {}).get(_STAT, {}).values())
        if waits and (wait_s := sum(waits) / len(waits)) > self._target_wait_s:
            num_replicas = max(num_replicas, context.current_num_replicas * wait_s / self._target_wait_s)
        return num_replicas, {}


class Replica:
    """A deployment of Ray Serve: a server of ours, and its door to Ray's proxy."""

    def __init__(self, config: Config) -> None:
        port, ops_port = launcher.free_port(), launcher.free_port()
        server = replace(config.server, host="127.0.0.1", port=port, ops_host="127.0.0.1", ops_port=ops_port)
        encoded = msgspec.json.encode(replace(config, server=server)).decode()
        command = [sys.executable, "-P", "-m", "roseinfer.ray.child", encoded]
        self._server = launcher.Server(command, port, ops_port=ops_port)
        self._server.wait_ready(START_TIMEOUT_S)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx2.AsyncClient(limits=limits, timeout=None, trust_env=False)

    def __del__(self) -> None:
        """Called by Ray when the requests have ended that were under way."""
        if hasattr(self, "_server"):
            self._server.stop()

    async def __call__(self, request: Request) -> Response:
        """Hand the request to the server, and its answer back, piece by piece."""
        scope = request.scope
        path = scope.get("raw_path") or scope["path"].encode()
        path = path.removeprefix(scope.get("root_path", "").encode())
        query = scope["query_string"]
        sent = httpx2.Request(  # not the client's, which adds headers: that it can read gzip, for one
            request.method,
            httpx2.URL(self._server.url).copy_with(raw_path=path + (b"?" + query if query else b"")),
            headers=_end_to_end(request.headers.raw),
            content=await request.body(),
        )
        try:
            answer = await self._client.send(sent, stream=True)
        except httpx2.TransportError:
            gone = error_body(EngineDead("The server of this replica is gone."))
            return Response(gone, EngineDead.status, media_type="application/json")
        response: Response
        if "content-length" in answer.headers:
            response = Response(b"".join([piece async for piece in _pieces(answer)]), answer.status_code)
        else:
            response = StreamingResponse(_pieces(answer), answer.status_code)
        response.raw_headers = [
            header for header in _end_to_end(answer.headers.raw) if header[0].lower() not in _OF_RAY
        ]
        return response

    async def check_health(self) -> None:
        """Raise where the server is dead or makes no progress, upon which Ray replaces the replica."""
        (await self._client.get(f"{self._server.url}/livez", timeout=10)).raise_for_status()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `WaitPolicy` reads, each time that Ray measures."""
        load = await self._client.get(f"http://127.0.0.1:{self._server.ops_port}/load", timeout=5)
        return {_STAT: load.json()[_STAT]}


def _end_to_end(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that are not about one connection, as a proxy hands them on."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_ONE_CONNECTION]


async def _pieces(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """The body as it comes. Leaving the loop, as for a client that has gone, closes the connection."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()
