"""Turns JSON bodies into validated OpenAI request structs. Knows no tokens; what is answered is in `wire_answers.py`.

What a struct accepts is the whole of what is accepted: an unknown field, a wrong type or a value out of range is an
`InvalidRequest` that names the field. The field tables of docs/http-api.md are generated from the annotations here.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, TypeVar

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
from roseinfer.server.openai.schema_errors import decode_object, refusal
from roseinfer.server.openai.schema_messages import Message, earlier_arguments
from roseinfer.server.openai.schema_structured import (
    MAX_TOOLS,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolChoice,
    without_nulls,
)
from roseinfer.text.template_variables import FIELD as TEMPLATE_FIELD
from roseinfer.text.template_variables import TemplateVariables, check_variables

MAX_CHOICES = 8
MAX_PROMPTS = 64
MAX_PROMPT_SCORES = 1 << 18  # in one answer: a fraction of a second of the front end, some tens of megabytes
MAX_KEPT_SCORES = 1 << 20  # until the end of an answer that is not streamed: a hundred megabytes
_KEPT_SCORES = f"Not streamed, this number + 1 times the tokens of all sequences is at most {MAX_KEPT_SCORES}."

StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
PromptPart = str | TokenId | list[TokenId]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How a stream is told. `include_obfuscation` has no effect: chunks are never padded."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ModelBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What every body may hold. Optional fields may be null, which means the default."""

    model: Annotated[
        str | None, Meta(description="Must be the served model's name; another is 404. May be left out.")
    ] = None

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
            "`[DONE]`. `include_obfuscation`: no effect, chunks are never padded."
        ),
    ] = StreamOptions()
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
            f"at most {MAX_PROMPT_SCORES}."
        ),
    ] = False
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        Meta(
            description="So many are generated of each prompt, and the `n` with the highest mean log-probability of a "
            "token are told, best first. At least `n`; equal to it in a stream. Default: `n`."
        ),
    ] = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[Message],
        Meta(
            min_length=1,
            description="The conversation so far; content is text or a list of text parts, in an assistant's message "
            "also of `refusal` parts, whose text is told as any other. In such a message without content `refusal` is "
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

    def json_texts(self) -> Iterable[tuple[str, str]]:
        return earlier_arguments(self.messages)


# Fields of OpenAI's that ask for something we do not do, with the values that ask for nothing: OpenAI's own defaults.
_UNSERVED: Mapping[str, tuple[object, ...]] = {
    "store": (False,),
}
UNSERVED: Mapping[type[ModelBody], Mapping[str, tuple[object, ...]]] = {
    CompletionBody: {**_UNSERVED, "suffix": ("",)},
    ChatBody: {
        **_UNSERVED,
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
}

# Fields of vLLM's, its older names for `structured_outputs` among them: what there is instead.
_ELSEWHERE: Mapping[str, str] = {
    **{f"guided_{name}": f"use `structured_outputs` with `{name}`" for name in ("json", "regex", "choice", "grammar")},
    "add_special_tokens": "a text gets the model's, a chat its template's; token ids are taken as they are",
    "continuous_usage_stats": "the usage is told once, in the last chunk",
    "prompt_logprobs": "use `echo` with `logprobs`, of /v1/completions",
    "skip_special_tokens": "special tokens are always left out of the text",
    "truncate_prompt_tokens": "a prompt is never cut",
}

BodyT = TypeVar("BodyT", bound=ModelBody)


def parse_body(raw: bytes | bytearray, body_type: type[BodyT]) -> BodyT:
    """Read a request body. Raises InvalidRequest naming the field."""
    fields = decode_object(raw)
    present = {name: value for name, value in fields.items() if value is not None}
    for name, neutral in UNSERVED.get(body_type, {}).items():
        if name in present and not _is_one_of(present.pop(name), neutral):
            raise InvalidRequest(f"`{name}` is not supported.", param=name)
    for name in ("messages", "stream_options", "response_format", "structured_outputs", "tools", "tool_choice"):
        if name in present:
            present[name] = without_nulls(present[name])
    if unknown := present.keys() - set(body_type.__struct_encode_fields__):
        raise _unknown(next(name for name in present if name in unknown))
    try:
        body = msgspec.convert(present, body_type, str_keys=True)  # token ids are keys of `logit_bias`
    except msgspec.ValidationError as error:
        raise _with_hint(refusal(error, present, body_type), body_type) from None
    if "stream_options" in present and not present.get("stream"):
        raise InvalidRequest("`stream_options` needs `stream` to be true.", param="stream_options")
    check_variables(present.get(TEMPLATE_FIELD, {}))
    return body


def _unknown(path: str) -> InvalidRequest:
    """Of a field that no struct has."""
    instead = _ELSEWHERE.get(path.rpartition(".")[2])
    message = f"Unknown field `{path}`." if instead is None else f"`{path}` is not supported: {instead}."
    return InvalidRequest(message, param=path)


def _with_hint(refused: InvalidRequest, body_type: type[ModelBody]) -> InvalidRequest:
    """The same with what would do instead, where types and bounds do not say it."""
    if refused.param and refused.message == f"Unknown field `{refused.param}`.":
        return _unknown(refused.param)
    if refused.message == "`top_k`: Expected `int` >= 0.":  # -1 is the word of others for all
        return InvalidRequest("`top_k`: Expected `int` >= 0; 0 keeps all.", param="top_k")
    if body_type is CompletionBody and refused.message == "`max_tokens`: Expected `int` >= 0.":  # alone it is no use
        return InvalidRequest("`max_tokens`: Expected `int` >= 1, or 0 with `echo`.", param="max_tokens")
    return refused


def _is_one_of(value: object, neutral: Sequence[object]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
