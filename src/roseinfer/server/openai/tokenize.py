"""Serves POST /tokenize and /detokenize: text into token ids and back, as the generation endpoints do it."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, ClassVar

import msgspec
from aiohttp import web
from msgspec import Meta

from roseinfer.errors import InvalidRequest
from roseinfer.messages import TokenId
from roseinfer.server.api.fields import ModelBody, Schema, given, when
from roseinfer.server.api.parsing import read_body
from roseinfer.server.api.unserved import OF_DETOKENIZE, OF_TOKENIZE, Unserved
from roseinfer.server.connection.body import INLINE_BYTES
from roseinfer.server.connection.body_budget import HELD_BYTES
from roseinfer.server.openai.chat_schema import Message, earlier_arguments
from roseinfer.server.openai.replies import DetokenizeReply, TokenizeReply
from roseinfer.server.service import SERVICE
from roseinfer.text.templates import VARIABLES_FIELD, TemplateVariables, check_variables
from roseinfer.text.text_model import TextModel
from roseinfer.text.tokenizer.tokenizer import INLINE_CHARS, Tokenizer

# Most that a byte of text adds to an answer: a token of its own, which has an id of seven digits and a comma, and whose
# spelling is `"\u0000",` at worst.
ID_BYTES = 8
SPELLING_BYTES = 9
PIECE = 4096  # values: a tenth of a millisecond to encode


class TokenizeBody(ModelBody, frozen=True, kw_only=True):
    """POST /tokenize: the fields of vLLM that can be served."""

    unserved: ClassVar[dict[str, Unserved]] = OF_TOKENIZE
    relations: ClassVar[tuple[Schema, ...]] = (
        {"oneOf": [given("prompt"), given("messages")]},
        when(
            given("prompt"),
            {
                "properties": {
                    "add_generation_prompt": {"enum": [True, None]},
                    VARIABLES_FIELD: {"maxProperties": 0},
                }
            },
        ),
    )

    prompt: Annotated[str | None, Meta(description="A text. Either this or `messages`.")] = None
    messages: Annotated[
        Annotated[list[Message], Meta(min_length=1)] | None,
        Meta(description="A conversation, which goes through the chat template first."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="Add what the tokenizer puts around a text. Default: with `prompt`, not with `messages`."),
    ] = None
    add_generation_prompt: Annotated[
        bool, Meta(description="End the conversation with what makes the assistant speak. Needs `messages`.")
    ] = True
    chat_template_kwargs: TemplateVariables = msgspec.field(default_factory=dict)
    return_token_strs: Annotated[bool, Meta(description="Also spell out each token.")] = False

    def check(self) -> None:
        super().check()
        check_variables(self.chat_template_kwargs)
        if self.prompt is not None and self.messages is not None:
            raise InvalidRequest("Either `prompt` or `messages`, not both.", param="messages")
        if self.prompt is None and self.messages is None:
            raise InvalidRequest("Either `prompt` or `messages` is needed.", param="prompt")
        if self.messages is None and not self.add_generation_prompt:
            raise InvalidRequest("`add_generation_prompt` needs `messages`.", param="add_generation_prompt")
        if self.messages is None and self.chat_template_kwargs:
            raise InvalidRequest(f"`{VARIABLES_FIELD}` needs `messages`.", param=VARIABLES_FIELD)

    def json_texts(self) -> Iterable[tuple[str, str]]:
        return earlier_arguments(self.messages or ())


class DetokenizeBody(ModelBody, frozen=True, kw_only=True):
    """POST /detokenize."""

    unserved: ClassVar[dict[str, Unserved]] = OF_DETOKENIZE

    tokens: Annotated[list[TokenId], Meta(description="Token ids.")]


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Answer with the token ids of a text or a conversation. Raises InvalidRequest or Overloaded."""
    service = request.app[SERVICE]
    text_model, max_model_len = service.text_model, service.client.info.max_model_len
    body = await read_body(request, TokenizeBody)
    text = await _text(body, text_model)
    if len(text) > INLINE_CHARS:
        num_bytes = len(text) * (1 if text.isascii() else 4)
        request[HELD_BYTES].hold(num_bytes * (ID_BYTES + (SPELLING_BYTES if body.return_token_strs else 0)))
    add_special_tokens = body.add_special_tokens if body.add_special_tokens is not None else body.prompt is not None
    work = (text_model.tokenizer, text, add_special_tokens, max_model_len, body.return_token_strs)
    return await _answer(request, await text_model.tokenizer.for_text(len(text), _tokenized, *work))


async def _text(body: TokenizeBody, text_model: TextModel) -> str:
    if body.prompt is not None:
        return body.prompt
    template = text_model.require_chat_template()
    messages = (message.for_template() for message in body.messages or ())  # which decodes: where they are rendered
    render = partial(template.render, messages, variables=body.chat_template_kwargs)
    return await text_model.tokenizer.off_loop(partial(render, opens_turn=body.add_generation_prompt))


def _tokenized(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, max_model_len: int, with_strings: bool
) -> bytes:
    """A TokenizeReply in JSON, made in one call, so that there is one list of the ids of a long text at a time."""
    token_ids = tokenizer.encode_here(text, add_special_tokens=add_special_tokens)

    def spell(piece: list[int]) -> list[str]:
        return [tokenizer.spell(token_id).decode(errors="replace") for token_id in piece]

    spelled = msgspec.Raw(_array(token_ids, spell) if with_strings else b"null")
    values = (len(token_ids), max_model_len, msgspec.Raw(_array(token_ids, list)), spelled)
    while token_ids:  # freed in pieces too: a million at once take ten milliseconds
        del token_ids[-PIECE:]
    return msgspec.json.encode(dict(zip(TokenizeReply.__struct_fields__, values, strict=True)))


def _array(token_ids: list[int], convert: Callable[[list[int]], Sequence[object]]) -> bytes:
    """A JSON array with what each token converts to, encoded in pieces: no other thread runs while one is."""
    pieces = (convert(token_ids[start : start + PIECE]) for start in range(0, len(token_ids), PIECE))
    return b"[" + b",".join(msgspec.json.encode(piece)[1:-1] for piece in pieces) + b"]"


async def _answer(request: web.Request, content: bytes) -> web.StreamResponse:
    """Write the answer: what the request holds, which includes it, is released when the handler returns."""
    response = web.Response(body=content, content_type="application/json")
    await response.prepare(request)
    await response.write_eof()
    return response


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Answer with the text of token ids, special tokens spelled out. Raises InvalidRequest or Overloaded."""
    service = request.app[SERVICE]
    tokenizer, vocab_size = service.text_model.tokenizer, service.client.info.vocab_size
    body = await read_body(request, DetokenizeBody)
    if len(body.tokens) <= INLINE_CHARS:
        content = _spelled(tokenizer, body.tokens, vocab_size)
    else:
        content = await tokenizer.off_loop(_spelled, tokenizer, body.tokens, vocab_size)
    if len(content) > INLINE_BYTES:  # shorter answers are bounded by the number of connections, as shorter bodies are
        request[HELD_BYTES].hold(len(content))
    return await _answer(request, content)


def _spelled(tokenizer: Tokenizer, token_ids: list[int], vocab_size: int) -> bytes:
    """A DetokenizeReply in JSON, encoded in pieces: no other thread runs while one is."""
    for position, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            where = f"tokens[{position}]"
            raise InvalidRequest(f"`{where}`: {token_id} is no token; the vocabulary has {vocab_size}.", param=where)
    decoder = getincrementaldecoder("utf-8")("replace")
    [name] = DetokenizeReply.__struct_fields__
    pieces = [b'{"%b":"' % name.encode()]
    for start in range(0, len(token_ids), PIECE):
        piece = b"".join(map(tokenizer.spell, token_ids[start : start + PIECE]))
        pieces.append(_within_quotes(decoder.decode(piece)))
    pieces += [_within_quotes(decoder.decode(b"", final=True)), b'"}']
    return b"".join(pieces)


def _within_quotes(text: str) -> bytes:
    """As a part of a JSON string."""
    return msgspec.json.encode(text)[1:-1]
