"""POST /v1/completions: continues prompts.

The handler is steps 2–6 and 12–14 of docs/architecture.md, in that order.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from roseinfer.errors import PromptName, PromptTooLong
from roseinfer.records import Api
from roseinfer.server.api.parsing import read_body
from roseinfer.server.api.respond import Job, respond
from roseinfer.server.exchange import generates_tokens
from roseinfer.server.openai.chunks import ChunkDialect
from roseinfer.server.openai.schema import FILL_CONTEXT, CompletionBody, PromptPart
from roseinfer.server.service import SERVICE
from roseinfer.text.choice import Delta, EncodedPrompt
from roseinfer.text.grammar.checker import check_form
from roseinfer.text.logprobs import ScoredToken
from roseinfer.text.served_model import ServedModel
from roseinfer.text.tokenizer.tokenizer import Tokenizer


@generates_tokens(Api.COMPLETIONS)
async def create_completion(request: web.Request) -> web.StreamResponse:
    """Read the body (2), make token ids of its prompts (4), and run them (5, 6, 12–14)."""
    body = await read_body(request, CompletionBody)
    return await respond(request, *await prepare(body, request.app[SERVICE]))


async def prepare(body: CompletionBody, served: ServedModel) -> tuple[Job, "CompletionDialect"]:
    """What to run, and the form of its answer. Raises RequestError."""
    tokenizer = served.text_model.tokenizer
    form = body.form()
    await check_form(form, served.grammar_checker)
    names, prompts = await encode_prompts(body.prompt, "prompt", tokenizer, served.client.info.max_model_len)
    echoes = _echoes(body, prompts, tokenizer) if body.echo else [None] * len(prompts)
    job = Job(
        body=body,
        prompts=list(map(EncodedPrompt, prompts, names, echoes)),
        max_tokens=None if body.max_tokens == FILL_CONTEXT else body.max_tokens,
        num_logprobs=None if body.logprobs is False else body.logprobs,
        n=body.n,
        best_of=body.best_of or body.n,
        grammar=form and form[0],
    )
    return job, CompletionDialect(body.stream_options)


def _echoes(body: CompletionBody, prompts: list[list[int]], tokenizer: Tokenizer) -> Sequence[str | None]:
    """The text of each prompt: as it was given, or decoded from token ids."""
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    return [
        text if isinstance(text, str) else tokenizer.text(prompt)
        for prompt, text in zip(prompts, texts if len(texts) == len(prompts) else [None], strict=True)
    ]


async def encode_prompts(
    given: str | Sequence[PromptPart], field: str, tokenizer: Tokenizer, max_model_len: int
) -> tuple[list[PromptName], list[list[int]]]:
    """What each prompt of a field is called in errors, and its token ids. Raises InvalidRequest or PromptTooLong."""
    parts = [given] if isinstance(given, str) else given
    if not parts or isinstance(parts[0], int):
        if len(parts) > max_model_len:  # checking each id would hold up other requests
            message = f"{PromptTooLong.limit(max_model_len)}; the {len(parts)} of `{field}` do not fit."
            raise PromptTooLong(message, param=field)
        return [PromptName(field)], [[part for part in parts if isinstance(part, int)]]
    is_text = isinstance(parts[0], str)
    params = [field] if isinstance(given, str) else [f"{field}[{index}]" for index in range(len(parts))]
    names = [PromptName(param, is_text=is_text) for param in params]
    if not is_text:
        return names, [part for part in parts if isinstance(part, list)]
    texts = [part for part in parts if isinstance(part, str)]
    return names, await tokenizer.encode_prompts(texts, max_model_len, names, add_special_tokens=True)


class CompletionDialect(ChunkDialect):
    """Text under `text`, log-probabilities as parallel lists, also of the token that ended the text.

    lm-evaluation-harness scores texts by generating one token, and leaves out the last entry, whatever it is.
    """

    id_prefix = "cmpl-"
    reply_object = "text_completion"
    reply_field = "text"
    chunk_object = "text_completion"
    chunk_field = "text"

    def payload(self, delta: Delta) -> bytes:
        return msgspec.json.encode(delta.text)

    def columns(self, scored: Sequence[ScoredToken]) -> dict[str, list[Any]]:
        return {
            "tokens": [_spell(token.token) for token in scored],
            "token_logprobs": [token.logprob for token in scored],
            "top_logprobs": [_likeliest(token) for token in scored],
            "text_offset": [token.offset for token in scored],
        }

    async def content(self, delta: Delta) -> str:
        return delta.text


def _spell(token: bytes) -> str:
    r"""The text of a token; of one that is part of a character, OpenAI's `bytes:\xe2\x82`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _likeliest(scored: ScoredToken) -> dict[str, float] | None:
    """By spelling, the token itself and the likeliest; of two spelled alike, the one that comes first."""
    if scored.logprob is None or scored.top is None:
        return None
    top = [(scored.token, scored.logprob), *scored.top]
    return {_spell(token): logprob for token, logprob in reversed(top)}
