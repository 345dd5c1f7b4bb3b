"""Turns a conversation into the prompt text its model was trained on. Knows no tokens.

The template is the model's own, never the client's; it still runs in Jinja's immutable sandbox, with an output cap.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from roseinfer.errors import ConfigError, InvalidRequest
from roseinfer.server.tokenizer_config import TokenizerConfig, read_json

MAX_PROMPT_CHARS = 4 * 1024 * 1024  # twice the largest default body: more is a template that multiplies its input

# What messages of another shape than a template expects may raise in it, besides its own refusals.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now(UTC).strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlocks(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks for training what the assistant says: to us, what it holds."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """As the authors of templates expect it: `apply_chat_template` of the transformers library."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


class _NamedTemplate(msgspec.Struct):
    """One of several templates, of which `default` is the one to chat with."""

    name: str
    template: str


def _compile(source: str, param: str) -> jinja2.Template:
    """Raises ConfigError that blames the option `param`."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"The chat template does not compile: {error}.", param=param) from None


def read_chosen_template(path: str | None) -> str | None:
    """The source in the file that `server.chat_template` names, if it names one. Raises ConfigError; needs no model."""
    if path is None:
        return None
    try:
        source = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"The chat template {path} cannot be read: {reason}.", param="server.chat_template") from None
    _compile(source, "server.chat_template")
    return source


class ChatTemplate:
    """A compiled template and the special tokens it may name, such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _compile(source, "model.path")
        self.source = source
        self.knows_tools = "tools" in meta.find_undeclared_variables(_environment().parse(source))
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, directory: Path, chosen: str | None = None) -> "ChatTemplate | None":
        """The template `chosen` instead of the checkpoint's, or the checkpoint's; None when there is neither."""
        config = TokenizerConfig.load(directory)
        source = _checkpoint_template(directory, config) if chosen is None else chosen
        return None if source is None else cls(source, config.special_tokens)

    def render(self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None = None) -> str:
        """The prompt up to the place where the assistant speaks. Raises InvalidRequest when the template refuses."""
        return self._render(messages, tools, is_open=True)

    def render_closed(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The conversation alone, with nobody asked to speak."""
        return self._render(messages, None, is_open=False)

    def _render(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None, *, is_open: bool
    ) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=is_open, tools=tools, documents=None, **self._special_tokens
            ):
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise InvalidRequest(
                        f"The rendered prompt is longer than {MAX_PROMPT_CHARS} characters.", param="messages"
                    )
                pieces.append(piece)
        except _REFUSALS as error:
            raise InvalidRequest(f"The chat template refused the messages: {error}.", param="messages") from None
        return "".join(pieces)


def _checkpoint_template(directory: Path, config: TokenizerConfig) -> str | None:
    """Of `chat_template.jinja`, else of `tokenizer_config.json`, else of `chat_template.json`; None without any."""
    file = directory / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
        entry = config.chat_template or read_json(directory / "chat_template.json").get("chat_template")
        source = msgspec.convert(entry, str | list[_NamedTemplate] | None)
    except ValueError as error:  # not UTF-8, or not the shape that checkpoints have
        raise ConfigError(f"The chat template cannot be read: {error}.", param="model.path") from None
    if isinstance(source, list):
        return next((named.template for named in source if named.name == "default"), None)
    return source
