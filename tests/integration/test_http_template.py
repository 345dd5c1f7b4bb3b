"""Variables of the chat template over HTTP: in a chat, in /tokenize, and nowhere else."""

from typing import Any

import pytest

from roseinfer.text.tokenizer.tokenizer import INLINE_CHARS
from tests.unit.server.harness import ScriptedEngine, ids, says, serving, text_model

MESSAGES = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ note }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("variables", "prompt"),
    [
        (None, "<user>Hi<assistant>"),
        ({}, "<user>Hi<assistant>"),
        ({"enable_thinking": True}, "<user>Hi<assistant>"),
        ({"enable_thinking": False}, "<user>Hi<assistant><think></think>"),
        ({"enable_thinking": False, "note": "!", "thinking": True}, "<user>Hi!<assistant><think></think>"),
    ],
)
async def test_a_chat_and_the_tokens_of_it_see_them_alike(variables: Any, prompt: str) -> None:
    engine = ScriptedEngine(says("a"))
    async with serving(engine, text=text_model(template=TEMPLATE)) as server:
        body = {"messages": MESSAGES, "chat_template_kwargs": variables}
        assert (await server.chat(**body)).status == 200
        tokens = await server.request("POST", "/tokenize", json=body)
        closed = await server.request("POST", "/tokenize", json=body | {"add_generation_prompt": False})
    assert engine.requests[0].prompt_token_ids == tokens.json["tokens"] == ids(prompt)
    assert closed.json["tokens"] == ids(prompt.partition("<assistant>")[0])


async def test_what_would_take_long_to_render_is_rendered_off_the_loop() -> None:
    text = text_model(template=TEMPLATE)
    num_hops = 0
    off_loop = text.tokenizer.off_loop

    async def counted(*work: Any) -> Any:
        nonlocal num_hops
        num_hops += 1
        return await off_loop(*work)

    text.tokenizer.off_loop = counted  # type: ignore[method-assign, assignment]
    async with serving(ScriptedEngine(says("a")), text=text) as server:
        await server.chat(chat_template_kwargs={"enable_thinking": False})
        assert num_hops == 0
        await server.chat(chat_template_kwargs={"enable_thinking": "x" * INLINE_CHARS})
        assert num_hops == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, "chat_template_kwargs.note_"),
        ("/tokenize", {"messages": MESSAGES}, "chat_template_kwargs.note_"),
        ("/tokenize", {"prompt": "a"}, "chat_template_kwargs"),
        ("/v1/completions", {"prompt": "a"}, "chat_template_kwargs"),
        ("/detokenize", {"tokens": [1]}, "chat_template_kwargs"),
    ],
)
async def test_where_they_do_nothing_they_are_refused(path: str, body: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine(says("a"))
    async with serving(engine, text=text_model(template=TEMPLATE)) as server:
        answer = await server.request("POST", path, json=body | {"chat_template_kwargs": {"note_": "!"}})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_value", param)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ([], "`messages` with `chat_template_kwargs`"),
        ([{"type": "function", "function": {"name": "f"}}], "`messages` with `tools` and `chat_template_kwargs`"),
    ],
)
async def test_a_value_that_is_long_is_a_prompt_that_is_long(tools: list[Any], told: str) -> None:
    async with serving(ScriptedEngine(says("a")), text=text_model(template=TEMPLATE + "{{ tools }}")) as server:
        answer = await server.chat(chat_template_kwargs={"note": "x" * 200}, tools=tools)
    assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", "messages")
    assert f" of {told} and the " in answer.error["message"]


async def test_the_document_says_how_they_are_called_and_how_many_there_may_be() -> None:
    async with serving(ScriptedEngine()) as server:
        schemas = (await server.get("/openapi.json")).json["components"]["schemas"]
    for name in ("ChatBody", "TokenizeBody"):
        field, nothing = schemas[name]["properties"]["chat_template_kwargs"]["anyOf"]
        assert nothing == {"type": "null"}
        assert field["propertyNames"]["pattern"].startswith("^[A-Za-z_]")
        assert field["maxProperties"] == 32
