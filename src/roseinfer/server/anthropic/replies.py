"""Defines the answers of Anthropic's Messages API as structs.

/openapi.json describes these types. The endpoint writes its answers piece by piece, and tests compare those with the
types here.
"""

from typing import Any, Literal

import msgspec


class TextBlockReply(msgspec.Struct, tag_field="type", tag="text"):
    """What the model said."""

    text: str


class ThinkingBlockReply(msgspec.Struct, tag_field="type", tag="thinking"):
    """What it thought; `signature` is always `unsigned`."""

    thinking: str
    signature: str


class ToolUseBlockReply(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool to be called."""

    id: str
    name: str
    input: dict[str, Any]


class OutputTokensDetails(msgspec.Struct):
    """Of the generated tokens."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Counted by the engine. The tokens of the prompt are those of `input_tokens` and those read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageReply(msgspec.Struct):
    """POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlockReply | ThinkingBlockReply | ToolUseBlockReply]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    roseinfer_ledger: list[Any] | msgspec.UnsetType = msgspec.UNSET  # when asked for


class CountReply(msgspec.Struct):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageErrorDetail(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class MessageErrorReply(msgspec.Struct):
    """Every answer with a status of 400 or more."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str
