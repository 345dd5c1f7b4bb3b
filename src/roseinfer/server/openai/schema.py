"""Defines the request body of OpenAI's completions, and what it shares with that of chat."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from roseinfer.errors import InvalidRequest
from roseinfer.messages import MAX_TOKENS, Grammar, NumLogprobs, TokenId
from roseinfer.runtime.validation import Misfit
from roseinfer.server.api.fields import (
    ANY_OBJECT,
    MAX_PROMPT_TOKENS,
    Name,
    Off,
    Part,
    SamplingBody,
    Schema,
    StopString,
    StopStrings,
    absent,
    given,
    holds,
    when,
)
from roseinfer.server.api.unserved import OF_COMPLETIONS, Unserved
from roseinfer.text.grammar.source import encode_source
from roseinfer.text.logprobs import MAX_KEPT_LOGPROBS, MAX_PROMPT_LOGPROBS

MAX_CHOICES = 128  # OpenAI's own bound
MAX_PROMPTS = 64
MAX_SEQUENCES = 512  # of a body: each is about as much work for the front end as a request
FILL_CONTEXT = -1  # as llama.cpp has it, in `max_tokens`
MaxTokens = Annotated[int, Meta(ge=FILL_CONTEXT, le=MAX_TOKENS)]
KEPT_SCORES = f"Not streamed, this number + 1 times the tokens of all sequences is at most {MAX_KEPT_LOGPROBS}."

PromptPart = str | TokenId | list[TokenId]
_TEXT: Schema = {"type": "string", "minLength": 1}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}


def prompts_schema(most: int) -> list[Schema]:
    """What `check_prompts` checks."""
    lists = ({"type": "array", "items": one, "minItems": 1, "maxItems": most} for one in (_TEXT, _TOKENS))
    return [_TEXT, _TOKENS, *lists]


class JsonSchemaFormat(Part, frozen=True, kw_only=True):
    """The schema that an answer follows, whatever `strict` says. `name` and `description` have no effect."""

    name: Name
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Part, frozen=True, kw_only=True):
    """The form of an answer.

    Its schema is in `json_schema`, as OpenAI's, in `schema`, as llama.cpp's, or in `value`, as Hugging Face's, which
    has expressions too.
    """

    relations: ClassVar[tuple[Schema, ...]] = (
        when(holds("type", "text"), absent("json_schema", "schema", "value")),
        when(holds("type", "json_object"), absent("json_schema")),
        when(holds("type", "json_object"), {"anyOf": [absent("schema"), absent("value")]}),
        when(holds("type", "json_schema", "json"), {"oneOf": [*map(given, ("json_schema", "schema", "value"))]}),
        when(
            holds("type", "regex"),
            {"allOf": [given("value"), absent("json_schema", "schema")], "properties": {"value": {"type": "string"}}},
            {"properties": {"value": {"type": ["object", "null"]}}},
        ),
    )

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json_schema", "schema", "value") if getattr(self, name) is not None]
        if len(given) > 1:
            raise Misfit("only one of `json_schema`, `schema` and `value` can be given")
        if self.type == "text" and given:
            raise Misfit(f"`{given[0]}` does not belong to the type `text`")
        if self.type == "json_object" and self.json_schema is not None:
            raise Misfit("`json_schema` belongs to the type `json_schema` alone")
        if self.type == "json" and not given:
            raise Misfit("the type `json` needs a schema here; for any object the type is `json_object`", ("value",))
        if self.type in {"json_schema", "regex"} and not given:
            raise Misfit.missing("json_schema" if self.type == "json_schema" else "value")
        if given and (self.type == "regex") != isinstance(self.value, str):
            raise Misfit("an expression as `value` belongs to the type `regex`, and a schema to the others")

    def form(self) -> tuple[Grammar, str]:
        """The grammar, and the field it stands in. Raises InvalidRequest for a schema that is too deep."""
        if isinstance(self.value, str):
            return Grammar("regex", self.value), "response_format.value"
        nested = None if self.json_schema is None else self.json_schema.schema
        named = (self.value or {}).get("schema") if self.type == "json_schema" else None
        for name, schema in (
            ("json_schema.schema", nested),
            ("schema", self.schema),
            ("value.schema", named),
            ("value", self.value),
        ):
            if schema is not None:
                param = f"response_format.{name}"
                return Grammar("json_schema", encode_source(schema, param)), param
        return ANY_OBJECT, "response_format"


class StreamOptions(Part, frozen=True, kw_only=True):
    """What a stream holds. `include_obfuscation` has no effect: chunks are never padded."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


NO_STREAM_OPTIONS = StreamOptions()  # that a body has which gives none: `stream_options` without `stream` is refused


class OpenAIBody(SamplingBody, frozen=True, kw_only=True):
    """The fields that all of OpenAI's endpoints share."""

    stop: Annotated[
        StopString | StopStrings,
        Meta(description="At most 16 strings; the text ends before the one that is complete first."),
    ] = []
    user: Annotated[str, Meta(description="No effect.")] = ""
    metadata: Annotated[Any, Meta(description="No effect.")] = None
    service_tier: Annotated[str, Meta(description="No effect.")] = "auto"
    prompt_cache_key: Annotated[str, Meta(description="No effect.")] = ""
    safety_identifier: Annotated[str, Meta(description="No effect.")] = ""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class GenerationBody(OpenAIBody, frozen=True, kw_only=True):
    """The fields that completions and chat share."""

    relations: ClassVar[tuple[Schema, ...]] = (
        when(given("stream_options"), holds("stream", True)),
        when(
            given("structured_outputs"),
            {"anyOf": [absent("response_format"), {"properties": {"response_format": holds("type", "text")}}]},
        ),
    )

    stream_options: Annotated[
        StreamOptions,
        Meta(
            description="Needs `stream`. `include_usage`: one more chunk, with `usage` and no choices, before "
            "`[DONE]`. `continuous_usage_stats`: each chunk has the `usage` of its choice so far, so what it adds to "
            "that of the chunk before are the tokens in this one. `include_obfuscation`: no effect, chunks are never "
            "padded."
        ),
    ] = NO_STREAM_OPTIONS
    n: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_CHOICES,
            description=f"Completions of each prompt; at most {MAX_SEQUENCES} in a body. The tokens of its prompts, "
            f"counted for each completion, are at most {MAX_PROMPT_TOKENS}.",
        ),
    ] = 1
    response_format: Annotated[
        ResponseFormat | None,
        Meta(
            description="`json_object`: any JSON object, or one by a `schema`; `json_schema`: by the schema. See "
            "structured-output.md."
        ),
    ] = None

    def check(self) -> None:
        super().check()
        if self.stream_options is not NO_STREAM_OPTIONS and not self.stream:
            raise InvalidRequest("`stream_options` needs `stream` to be true.", param="stream_options")

    @property
    def form_field(self) -> str | None:
        is_formed = self.response_format is not None and self.response_format.type != "text"
        return "response_format" if is_formed else super().form_field

    def form(self) -> tuple[Grammar, str] | None:
        if self.form_field == "response_format" and self.response_format is not None:
            return self.response_format.form()
        return super().form()


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    unserved: ClassVar[dict[str, Unserved]] = GenerationBody.unserved | OF_COMPLETIONS
    relations: ClassVar[tuple[Schema, ...]] = (
        *GenerationBody.relations,
        {"properties": {"prompt": {"anyOf": prompts_schema(MAX_PROMPTS)}}},
        when(holds("max_tokens", 0), holds("echo", True)),
    )

    prompt: Annotated[
        str | list[PromptPart],
        Meta(description=f"Text, token ids, or a list of at most {MAX_PROMPTS} texts or of lists of token ids."),
    ]
    max_tokens: Annotated[
        MaxTokens,
        Meta(
            description="Most tokens to generate; 0, with `echo`, only reads the prompt; -1: what the context leaves."
        ),
    ] = 16
    logprobs: Annotated[
        NumLogprobs | Off | None,
        Meta(
            description="Log-probabilities of each token, and how many of the likeliest to list beside it. "
            + KEPT_SCORES
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
            description="How many to generate of each prompt; the `n` with the highest mean log-probability of a "
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
        if self.logprobs is True:
            raise InvalidRequest("`logprobs` is how many of the likeliest tokens to list.", param="logprobs")
        if not self.max_tokens and not self.echo:
            raise InvalidRequest("`max_tokens` 0 needs `echo`: the answer would be empty.", param="max_tokens")
        check_prompts(self.prompt, "prompt", MAX_PROMPTS)
        self._check_sequences()

    def _check_sequences(self) -> None:
        is_one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        num_prompts, name = 1 if is_one else len(self.prompt), "n" if self.best_of is None else "best_of"
        if (num_sequences := num_prompts * (self.best_of or self.n)) > MAX_SEQUENCES:
            message = f"`{name}`: a body asks for at most {MAX_SEQUENCES} sequences, and this one for {num_sequences}."
            raise InvalidRequest(message, param=name)


def check_prompts(prompt: str | Sequence[PromptPart], field: str, most: int) -> None:
    """Raise InvalidRequest where prompts are of several kinds, too many, or an empty text, which nothing continues."""
    parts = [prompt] if isinstance(prompt, str) else prompt
    kinds = set(map(type, parts))
    if len(kinds) > 1:
        raise InvalidRequest(f"`{field}` mixes texts, token ids and lists.", param=field)
    if len(parts) > most and kinds != {int}:
        raise InvalidRequest(f"`{field}` holds more than {most} prompts.", param=field)
    if kinds == {str} and "" in parts:
        where = field if isinstance(prompt, str) else f"{field}[{parts.index('')}]"
        raise InvalidRequest(f"`{where}` is empty.", param=where)
