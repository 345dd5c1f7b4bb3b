"""Serves POST /v1/completions/render and /v1/chat/completions/render: the token ids of a request's prompts.

A router that scores by prefix sends the body that it is about to forward, before it chooses: llm-d's `token-producer`
does so to vLLM, whose paths and form these are.
"""

from typing import Any

import msgspec
from aiohttp import web

from roseinfer.server.api.parsing import read_body
from roseinfer.server.openai.chat import conversation_of
from roseinfer.server.openai.chat_schema import ChatBody
from roseinfer.server.openai.completions import encode_prompts
from roseinfer.server.openai.replies import RenderReply
from roseinfer.server.openai.schema import CompletionBody
from roseinfer.server.service import SERVICE
from roseinfer.text.conversation import encode_conversation


async def render_completion(request: web.Request) -> web.Response:
    """Answer with a list, of one object for each prompt. Raises RequestError."""
    body, service = await read_body(request, CompletionBody), request.app[SERVICE]
    _, prompts = await encode_prompts(
        body.prompt, "prompt", service.text_model.tokenizer, service.client.info.max_model_len
    )
    return _answer(list(map(RenderReply, prompts)))


async def render_chat(request: web.Request) -> web.Response:
    """Answer with one object. Raises RequestError."""
    body, service = await read_body(request, ChatBody), request.app[SERVICE]
    max_model_len = service.client.info.max_model_len
    prompt = await encode_conversation(conversation_of(body), service.text_model, max_model_len)
    return _answer(RenderReply(prompt.token_ids))


def _answer(content: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")
