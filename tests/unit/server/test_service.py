"""The states of a server go one way, and each is told once."""

import pytest
from aiohttp.test_utils import make_mocked_request

from roseinfer.config.options import Config
from roseinfer.errors import EngineDead, NotReady
from roseinfer.records import Api, LifecycleState
from roseinfer.server.exchange import HEAD_NS, generates_tokens
from roseinfer.server.service import Service
from tests.unit.server.harness import INSTRUMENTS, Listener, ScriptedEngine, text_model


def make_service() -> tuple[Service, Listener]:
    listener = Listener()
    return Service(Config(), ScriptedEngine(), listener, None, INSTRUMENTS.ledgers), listener


async def test_states_go_one_way_and_may_be_left_out() -> None:
    service, listener = make_service()
    for state in ("loading", "starting", "loading", "ready", "warmup", "draining", "ready", "failed", "draining"):
        service.enter(LifecycleState(state))
    assert listener.states == ["starting", "loading", "ready", "draining", "failed"]


async def test_only_ready_admits() -> None:
    service, _ = make_service()
    for state in (LifecycleState.STARTING, LifecycleState.LOADING, LifecycleState.WARMUP):
        service.enter(state)
        assert not service.is_ready
        with pytest.raises(NotReady):
            service.admit()
    service.open(text_model())
    service.admit()
    assert service.is_ready
    service.enter(LifecycleState.DRAINING)
    with pytest.raises(NotReady):
        service.admit()
    service.enter(LifecycleState.FAILED)
    with pytest.raises(EngineDead):
        service.admit()
    assert service.has_been_ready
    assert not service.is_ready


async def test_the_text_side_is_there_when_it_is_open() -> None:
    service, _ = make_service()
    with pytest.raises(NotReady):
        _ = service.text_model
    service.open(model := text_model())
    assert service.text_model is model


async def test_a_key_is_remembered_as_long_as_the_engine_has_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients leave before the engine has heard of it; what the server remembers of them is not to grow with each."""
    service, _ = make_service()
    held: set[str] = set()
    monkeypatch.setattr(service.client, "holds", held.__contains__)
    request = make_mocked_request("POST", "/v1/completions")
    request[HEAD_NS] = 1
    generates_tokens(Api.COMPLETIONS)(request.match_info.handler)
    for number in range(200):
        held.add(f"r{number}")
        service.close_exchange(service.open_exchange(request, f"r{number}"))
        held.discard(f"r{number - 5}")
    assert service.open_exchange(request, "r199").key.startswith("r199~"), "the engine has this one still"
    assert service.open_exchange(request, "r190").key == "r190"
    assert len(service._abandoned) < 20
