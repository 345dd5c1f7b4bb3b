"""Reasoning: how models mark their thoughts, and the parser that separates thoughts from the rest of an answer.

To add a format, add a row to FORMATS and its name to `structured.reasoning_format` in config/options.py; where the
option is `auto`, `find_reasoning_format` chooses by the chat template. Whether an answer begins amid thoughts depends
on how the template ended the prompt: `find_reasoning`. docs/structured-output.md shows the formats.
"""

import codecs
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, NamedTuple

import msgspec

from roseinfer.messages import Grammar, Thought
from roseinfer.text.tokenizer.detokenizer import first_candidate


class ReasoningFormat(NamedTuple):
    """The tags around a model's thoughts."""

    opening: str
    closing: str


FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),  # Qwen3, DeepSeek-R1, SmolLM3, GLM-4.5
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),  # Magistral
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),  # Seed-OSS
    "thought": ReasoningFormat("<thought>", "</thought>"),  # EXAONE Deep
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),  # Kimi-VL-Thinking
    "cohere": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),  # Granite 3.2
}
REASONING_TAGS = tuple(tag for row in FORMATS.values() for tag in row)


def find_reasoning_format(wanted: str, template: str | None) -> ReasoningFormat | None:
    """The format named; with `auto` the one whose tags the chat template holds, None where it holds none."""
    if wanted == "none" or (wanted == "auto" and template is None):
        return None
    if wanted != "auto":
        return FORMATS[wanted]
    return next((row for row in FORMATS.values() if any(tag in (template or "") for tag in row)), None)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True)
class Thinking:
    """How much a request wants the model to think."""

    effort: Effort | None = None  # None: as the chat template has it
    max_tokens: int | None = None  # of the thoughts, behind which the answer begins; None: no limit
    max_tokens_field: str = "max_tokens"  # in errors


AS_THE_TEMPLATE_HAS_IT = Thinking()


def switched_effort(is_on: bool | None, effort: Effort | None) -> Effort | None:
    """The effort with a switch beside it, if there is one."""
    if is_on is None:
        return effort
    return (effort or "medium") if is_on else "none"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How thoughts come in the answer to one prompt. `is_open`: the prompt ends with the opening tag."""

    tags: ReasoningFormat
    is_open: bool


def find_reasoning(tags: ReasoningFormat | None, prompt: str, *, opens_thoughts: bool) -> Reasoning | None:
    """How the answer to a rendered prompt reasons; None where it does not.

    A prompt says that it does not by an empty thought at its end, or, if the template `opens_thoughts`, by none.
    """
    end = prompt.rstrip()
    if tags is None or end.endswith(tags.closing):
        return None
    is_open = end.endswith(tags.opening)
    return None if opens_thoughts and not is_open else Reasoning(tags, is_open)


def continued_reasoning(tags: ReasoningFormat | None, begun: str) -> Reasoning | None:
    """How an answer goes on that the client has begun: with thoughts where their closing tag has not come."""
    is_thinking = tags is not None and begun.rfind(tags.opening) > begun.rfind(tags.closing)
    return Reasoning(tags, is_open=True) if tags is not None and is_thinking else None


def with_thought(grammar: Grammar | None, reasoning: Reasoning | None, max_tokens: int | None) -> Grammar | None:
    """The grammar of an answer that may think first, for `max_tokens` at most; None where any answer is allowed."""
    if reasoning is None or (grammar is None and max_tokens is None):
        return grammar
    thought = Thought(*reasoning.tags, reasoning.is_open, max_tokens)
    return msgspec.structs.replace(grammar or Grammar("text", ""), thought=thought)


class Stage(Enum):
    """Where in an answer its next character stands."""

    START = auto()  # the opening tag may come
    THOUGHTS = auto()
    REST = auto()


class ReasoningParser:
    """Separates the thoughts at the beginning of one answer from the rest, in linear time however the text is cut.

    Blanks around thoughts belong to neither. Without a closing tag all is thought; an answer that does not begin with
    the opening tag, where the prompt does not end with it, has no thoughts and keeps its blanks.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self.stage = Stage.START
        self.has_thoughts = reasoning.is_open
        self._opening, self._closing = reasoning.tags
        self._held: list[str] = []  # blanks, and behind them what may begin a tag
        self._skips_blanks = reasoning.is_open  # at the beginning of the thoughts, and of the rest behind them

    def push(self, text: str) -> tuple[str, str]:
        """Read the next text of the answer. Returns what it adds to the thoughts, and to the rest."""
        thoughts = ""
        if self.stage is Stage.START:
            text = self._read_start(text)
        if self.stage is Stage.THOUGHTS:
            thoughts, text = self._read_thoughts(text)
        if self.stage is not Stage.REST:
            return thoughts, ""
        if self._skips_blanks:
            text = text.lstrip()
            self._skips_blanks = not text
        return thoughts, text

    @property
    def missing(self) -> str:
        """What of the closing tag has not come yet, inside of thoughts."""
        held = "".join(self._held[-1:])
        return self._closing[len(held) - first_candidate(held, (self._closing,), len(self._closing)) :]

    def finish(self) -> tuple[str, str]:
        """The text has ended: return what was held back."""
        held, self._held = "".join(self._held), []
        if self.stage is Stage.THOUGHTS or self.has_thoughts:
            return held.strip() if self._skips_blanks else held.rstrip(), ""
        return "", held

    def _read_start(self, text: str) -> str:
        """Returns the text behind the opening tag, or all of it where there is none; nothing until that is known."""
        if not (text := self._join_held(text)):
            return ""
        begin = text.lstrip()
        if begin != self._opening and self._opening.startswith(begin):
            self._held = [text]
            return ""
        if begin.startswith(self._opening):
            self.has_thoughts = True
            text = begin.removeprefix(self._opening)
        self.stage = Stage.THOUGHTS if self.has_thoughts else Stage.REST
        self._skips_blanks = self.has_thoughts
        return text

    def _read_thoughts(self, text: str) -> tuple[str, str]:
        """Returns thoughts, and what stands behind the closing tag."""
        if not (text := self._join_held(text)):
            return "", ""
        start = text.find(self._closing)
        end = first_candidate(text, (self._closing,), len(self._closing)) if start < 0 else start
        thoughts = text[:end].rstrip()
        self._held = [text[len(thoughts) :]]
        if self._skips_blanks:
            thoughts = thoughts.lstrip()
            self._skips_blanks = not thoughts
        if start < 0:
            return thoughts, ""
        self.stage, self._skips_blanks, self._held = Stage.REST, True, []
        return thoughts, text[start + len(self._closing) :]

    def _join_held(self, text: str) -> str:
        """What was held back and the text behind it; nothing while all are blanks, of which there may be many."""
        if not text.strip() and not any(map(str.strip, self._held[-1:])):
            self._held.append(text)
            return ""
        text, self._held = "".join([*self._held, text]), []
        return text


class ReasoningCounter:
    """Counts the tokens of one answer's thoughts, with those of their tags."""

    def __init__(self, reasoning: Reasoning) -> None:
        self._parser = ReasoningParser(reasoning)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens if self._parser.has_thoughts else 0

    def push(self, token: bytes) -> None:
        """Read the bytes of the next token."""
        if self._parser.stage is not Stage.REST:
            self._num_tokens += 1
            self._parser.push(self._decoder.decode(token))
