"""The text side of a model: its tokenizer and its chat template, and the prompt that a conversation becomes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from roseinfer.config.options import Config
from roseinfer.errors import InvalidRequest
from roseinfer.text.answers.reasoning import (
    Reasoning,
    ReasoningFormat,
    continued_reasoning,
    find_reasoning,
    find_reasoning_format,
)
from roseinfer.text.templates import ChatTemplate, read_chosen_template
from roseinfer.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextModel:
    """What the text of one checkpoint needs. It is read when the engine has said where the checkpoint lies."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    reasoning_format: ReasoningFormat | None = None
    opens_thoughts: bool = False  # an answer has thoughts only where the prompt ends with the opening tag

    @classmethod
    def loader(cls, config: Config) -> Callable[[Path], "TextModel"]:
        """What reads a checkpoint as the configuration says. Raises ConfigError for the template that it names."""
        template, reasoning_format = config.server.chat_template, config.structured.reasoning_format
        return partial(cls.load, chosen_template=read_chosen_template(template), reasoning_format=reasoning_format)

    @classmethod
    def load(cls, checkpoint_dir: Path, chosen_template: str | None, reasoning_format: str) -> "TextModel":
        """Read the checkpoint's files; `chosen_template` takes the place of its own. Raises ConfigError."""
        template = ChatTemplate.load(checkpoint_dir, chosen_template)
        tags = find_reasoning_format(reasoning_format, None if template is None else template.source)
        opens_thoughts = template is not None and tags is not None and template.opens_thoughts(tags)
        return cls(Tokenizer.load(checkpoint_dir), template, tags, opens_thoughts)

    def require_chat_template(self, field: str = "messages") -> ChatTemplate:
        """Raises InvalidRequest that names the field of the conversation."""
        if self.chat_template is None:
            raise InvalidRequest(
                "This model has no chat template, so it cannot chat: use /v1/completions, or start the server with "
                "--chat-template.",
                param=field,
            )
        return self.chat_template

    def render(
        self,
        messages: Iterable[Mapping[str, object]],
        tools: Sequence[object] | None,
        variables: Mapping[str, object],
        *,
        continues_last: bool,
    ) -> tuple[str, Reasoning | None]:
        """The text of a prompt, and how the answer to it reasons. Raises InvalidRequest."""
        turns = list(messages)
        text = self.require_chat_template().render(turns, tools, variables, continues_last=continues_last)
        if continues_last:
            return text, continued_reasoning(self.reasoning_format, str(turns[-1]["content"]))
        return text, find_reasoning(self.reasoning_format, text, opens_thoughts=self.opens_thoughts)
