"""Unicode's line ends in the text of a stream: clients that split it into lines, as httpx does, read whole events."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from roseinfer.messages import Request, TokenOutput
from roseinfer.records import FinishReason
from tests.unit.server.harness import ScriptedEngine, ids, serving, text_model, times

TEXT = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e\r\né"
USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 50},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 50},
}


def reply(request: Request, reason: FinishReason) -> Iterator[TokenOutput]:
    yield TokenOutput(request.request_id, ids(TEXT))
    yield TokenOutput(request.request_id, [], None, reason, None, times())


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ERROR])
@pytest.mark.parametrize("ledger", ["0", "1"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_has_no_line_ends_of_unicode(path: str, ledger: str, reason: FinishReason) -> None:
    async with serving(ScriptedEngine(partial(reply, reason=reason)), text=text_model()) as server:
        body = BODIES[path] | {"stream": True}
        answer = await server.request("POST", path, json=body, headers={"x-roseinfer-ledger": ledger})
    lines = answer.body.decode().splitlines()
    assert all(line.startswith(("data: ", "event: ")) or not line for line in lines)
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert TEXT in strings(events)


def strings(part: Any) -> list[str]:
    """All texts in it."""
    if isinstance(part, dict | list):
        return [text for item in (part.values() if isinstance(part, dict) else part) for text in strings(item)]
    return [part] if isinstance(part, str) else []
