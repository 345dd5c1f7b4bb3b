"""Lets a model think before its text follows a grammar, and ends thoughts that take more tokens than they may.

The library of grammars sees none of the thoughts: what it keeps would grow with them, and their masks are constant.
"""

import codecs
import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roseinfer.engine.core.constraint import MaskArray, Matcher
from roseinfer.messages import Thought
from roseinfer.text.answers.reasoning import Reasoning, ReasoningFormat, ReasoningParser, Stage


@dataclass(frozen=True, slots=True)
class ThoughtTokens:
    """The tokens of a vocabulary, as far as thoughts between certain tags need to know them."""

    allowed: MaskArray  # inside of thoughts
    allowed_in_tag: MaskArray  # likewise when the closing tag has begun: none that has more text behind it
    spell: Callable[[int], bytes]
    encode: Callable[[str], list[int]]


class ThoughtMatcher:
    """See `engine/core/constraint.py:Matcher`. Behind thoughts comes what `behind` allows, without thoughts `before`.

    That one allows the opening tag too, unless the prompt ends with it. Without them any text may come.
    """

    def __init__(self, thought: Thought, tokens: ThoughtTokens, before: Matcher | None, behind: Matcher | None) -> None:
        tags = ReasoningFormat(thought.opening, thought.closing)
        self._parser = ReasoningParser(Reasoning(tags, thought.is_open))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens = tokens
        self._matcher, self._behind = before, behind
        self._closing = thought.closing
        self._num_left = thought.max_tokens
        self._to_close: list[int] = []  # tokens that are left of a closing tag that is forced

    @property
    def _is_thinking(self) -> bool:
        return self._parser.has_thoughts and self._parser.stage is not Stage.REST

    @property
    def is_over(self) -> bool:
        return self._matcher is not None and not self._is_thinking and self._matcher.is_over

    @property
    def has_failed(self) -> bool:
        return self._matcher is not None and self._matcher.has_failed

    @property
    def error(self) -> str:
        return "" if self._matcher is None else self._matcher.error

    def _find_to_close(self) -> list[int]:
        """What must come next where no more thoughts may: found once, since a token may end amid a character."""
        return self._to_close or self._tokens.encode(self._parser.missing)

    def fill(self, allowed: MaskArray) -> None:
        if self._is_thinking and self._num_left == 0:
            token_id = self._find_to_close()[0]
            allowed[:] = 0
            allowed[token_id // 32] = np.uint32(1 << (token_id % 32))
        elif self._matcher is None:
            allowed[:] = 0xFFFFFFFF
        elif self._is_thinking:
            is_in_tag = self._parser.missing != self._closing
            allowed[:] = self._tokens.allowed_in_tag if is_in_tag else self._tokens.allowed
        else:
            self._matcher.fill(allowed)

    def copy(self) -> "ThoughtMatcher":
        made = copy.copy(self)
        made.__dict__ |= {
            "_parser": copy.deepcopy(self._parser),
            "_decoder": copy.copy(self._decoder),
            "_matcher": self._matcher and self._matcher.copy(),
            "_behind": self._behind and self._behind.copy(),
        }
        return made

    def forced(self) -> list[int]:
        if self._is_thinking:
            return [] if self._num_left != 0 else self._find_to_close()
        return [] if self._matcher is None else self._matcher.forced()

    def accept(self, token_id: int) -> None:
        if self._is_thinking:
            self._to_close = self._find_to_close()[1:] if self._num_left == 0 else []
            self._num_left = self._num_left and self._num_left - 1
        elif self._matcher is not None:
            self._matcher.accept(token_id)
        if self._parser.stage is not Stage.REST:
            self._parser.push(self._decoder.decode(self._tokens.spell(token_id)))
            if self._is_thinking:
                self._matcher = self._behind
