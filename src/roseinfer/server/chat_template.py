"""Turns a conversation into the prompt text its model was trained on. Knows no tokens.

The template is the model's own, never the client's; it still runs in Jinja's immutable sandbox, with an output cap.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from roseinfer.errors import ConfigError, InvalidRequest

MAX_PROMPT_CHARS = 4 * 1024 * 1024  # twice the largest default body: more is a template that multiplies its input


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now(UTC).strftime(pattern)


def _to_json(value: object, *, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)  # Jinja's own escapes for HTML


def _environment() -> ImmutableSandboxedEnvironment:
    """As the authors of templates expect it: `apply_chat_template` of the transformers library."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


class _NamedTemplate(msgspec.Struct):
    """One of several templates, of which `default` is the one to chat with."""

    name: str
    template: str


class ChatTemplate:
    """A compiled template and the special tokens it may name, such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"The chat template does not compile: {error}.", param="model.path") from None
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate | None":
        """Read `chat_template.jinja` or the field of `tokenizer_config.json`; None when the model has neither."""
        config = _read_config(directory / "tokenizer_config.json")
        file = directory / "chat_template.jinja"
        try:
            entry = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
            source = msgspec.convert(entry, str | list[_NamedTemplate] | None)
        except ValueError as error:  # not UTF-8, or not the shape that checkpoints have
            raise ConfigError(f"The chat template cannot be read: {error}.", param="model.path") from None
        if isinstance(source, list):
            source = next((named.template for named in source if named.name == "default"), None)
        if source is None:
            return None
        return cls(source, {name: text for name in config if (text := _token_text(name, config[name])) is not None})

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to the place where the assistant speaks. Raises InvalidRequest when the template refuses."""
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=True, tools=None, **self._special_tokens
            ):
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise InvalidRequest(
                        f"The rendered prompt is longer than {MAX_PROMPT_CHARS} characters.", param="messages"
                    )
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"The chat template refused the messages: {error}.", param="messages") from None
        return "".join(pieces)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except ValueError as error:
        raise ConfigError(f"{path.name} cannot be read: {error}.", param="model.path") from None


def _token_text(name: str, value: object) -> str | None:
    """The text of a `*_token` entry, which is a string or an object with `content`; None for other entries."""
    if not name.endswith("_token"):
        return None
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
