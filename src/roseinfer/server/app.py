"""Builds the two HTTP applications: their routes, and their middlewares in the order in which a request meets them."""

import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web
from aiohttp.typedefs import Middleware

from roseinfer.runtime.passage import Passage
from roseinfer.server import middleware, openapi
from roseinfer.server.anthropic import messages
from roseinfer.server.anthropic.errors import PATH, add_request_id, error_form
from roseinfer.server.connection.listener import Listener
from roseinfer.server.connection.scraping import Scrape
from roseinfer.server.exchange import Ledgers
from roseinfer.server.openai import chat, completions, embeddings, render, responses, tokenize
from roseinfer.server.ops import debug_access, probes
from roseinfer.server.ops.front_end import Reply
from roseinfer.server.ops.pages import Pages
from roseinfer.server.ops.pages import routes as page_routes
from roseinfer.server.port import PORT, Port
from roseinfer.server.service import SERVICE, Service
from roseinfer.text.grammar.checker import GrammarChecker

# Where scrapers may be answered without a middleware: here, or by a process to which their connections go.
SCRAPE: web.AppKey[Scrape] = web.AppKey("scrape")
PASSAGE = web.AppKey("passage", Passage)


class Telemetry(Protocol):
    """The telemetry process: where there is one, it serves the operations port."""

    async def start(
        self,
        replies: Mapping[str, Reply],
        ports: Sequence[socket.socket],
        take_over: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Start it, to listen at these sockets; `replies` answer what it asks, by name.

        When it has gone for good, `take_over` is called, and answers there what can be answered without it.
        """

    async def ready(self) -> None:
        """Return when it observes. Raises ConfigError."""

    @property
    def passage(self) -> Passage:
        """Through which it gets scrapers of the API port."""

    async def close(self) -> None:
        """Give it what it has not got, and end it."""


@dataclass(frozen=True, slots=True)
class Instruments:
    """What the wiring hands to the HTTP side.

    `debug_routes` are for the operations port alone, where this process serves it, and not `telemetry`.
    """

    pages: Pages
    ledgers: Ledgers
    debug_routes: Sequence[web.RouteDef] = ()
    grammar_checker: GrammarChecker | None = None
    telemetry: Telemetry | None = None


def build_app(service: Service, instruments: Instruments) -> web.Application:
    """The API port."""
    routes = [
        web.post("/v1/completions", completions.create_completion),
        web.post("/v1/completions/render", render.render_completion),
        web.post("/v1/chat/completions", chat.create_chat_completion),
        web.post("/v1/chat/completions/render", render.render_chat),
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
        *_operations(instruments.pages, probes.judge_of(service)),
    ]
    app = _application(service, routes)
    app[SERVICE] = service
    app[middleware.ERROR_FORMS] = {PATH: error_form}
    if service.api_keys is None and instruments.telemetry is not None:
        app[PASSAGE] = instruments.telemetry.passage
    app.middlewares.extend(
        (middleware.answer_preflight, middleware.authenticate, middleware.admit, debug_access.point_elsewhere)
    )
    app.on_response_prepare.extend((middleware.allow_origin, add_request_id))
    return app


def build_ops_app(
    port: Port,
    pages: Pages,
    judge: probes.Judge,
    debug_routes: Sequence[web.RouteDef],
    middlewares: Sequence[Middleware] = (),
) -> web.Application:
    """The operations port: probes and metrics without a key, for the cluster's own network, and `/debug/*`."""
    routes = [web.get("/", probes.list_paths), *_operations(pages, judge), *debug_routes]
    app = _application(port, routes)
    app.middlewares.extend((debug_access.guard, *middlewares))
    return app


def _operations(pages: Pages, judge: probes.Judge) -> list[web.RouteDef]:
    return [*probes.routes(judge), *page_routes(pages)]


def _application(port: Port, routes: list[web.RouteDef]) -> web.Application:
    app = web.Application(
        middlewares=[
            middleware.identify,
            middleware.release_body,
            middleware.open_exchange,
            middleware.answer_errors,
            middleware.refuse_odd_heads,
        ],
        client_max_size=port.config.max_body_bytes,
    )
    app[PORT] = port
    app.add_routes(routes)
    app.on_response_prepare.append(middleware.add_headers)
    return app


def build_runner(app: web.Application, shutdown_timeout_s: float) -> Listener:
    """The application with its listener."""
    port = app[PORT]
    return Listener(app, port, shutdown_timeout_s, app.get(SCRAPE), app.get(PASSAGE))
