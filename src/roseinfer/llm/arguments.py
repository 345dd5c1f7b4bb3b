"""Checks what a program gives `LLM`, and brings it into the form that the rest reads."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, TypeGuard

import msgspec
from msgspec import Meta

from roseinfer.config.options import Config
from roseinfer.config.values import shown
from roseinfer.errors import ConfigError, InvalidRequest
from roseinfer.messages import SamplingParams, check_text, check_value
from roseinfer.records import Observer

Prompt = str | Sequence[int]


class _TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class Message(msgspec.Struct):
    """What is checked of a message; the rest is for the chat template."""

    role: str
    content: str | list[_TextPart] | None = None


def with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with a text as its content, as chat templates read it and the server writes it."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def as_prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; one text or one list of token ids becomes a list of one. Raises InvalidRequest."""
    if isinstance(given, str):
        return [given]
    if not _has_an_order(given):
        raise InvalidRequest(
            f"`prompts`: expected a text, a list of token ids, or a list of these; got {shown(given)}.", param="prompts"
        )
    items: list[Any] = list(given)
    return [items] if items and isinstance(items[0], int) else items


def as_prompt(given: Prompt, name: str) -> str | list[int]:
    """A prompt as text or list, whose items are not checked. Raises InvalidRequest that calls it `name`."""
    if isinstance(given, str):
        check_text(given, name)
        return given
    if not _has_an_order(given):
        raise InvalidRequest(f"`{name}`: expected a text or a list of token ids; got {shown(given)}.", param=name)
    return list(given)


def as_stops(given: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings; one text becomes a tuple of one. Raises InvalidRequest for an empty text or another type."""
    if not isinstance(given, str) and not _has_an_order(given):
        raise InvalidRequest(f"`stop`: expected a text or a list of texts; got {shown(given)}.", param="stop")
    named = [("stop", given)] if isinstance(given, str) else [(f"stop[{i}]", text) for i, text in enumerate(given)]
    for name, text in named:
        check_text(text, name)
        if not text:
            raise InvalidRequest(f"`{name}` is empty.", param=name)
    return tuple(text for _, text in named)


def check_params(given: SamplingParams | None) -> None:
    """Raises InvalidRequest for what are no parameters, and for log-probabilities of prompts."""
    if given is None:
        return
    if not isinstance(given, SamplingParams):
        raise InvalidRequest(f"`params`: expected SamplingParams; got {shown(given)}.", param="params")
    if given.num_prompt_logprobs is not None:
        raise InvalidRequest(
            "`num_prompt_logprobs`: `LLM` has no log-probabilities of prompts; a server has, for `echo`.",
            param="num_prompt_logprobs",
        )


def check_settings(config: object, observers: object, on_progress: object, **numbers: int | None) -> None:
    """Check the arguments of the constructor; `max_inflight` is at least 1 or None. Raises ConfigError."""
    if not isinstance(config, Config):
        raise ConfigError(f"expected a Config; got {shown(config)}.", param="config")
    if not isinstance(observers, Sequence) or not all(isinstance(observer, Observer) for observer in observers):
        raise ConfigError(f"expected a list of observers; got {shown(observers)}.", param="observers")
    if not callable(on_progress):
        raise ConfigError(f"expected a function; got {shown(on_progress)}.", param="on_progress")
    kinds = {"tokenize_workers": Annotated[int, Meta(ge=0)], "max_inflight": Annotated[int, Meta(ge=1)] | None}
    for name, number in numbers.items():
        try:
            check_value(number, kinds[name], name)
        except InvalidRequest as error:
            raise ConfigError(error.message, param=name) from None


def _has_an_order(given: object) -> TypeGuard[Iterable[Any]]:
    """It is a list, or like one. A mapping or a set is iterable too, but is no list of prompts."""
    return isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray | Mapping | AbstractSet)
