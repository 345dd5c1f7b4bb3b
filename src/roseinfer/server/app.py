"""Builds the two HTTP applications: their routes, and their middlewares in the order in which a request meets them."""

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from roseinfer.server import middleware, openapi
from roseinfer.server.anthropic import messages
from roseinfer.server.anthropic.errors import PATH, add_request_id, error_form
from roseinfer.server.connection.listener import Listener
from roseinfer.server.exchange import Ledger
from roseinfer.server.openai import chat, completions, embeddings, responses, tokenize
from roseinfer.server.ops import debug_access, probes
from roseinfer.server.service import SERVICE, Service
from roseinfer.text.grammar.checker import GrammarChecker

LOAD_PATH = "/metrics/load"


@dataclass(frozen=True, slots=True)
class Instruments:
    """What the wiring hands to the HTTP side; `debug_routes` are for the operations port alone.

    `metrics` answers both `/metrics` and `/metrics/load`.
    """

    metrics: Handler
    ledger: Ledger
    debug_routes: Sequence[web.RouteDef] = ()
    grammars: GrammarChecker | None = None


def build_app(service: Service, instruments: Instruments) -> web.Application:
    """The API port."""
    routes = [
        web.post("/v1/completions", completions.create_completion),
        web.post("/v1/chat/completions", chat.create_chat_completion),
        web.post("/v1/responses", responses.create_response),
        web.post("/v1/responses/input_tokens", responses.count_input_tokens),
        web.post("/v1/embeddings", embeddings.create_embeddings),
        web.post("/v1/messages", messages.create_message),
        web.post("/v1/messages/count_tokens", messages.count_tokens),
        web.get("/v1/models", probes.list_models),
        web.get("/v1/models/{id:.*}", probes.get_model),
        web.post("/v1/requests/{id}/abort", probes.abort_request),
        web.post("/tokenize", tokenize.tokenize),
        web.post("/detokenize", tokenize.detokenize),
        web.get("/openapi.json", openapi.handle),
        web.get("/version", probes.version),
        *_operations(instruments.metrics),
    ]
    app = _application(service, routes)
    app[middleware.ERROR_FORMS] = {PATH: error_form}
    app.middlewares.extend(
        (middleware.answer_preflight, middleware.authenticate, middleware.admit, debug_access.point_elsewhere)
    )
    app.on_response_prepare.extend((middleware.allow_origin, add_request_id))
    return app


def build_ops_app(service: Service, instruments: Instruments) -> web.Application:
    """The operations port: probes and metrics without a key, for the cluster's own network, and `/debug/*`."""
    routes = [web.get("/", probes.list_paths), *_operations(instruments.metrics), *instruments.debug_routes]
    app = _application(service, routes)
    app.middlewares.append(debug_access.guard)
    return app


def _operations(metrics_handler: Handler) -> list[web.RouteDef]:
    return [
        web.get("/livez", probes.livez),
        web.get("/readyz", probes.readyz),
        web.get("/health", probes.readyz),
        web.get("/ping", probes.readyz),
        web.get("/load", probes.load),
        web.get("/startupz", probes.startupz),
        web.get("/metrics", metrics_handler),
        web.get(LOAD_PATH, metrics_handler),
    ]


def _application(service: Service, routes: list[web.RouteDef]) -> web.Application:
    app = web.Application(
        middlewares=[
            middleware.identify,
            middleware.release_body,
            middleware.open_exchange,
            middleware.answer_errors,
            middleware.refuse_odd_heads,
        ],
        client_max_size=service.config.max_body_bytes,
    )
    app[SERVICE] = service
    app.add_routes(routes)
    app.on_response_prepare.append(middleware.add_headers)
    return app


def build_runner(app: web.Application, shutdown_timeout_s: float) -> Listener:
    """The application with its listener."""
    service = app[SERVICE]
    return Listener(app, service.config, service.observer.on_refusal, shutdown_timeout_s)
