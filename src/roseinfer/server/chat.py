"""POST /v1/chat/completions: turns a conversation into its next turn. Knows no vocabulary.

The handler is steps 2–6 and 12–14 of docs/architecture.md, in that order.
"""

from typing import Any

import msgspec
from aiohttp import web

from roseinfer.errors import InvalidRequest
from roseinfer.server.body import read_body
from roseinfer.server.choice import Delta
from roseinfer.server.exchange import generates_tokens
from roseinfer.server.generation import Job, respond
from roseinfer.server.service import SERVICE, TextModel
from roseinfer.server.tokenizer import INLINE_CHARS
from roseinfer.server.wire import ChatBody


@generates_tokens("chat")
async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Read the body (2), make a prompt of its messages (3, 4), and run it (5, 6, 12–14)."""
    text_model = request.app[SERVICE].text_model
    body = await read_body(request, ChatBody)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in {None, body.max_tokens}:
        raise InvalidRequest("`max_tokens` and `max_completion_tokens` differ.", param="max_tokens")
    job = Job(
        body=body,
        prompts=[await _encode_messages(body, text_model)],
        prompt_names=["messages"],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        num_sequences=body.n,
    )
    return await respond(request, job, ChatDialect())


async def _encode_messages(body: ChatBody, text_model: TextModel) -> list[int]:
    """The template writes the special tokens itself, so none are added. Raises InvalidRequest."""
    template, tokenizer = text_model.require_chat_template(), text_model.tokenizer
    messages = [message.for_template() for message in body.messages]
    if sum(len(message["content"]) for message in messages) + len(messages) <= INLINE_CHARS:
        text = template.render(messages)
    else:
        text = await tokenizer.off_loop(template.render, messages)
    [token_ids] = await tokenizer.encode([text], add_special_tokens=False)
    return token_ids


class ChatDialect:
    """Text under `message.content`, or `delta.content` with the role in the first; one object a scored token."""

    id_prefix = "chatcmpl"
    reply_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    chunk_field = "delta"

    def payload(self, delta: Delta) -> bytes:
        if delta.is_first:
            return b'{"role":"assistant","content":' + msgspec.json.encode(delta.text) + b"}"
        return b'{"content":' + msgspec.json.encode(delta.text) + b"}" if delta.text else b"{}"

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.choice.wants_logprobs:
            return None
        content = [
            {
                **_scored(scored.token, scored.logprob),
                "top_logprobs": [_scored(token, logprob) for token, logprob in scored.top or ()],
            }
            for scored in delta.scored
            if not scored.is_end
        ]
        return {"content": content, "refusal": None}

    def choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.choice.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self.logprobs(delta),
            "finish_reason": delta.finish_reason,
        }


def _scored(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}
