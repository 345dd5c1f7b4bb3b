"""Defines the request body of OpenAI's chat: messages, tools, thinking, their bounds and relations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from roseinfer.errors import InvalidRequest
from roseinfer.messages import MinTokens, NumLogprobs
from roseinfer.runtime.validation import Misfit
from roseinfer.server.api.fields import ConversationPart, Name, Part, Schema, absent, given, holds, when
from roseinfer.server.api.functions import FunctionChoice
from roseinfer.server.api.unserved import OF_CHAT, Unserved
from roseinfer.server.openai.schema import FILL_CONTEXT, KEPT_SCORES, GenerationBody, MaxTokens
from roseinfer.text.answers.functions import Function
from roseinfer.text.answers.reasoning import Effort, Thinking, switched_effort
from roseinfer.text.templates import TemplateVariables, check_variables

T = TypeVar("T")

MAX_TOOLS = 128  # OpenAI's own bound
_ONLY_CALL = "function0"  # the id of a call in `function_call`, which has none; templates of Mistral want nine letters
ChatTokens = Annotated[MaxTokens, Meta(extra_json_schema={"not": {"const": 0}})]


class FunctionDefinition(ConversationPart, frozen=True, kw_only=True):
    """A function that the model may call. Calls that are forced follow the schema, whatever a `strict` says."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def for_model(self) -> Function:
        return Function(self.name, self.description or "", self.parameters)


class Tool(ConversationPart, frozen=True, kw_only=True):
    """What the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(ConversationPart, frozen=True, kw_only=True):
    """One of the functions."""

    name: Name


class NamedTool(ConversationPart, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """The function that must be called."""

    function: FunctionName


class AllowedFunctions(ConversationPart, frozen=True, kw_only=True):
    """Some of the functions, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(ConversationPart, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Fewer functions than `tools` describes."""

    allowed_tools: AllowedFunctions


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class FunctionCall(ConversationPart, frozen=True, kw_only=True):
    """`arguments` is JSON in a string."""

    name: Name
    arguments: str


class ToolCall(ConversationPart, frozen=True, kw_only=True):
    """What the assistant asked for in an earlier turn."""

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, object]:
        """Templates write the arguments themselves, so they get them as an object."""
        arguments: dict[str, Any] | str
        try:
            arguments = msgspec.json.decode(self.function.arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            arguments = self.function.arguments  # models write invalid JSON too: the template gets it as it stands
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class TextPart(ConversationPart, frozen=True, tag_field="type", tag="text"):
    """One piece of a message's content. Images, audio and files are not supported."""

    text: str


class RefusalPart(ConversationPart, frozen=True, tag_field="type", tag="refusal"):
    """One piece of an assistant's message: how it refused."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Message(ConversationPart, frozen=True, kw_only=True):
    """One turn of a conversation. `developer` is today's word for `system` and is given to the template as that."""

    relations: ClassVar[tuple[Schema, ...]] = (
        when(
            holds("role", "assistant"),
            {
                "anyOf": [
                    absent("audio"),
                    {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
                    *map(given, ("content", "refusal", "reasoning_content", "reasoning", "function_call")),
                ]
            },
            {
                "allOf": [given("content"), absent("refusal", "reasoning_content", "reasoning", "function_call")],
                "properties": {
                    "content": {"items": {"properties": {"type": {"const": "text"}}}},
                    "tool_calls": {"maxItems": 0},
                },
            },
        ),
        when(holds("role", "tool"), given("tool_call_id"), absent("tool_call_id")),
    )

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart | RefusalPart] | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] = []
    tool_call_id: Annotated[str, Meta(max_length=128)] | None = None
    function_call: FunctionCall | None = None  # of the time before tools; the role `function` answers it
    reasoning_content: str | None = None
    reasoning: str | None = None
    audio: dict[str, Any] | None = None  # what was said where there is no text, which is not served

    def __post_init__(self) -> None:
        has_said = self.refusal is not None or self.thoughts is not None
        # An answer that ended within a call or a thought may be empty, and clients send it back.
        may_lack_content = self.role == "assistant" and (has_said or self.audio is None)
        if self.content is None and not self.calls and not may_lack_content:
            raise Misfit.missing("content")
        if self.thoughts is not None and self.role != "assistant":
            raise Misfit("only an assistant's message has `reasoning_content`")
        if self._has_refusal and self.role != "assistant":
            raise Misfit("only an assistant's message has a `refusal`")
        if self.calls and self.role != "assistant":
            raise Misfit("only an assistant's message has `tool_calls` or a `function_call`")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise Misfit("a message has a `tool_call_id` if its role is `tool`, and only then")

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
    def thoughts(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def calls(self) -> list[ToolCall]:
        """What the assistant asked for."""
        if self.function_call is None:
            return self.tool_calls
        return [ToolCall(id=_ONLY_CALL, function=self.function_call)]

    @property
    def num_chars(self) -> int:
        """About how much of it a template writes."""
        return len(self.text) + len(self.thoughts or "") + sum(len(call.function.arguments) for call in self.calls)

    def for_template(self) -> dict[str, object]:
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, object] = {"role": role, "content": self.text}
        if self.thoughts is not None:
            message |= {"reasoning_content": self.thoughts, "reasoning": self.thoughts}
        if self.calls:
            message["tool_calls"] = [call.for_template() for call in self.calls]
        if role == "tool":
            message["tool_call_id"] = self.tool_call_id or _ONLY_CALL
        return message


def earlier_arguments(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """The arguments of all calls in a conversation, each behind its path in the body."""
    for at, message in enumerate(messages):
        for index, call in enumerate(message.calls):
            where = "function_call" if message.function_call is not None else f"tool_calls[{index}].function"
            yield f"messages[{at}].{where}.arguments", call.function.arguments


ThinkingBudget = Annotated[
    Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
    Meta(description="Most tokens of thoughts, behind which the answer is forced; -1: no limit."),
]


class ThinkingSwitch(Part, frozen=True, kw_only=True):
    """Whether the model thinks, as DeepSeek, GLM and Anthropic have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: MinTokens | None = None


class ReasoningSettings(Part, frozen=True, kw_only=True):
    """Whether and how much the model thinks, and whether the answer has it, as OpenRouter has it.

    The answer has the thoughts themselves, whatever `summary` says.
    """

    effort: Effort | None = None
    max_tokens: MinTokens | None = None
    exclude: bool = False
    enabled: bool | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    unserved: ClassVar[dict[str, Unserved]] = GenerationBody.unserved | OF_CHAT
    relations: ClassVar[tuple[Schema, ...]] = (
        *GenerationBody.relations,
        when(
            {"required": ["top_logprobs"], "properties": {"top_logprobs": {"type": "integer", "minimum": 1}}},
            holds("logprobs", True),
        ),
        when(
            {"allOf": [given("function_call"), {"not": holds("function_call", "none")}]},
            {"required": ["functions"], "properties": {"functions": {"type": "array", "minItems": 1}}},
        ),
        when(
            {"allOf": [given("tool_choice"), {"not": holds("tool_choice", "none")}]},
            {"required": ["tools"], "properties": {"tools": {"type": "array", "minItems": 1}}},
        ),
    )

    messages: Annotated[
        list[Message],
        Meta(
            min_length=1,
            description="The conversation so far; content is text or a list of text parts, in an assistant's message "
            "also of `refusal` parts, whose text counts as any other. Such a message may lack content; then "
            "`refusal`, if any, is what was said. Other fields of a message, such as its `name`, have no effect.",
        ),
    ]
    tools: Annotated[
        list[Tool],
        Meta(max_length=MAX_TOOLS, description="Functions that the model may call; the chat template must know tools."),
    ] = []
    tool_choice: Annotated[
        ToolChoice | None,
        Meta(
            description="`none`, `auto`, `required`, a function to call, or `allowed_tools`: a `mode` and the "
            "functions to choose from. Default: `auto` with tools."
        ),
    ] = None
    functions: Annotated[
        list[FunctionDefinition],
        Meta(
            max_length=MAX_TOOLS,
            description="The older form of `tools`: an answer calls one at most, in `function_call`, which is its "
            "`finish_reason` too.",
        ),
    ] = []
    function_call: Annotated[
        Literal["none", "auto"] | FunctionName | None,
        Meta(description="The older form of `tool_choice`. Default: `auto` with functions."),
    ] = None
    parallel_tool_calls: Annotated[bool, Meta(description="Whether one answer may hold several calls.")] = True
    chat_template_kwargs: TemplateVariables = {}
    reasoning_effort: Annotated[
        Effort | None,
        Meta(
            description="How much the model thinks before it answers, in the words of its chat template; no effect "
            "where that has none. See structured-output.md. Default: the template's."
        ),
    ] = None
    thinking: Annotated[
        ThinkingSwitch,
        Meta(description="`disabled`: as the `reasoning_effort` none. `budget_tokens`: as `thinking_token_budget`."),
    ] = ThinkingSwitch(type="auto")
    thinking_token_budget: ThinkingBudget = None
    include_reasoning: Annotated[bool, Meta(description="False: thoughts are left out of the answer.")] = True
    reasoning: Annotated[
        ReasoningSettings,
        Meta(
            description="As OpenRouter has it: `effort` is `reasoning_effort`, `max_tokens` `thinking_token_budget`, "
            "`exclude` is the opposite of `include_reasoning`, and `enabled` is `enable_thinking`. `summary`, of "
            "OpenAI's Responses, has no effect."
        ),
    ] = ReasoningSettings()
    enable_thinking: Annotated[
        bool | None, Meta(description="False: as the `reasoning_effort` none. True: as `medium`, if none is given.")
    ] = None
    max_completion_tokens: Annotated[
        ChatTokens | None, Meta(description="Most tokens to generate. Default, and -1: what the context leaves.")
    ] = None
    max_tokens: Annotated[ChatTokens | None, Meta(description="The older name of `max_completion_tokens`.")] = None
    logprobs: Annotated[bool, Meta(description="Log-probabilities of each token.")] = False
    top_logprobs: Annotated[
        NumLogprobs | None,
        Meta(
            description="How many of the likeliest to list beside each token; needs `logprobs`. Default: 0. "
            + KEPT_SCORES
        ),
    ] = None

    def check(self) -> None:
        super().check()
        check_variables(self.chat_template_kwargs)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise InvalidRequest(f"`{name}` is 0: the answer would be empty.", param=name)
        if self.max_tokens is not None and self.max_completion_tokens not in {None, self.max_tokens}:
            raise InvalidRequest("`max_tokens` and `max_completion_tokens` differ.", param="max_tokens")
        self.wanted_thinking()
        self._check_tools()

    def _check_tools(self) -> None:
        if self.functions and (self.tools or self.tool_choice is not None):
            raise InvalidRequest("`functions` is the older form of `tools`: use one of them.", param="functions")
        if isinstance(self.tool_choice, AllowedTools):
            named_by = "tool_choice.allowed_tools.tools"
        else:
            named_by = "tool_choice.function.name" if self.function_choice.field == "tools" else "function_call.name"
        self.function_choice.check(named_by)

    def json_texts(self) -> Iterable[tuple[str, str]]:
        return earlier_arguments(self.messages)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens to generate; None: what the context leaves."""
        most = self.max_completion_tokens or self.max_tokens
        return None if most == FILL_CONTEXT else most

    def wanted_thinking(self) -> Thinking:
        """How much the model is to think. Raises InvalidRequest where fields of different APIs differ."""
        efforts: dict[str, Effort | None] = {
            "reasoning_effort": self.reasoning_effort,
            "reasoning.effort": self.reasoning.effort,
        }
        switches = {
            "enable_thinking": self.enable_thinking,
            "thinking.type": {"enabled": True, "disabled": False}.get(self.thinking.type),
            "reasoning.enabled": self.reasoning.enabled,
        }
        budgets = {
            "thinking_token_budget": self.thinking_token_budget,
            "thinking.budget_tokens": self.thinking.budget_tokens,
            "reasoning.max_tokens": self.reasoning.max_tokens,
        }
        effort: Effort | None
        (_, effort), (_, is_on), (field, budget) = _agreed(efforts), _agreed(switches), _agreed(budgets)
        return Thinking(switched_effort(is_on, effort), None if budget == -1 else budget, field)

    @property
    def shows_thoughts(self) -> bool:
        """Whether the answer has the thoughts."""
        return self.include_reasoning and not self.reasoning.exclude

    @property
    def is_single_call(self) -> bool:
        """Whether the answer has one call at most."""
        return not self.parallel_tool_calls or isinstance(self.tool_choice, NamedTool) or bool(self.functions)

    @property
    def function_choice(self) -> FunctionChoice:
        if self.functions or self.function_call not in {None, "none"}:
            return self._older_choice
        definitions = {
            f"tools[{index}].function.parameters": tool.function.for_model for index, tool in enumerate(self.tools)
        }
        match self.tool_choice:
            case NamedTool(function=function):
                return FunctionChoice(definitions, "required", [function.name])
            case AllowedTools(allowed_tools=allowed):
                return FunctionChoice(definitions, allowed.mode, [tool.function.name for tool in allowed.tools])
            case choice:
                return FunctionChoice(definitions, choice or ("auto" if self.tools else "none"))

    @property
    def _older_choice(self) -> FunctionChoice:
        definitions = {
            f"functions[{index}].parameters": function.for_model for index, function in enumerate(self.functions)
        }
        if isinstance(self.function_call, FunctionName):
            return FunctionChoice(definitions, "required", [self.function_call.name], "functions")
        return FunctionChoice(definitions, self.function_call or "auto", None, "functions")


def _agreed(given: Mapping[str, T | None]) -> tuple[str, T | None]:
    """The first of the fields that has a value, and it. Raises InvalidRequest where another has a different one."""
    fields = {name: value for name, value in given.items() if value is not None}
    first = next(iter(fields or given))
    if other := next((name for name in fields if fields[name] != fields[first]), None):
        raise InvalidRequest(f"`{first}` and `{other}` differ.", param=first)
    return first, fields.get(first)
