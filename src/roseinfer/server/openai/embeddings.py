"""POST /v1/embeddings: texts as vectors.

The handler is steps 2–6 and 12–14 of docs/architecture.md, in that order; the engine's work ends with the prompt.
"""

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from roseinfer.messages import EmbeddingInfo, Pooling
from roseinfer.records import Api
from roseinfer.server.api.fields import EngineBody, Schema
from roseinfer.server.api.parsing import read_body
from roseinfer.server.api.respond import submit
from roseinfer.server.api.unserved import OF_EMBEDDINGS, Unserved
from roseinfer.server.connection.body_budget import HELD_BYTES
from roseinfer.server.exchange import EXCHANGE, generates_tokens, server_timing
from roseinfer.server.openai.completions import encode_prompts
from roseinfer.server.openai.replies import EmbeddingItem, EmbeddingsReply, EmbeddingUsage
from roseinfer.server.openai.schema import PromptPart, check_prompts, prompts_schema
from roseinfer.server.service import SERVICE
from roseinfer.text.choice import EncodedPrompt
from roseinfer.text.embeddings import embedding_params, finished
from roseinfer.text.generation import Generation, GenerationRequest
from roseinfer.text.served_model import ServedModel

MAX_INPUTS = 2048  # OpenAI's own bound
_NUMBER_BYTES = {"float": 22, "base64": 6}  # of an answer, for each number


class EmbeddingsBody(EngineBody, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    unserved: ClassVar[dict[str, Unserved]] = OF_EMBEDDINGS
    relations: ClassVar[tuple[Schema, ...]] = ({"properties": {"input": {"anyOf": prompts_schema(MAX_INPUTS)}}},)

    input: Annotated[
        str | list[PromptPart],
        Meta(description=f"Text, token ids, or a list of at most {MAX_INPUTS} texts or of lists of token ids."),
    ]
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Only this many of the first numbers, at length 1 again. Default: all, which the model has."),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"],
        Meta(description="`base64`: the bytes of the numbers, 32 bits each, little-endian, which OpenAI's SDKs read."),
    ] = "float"
    pooling: Annotated[
        Pooling | None,
        Meta(
            description="The hidden row of the `last` token, or the `mean` of all; for `mean` no prefix is taken from "
            "the cache. Default: what the checkpoint's `modules.json` says, else `last`."
        ),
    ] = None
    user: Annotated[str, Meta(description="No effect.")] = ""

    def check(self) -> None:
        super().check()
        check_prompts(self.input, "input", MAX_INPUTS)


@generates_tokens(Api.EMBEDDINGS)
async def create_embeddings(request: web.Request) -> web.StreamResponse:
    """Read the body (2), make token ids of its texts (4), run them (5, 6), and write their vectors (12–14)."""
    service, exchange = request.app[SERVICE], request[EXCHANGE]
    body = await read_body(request, EmbeddingsBody)
    wanted = await prepare(body, service)
    size = body.dimensions or service.client.info.embedding.size
    request[HELD_BYTES].hold(len(wanted.prompts) * size * _NUMBER_BYTES[body.encoding_format])
    generation = submit(wanted, service, exchange, is_streamed=False)
    await generation.run()
    ledgers = await exchange.fetch_ledgers()
    content = msgspec.json.encode(await reply(body, generation, service, ledgers))
    response = web.Response(body=content, content_type="application/json", headers=server_timing(ledgers))
    exchange.stream = response
    await response.prepare(request)
    await response.write_eof()
    return response


async def prepare(body: EmbeddingsBody, served: ServedModel) -> GenerationRequest:
    """What to run. Raises RequestError."""
    info = served.client.info
    params = embedding_params(info.embedding, body.pooling, body.dimensions)
    names, prompts = await encode_prompts(body.input, "input", served.text_model.tokenizer, info.max_model_len)
    return GenerationRequest(
        prompts=list(map(EncodedPrompt, prompts, names)),
        params=params,
        cache_salt=body.cache_salt,
        client_salt=body.cache_salt,
        priority=body.priority,
    )


async def reply(
    body: EmbeddingsBody, generation: Generation, served: ServedModel, ledgers: list[dict[str, object]] | None
) -> EmbeddingsReply:
    """The whole answer, ready for JSON."""
    info = served.client.info.embedding
    num_tokens = generation.counts.prompt
    return EmbeddingsReply(
        data=await _encode([choice.embedding for choice in generation.choices], body, info),
        model=body.model or served.model_names[0],
        usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        roseinfer_ledger=msgspec.UNSET if ledgers is None else ledgers,
    )


async def _encode(raw: Sequence[bytes], body: EmbeddingsBody, info: EmbeddingInfo) -> list[EmbeddingItem]:
    """Each vector as JSON; the event loop runs between them when a millisecond has passed."""
    items, paused_s = [], time.monotonic()
    for index, pooled in enumerate(raw):
        vector = finished(pooled, info, body.dimensions)
        if body.encoding_format == "base64":
            encoded = msgspec.json.encode(base64.b64encode(vector.astype("<f4").tobytes()).decode())
        else:
            encoded = msgspec.json.encode(vector.tolist())
        items.append(EmbeddingItem(index=index, embedding=msgspec.Raw(encoded)))
        if time.monotonic() - paused_s > 1e-3:
            await asyncio.sleep(0)
            paused_s = time.monotonic()
    return items
