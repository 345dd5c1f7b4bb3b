"""Defines the answer of /v1/responses as structs: the response, its output items, and its usage.

The keys are those that the `openai` packages, `@ai-sdk/openai` and Codex read or demand; many are null here.
"""

from typing import Any, Literal

import msgspec

from roseinfer.server.openai.replies import ChatLogprob, CompletionTokensDetails
from roseinfer.text.choice import TokenCounts

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", kw_only=True):
    """The text of a message. `annotations` is empty: models here cite nothing."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] | msgspec.Raw = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The thoughts of the model."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """The same thoughts again, where a summary is asked for: what most clients show."""

    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """What the model says."""

    id: str
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """What the model thinks before it says or calls something.

    `encrypted_content` is empty where it is asked for: `@ai-sdk/openai` sends no thoughts back without one.
    """

    id: str
    status: Status = "in_progress"
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: Literal[""] | None = None


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A function that the model calls; `arguments` is JSON in a string."""

    id: str
    status: Status = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | Reasoning | OutputCall


class InputTokensDetails(msgspec.Struct):
    """Of the prompt's tokens. Writing to the cache is not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Counted by the engine."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, counts: TokenCounts) -> "ResponseUsage":
        return cls(
            input_tokens=counts.prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=counts.cached),
            output_tokens=counts.generated,
            output_tokens_details=CompletionTokensDetails(reasoning_tokens=counts.reasoning),
            total_tokens=counts.prompt + counts.generated,
        )


class IncompleteDetails(msgspec.Struct):
    """Why an answer was cut."""

    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    """Why a response failed. The event `error` before it has the code that other answers have."""

    code: Literal["server_error"]
    message: str


class ResponseReply(msgspec.Struct, kw_only=True):
    """POST /v1/responses. What a body did not set is here with its default."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    background: Literal[False] = False
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    metadata: Any
    roseinfer_ledger: list[Any] | msgspec.UnsetType = msgspec.UNSET  # when asked for


class InputTokensReply(msgspec.Struct):
    """POST /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
