"""POST /v1/messages: generates the next turn of a conversation; and POST /v1/messages/count_tokens.

The handler is steps 2–6 and 12–14 of docs/architecture.md, in that order.
"""

import msgspec
from aiohttp import web

from roseinfer.records import Api
from roseinfer.server.anthropic.conversation import conversation_of
from roseinfer.server.anthropic.events import MessageDialect
from roseinfer.server.anthropic.replies import CountReply
from roseinfer.server.anthropic.schema import CountBody, MessagesBody
from roseinfer.server.api.parsing import read_body
from roseinfer.server.api.respond import Job, respond
from roseinfer.server.exchange import generates_tokens
from roseinfer.server.middleware import REQUEST_ID
from roseinfer.server.service import SERVICE


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
