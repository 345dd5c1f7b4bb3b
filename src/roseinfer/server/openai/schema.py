"""Defines the request bodies of the OpenAI API as structs: their fields, types, bounds and relations.

A body is valid if its struct decodes and `check` raises nothing. The field tables of docs/http-api.md and
/openapi.json are generated from the annotations here.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from roseinfer.errors import InvalidRequest
from roseinfer.messages import (
    GREEDY_BELOW,
    LogitBias,
    MinP,
    MinTokens,
    NumLogprobs,
    Penalty,
    Priority,
    RepetitionPenalty,
    StopTokenIds,
    Temperature,
    TokenCount,
    TokenId,
    TopK,
    TopP,
)
from roseinfer.runtime.validation import Misfit
from roseinfer.text.logprobs import MAX_KEPT_LOGPROBS, MAX_PROMPT_LOGPROBS
from roseinfer.text.templates import TemplateVariables, check_variables

MAX_CHOICES = 8
MAX_TOOLS = 128  # OpenAI's own bound
MAX_PROMPTS = 64
_KEPT_SCORES = f"Not streamed, this number + 1 times the tokens of all sequences is at most {MAX_KEPT_LOGPROBS}."

StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
PromptPart = str | TokenId | list[TokenId]
# (?!\n): the end that Python means by $ may also be before a last newline; JSON Schema's may not.
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}(?!\n)$")]
Choices = Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=1024)]


class Part(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An object inside a body."""


class JsonSchemaFormat(Part, frozen=True, kw_only=True):
    """The schema that an answer follows, whatever `strict` says. `name` and `description` have no effect."""

    name: Name
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Part, frozen=True, kw_only=True):
    """`json_schema` belongs to the type `json_schema` alone."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def __post_init__(self) -> None:
        if self.type == "json_schema" and self.json_schema is None:
            raise Misfit.missing("json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise Misfit("`json_schema` belongs to the type `json_schema` alone")


class StructuredOutputs(Part, frozen=True, kw_only=True):
    """Exactly one of these."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = (self.json, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in given) != 1:
            raise Misfit("exactly one of `json`, `json_object`, `regex`, `choice` and `grammar` is needed")


class FunctionDefinition(Part, frozen=True, kw_only=True):
    """A function that the model may call. `strict` has no effect: calls that are forced follow the schema anyway."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part, frozen=True, kw_only=True):
    """What the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Part, frozen=True, kw_only=True):
    """One of the functions."""

    name: Name


class NamedTool(Part, frozen=True, kw_only=True):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


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
            arguments = self.function.arguments  # models write invalid JSON too: the template gets it as it stands
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class TextPart(Part, frozen=True, tag_field="type", tag="text"):
    """One piece of a message's content. Images, audio and files are not supported."""

    text: str


class RefusalPart(Part, frozen=True, tag_field="type", tag="refusal"):
    """One piece of an assistant's message: how it refused."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Message(Part, frozen=True, kw_only=True):
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
            raise Misfit.missing("content")
        if self._has_refusal and self.role != "assistant":
            raise Misfit("only an assistant's message has a `refusal`")
        if self.tool_calls and self.role != "assistant":
            raise Misfit("only an assistant's message has `tool_calls`")
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
    def num_chars(self) -> int:
        """About how much of it a template writes."""
        return len(self.text) + sum(len(call.function.arguments) for call in self.tool_calls)

    def for_template(self) -> dict[str, object]:
        message: dict[str, object] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def earlier_arguments(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """The arguments of all calls in a conversation, each behind its path in the body."""
    for at, message in enumerate(messages):
        for index, call in enumerate(message.tool_calls):
            yield f"messages[{at}].tool_calls[{index}].function.arguments", call.function.arguments


class StreamOptions(Part, frozen=True, kw_only=True):
    """What a stream holds. `include_obfuscation` has no effect: chunks are never padded."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


NO_STREAM_OPTIONS = StreamOptions()  # that a body has which gives none: `stream_options` without `stream` is refused


class ModelBody(Part, frozen=True, kw_only=True):
    """What every body may hold. Optional fields may be null, which means the default."""

    model: Annotated[
        str | None, Meta(description="Must be the served model's name; another is 404. May be left out.")
    ] = None

    def check(self) -> None:
        """Check what no field alone can say. Raises InvalidRequest."""

    def json_texts(self) -> Iterable[tuple[str, str]]:
        """The texts that are JSON themselves and are decoded for a chat template, each behind its path."""
        return ()


class GenerationBody(ModelBody, frozen=True, kw_only=True):
    """The fields both generation endpoints share."""

    stream: Annotated[bool, Meta(description="Answer with server-sent events, as the tokens come.")] = False
    stream_options: Annotated[
        StreamOptions,
        Meta(
            description="Needs `stream`. `include_usage`: one more chunk, with `usage` and no choices, before "
            "`[DONE]`. `continuous_usage_stats`: each chunk has the `usage` of its choice so far, so what it adds to "
            "that of the chunk before are the tokens in this one. `include_obfuscation`: no effect, chunks are never "
            "padded."
        ),
    ] = NO_STREAM_OPTIONS
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Tokens between two chunks of a stream; the first is sent at once. Default: the server's."),
    ] = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Completions of each prompt.")] = 1
    seed: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None,
        Meta(
            description="From -2**63 to 2**63 - 1. Choice i uses (seed + i) mod 2**63; the same seed gives the same "
            "text. Default: random.",
        ),
    ] = None
    temperature: Annotated[
        Temperature | None,
        Meta(
            description=f"Flattens or sharpens the distribution; below {GREEDY_BELOW:g} the likeliest token. "
            "Default: the model's, else 1."
        ),
    ] = None
    top_p: Annotated[
        TopP | None,
        Meta(description="Keep the likeliest tokens that together reach this. Default: the model's, else 1."),
    ] = None
    top_k: Annotated[
        TopK | None,
        Meta(description="How many of the likeliest tokens to keep; 0 keeps all. Default: the model's, else 0."),
    ] = None
    min_p: Annotated[
        MinP | None,
        Meta(description="Drop tokens less likely than this times the likeliest. Default: the model's, else 0."),
    ] = None
    presence_penalty: Annotated[
        Penalty, Meta(description="Taken from the logit of each token that was generated before.")
    ] = 0.0
    frequency_penalty: Annotated[
        Penalty, Meta(description="Taken from the logit of each token that was generated before, each time it was.")
    ] = 0.0
    repetition_penalty: Annotated[
        RepetitionPenalty | None,
        Meta(
            description="The logit of each token of prompt and text is divided by this, or multiplied where it is "
            "negative. Default: the model's, else 1."
        ),
    ] = None
    logit_bias: Annotated[
        LogitBias,
        Meta(description="By token id: what is added to its logit. -100 all but bars it, 100 all but forces it."),
    ] = {}
    min_tokens: Annotated[
        MinTokens, Meta(description="Until then neither the end token nor a stop token is sampled.")
    ] = 0
    stop: Annotated[
        StopString | StopStrings,
        Meta(description="At most 16 strings; the text ends before the one that is complete first."),
    ] = []
    stop_token_ids: Annotated[
        StopTokenIds, Meta(description="Ends the text like the end token; its own text is left out.")
    ] = ()
    include_stop_str_in_output: Annotated[
        bool, Meta(description="The stop string, or the text of the stop token, stays in the text.")
    ] = False
    response_format: Annotated[
        ResponseFormat | None,
        Meta(description="`json_object`: any JSON object; `json_schema`: by the schema. See structured-output.md."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(description="As vLLM has it: the text follows a schema, an expression, a list or a grammar."),
    ] = None
    ignore_eos: Annotated[bool, Meta(description="The end token does not end the text.")] = False
    timeout_s: Annotated[
        Seconds | None,
        Meta(
            description="Longest time of the request, from its first byte; then 504, or in a stream an error event. "
            "Default: the server's."
        ),
    ] = None
    queue_timeout_s: Annotated[
        Seconds | None,
        Meta(
            description="Longest wait for the engine to begin; then 503, and nothing was done. Default: the server's."
        ),
    ] = None
    priority: Annotated[
        Priority,
        Meta(description="Lower goes sooner, where `scheduler.admission` is `priority`; of equals the first to come."),
    ] = 0
    cache_salt: Annotated[
        Annotated[str, Meta(max_length=128)],
        Meta(description="Cached prefixes are shared only with requests of the same salt, never with another API key."),
    ] = ""
    user: Annotated[str, Meta(description="No effect.")] = ""
    metadata: Annotated[dict[str, str], Meta(description="No effect.")] = {}
    service_tier: Annotated[str, Meta(description="No effect.")] = "auto"
    prompt_cache_key: Annotated[str, Meta(description="No effect.")] = ""
    safety_identifier: Annotated[str, Meta(description="No effect.")] = ""

    def check(self) -> None:
        super().check()
        if self.stream_options is not NO_STREAM_OPTIONS and not self.stream:
            raise InvalidRequest("`stream_options` needs `stream` to be true.", param="stream_options")
        if self.structured_outputs is not None and self.form_field != "structured_outputs":
            message = "`response_format` and `structured_outputs` exclude each other."
            raise InvalidRequest(message, param="response_format")

    @property
    def form_field(self) -> str | None:
        """The field that asks for a form of the text, if one does."""
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        return None if self.structured_outputs is None else "structured_outputs"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[
        str | list[PromptPart],
        Meta(description=f"Text, token ids, or a list of at most {MAX_PROMPTS} texts or of lists of token ids."),
    ]
    max_tokens: Annotated[
        MinTokens, Meta(description="Most tokens to generate; 0, with `echo`, only reads the prompt.")
    ] = 16
    logprobs: Annotated[
        NumLogprobs | None,
        Meta(
            description="Log-probabilities of each token, and how many of the likeliest to list beside it. "
            + _KEPT_SCORES
        ),
    ] = None
    echo: Annotated[
        bool,
        Meta(
            description="The text begins with the prompt. With `logprobs` the tokens of the prompt are scored too, the "
            "first with `null`; such a prompt is not looked up in the cache. All their tokens times `logprobs` + 1 are "
            f"at most {MAX_PROMPT_LOGPROBS}."
        ),
    ] = False
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        Meta(
            description="So many are generated of each prompt, and the `n` with the highest mean log-probability of a "
            "token are in the answer, best first. At least `n`; equal to it in a stream. Default: `n`."
        ),
    ] = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(f"`best_of` is {self.best_of}, less than the {self.n} of `n`.", param="best_of")
        if self.stream and self.best_of not in {None, self.n}:
            message = "`best_of` above `n` cannot be streamed: the best is known at the end."
            raise InvalidRequest(message, param="best_of")
        if not self.max_tokens and not self.echo:
            raise InvalidRequest("`max_tokens` 0 needs `echo`: the answer would be empty.", param="max_tokens")
        _check_prompt(self.prompt)


def _check_prompt(prompt: str | Sequence[PromptPart]) -> None:
    """Raise InvalidRequest where prompts are of several kinds, too many, or an empty text, which nothing continues."""
    parts = [prompt] if isinstance(prompt, str) else prompt
    kinds = set(map(type, parts))
    if len(kinds) > 1:
        raise InvalidRequest("`prompt` mixes texts, token ids and lists.", param="prompt")
    if len(parts) > MAX_PROMPTS and kinds != {int}:
        raise InvalidRequest(f"`prompt` holds more than {MAX_PROMPTS} prompts.", param="prompt")
    if kinds == {str} and "" in parts:
        where = "prompt" if isinstance(prompt, str) else f"prompt[{parts.index('')}]"
        raise InvalidRequest(f"`{where}` is empty.", param=where)


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[Message],
        Meta(
            min_length=1,
            description="The conversation so far; content is text or a list of text parts, in an assistant's message "
            "also of `refusal` parts, whose text counts as any other. In such a message without content `refusal` is "
            "what was said. `name`, `annotations` and `parsed` have no effect; `audio` is null.",
        ),
    ]
    tools: Annotated[
        list[Tool],
        Meta(max_length=MAX_TOOLS, description="Functions that the model may call; the chat template must know tools."),
    ] = []
    tool_choice: Annotated[
        ToolChoice | None,
        Meta(description="`none`, `auto`, `required`, or a function to call. Default: `auto` with tools."),
    ] = None
    parallel_tool_calls: Annotated[bool, Meta(description="Whether one answer may hold several calls.")] = True
    chat_template_kwargs: TemplateVariables = {}
    max_completion_tokens: Annotated[
        TokenCount | None, Meta(description="Most tokens to generate. Default: what the context leaves.")
    ] = None
    max_tokens: Annotated[TokenCount | None, Meta(description="The older name of `max_completion_tokens`.")] = None
    logprobs: Annotated[bool, Meta(description="Log-probabilities of each token.")] = False
    top_logprobs: Annotated[
        NumLogprobs | None,
        Meta(
            description="How many of the likeliest to list beside each token; needs `logprobs`. Default: 0. "
            + _KEPT_SCORES
        ),
    ] = None

    def check(self) -> None:
        super().check()
        check_variables(self.chat_template_kwargs)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in {None, self.max_tokens}:
            raise InvalidRequest("`max_tokens` and `max_completion_tokens` differ.", param="max_tokens")
        self._check_tools()

    def _check_tools(self) -> None:
        choice = self.tool_choice or ("auto" if self.tools else "none")
        names = [tool.function.name for tool in self.tools]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InvalidRequest(f"`tools` has two functions called {twice}.", param="tools")
        if choice == "none":
            return
        if not self.tools:
            raise InvalidRequest("`tool_choice` needs `tools`.", param="tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise InvalidRequest(f"`tools` has no function {choice.function.name}.", param="tool_choice.function.name")
        for index, tool in enumerate(self.tools):
            if (tool.function.parameters or {}).get("type", "object") != "object":
                param = f"tools[{index}].function.parameters"
                raise InvalidRequest(f"`{param}` must be of type object: arguments are one.", param=param)
        if self.form_field is not None:
            message = f"`{self.form_field}` and `tools` exclude each other, unless `tool_choice` is none."
            raise InvalidRequest(message, param=self.form_field)

    def json_texts(self) -> Iterable[tuple[str, str]]:
        return earlier_arguments(self.messages)
