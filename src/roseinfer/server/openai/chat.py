"""POST /v1/chat/completions: generates the next turn of a conversation.

The handler is steps 2–6 and 12–14 of docs/architecture.md, in that order.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from aiohttp import web

from roseinfer.records import Api, FinishReason
from roseinfer.server.api.parsing import read_body
from roseinfer.server.api.respond import Job, respond
from roseinfer.server.exchange import generates_tokens
from roseinfer.server.openai.chat_schema import ChatBody
from roseinfer.server.openai.chunks import NOTHING, ChunkDialect
from roseinfer.server.openai.replies import scored_token
from roseinfer.server.openai.schema import StreamOptions
from roseinfer.server.service import SERVICE
from roseinfer.text.answers.answer import AnswerParser
from roseinfer.text.answers.parts import CallPart, Parts
from roseinfer.text.choice import Delta
from roseinfer.text.conversation import Conversation
from roseinfer.text.logprobs import ScoredToken
from roseinfer.text.served_model import ServedModel


@generates_tokens(Api.CHAT)
async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Read the body (2), make a prompt of its messages (3, 4), and run it (5, 6, 12–14)."""
    body = await read_body(request, ChatBody)
    return await respond(request, *await prepare(body, request.app[SERVICE]))


async def prepare(body: ChatBody, served: ServedModel) -> tuple[Job, "ChatDialect"]:
    """What to run, and the form of its answer. Raises RequestError."""
    turn = await served.prepare_turn(conversation_of(body))
    job = Job(
        body=body,
        prompts=[turn.prompt],
        max_tokens=body.most_tokens,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        n=body.n,
        best_of=body.n,
        grammar=turn.grammar,
        reads_calls=turn.tool_use is not None,
        max_tokens_name="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
    )
    parsers = [turn.parser() for _ in range(body.n)] if turn.has_parts else []
    if not parsers:
        return job, ChatDialect(body.stream_options)
    form = FunctionCallDialect if body.functions else PartsDialect
    return job, form(parsers, body.stream_options, has_reasoning=body.shows_thoughts)


def conversation_of(body: ChatBody) -> Conversation:
    """What the prompt is made of."""
    choice = body.function_choice
    return Conversation(
        turns=lambda: (message.for_template() for message in body.messages),
        num_chars=sum(message.num_chars + 1 for message in body.messages),
        functions=choice.functions,
        must_call=choice.mode == "required",
        is_parallel=not body.is_single_call,
        form=body.form(),
        variables=body.chat_template_kwargs,
        thinking=body.wanted_thinking(),
    )


class ChatDialect(ChunkDialect):
    """Text under `message.content`, or `delta.content` with the role in the first; one object a scored token."""

    id_prefix = "chatcmpl-"
    reply_object = "chat.completion"
    reply_field = "message"
    chunk_object = "chat.completion.chunk"
    chunk_field = "delta"

    def payload(self, delta: Delta) -> bytes:
        if delta.is_first:
            return b'{"role":"assistant","content":' + msgspec.json.encode(delta.text) + b"}"
        return b'{"content":' + msgspec.json.encode(delta.text) + b"}" if delta.text else NOTHING

    def columns(self, scored: Sequence[ScoredToken]) -> dict[str, list[Any] | None]:
        content = [scored_token(token) for token in scored if not token.is_end]
        return {"content": content, "refusal": None}

    async def content(self, delta: Delta) -> dict[str, Any]:
        return {"role": "assistant", "content": delta.text, "refusal": None}


class PartsDialect(ChatDialect):
    """As `ChatDialect`, with thoughts beside the text, and `tool_calls`, which are a finish reason too."""

    call_reason: ClassVar[str] = "tool_calls"

    def __init__(self, parsers: Sequence[AnswerParser], options: StreamOptions, *, has_reasoning: bool) -> None:
        super().__init__(options)
        self._parsers = parsers  # of the choices
        self._has_reasoning = has_reasoning

    def payload(self, delta: Delta) -> bytes:
        parts = Parts()
        for more in self._parsers[delta.choice.index].read(delta.text, is_last=delta.finish_reason is not None):
            parts.extend(more)
        content = parts.content
        # Null, as OpenAI has it: a client that joins the pieces has null at the end too where only calls came.
        payload: dict[str, Any] = {"role": "assistant", "content": content or None} if delta.is_first else {}
        payload |= self._reasoning(parts)
        if content:
            payload["content"] = content
        payload |= self._calls(parts)
        return msgspec.json.encode(payload) if payload else NOTHING

    def finish_reason(self, delta: Delta) -> str | None:
        has_stopped = delta.finish_reason is FinishReason.STOP
        ends_with_calls = has_stopped and self._parsers[delta.choice.index].ends_with_calls
        return self.call_reason if ends_with_calls else delta.finish_reason

    async def content(self, delta: Delta) -> dict[str, Any]:
        parts = await self._parsers[delta.choice.index].read_whole(delta.text)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content or None, "refusal": None}
        message |= self._reasoning(parts) | self._calls(parts)
        for call in message.get("tool_calls", ()):
            del call["index"]  # which is for streams
        return message

    def _reasoning(self, parts: Parts) -> dict[str, str]:
        """The thoughts under both of their names: vLLM's older servers, DeepSeek and most clients have the longer."""
        if not parts.thoughts or not self._has_reasoning:
            return {}
        return {"reasoning": parts.reasoning, "reasoning_content": parts.reasoning}

    def _calls(self, parts: Parts) -> dict[str, Any]:
        return {"tool_calls": [_call(part) for part in parts.calls]} if parts.calls else {}


class FunctionCallDialect(PartsDialect):
    """As `PartsDialect`, with the only call in `function_call`: for a body with `functions`."""

    call_reason = "function_call"

    def _calls(self, parts: Parts) -> dict[str, Any]:
        if not parts.calls:
            return {}
        first, arguments = parts.calls[0], "".join(part.arguments for part in parts.calls)
        named = {} if first.call_id is None else {"name": first.name}
        return {"function_call": {**named, "arguments": arguments}}


def _call(part: CallPart) -> dict[str, Any]:
    if part.call_id is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.call_id, "type": "function", "function": function}
