"""Defines the request bodies of Anthropic's Messages API: their fields, types, bounds and relations."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from roseinfer.errors import InvalidRequest
from roseinfer.messages import Grammar, MinTokens, TokenCount
from roseinfer.runtime.validation import Misfit
from roseinfer.server.api.fields import ConversationPart, Part, SamplingBody, Schema, StopStrings, given, holds, when
from roseinfer.server.api.functions import FunctionChoice
from roseinfer.server.api.unserved import OF_MESSAGES, Unserved
from roseinfer.text.answers.functions import Function
from roseinfer.text.answers.reasoning import Effort, Thinking, switched_effort
from roseinfer.text.grammar.source import encode_source
from roseinfer.text.templates import TemplateVariables, check_variables

MAX_TOOLS = 512  # Claude Code with a few MCP servers has more than OpenAI's 128

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}(?!\n)$")]
CallId = Annotated[str, Meta(min_length=1, max_length=128)]
Role = Annotated[str, Meta(extra_json_schema={"enum": ["user", "assistant", "system"]})]


class TextBlock(ConversationPart, frozen=True, tag_field="type", tag="text"):
    """A piece of text. Images, documents and search results are not supported."""

    text: str


class OnlyText(ConversationPart, frozen=True, kw_only=True):
    """A piece of text where nothing else may stand; where other blocks may, a tag tells them apart."""

    type: Literal["text"]
    text: str


class ThinkingBlock(ConversationPart, frozen=True, tag_field="type", tag="thinking"):
    """Thoughts of an earlier answer, for the chat template; what they are signed with has no effect."""

    thinking: str


class RedactedThinkingBlock(ConversationPart, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Thoughts that another server has encrypted: they are left out."""


class ToolUseBlock(ConversationPart, frozen=True, tag_field="type", tag="tool_use"):
    """A call of an earlier answer."""

    id: CallId
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    input: dict[str, Any]

    def for_template(self) -> dict[str, object]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


class ToolResultBlock(ConversationPart, frozen=True, tag_field="type", tag="tool_result"):
    """What a call gave. Chat templates know no failed calls, so the text of one begins with `Error: `."""

    tool_use_id: CallId
    content: str | list[OnlyText] = ""
    is_error: bool = False

    @property
    def text(self) -> str:
        return ("Error: " if self.is_error else "") + text_of(self.content)


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
_OF_ANSWERS, _OF_USERS = (ThinkingBlock, RedactedThinkingBlock, ToolUseBlock), (ToolResultBlock,)


def text_of(content: str | Sequence[Block | OnlyText]) -> str:
    """The text of the text blocks, each on a line of its own."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, TextBlock | OnlyText))


def _blocks_but(*kinds: type[Block]) -> Schema:
    tags = [kind.__struct_config__.tag for kind in kinds]
    return {"properties": {"content": {"items": {"properties": {"type": {"not": {"enum": tags}}}}}}}


class MessageParam(ConversationPart, frozen=True, kw_only=True):
    """A part of a turn. One of the role `system` amid the conversation is the user's where the template knows none."""

    relations: ClassVar[tuple[Schema, ...]] = (
        when(holds("role", "assistant"), _blocks_but(*_OF_USERS), _blocks_but(*_OF_ANSWERS)),
    )

    role: Role
    content: str | list[Block]

    def __post_init__(self) -> None:
        if self.role == "tool":
            raise Misfit("what a tool gave is a `tool_result` block in a message of the role user", ("role",))
        if self.role not in {"user", "assistant", "system"}:
            raise Misfit(f"Expected one of 'assistant', 'system', 'user'; got {self.role[:100]!r}", ("role",))
        of_others = _OF_USERS if self.is_answer else _OF_ANSWERS
        for index, block in enumerate(self.blocks):
            if isinstance(block, of_others):
                kind = block.__struct_config__.tag
                raise Misfit(f"a block of the type {kind} is in no message of the role {self.role}", ("content", index))

    @property
    def is_answer(self) -> bool:
        return self.role == "assistant"

    @property
    def blocks(self) -> Sequence[Block]:
        return [TextBlock(self.content)] if isinstance(self.content, str) else self.content

    @property
    def num_chars(self) -> int:
        """About how much of it a template writes."""
        return sum(map(_num_chars, self.blocks))


def _num_chars(block: Block) -> int:
    match block:
        case TextBlock() | ToolResultBlock():
            return len(block.text)
        case ThinkingBlock():
            return len(block.thinking)
        case ToolUseBlock():
            return len(msgspec.json.encode(block.input))
    return 0


class ToolParam(ConversationPart, frozen=True, kw_only=True):
    """A function that the model may call; `type` is `custom` or left out."""

    name: ToolName
    type: Annotated[str, Meta(extra_json_schema={"enum": ["custom"]})] = "custom"
    description: str | None = None
    input_schema: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.type != "custom":
            kind = self.type[:100]
            raise Misfit(f"no tool {kind!r} is built into this server; give one with an `input_schema`", ("type",))


class ToolChoice(Part, frozen=True, kw_only=True):
    """Whether a tool must be called, and which; `name` belongs to the type `tool`."""

    relations: ClassVar[tuple[Schema, ...]] = (when(holds("type", "tool"), given("name")),)

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False

    def __post_init__(self) -> None:
        if self.type == "tool" and self.name is None:
            raise Misfit.missing("name")

    @property
    def is_parallel(self) -> bool:
        """Whether an answer may hold several calls."""
        return not self.disable_parallel_tool_use and self.type != "tool"


class ThinkingParam(Part, frozen=True, kw_only=True):
    """Whether the model is to think before it answers, and whether the answer has its thoughts.

    Thoughts here are bound to no conversation, so `block_binding` has no effect.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: MinTokens | None = None
    display: Literal["summarized", "omitted"] = "summarized"
    block_binding: Any = None


class JsonFormat(ConversationPart, frozen=True, kw_only=True):
    """The schema that the answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Part, frozen=True, kw_only=True):
    """How to answer."""

    effort: Effort | None = None
    format: JsonFormat | None = None


class CountBody(SamplingBody, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: what /v1/messages has, of which `max_tokens` has no effect."""

    relations: ClassVar[tuple[Schema, ...]] = (
        {"properties": {"messages": {"prefixItems": [{"properties": {"role": {"not": {"const": "system"}}}}]}}},
    )
    unserved: ClassVar[dict[str, Unserved]] = (
        SamplingBody.unserved | OF_MESSAGES | {"max_tokens": Unserved(is_ignored=True)}
    )

    messages: Annotated[
        list[MessageParam],
        Meta(
            min_length=1,
            description="The conversation so far; content is text or a list of blocks: `text`, `thinking`, `tool_use`, "
            "`tool_result`; `redacted_thinking` is left out. If the last is the assistant's, its text is continued.",
        ),
    ]
    system: Annotated[str | list[OnlyText], Meta(description="A system message before all others.")] = ""
    tools: Annotated[
        list[ToolParam],
        Meta(max_length=MAX_TOOLS, description="Functions that the model may call; the chat template must know tools."),
    ] = []
    tool_choice: Annotated[
        ToolChoice | None,
        Meta(
            description="Of the type `none`, `auto`, `any`, or `tool` with a `name`; `disable_parallel_tool_use`: at "
            "most one call. Default: `auto` with tools."
        ),
    ] = None
    thinking: Annotated[
        ThinkingParam | None,
        Meta(
            description="`enabled` or `disabled`, where the chat template has a switch for it; `adaptive`, or nothing: "
            "as the template does by default. `budget_tokens`: most tokens of thoughts. `display`: `omitted` leaves "
            "the blocks of thoughts empty. `block_binding`: no effect, since thoughts are not signed."
        ),
    ] = None
    output_config: Annotated[
        OutputConfig | None,
        Meta(
            description="`format`: the JSON schema that the answer follows. `effort`: how much the model thinks, where "
            "the chat template has a switch for it."
        ),
    ] = None
    output_format: Annotated[JsonFormat | None, Meta(description="The older place of `output_config.format`.")] = None
    stop_sequences: Annotated[
        StopStrings, Meta(description="The text ends before the one that is complete first, and the answer names it.")
    ] = []
    chat_template_kwargs: TemplateVariables = {}

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences)

    @property
    def form_field(self) -> str | None:
        if self.output_config is not None and self.output_config.format is not None:
            return "output_config.format"
        return super().form_field if self.output_format is None else "output_format"

    def form(self) -> tuple[Grammar, str] | None:
        field = self.form_field
        wanted = self.output_config.format if self.output_config and self.output_config.format else self.output_format
        if field is None or wanted is None:
            return super().form()
        return Grammar("json_schema", encode_source(wanted.schema, f"{field}.schema")), f"{field}.schema"

    def check(self) -> None:
        super().check()
        check_variables(self.chat_template_kwargs)
        if self.messages[0].role == "system":
            where = "messages[0].role"
            raise InvalidRequest(f"`{where}`: What comes before the conversation is the field `system`.", param=where)
        self.function_choice.check("tool_choice.name")
        self._check_continued()

    def _check_continued(self) -> None:
        if not self.continues_last:
            return
        where = f"messages[{len(self.messages) - 1}]"
        turn = [b for message in takewhile(lambda m: m.is_answer, reversed(self.messages)) for b in message.blocks]
        last = self.messages[-1].blocks[-1:]
        if not last or not isinstance(last[0], TextBlock) or any(isinstance(block, ToolUseBlock) for block in turn):
            message = (
                f"`{where}`: The last message is continued if it is the assistant's: it must be text, and no call."
            )
            raise InvalidRequest(message, param=where)
        if self.form_field is not None or self.function_choice.mode == "required":
            field = self.form_field or "tool_choice"
            message = f"`{field}`: An answer with a form cannot continue the text of `{where}`."
            raise InvalidRequest(message, param=field)

    @property
    def continues_last(self) -> bool:
        """Whether the answer continues the last message."""
        return self.messages[-1].is_answer

    @property
    def wanted_thinking(self) -> Thinking:
        effort = None if self.output_config is None else self.output_config.effort
        if self.thinking is None:
            return Thinking(effort)
        is_on = {"enabled": True, "disabled": False}.get(self.thinking.type)
        budget = None if is_on is False else self.thinking.budget_tokens
        return Thinking(switched_effort(is_on, effort), budget, "thinking.budget_tokens")

    @property
    def shows_thoughts(self) -> bool:
        """Whether the answer has the thoughts; else it has empty blocks in their place."""
        return self.thinking is None or self.thinking.display == "summarized"

    @property
    def function_choice(self) -> FunctionChoice:
        defined = {
            f"tools[{index}].input_schema": Function(tool.name, tool.description or "", tool.input_schema)
            for index, tool in enumerate(self.tools)
        }
        match self.tool_choice:
            case None:
                return FunctionChoice(defined, "auto" if self.tools else "none")
            case ToolChoice(type="tool", name=str(name)):
                return FunctionChoice(defined, "required", [name])
            case ToolChoice(type="any"):
                return FunctionChoice(defined, "required")
            case choice:
                return FunctionChoice(defined, "auto" if choice.type == "auto" and self.tools else "none")


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """POST /v1/messages."""

    unserved: ClassVar[dict[str, Unserved]] = SamplingBody.unserved | OF_MESSAGES

    max_tokens: Annotated[
        TokenCount,
        Meta(description="Most tokens to generate, as far as the context has room for them behind the prompt."),
    ]
