"""Defines the request body of OpenAI's Responses: its items, tools, formats, bounds and relations."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from roseinfer.errors import InvalidRequest
from roseinfer.messages import Grammar, NumLogprobs, TokenCount
from roseinfer.runtime.validation import Misfit
from roseinfer.server.api.fields import ANY_OBJECT, ConversationPart, Name, Part, Schema, absent, given, holds, when
from roseinfer.server.api.functions import FunctionChoice
from roseinfer.server.api.unserved import OF_RESPONSES, Unserved
from roseinfer.server.openai.chat_schema import MAX_TOOLS, FunctionCall, FunctionDefinition, ThinkingBudget, ToolCall
from roseinfer.server.openai.schema import OpenAIBody
from roseinfer.text.answers.reasoning import Effort, Thinking
from roseinfer.text.grammar.source import encode_source
from roseinfer.text.templates import TemplateVariables, check_variables

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Summary = Literal["auto", "concise", "detailed"]
_NEEDS: Mapping[str, Sequence[str]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "item_reference": ("id",),
}


class ItemPart(ConversationPart, frozen=True, kw_only=True):
    """One piece of an item's text. What it was annotated with has no effect."""

    relations: ClassVar[tuple[Schema, ...]] = (when(holds("type", "refusal"), given("refusal"), given("text")),)

    type: Literal["input_text", "output_text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        name = "refusal" if self.type == "refusal" else "text"
        if getattr(self, name) is None:
            raise Misfit.missing(name)


Content = str | list[ItemPart]


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or part.refusal or "" for part in content)


class Item(ConversationPart, frozen=True, kw_only=True):
    """One item of a conversation, as a client writes it or as an answer had it; keys without effect are ignored."""

    relations: ClassVar[tuple[Schema, ...]] = (
        when({"properties": {"type": {"enum": ["message", None]}}}, given(*_NEEDS["message"])),
        *(when(holds("type", kind), given(*names)) for kind, names in _NEEDS.items()),
        when(holds("type", "item_reference"), {"properties": {"id": {"pattern": "^rs_"}}}),
    )

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    summary: list[ItemPart] = []
    call_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    name: Name | None = None
    arguments: str | None = None
    output: Content | None = None

    def __post_init__(self) -> None:
        for name in _NEEDS.get(self.type, ()):
            if getattr(self, name) is None:
                raise Misfit.missing(name)
        if self.type == "item_reference" and not (self.id or "").startswith("rs_"):
            raise Misfit(
                "nothing is stored here, so an item cannot be referred to; set `store` to false, and clients send the "
                "items themselves",
                ("id",),
            )

    @property
    def num_chars(self) -> int:
        """About how much of it a template writes."""
        return sum(map(len, (*map(_text, (self.content, self.summary, self.output)), self.arguments or "")))

    def for_template(self) -> dict[str, object]:
        """The item as a turn of its own."""
        match self.type:
            case "message":
                return {"role": "system" if self.role == "developer" else self.role, "content": _text(self.content)}
            case "function_call_output":
                return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}
            case "function_call":
                function = FunctionCall(name=self.name or "", arguments=self.arguments or "")
                call = ToolCall(id=self.call_id or "", function=function)
                return {"role": "assistant", "content": "", "tool_calls": [call.for_template()]}
        # A reference to thoughts: they are optional to every template.
        return {"role": "assistant", "content": "", "reasoning_content": _text(self.content or self.summary)}


class FunctionTool(ConversationPart, frozen=True, kw_only=True):
    """A function that the model may call; `strict` has no effect. The model does not hear of tools of other types.

    Codex sends them in each request and cannot leave them out; an answer lists the tools that it had.
    """

    relations: ClassVar[tuple[Schema, ...]] = (when(holds("type", "function"), given("name")),)

    type: Literal["function", "web_search", "namespace"]
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.type == "function" and self.name is None:
            raise Misfit.missing("name")

    @property
    def definition(self) -> FunctionDefinition:
        return FunctionDefinition(name=self.name or "", description=self.description, parameters=self.parameters)


class AllowedTool(ConversationPart, frozen=True, kw_only=True):
    """One of the functions."""

    type: Literal["function"]
    name: Name


class ChosenTools(Part, frozen=True, kw_only=True):
    """The function that must be called, or those that may be."""

    relations: ClassVar[tuple[Schema, ...]] = (
        when(
            holds("type", "function"),
            given("name"),
            {"required": ["tools"], "properties": {"tools": {"type": "array", "minItems": 1}}},
        ),
        when(holds("type", "function"), {"properties": {"tools": {"maxItems": 0}}}, absent("name")),
    )

    type: Literal["function", "allowed_tools"]
    name: Name | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[AllowedTool], Meta(max_length=MAX_TOOLS)] = []

    def __post_init__(self) -> None:
        if self.type == "function" and self.name is None:
            raise Misfit.missing("name")
        if self.type == "allowed_tools" and not self.tools:
            raise Misfit.missing("tools")
        if self.type == "function" and self.tools:
            raise Misfit("`tools` does not belong to the type `function`")
        if self.type == "allowed_tools" and self.name is not None:
            raise Misfit("`name` does not belong to the type `allowed_tools`")

    @property
    def names(self) -> list[str]:
        return [self.name] if self.name is not None else [tool.name for tool in self.tools]


class TextFormat(Part, frozen=True, kw_only=True):
    """The form of the text; `name`, `description` and `strict` have no effect."""

    relations: ClassVar[tuple[Schema, ...]] = (
        when(holds("type", "json_schema"), given("name", "schema"), absent("schema")),
    )

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        for name in ("name", "schema") if self.type == "json_schema" else ():
            if getattr(self, name) is None:
                raise Misfit.missing(name)
        if self.type != "json_schema" and self.schema is not None:
            raise Misfit(f"`schema` does not belong to the type `{self.type}`")


class TextOptions(Part, frozen=True, kw_only=True):
    """The text of the answer; `verbosity` has no effect."""

    format: TextFormat = TextFormat(type="text")
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Part, frozen=True, kw_only=True):
    """How the model reasons, and whether its thoughts are their own summary too.

    Which earlier thoughts the model sees is up to its template, so `context` has no effect.
    """

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Part, frozen=True, kw_only=True):
    """No effect: events are never padded."""

    include_obfuscation: bool = False


class ResponseBody(OpenAIBody, frozen=True, kw_only=True):
    """POST /v1/responses."""

    unserved: ClassVar[dict[str, Unserved]] = OpenAIBody.unserved | OF_RESPONSES
    relations: ClassVar[tuple[Schema, ...]] = (
        when(
            {"required": ["top_logprobs"], "properties": {"top_logprobs": {"type": "integer", "minimum": 1}}},
            {"required": ["include"], "properties": {"include": {"type": "array", "contains": {"const": LOGPROBS}}}},
        ),
    )

    input: Annotated[
        str | Annotated[list[Item], Meta(min_length=1)],
        Meta(
            description="What the user says, or the items of the conversation so far: messages, function calls, their "
            "outputs, and reasoning. See below."
        ),
    ]
    instructions: Annotated[str | None, Meta(description="A system message before all others.")] = None
    tools: Annotated[
        list[FunctionTool],
        Meta(
            max_length=MAX_TOOLS,
            description="Functions that the model may call; the chat template must know tools. `web_search` and "
            "`namespace` are accepted, and the model does not hear of them.",
        ),
    ] = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ChosenTools | None,
        Meta(
            description="`none`, `auto`, `required`, a function to call, or `allowed_tools`. Default: `auto` with "
            "tools."
        ),
    ] = None
    parallel_tool_calls: Annotated[bool, Meta(description="Whether one answer may hold several calls.")] = True
    text: Annotated[
        TextOptions, Meta(description="`format`: `json_object`: any JSON object; `json_schema`: by the schema.")
    ] = TextOptions()
    reasoning: Annotated[
        ReasoningOptions,
        Meta(
            description="`summary`: the thoughts are in the answer as their own summary too. `effort`: see "
            "structured-output.md. `context` has no effect: which earlier thoughts the model sees, its template says. "
            "There is one `mode`, `standard`."
        ),
    ] = ReasoningOptions()
    thinking_token_budget: ThinkingBudget = None
    max_output_tokens: Annotated[
        TokenCount | None,
        Meta(description="Most tokens to generate, as far as the context has room for them behind the prompt."),
    ] = None
    include: Annotated[
        list[Include],
        Meta(
            description=f"`{LOGPROBS}`: log-probabilities of each token. `{ENCRYPTED}`: it is empty, not null, which "
            "some clients need. The others have no effect."
        ),
    ] = []
    top_logprobs: Annotated[
        NumLogprobs,
        Meta(description=f"How many of the likeliest to list beside each token; needs `include` with `{LOGPROBS}`."),
    ] = 0
    chat_template_kwargs: TemplateVariables = {}
    truncation: Annotated[
        Literal["auto", "disabled"],
        Meta(description="No item is ever dropped: a prompt that does not fit the context is a 400 with either."),
    ] = "disabled"
    stream_options: Annotated[ResponseStreamOptions, Meta(description="No effect.")] = ResponseStreamOptions()

    def check(self) -> None:
        super().check()
        check_variables(self.chat_template_kwargs)
        if self.top_logprobs and LOGPROBS not in self.include:
            message = f"`top_logprobs` needs `{LOGPROBS}` in `include`."
            raise InvalidRequest(message, param="top_logprobs")
        self.function_choice.check("tool_choice.name" if isinstance(self.tool_choice, ChosenTools) else "tool_choice")

    @property
    def form_field(self) -> str | None:
        return super().form_field if self.text.format.type == "text" else "text.format"

    @property
    def function_choice(self) -> FunctionChoice:
        functions = ((i, tool.definition.for_model) for i, tool in enumerate(self.tools) if tool.type == "function")
        definitions = {f"tools[{i}].parameters": function for i, function in functions}
        choice = self.tool_choice or "auto"
        if isinstance(choice, ChosenTools):
            return FunctionChoice(definitions, "required" if choice.type == "function" else choice.mode, choice.names)
        return FunctionChoice(definitions, choice if definitions or choice == "required" else "none")

    def form(self) -> tuple[Grammar, str] | None:
        match self.text.format.type:
            case "json_object":
                return ANY_OBJECT, "text.format"
            case "json_schema":
                param = "text.format.schema"
                return Grammar("json_schema", encode_source(self.text.format.schema, param)), param
        return super().form()

    @property
    def names_one_function(self) -> bool:
        """Whether one function must be called, once."""
        return isinstance(self.tool_choice, ChosenTools) and self.tool_choice.type == "function"

    @property
    def wanted_thinking(self) -> Thinking:
        budget = self.thinking_token_budget
        return Thinking(self.reasoning.effort, None if budget == -1 else budget, "thinking_token_budget")

    @property
    def summary(self) -> str | None:
        """The kind of summary that is asked for: all are the thoughts themselves."""
        return self.reasoning.summary or self.reasoning.generate_summary

    @property
    def items(self) -> list[Item]:
        return [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def json_texts(self) -> Iterable[tuple[str, str]]:
        for at, item in enumerate(self.items):
            if item.arguments is not None:
                yield f"input[{at}].arguments", item.arguments


class InputTokensBody(ResponseBody, frozen=True, kw_only=True):
    """POST /v1/responses/input_tokens: what /v1/responses has, of which only what makes the prompt has an effect."""
