"""Answers `/metrics` and `/metrics/load`, on either port."""

from typing import Protocol

from aiohttp import web

LOAD_PATH = "/metrics/load"


class Page(Protocol):
    """A page of metrics."""

    @property
    def content(self) -> bytes: ...

    @property
    def content_type(self) -> str: ...

    @property
    def is_compressed(self) -> bool:
        """Whether the content is gzip's."""


class Pages(Protocol):
    """Makes pages of metrics, in the format that an Accept header asks for."""

    async def __call__(self, accept: str, *, is_load: bool, takes_gzip: bool) -> Page:
        """Raises NotReady where there is none in time."""


def routes(pages: Pages) -> list[web.RouteDef]:
    """The pages, by aiohttp."""

    async def handle(request: web.Request) -> web.Response:
        headers = request.headers
        is_load, takes_gzip = request.path == LOAD_PATH, accepts_gzip(headers.get("Accept-Encoding", ""))
        page = await pages(headers.get("Accept", ""), is_load=is_load, takes_gzip=takes_gzip)
        return web.Response(body=page.content, headers=dict(head_of(page)))

    return [web.get("/metrics", handle), web.get(LOAD_PATH, handle)]


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether a client takes gzip, by its header."""
    for part in accept_encoding.lower().replace(" ", "").split(","):
        coding, _, weight = part.partition(";")
        if coding == "gzip":
            return not weight or bool(weight.strip("q=0."))  # `q=0` says that it does not
    return False


def head_of(page: Page) -> list[tuple[str, str]]:
    """The headers that say what its content is."""
    encoding = [("Content-Encoding", "gzip")] if page.is_compressed else []
    return [("Content-Type", page.content_type), *encoding]
