"""Half of a character, which JSON can spell and no text has: wherever it stands, it is a mistake of the client's."""

import asyncio
import json
from typing import Any

import pytest

from tests.unit.server.harness import ScriptedEngine, says, serving

HALF = "a\ud800"
SPELLED = r'{"a": "\ud800"}'  # JSON in a text, which is sound by itself
USER = {"role": "user", "content": "Hi"}


def schema(**given: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": {}} | given}


def tool(**given: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "a"} | given}]


def called(**given: Any) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": "{}"} | given}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}]


BOTH: list[dict[str, Any]] = [
    *({"model": HALF}, {"user": HALF}, {"metadata": {"a": HALF}}, {"metadata": {HALF: "a"}}, {"service_tier": HALF}),
    *({"stop": HALF}, {"stop": ["a", HALF]}, {"cache_salt": HALF}, {"logit_bias": {HALF: 1}}, {HALF: 1}),
    *({"structured_outputs": {name: HALF}} for name in ("json", "regex", "grammar", HALF)),
    *({"structured_outputs": {"json": {"const": HALF}}}, {"structured_outputs": {"choice": [HALF]}}),
    *({"response_format": {"type": HALF}}, {"response_format": schema(name=HALF)}),
    *({"response_format": schema(description=HALF)}, {"response_format": schema(schema={"const": HALF})}),
    {"response_format": schema(schema={HALF: {}})},
]
COMPLETION: list[dict[str, Any]] = [{"prompt": HALF}, {"prompt": ["a", HALF]}, {"suffix": HALF}]
CHAT: list[dict[str, Any]] = [
    *({"messages": [USER | {name: HALF}]} for name in ("role", "content", "refusal", "tool_call_id")),
    {"messages": [USER | {"content": [{"type": "text", "text": HALF}]}]},
    *({"messages": called(**{name: HALF})} for name in ("name", "arguments")),
    *({"tools": tool(**{name: HALF})} for name in ("name", "description")),
    *({"tools": tool(parameters={"const": HALF})}, {"tools": tool(parameters={HALF: {}})}),
    *({"tools": tool(), "tool_choice": HALF}, {"tools": tool(), "tool_choice": tool(name=HALF)[0]}),
]
ASKED = [
    *(("/v1/completions", {"prompt": "Hi"} | wrong) for wrong in BOTH + COMPLETION),
    *(("/v1/chat/completions", {"messages": [USER]} | wrong) for wrong in BOTH + CHAT),
    *(("/tokenize", wrong) for wrong in ({"prompt": HALF}, {"messages": [USER | {"content": HALF}]})),
]


async def test_in_a_body_it_is_no_json() -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        for path, body in ASKED:
            for raw in (json.dumps(body).encode(), json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")):
                answer = await server.request("POST", path, data=raw, headers={"Content-Type": "application/json"})
                assert (answer.status, answer.error["code"]) == (400, "invalid_value"), (path, body)
                assert "is not valid JSON" in answer.error["message"], (path, body)
    assert server.engine.requests == []


@pytest.mark.parametrize(
    "body", [{"prompt": SPELLED}, {"stop": SPELLED}, {"cache_salt": SPELLED}, {"user": SPELLED}], ids=str
)
async def test_where_a_text_only_spells_it_the_text_is_taken(body: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        assert (await server.complete(**body)).status == 200


async def test_the_template_gets_arguments_that_spell_it_as_they_stand() -> None:
    async with serving(ScriptedEngine(says("a"))) as server:
        assert (await server.chat(messages=[*called(arguments=SPELLED), USER])).status == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [("X-Request-Id", 200), ("Traceparent", 200), ("X-Roseinfer-Ledger", 400), ("X-Roseinfer-Intended-Time", 400)],
)
async def test_bytes_in_a_header_that_are_no_text(header: str, status: int) -> None:
    body = b'{"prompt": "Hi"}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    async with serving(ScriptedEngine(says("a"))) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"{head}\r\n{header}: ".encode() + b"\xed\xa0\x80\xff\r\nConnection: close\r\n\r\n" + body)
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
