"""POST /v1/completions: turns a prompt into its continuation. Knows no message and no template.

The handler is steps 2–6 and 12–14 of docs/architecture.md, in that order.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from roseinfer.errors import InvalidRequest, PromptName, PromptTooLong
from roseinfer.server.connection.body import read_body
from roseinfer.server.exchange import generates_tokens
from roseinfer.server.openai.respond import Job, respond
from roseinfer.server.openai.schema import MAX_PROMPTS, CompletionBody, PromptPart
from roseinfer.server.openai.score_limits import check_prompt_scores
from roseinfer.server.openai.structured import check_grammar, requested_grammar
from roseinfer.server.service import SERVICE
from roseinfer.text.choice import Delta, Echo
from roseinfer.text.logprobs import ScoredToken
from roseinfer.text.tokenizer import Tokenizer


@generates_tokens("text_completion")
async def create_completion(request: web.Request) -> web.StreamResponse:
    """Read the body (2), make token ids of its prompts (4), and run them (5, 6, 12–14)."""
    service = request.app[SERVICE]
    text_model = service.text_model
    body = await read_body(request, CompletionBody)
    _check(body)
    _check_length(body.prompt, service.client.info.max_model_len)
    wanted = requested_grammar(body)
    await check_grammar(wanted, service.grammars)
    names, prompts = await _encode_prompts(body, text_model.tokenizer, service.client.info.max_model_len)
    if body.echo and body.logprobs is not None:
        check_prompt_scores(sum(map(len, prompts)) * (body.best_of or body.n), body.logprobs)
    job = Job(
        body=body,
        prompts=prompts,
        prompt_names=names,
        max_tokens=body.max_tokens,
        num_logprobs=body.logprobs,
        num_sequences=body.best_of or body.n,
        echoes=_echoes(body, prompts, text_model.tokenizer) if body.echo else None,
        grammar=wanted and wanted[0],
    )
    return await respond(request, job, CompletionDialect())


def _check(body: CompletionBody) -> None:
    """What no field alone can say. Raises InvalidRequest."""
    if body.best_of is not None and body.best_of < body.n:
        raise InvalidRequest(f"`best_of` is {body.best_of}, less than the {body.n} of `n`.", param="best_of")
    if body.stream and body.best_of not in {None, body.n}:
        raise InvalidRequest("`best_of` above `n` cannot be streamed: the best is known at the end.", param="best_of")
    if not body.max_tokens and not body.echo:
        raise InvalidRequest("`max_tokens` 0 needs `echo`: there would be nothing to tell.", param="max_tokens")


def _echoes(body: CompletionBody, prompts: list[list[int]], tokenizer: Tokenizer) -> list[Echo]:
    """The prompts as they were given; those given as token ids as their text."""
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    return [
        Echo(prompt, text if isinstance(text, str) else tokenizer.text(prompt))
        for prompt, text in zip(prompts, texts if len(texts) == len(prompts) else [None], strict=True)
    ]


def _check_length(prompt: str | Sequence[PromptPart], max_model_len: int) -> None:
    """Whether it is worth a look, which costs as much as it is long. Raises PromptTooLong or InvalidRequest."""
    if isinstance(prompt, str) or len(prompt) <= max(max_model_len, MAX_PROMPTS):
        return
    if not isinstance(prompt[0], int):
        raise InvalidRequest(f"`prompt` holds more than {MAX_PROMPTS} prompts.", param="prompt")
    message = f"This model's context is {max_model_len} tokens; the {len(prompt)} of `prompt` do not fit."
    raise PromptTooLong(message, param="prompt")


async def _encode_prompts(
    body: CompletionBody, tokenizer: Tokenizer, max_model_len: int
) -> tuple[list[PromptName], list[list[int]]]:
    """What each prompt is called in errors, and its token ids. Raises InvalidRequest or PromptTooLong."""
    prompt, names = body.prompt, [PromptName("prompt")]
    if isinstance(prompt, str):
        _check_texts(names, [prompt])
        return names, await tokenizer.encode_prompts([prompt], max_model_len, names, add_special_tokens=True)
    token_ids = [part for part in prompt if isinstance(part, int)]
    texts = [part for part in prompt if isinstance(part, str)]
    id_lists = [part for part in prompt if isinstance(part, list)]
    if len(prompt) not in {len(token_ids), len(texts), len(id_lists)}:
        raise InvalidRequest("`prompt` mixes texts, token ids and lists.", param="prompt")
    if token_ids or not prompt:
        return names, [token_ids]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"`prompt` holds more than {MAX_PROMPTS} prompts.", param="prompt")
    names = [PromptName(f"prompt[{i}]") for i in range(len(prompt))]
    if id_lists:
        return names, id_lists
    _check_texts(names, texts)
    return names, await tokenizer.encode_prompts(texts, max_model_len, names, add_special_tokens=True)


def _check_texts(names: list[PromptName], texts: list[str]) -> None:
    """An empty text has nothing to continue, also where the vocabulary puts a token before every text."""
    for name, text in zip(names, texts, strict=True):
        if not text:
            raise InvalidRequest(f"{name} is empty.", param=name.param)


class CompletionDialect:
    """Text under `text`, log-probabilities as parallel lists, also of the token that ended the text.

    Who scores texts with one token to generate leaves the last entry out, whatever it is (lm-evaluation-harness).
    """

    id_prefix = "cmpl"
    reply_object = "text_completion"
    chunk_object = "text_completion"
    chunk_field = "text"

    def payload(self, delta: Delta) -> bytes:
        return msgspec.json.encode(delta.text)

    def scores(self, scored: Sequence[ScoredToken]) -> dict[str, list[Any]]:
        return {
            "tokens": [_spell(token.token) for token in scored],
            "token_logprobs": [token.logprob for token in scored],
            "top_logprobs": [_likeliest(token) for token in scored],
            "text_offset": [token.offset for token in scored],
        }

    def finish_reason(self, delta: Delta) -> str | None:
        return delta.finish_reason

    async def choice(self, delta: Delta, logprobs: msgspec.Raw | None) -> dict[str, Any]:
        return {
            "index": delta.choice.index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }


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
