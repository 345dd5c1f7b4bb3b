"""Defines what the bodies of all generation APIs share: sampling, deadlines, priorities, and structured output.

A body is valid if its struct decodes and `check` raises nothing. The field tables of docs/http-api.md and /openapi.json
are generated from the annotations here and in the `schema.py` of each API.
"""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from roseinfer.errors import InvalidRequest
from roseinfer.messages import (
    GREEDY_BELOW,
    MAX_INT32,
    Grammar,
    GrammarKind,
    LogitBias,
    MinP,
    MinTokens,
    Penalty,
    Priority,
    RepetitionPenalty,
    StopTokenIds,
    Temperature,
    TopP,
)
from roseinfer.runtime.validation import Misfit
from roseinfer.server.api.unserved import OF_SAMPLING, Unserved
from roseinfer.text.grammar.source import encode_source

MAX_PROMPT_TOKENS = 1 << 24  # of a body, counted for each sequence: each takes seven bytes of engine and front end
ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')

StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
# (?!\n): the end that Python means by $ may also be before a last newline; JSON Schema's may not.
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}(?!\n)$")]
Off = Annotated[bool, Meta(extra_json_schema={"enum": [False]})]  # clients send it for what they do not want
Choices = Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=1024)]


Schema = dict[str, Any]  # of JSON


def given(*names: str) -> Schema:
    """The schema of objects that have these fields, none of them null."""
    return {"required": list(names), "properties": {name: {"not": {"type": "null"}} for name in names}}


def absent(*names: str) -> Schema:
    """The schema of objects without these fields."""
    return {"properties": {name: {"type": "null"} for name in names}}


def holds(name: str, *values: object) -> Schema:
    """The schema of objects with one of these values in a field."""
    return {"required": [name], "properties": {name: {"enum": list(values)}}}


def when(condition: Schema, then: Schema, otherwise: Schema | None = None) -> Schema:
    return {"if": condition, "then": then} | ({} if otherwise is None else {"else": otherwise})


class Related(msgspec.Struct, frozen=True, kw_only=True):
    """An object some of whose fields need or exclude others."""

    relations: ClassVar[tuple[Schema, ...]] = ()  # that `__post_init__` or `check` checks, for /openapi.json


class Part(Related, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An object inside a body that says how to answer: a field that is unknown is refused."""


class ConversationPart(Related, frozen=True, kw_only=True):
    """An object inside a conversation or a tool: what is unknown in it is ignored.

    Clients send back what any server answered, with whatever it had added.
    """


class StructuredOutputs(Part, frozen=True, kw_only=True):
    """Exactly one form. There is one backend, so `disable_fallback` has no effect."""

    relations: ClassVar[tuple[Schema, ...]] = (
        {"oneOf": [holds("json_object", True), *map(given, ("json", "regex", "choice", "grammar"))]},
    )

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    disable_fallback: bool = False
    disable_any_whitespace: Off = False
    disable_additional_properties: Off = False

    def __post_init__(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name):
                raise Misfit("not supported; use a `grammar`", (name,))
        given = (self.json, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in given) != 1:
            raise Misfit("exactly one of `json`, `json_object`, `regex`, `choice` and `grammar` is needed")

    def form(self) -> tuple[Grammar, str]:
        """The grammar, and the field it stands in. Raises InvalidRequest for a schema that is too deep."""
        sources: dict[str, tuple[GrammarKind, object]] = {
            "json": ("json_schema", self.json),
            "regex": ("regex", self.regex),
            "choice": ("choice", self.choice),
            "grammar": ("lark", self.grammar),
        }
        for name, (kind, source) in sources.items():
            if source is not None:
                param = f"structured_outputs.{name}"
                return Grammar(kind, source if isinstance(source, str) else encode_source(source, param)), param
        return ANY_OBJECT, "structured_outputs.json_object"


class ModelBody(Part, frozen=True, kw_only=True):
    """What every body may hold. Optional fields may be null, which means the default."""

    unserved: ClassVar[dict[str, Unserved]] = {}  # fields that may come all the same, by name

    model: Annotated[
        str | None,
        Meta(description="Must be a name of the served model; another is 404. Answers give it back. May be left out."),
    ] = None

    def check(self) -> None:
        """Check what no field alone can say. Raises InvalidRequest."""

    def json_texts(self) -> Iterable[tuple[str, str]]:
        """The texts that are JSON themselves and are decoded for a chat template, each behind its path."""
        return ()


class EngineBody(ModelBody, frozen=True, kw_only=True):
    """The fields of every body that the engine works on."""

    timeout_s: Annotated[
        Seconds | None,
        Meta(
            description="Longest time of the request, from when its head was read; then 504, or in a stream an error "
            "event. Default: the server's."
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


class SamplingBody(EngineBody, frozen=True, kw_only=True):
    """The fields of every body that asks for tokens."""

    unserved: ClassVar[dict[str, Unserved]] = OF_SAMPLING

    stream: Annotated[bool, Meta(description="Answer with server-sent events, as the tokens come.")] = False
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Tokens between two chunks of a stream; the first is sent at once. Default: the server's."),
    ] = None
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
        Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None,
        Meta(description="How many of the likeliest tokens to keep; 0 or -1 keeps all. Default: the model's, else 0."),
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
    stop_token_ids: Annotated[
        StopTokenIds, Meta(description="Ends the text like the end token; its own text is left out.")
    ] = ()
    include_stop_str_in_output: Annotated[
        bool, Meta(description="The stop string, or the text of the stop token, stays in the text.")
    ] = False
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(description="As vLLM has it: the text follows a schema, an expression, a list or a grammar."),
    ] = None
    ignore_eos: Annotated[bool, Meta(description="The end token does not end the text.")] = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The text ends before the first of these."""
        return ()

    def check(self) -> None:
        super().check()
        if self.structured_outputs is not None and self.form_field != "structured_outputs":
            message = f"`{self.form_field}` and `structured_outputs` exclude each other."
            raise InvalidRequest(message, param=self.form_field)

    @property
    def form_field(self) -> str | None:
        """The field that asks for a form of the text, if one does."""
        return None if self.structured_outputs is None else "structured_outputs"

    def form(self) -> tuple[Grammar, str] | None:
        """The grammar that the text follows, and the field it stands in. Raises InvalidRequest."""
        return None if self.structured_outputs is None else self.structured_outputs.form()
