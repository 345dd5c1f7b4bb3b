"""POST /v1/completions: turns a prompt into its continuation. Knows no message and no template.

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
from roseinfer.server.service import SERVICE
from roseinfer.server.tokenizer import Tokenizer
from roseinfer.server.wire import MAX_PROMPTS, CompletionBody


@generates_tokens("text_completion")
async def create_completion(request: web.Request) -> web.StreamResponse:
    """Read the body (2), make token ids of its prompts (4), and run them (5, 6, 12–14)."""
    text_model = request.app[SERVICE].text_model
    body = await read_body(request, CompletionBody)
    if body.best_of not in {None, body.n}:
        raise InvalidRequest("`best_of` other than `n` is not supported.", param="best_of")
    names, prompts = await _encode_prompts(body, text_model.tokenizer)
    job = Job(
        body=body,
        prompts=prompts,
        prompt_names=names,
        max_tokens=body.max_tokens,
        num_logprobs=body.logprobs,
    )
    return await respond(request, job, CompletionDialect())


async def _encode_prompts(body: CompletionBody, tokenizer: Tokenizer) -> tuple[list[str], list[list[int]]]:
    """What each prompt is called in errors, and its token ids. Raises InvalidRequest."""
    prompt = body.prompt
    if isinstance(prompt, str):
        _check_texts(["prompt"], [prompt])
        return ["prompt"], await tokenizer.encode([prompt], add_special_tokens=True)
    token_ids = [part for part in prompt if isinstance(part, int)]
    texts = [part for part in prompt if isinstance(part, str)]
    id_lists = [part for part in prompt if isinstance(part, list)]
    if len(prompt) not in {len(token_ids), len(texts), len(id_lists)}:
        raise InvalidRequest("`prompt` mixes texts, token ids and lists.", param="prompt")
    if token_ids or not prompt:
        return ["prompt"], [token_ids]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"`prompt` holds more than {MAX_PROMPTS} prompts.", param="prompt")
    names = [f"prompt[{i}]" for i in range(len(prompt))]
    if id_lists:
        return names, id_lists
    _check_texts(names, texts)
    return names, await tokenizer.encode(texts, add_special_tokens=True)


def _check_texts(names: list[str], texts: list[str]) -> None:
    """An empty text has nothing to continue, also where the vocabulary puts a token before every text."""
    for name, text in zip(names, texts, strict=True):
        if not text:
            raise InvalidRequest(f"`{name}` is empty.", param=name)


class CompletionDialect:
    """Text under `text`, log-probabilities as parallel lists."""

    id_prefix = "cmpl"
    reply_object = "text_completion"
    chunk_object = "text_completion"
    chunk_field = "text"

    def payload(self, delta: Delta) -> bytes:
        return msgspec.json.encode(delta.text)

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.choice.wants_logprobs:
            return None
        return {
            "tokens": [_spell(scored.token) for scored in delta.scored],
            "token_logprobs": [scored.logprob for scored in delta.scored],
            "top_logprobs": [_likeliest([(scored.token, scored.logprob), *scored.top]) for scored in delta.scored],
            "text_offset": [scored.offset for scored in delta.scored],
        }

    def choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.choice.index,
            "text": delta.text,
            "logprobs": self.logprobs(delta),
            "finish_reason": delta.finish_reason,
        }


def _spell(token: bytes) -> str:
    r"""The text of a token; of one that is part of a character, OpenAI's `bytes:\xe2\x82`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _likeliest(top: list[tuple[bytes, float]]) -> dict[str, float]:
    """By spelling, the sampled token and the likeliest; of two spelled alike, the one that comes first."""
    return {_spell(token): logprob for token, logprob in reversed(top)}
