"""Renders a conversation with the model's chat template into the prompt text it was trained on.

The template is the model's own, never the client's; it still runs in Jinja's immutable sandbox, with a cap on its
output. A client may set variables that the template reads and the server does not give it.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Meta

from roseinfer.errors import ConfigError, InvalidRequest
from roseinfer.text.answers.reasoning import Effort, ReasoningFormat, Thinking
from roseinfer.text.answers.tool_formats import find_tool_format, short_id
from roseinfer.text.tokenizer.files import read_file, read_json
from roseinfer.text.tokenizer.tokenizer import TokenizerConfig

VARIABLES_FIELD = "chat_template_kwargs"
MAX_VARIABLES = 32
MAX_VARIABLE_LEVELS = 16  # lists and objects within each other: enough for a JSON schema
MAX_VARIABLE_BYTES = 16 * 1024  # all names and values together, as JSON

VariableName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}(?!\n)$")]  # as a name of a function
TemplateVariables = Annotated[
    dict[VariableName, Any],
    Meta(
        max_length=MAX_VARIABLES,
        description='Variables of the chat template, such as `{"enable_thinking": false}`; see "Template variables" in '
        f"http-api.md. At most {MAX_VARIABLE_BYTES} bytes as JSON and {MAX_VARIABLE_LEVELS} levels deep; null is a "
        "value.",
    ),
]

MAX_PROMPT_CHARS = 4 * 1024 * 1024  # twice the largest default body: more is a template that multiplies its input

# Clients send these to every model. A model without such a switch always reasons or never does.
SWITCHES = frozenset({"enable_thinking", "thinking"})
_USUAL_EFFORTS: Mapping[Effort, str] = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")  # beside the special tokens, by name
NO_VARIABLES: Mapping[str, object] = {}

# What messages of another shape than a template expects may raise in it, besides its own refusals.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def check_variables(variables: Mapping[str, Any]) -> None:
    """Check the bounds that no type expresses. Raises InvalidRequest that names the field."""
    num_bytes = len(msgspec.json.encode(variables))  # what was decoded is not too deep to be encoded
    if num_bytes > MAX_VARIABLE_BYTES:
        raise InvalidRequest(
            f"`{VARIABLES_FIELD}`: {num_bytes} bytes as JSON; at most {MAX_VARIABLE_BYTES} are taken.",
            param=VARIABLES_FIELD,
        )
    for name, value in variables.items():
        level: list[Any] = [value]
        for _ in range(MAX_VARIABLE_LEVELS):
            level = [inner for outer in level for inner in _within(outer)]
        if any(isinstance(inner, list | dict) for inner in level):
            param = f"{VARIABLES_FIELD}.{name}"
            raise InvalidRequest(f"`{param}`: Nested deeper than {MAX_VARIABLE_LEVELS} levels.", param=param)


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


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


class _Arguments(dict[str, Any]):
    """The arguments of an earlier call: an object where a template writes it itself, JSON where it adds it to text."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def _for_template(message: Mapping[str, Any], *, has_short_ids: bool) -> dict[str, Any]:
    """The message with its calls and their ids as the template wants them."""
    changed = dict(message)
    if has_short_ids and "tool_call_id" in message:
        changed["tool_call_id"] = short_id(message["tool_call_id"])
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_call_for_template(call, has_short_ids=has_short_ids) for call in calls]
    return changed


def _call_for_template(call: Mapping[str, Any], *, has_short_ids: bool) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], dict):
        function = function | {"arguments": _Arguments(function["arguments"])}
    return {**call, "function": function} | ({"id": short_id(call["id"])} if has_short_ids else {})


class _GenerationBlocks(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks the assistant's text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that authors of templates expect: that of `apply_chat_template` in the transformers library."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


class _NamedTemplate(msgspec.Struct):
    """One of several templates: `default` is for chat, and `tool_use` for chat with tools (Hermes 2 and 3)."""

    name: str
    template: str


def _compile(source: str, param: str) -> jinja2.Template:
    """Raises ConfigError that names the option `param`."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"The chat template does not compile: {error}.", param=param) from None


def read_chosen_template(path: str | None) -> str | None:
    """The source in the file that `server.chat_template` names, if any. Raises ConfigError."""
    if path is None:
        return None
    try:
        source = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        if isinstance(error, RuntimeError):  # of `~user`
            reason = "there is no such user"
        raise ConfigError(f"The chat template {path} cannot be read: {reason}.", param="server.chat_template") from None
    _compile(source, "server.chat_template")
    return source


class ChatTemplate:
    """A compiled template and the special tokens it may name, such as `bos_token`.

    Where a checkpoint has another template for conversations with tools, `tool_source` is that.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        self._template = _compile(source, "model.path")
        self._for_tools = None if tool_source is None else ChatTemplate(tool_source, special_tokens)
        self.source = source
        self.tool_source = tool_source or source
        self._has_short_ids = find_tool_format("auto", source).has_short_ids
        environment = _environment()
        reads = meta.find_undeclared_variables(environment.parse(source))
        self.knows_tools: bool = "tools" in reads if self._for_tools is None else self._for_tools.knows_tools
        self._special_tokens = dict(special_tokens)
        self._given = {*_GIVEN, *special_tokens, *environment.globals}  # by the server, each time
        self._variables = reads - self._given  # those that a client may set

    @classmethod
    def load(cls, directory: Path, chosen: str | None = None) -> "ChatTemplate | None":
        """The template `chosen` instead of the checkpoint's, or the checkpoint's; None when there is neither."""
        config = TokenizerConfig.load(directory)
        sources = _checkpoint_templates(directory, config) if chosen is None else {"default": chosen}
        if "default" not in sources:
            return None
        return cls(sources["default"], config.special_tokens, sources.get("tool_use"))

    def thinking_variables(self, thinking: Thinking) -> dict[str, object]:
        """The variables in which this template reads how much the model is to think."""
        variables: dict[str, object] = {}
        if thinking.effort is not None:
            variables |= dict.fromkeys(SWITCHES, thinking.effort != "none")
            variables["reasoning_effort"] = self._nearest_effort(thinking.effort)
        if thinking.effort == "none" or thinking.max_tokens is not None:
            variables["thinking_budget"] = 0 if thinking.effort == "none" else thinking.max_tokens
        return {name: variables[name] for name in variables if name in self._variables}

    def opens_thoughts(self, tags: ReasoningFormat) -> bool:
        """Whether prompts end with the opening tag where the model is to think, so that it never writes the tag."""
        asked = [{"role": "user", "content": "Hi"}]
        try:
            prompt = self.render(asked, variables=self.thinking_variables(Thinking("high")))
        except InvalidRequest:  # its messages are of another shape
            return False
        return prompt.rstrip().endswith(tags.opening)

    def _nearest_effort(self, effort: Effort) -> str:
        """The effort itself, where the template holds the word; most know `low`, `medium` and `high` without it."""
        is_known = re.search(rf"""(["']){effort}\1""", self.source)
        return effort if is_known else _USUAL_EFFORTS.get(effort, effort)

    def render(
        self,
        messages: Iterable[Mapping[str, object]],
        tools: Sequence[object] | None = None,
        variables: Mapping[str, object] = NO_VARIABLES,
        *,
        opens_turn: bool = True,
        continues_last: bool = False,
    ) -> str:
        """The conversation, up to where the assistant speaks if `opens_turn`. Raises InvalidRequest if refused.

        With `continues_last` it ends with the text of the last message.
        """
        if tools and self._for_tools is not None:
            render = self._for_tools.render
            return render(messages, tools, variables, opens_turn=opens_turn, continues_last=continues_last)
        written = [_for_template(message, has_short_ids=self._has_short_ids) for message in messages]
        if not continues_last:
            return self._render(variables, messages=written, tools=tools, add_generation_prompt=opens_turn)
        mark = secrets.token_hex(16)  # a template may write a text changed, or twice
        written[-1] = {**written[-1], "content": f"{written[-1]['content']}{mark}"}
        text = self._render(variables, messages=written, tools=tools, add_generation_prompt=False)
        before, found, _ = text.rpartition(mark)
        if not found:
            raise InvalidRequest("The chat template does not write the text of the last message.", param="messages")
        return before

    def _check(self, variables: Mapping[str, object]) -> None:
        """Refuse variables without effect, such as misspelt ones. Raises InvalidRequest that names the variable."""
        for name in variables:
            param = f"{VARIABLES_FIELD}.{name}"
            if name in self._given:
                raise InvalidRequest(f"`{param}`: The server gives the template this variable itself.", param=param)
            if name not in self._variables and name not in SWITCHES:
                known = ", ".join(f"`{known}`" for known in sorted(self._variables)) or "none"
                message = f"`{param}`: This model's chat template has no such variable; those to be set: {known}."
                raise InvalidRequest(message, param=param)

    def _render(self, variables: Mapping[str, object], **given: object) -> str:
        self._check(variables)
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate({**variables, **self._special_tokens, "documents": None, **given}):
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise InvalidRequest(
                        f"The rendered prompt is longer than {MAX_PROMPT_CHARS} characters.", param="messages"
                    )
                pieces.append(piece)
        except _REFUSALS as error:
            refused = f"the messages with `{VARIABLES_FIELD}`" if variables else "the messages"
            reason = str(error).removesuffix(".")
            raise InvalidRequest(f"The chat template refused {refused}: {reason}.", param="messages") from None
        return "".join(pieces)


def _checkpoint_templates(directory: Path, config: TokenizerConfig) -> dict[str, str]:
    """By name: of `chat_template.jinja` and its like, else of `tokenizer_config.json`, else of `chat_template.json`."""
    file = directory / "chat_template.jinja"
    try:
        if file.is_file():
            others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
            return {"default" if each is file else each.stem: read_file(each).decode() for each in (*others, file)}
        entry = config.chat_template or read_json(directory / "chat_template.json").get("chat_template")
        source = msgspec.convert(entry, str | list[_NamedTemplate] | dict[str, str] | None)
    except ValueError as error:  # not UTF-8, or not the shape that checkpoints have
        raise ConfigError(f"The chat template cannot be read: {error}.", param="model.path") from None
    if isinstance(source, list):
        return {named.name: named.template for named in reversed(source)}
    return source if isinstance(source, dict) else {} if source is None else {"default": source}
