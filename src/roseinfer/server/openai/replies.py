"""Defines the answers of OpenAI's endpoints, and of those without an API of their own, as structs.

/openapi.json describes these types. The generation endpoints write their answers piece by piece, and tests compare
those with the types here.
"""

from typing import Any, Literal

import msgspec

from roseinfer.engine.link.heartbeat import Activity
from roseinfer.text.logprobs import ScoredToken


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Of the generated tokens."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Counted by the engine. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Reply(msgspec.Struct):
    """An unstreamed answer; `object` is `text_completion` or `chat.completion`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage
    roseinfer_ledger: list[Any] | msgspec.UnsetType = msgspec.UNSET  # of each choice, when asked for


class EmbeddingItem(msgspec.Struct, kw_only=True):
    """One vector: numbers, or the base64 of their bytes."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: msgspec.Raw


class EmbeddingUsage(msgspec.Struct):
    """Counted by the engine."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings: a vector for each text, in their order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
    roseinfer_ledger: list[Any] | msgspec.UnsetType = msgspec.UNSET  # of each text, when asked for


class ErrorDetail(msgspec.Struct):
    """What went wrong; `param` is the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    """Every answer with a status of 400 or more."""

    error: ErrorDetail


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One continuation; in a stream, a piece of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionReply(Reply):
    """POST /v1/completions."""

    choices: list[CompletionChoice]


class ChatTopLogprob(msgspec.Struct):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(ChatTopLogprob):
    """The same of a token of the answer, with the likeliest in its place."""

    top_logprobs: list[ChatTopLogprob]


def scored_token(scored: ScoredToken) -> dict[str, Any]:
    """The entry of a token, a `ChatLogprob`."""
    top = [_likely(token, logprob) for token, logprob in scored.top or ()]
    return {**_likely(scored.token, scored.logprob), "top_logprobs": top}


def _likely(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}


class ChatLogprobs(msgspec.Struct):
    """One entry a token."""

    content: list[ChatLogprob] | None
    refusal: None


class ChatMessage(msgspec.Struct):
    """The next turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Any] | msgspec.UnsetType = msgspec.UNSET
    function_call: dict[str, str] | msgspec.UnsetType = msgspec.UNSET  # for a body with `functions`


class ChatChoice(msgspec.Struct):
    """One of the answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"] | None


class ChatReply(Reply):
    """POST /v1/chat/completions."""

    choices: list[ChatChoice]


class ModelCard(msgspec.Struct):
    """The one model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int  # tokens of prompt and completion together
    vocab_size: int
    type: Literal["model"]  # from here on as Anthropic's clients read it
    display_name: str
    lifecycle: Literal["active"]
    created_at: str
    max_input_tokens: int


class ModelList(msgspec.Struct):
    """GET /v1/models: all of them, in OpenAI's form and in Anthropic's."""

    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str
    last_id: str


class TokenizeReply(msgspec.Struct):
    """POST /tokenize: `count` is the length of `tokens`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class RenderReply(msgspec.Struct):
    """POST /v1/chat/completions/render; /v1/completions/render has a list of them, one for each prompt."""

    token_ids: list[int]


class DetokenizeReply(msgspec.Struct):
    """POST /detokenize."""

    prompt: str


class AbortReply(msgspec.Struct):
    """POST /v1/requests/{id}/abort."""

    id: str
    object: Literal["request"]
    aborted: Literal[True]


class ProbeAccount(msgspec.Struct):
    """What the engine does, and for how long it has."""

    activity: Activity
    for_s: float


class ProbeReply(msgspec.Struct):
    """What the probes answer; `trouble` is a phrase when the engine is dead or makes no progress."""

    status: Literal["ok", "unavailable"]
    state: str
    trouble: str | None
    engine: ProbeAccount


class LoadReply(msgspec.Struct):
    """GET /load: requests for tokens in flight, and the predicted seconds until one more would be in a batch."""

    server_load: int
    predicted_wait_s: float


class VersionReply(msgspec.Struct):
    """GET /version."""

    version: str
