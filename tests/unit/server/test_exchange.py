"""Which requests are exchanges about tokens: those that a marked handler answers, and no others."""

import pytest

from tests.unit.server.harness import ScriptedEngine, says, serving


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_request_for_tokens_opens_a_timeline_also_when_it_is_refused(path: str) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        assert (await server.request("POST", path, json={})).status == 400
        assert len(server.engine.opened) == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/rerank", 404),
        ("POST", "/v1/completions/", 404),
        ("POST", "/v1//chat/completions", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models", 200),
    ],
)
async def test_nothing_else_does(method: str, path: str, status: int) -> None:
    async with serving(ScriptedEngine()) as server:
        assert (await server.request(method, path)).status == status
        assert server.engine.opened == []


async def test_a_server_that_is_not_ready_still_says_that_there_is_no_such_path() -> None:
    async with serving(ScriptedEngine(), is_ready=False) as server:
        assert (await server.request("POST", "/v1/rerank")).status == 404
        assert (await server.complete()).status == 503
