"""What is not a request for tokens: probes, models, version, metrics, and who may see them."""

import asyncio
from pathlib import Path

import pytest

from roseinfer import __version__
from roseinfer.records import FinishReason
from roseinfer.server.middleware import PROBE_PATHS
from tests.unit.server.harness import ScriptedEngine, answering, ops_app, says, serving


async def test_the_probes_of_a_ready_server() -> None:
    async with serving(ScriptedEngine()) as server:
        for path in ("/livez", "/readyz", "/startupz", "/health", "/ping"):
            answer = await server.get(path)
            assert answer.status == 200
            told = answer.json
            assert told.pop("engine")["activity"] == "idle"
            assert told == {"status": "ok", "state": "ready", "trouble": None}


async def test_the_model_and_its_context() -> None:
    async with serving(ScriptedEngine()) as server:
        [model] = (await server.get("/v1/models")).json["data"]
    assert (model["id"], model["object"]) == ("scripted", "model")
    assert (model["max_model_len"], model["vocab_size"]) == (128, 300)


async def test_version_and_metrics() -> None:
    async with serving(ScriptedEngine()) as server:
        assert (await server.get("/version")).json == {"version": __version__}
        for path in ("/metrics", "/metrics/load"):
            assert (await server.get(path)).body == b"# the metrics\n"


KEYS = ["first-key", "clé"]
NO_KEYS = [None, "", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer é"]


@pytest.mark.parametrize("authorization", NO_KEYS)
async def test_without_a_key_only_the_probes_answer(authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with serving(ScriptedEngine(says("a")), keys=KEYS) as server:
        refused = [await server.complete(headers=headers), await server.chat(headers=headers)]
        paths = ("/v1/models", "/metrics", "/version", "/nowhere")
        refused += [await server.get(path, headers=headers) for path in paths]
        probes = [await server.get(path, headers=headers) for path in PROBE_PATHS]
    for answer in refused:
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert [answer.status for answer in probes] == [200] * 5
    assert server.engine.requests == []
    assert [timeline.finish_reason for timeline in server.engine.closed] == [FinishReason.REJECTED] * 2


async def test_the_load_is_the_number_of_requests_for_tokens_in_flight() -> None:
    async with serving(engine := ScriptedEngine()) as server:
        assert (await server.get("/load")).json == {"server_load": 0, "predicted_wait_s": 0}
        waiting = [asyncio.create_task(server.complete(n=2)) for _ in range(2)]
        await engine.received(4)
        assert (await server.get("/load")).json["server_load"] == 2
        for index in range(4):
            engine.say("a", FinishReason.LENGTH, index=index)
        await asyncio.gather(*waiting)


async def test_each_key_opens_the_door_and_has_a_cache_of_its_own() -> None:
    async with serving(ScriptedEngine(says("a")), keys=KEYS) as server:
        for key in (*KEYS, KEYS[0]):
            assert (await server.complete(headers={"Authorization": f"Bearer {key}"})).status == 200
    first, second, again = (request.cache_salt for request in server.engine.requests)
    assert first == again
    assert len({first, second, ""}) == 3


async def test_the_operations_port_needs_no_key_and_serves_no_tokens(tmp_path: Path) -> None:
    async with serving(ScriptedEngine(), keys=KEYS) as server, answering(ops_app(server.service)) as (url, _):
        statuses = {}
        for path in ("/livez", "/readyz", "/startupz", "/health", "/metrics", "/v1/models"):
            async with server.session.get(url + path) as response:
                statuses[path] = response.status
    assert statuses.pop("/v1/models") == 404
    assert set(statuses.values()) == {200}
