"""The turns of a conversation, as bodies have them and as templates want them. Knows no template and no tokens."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from roseinfer.server.openai.schema_structured import MAX_TOOLS, Name, Part


class FunctionCall(Part, frozen=True, kw_only=True):
    """`arguments` is JSON in a string. What OpenAI's SDK read in it has no effect."""

    name: Name
    arguments: str
    parsed_arguments: Any = None


class ToolCall(Part, frozen=True, kw_only=True):
    """What the assistant asked for in an earlier turn. `index`, of a call that was streamed, has no effect."""

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    def for_template(self) -> dict[str, object]:
        """Templates write the arguments themselves, so they get them as an object."""
        arguments: dict[str, Any] | str
        try:
            arguments = msgspec.json.decode(self.function.arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            arguments = self.function.arguments  # not valid, as models are: the template tells it as it stands
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class TextPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="text"):
    """One piece of a message's content. Images, audio and files are not supported."""

    text: str


class RefusalPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="refusal"):
    """One piece of an assistant's message: how it refused."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Message(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One turn of a conversation. `developer` is today's word for `system` and is given to the template as that.

    An answer can be sent back as OpenAI or its SDK gave it; what it was annotated with or parsed into has no effect.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] = []
    tool_call_id: Annotated[str, Meta(max_length=128)] | None = None
    annotations: list[dict[str, Any]] = []
    audio: None = None
    parsed: Any = None

    def __post_init__(self) -> None:
        was_refused = self.refusal is not None and self.role == "assistant"
        if self.content is None and not self.tool_calls and not was_refused:
            raise ValueError("Object missing required field `content`")
        if self._has_refusal and self.role != "assistant":
            raise ValueError("only an assistant's message has a `refusal`")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has `tool_calls`")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a message has a `tool_call_id` if its role is `tool`, and only then")

    @property
    def _has_refusal(self) -> bool:
        parts = self.content if isinstance(self.content, list) else []
        return self.refusal is not None or any(isinstance(part, RefusalPart) for part in parts)

    @property
    def text(self) -> str:
        """What was said; a refusal is that where there is nothing else."""
        content = self.content or self.refusal or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    @property
    def num_chars(self) -> int:
        """How much of it a template is told of, in the main."""
        return len(self.text) + sum(len(call.function.arguments) for call in self.tool_calls)

    def for_template(self) -> dict[str, object]:
        told: dict[str, object] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            told["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            told["tool_call_id"] = self.tool_call_id
        return told


def earlier_arguments(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Of all the calls that were made, each behind its path in the body."""
    for at, message in enumerate(messages):
        for index, call in enumerate(message.tool_calls):
            yield f"messages[{at}].tool_calls[{index}].function.arguments", call.function.arguments
