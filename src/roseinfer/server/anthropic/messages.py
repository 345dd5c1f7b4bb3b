"""POST /v1/messages: generates the next turn of a conversation; and POST /v1/messages/count_tokens.

The handler is steps 2–6 and 12–14 of docs/architecture.md, in that order.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import msgspec
from aiohttp import web

from roseinfer.records import Api
from roseinfer.server.anthropic.events import MessageDialect
from roseinfer.server.anthropic.replies import CountReply
from roseinfer.server.anthropic.schema import (
    Block,
    CountBody,
    MessagesBody,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)
from roseinfer.server.api.parsing import read_body
from roseinfer.server.api.respond import Job, respond
from roseinfer.server.exchange import generates_tokens
from roseinfer.server.middleware import REQUEST_ID
from roseinfer.server.service import SERVICE
from roseinfer.text.conversation import Conversation
from roseinfer.text.turns import Turn


@generates_tokens(Api.MESSAGES)
async def create_message(request: web.Request) -> web.StreamResponse:
    """Read the body (2), make a prompt of its messages (3, 4), and run it (5, 6, 12–14)."""
    body = await read_body(request, MessagesBody)
    turn = await request.app[SERVICE].prepare_turn(conversation_of(body))
    job = Job(
        body=body,
        prompts=[turn.prompt],
        max_tokens=body.max_tokens,
        fits_context=True,
        num_logprobs=None,
        grammar=turn.grammar,
        reads_calls=turn.tool_use is not None,
    )
    parser = turn.parser() if turn.has_parts else None
    dialect = MessageDialect(body.max_tokens, parser, request[REQUEST_ID], shows_thoughts=body.shows_thoughts)
    return await respond(request, job, dialect)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Answer with the tokens of the prompt, also of one that the context has no room for. Raises InvalidRequest."""
    body = await read_body(request, CountBody)
    prompt = await request.app[SERVICE].encode_conversation(conversation_of(body))
    reply = CountReply(input_tokens=len(prompt.token_ids))
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")


def conversation_of(body: CountBody) -> Conversation:
    """The conversation of a body, for the chat template."""
    choice = body.function_choice
    return Conversation(
        turns=partial(_turns, body),
        num_chars=len(text_of(body.system)) + sum(message.num_chars + 1 for message in body.messages),
        functions=choice.functions,
        must_call=choice.mode == "required",
        is_parallel=body.tool_choice is None or body.tool_choice.is_parallel,
        form=body.form(),
        variables=body.chat_template_kwargs,
        thinking=body.wanted_thinking,
        continues_last=body.continues_last,
        folds=True,
    )


def _turns(body: CountBody) -> Iterator[Turn]:
    """The conversation as chat templates read it. Messages of one side that follow each other are one turn of it."""
    if system := text_of(body.system):
        yield {"role": "system", "content": system}
    for role, group in groupby(body.messages, lambda message: message.role):
        blocks = [block for message in group for block in message.blocks]
        if role == "user":
            yield from _questions(blocks)
        elif role == "assistant":
            yield _answer(blocks)
        else:
            yield {"role": "system", "content": text_of(blocks)}


def _questions(blocks: Sequence[Block]) -> Iterator[Turn]:
    """What tools gave, and behind it what the user says."""
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            yield {"role": "tool", "content": block.text, "tool_call_id": block.tool_use_id}
    if not blocks or not all(isinstance(block, ToolResultBlock) for block in blocks):
        yield {"role": "user", "content": text_of(blocks)}


def _answer(blocks: Sequence[Block]) -> Turn:
    turn: dict[str, object] = {"role": "assistant", "content": text_of(blocks)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        turn["reasoning_content"] = turn["reasoning"] = "\n".join(thoughts)
    if calls := [block.for_template() for block in blocks if isinstance(block, ToolUseBlock)]:
        turn["tool_calls"] = calls
    return turn
