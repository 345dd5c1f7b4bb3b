"""Separates an answer's text into thoughts, content and tool calls: the one reader of all APIs and of `LLM`."""

import asyncio
from collections.abc import Iterator

from roseinfer.text.answers.parts import Parts
from roseinfer.text.answers.reasoning import Reasoning, ReasoningParser
from roseinfer.text.answers.tool_calls import in_pieces
from roseinfer.text.answers.tool_use import ToolUse


class AnswerParser:
    """Reads one answer. The parts, joined, do not depend on how the text was cut.

    Thoughts come first where the prompt lets the model reason; a call that is drafted in them is no call.
    """

    def __init__(self, reasoning: Reasoning | None, tool_use: ToolUse | None) -> None:
        self._thoughts = None if reasoning is None else ReasoningParser(reasoning)
        self._calls = None if tool_use is None else tool_use.parser()

    @property
    def ends_with_calls(self) -> bool:
        """Clients run the calls of an answer that ends so: none of them is cut amid its arguments."""
        return self._calls is not None and self._calls.num_calls > 0 and not self.is_cut

    @property
    def is_cut(self) -> bool:
        """The text ended amid the arguments of a call."""
        return self._calls is not None and self._calls.is_cut

    def read(self, text: str, *, is_last: bool) -> Iterator[Parts]:
        """As `push`, and `finish` behind the last text, in pieces that each take well under a millisecond."""
        for piece in in_pieces(text):
            yield self.push(piece)
        if is_last:
            yield self.finish()

    async def read_whole(self, text: str) -> Parts:
        """All parts of an answer, read in pieces between which the event loop runs."""
        parts = Parts()
        for more in self.read(text, is_last=True):
            parts.extend(more)
            await asyncio.sleep(0)
        return parts

    def push(self, text: str) -> Parts:
        """Read the next text of the answer."""
        return self._read_rest(*(("", text) if self._thoughts is None else self._thoughts.push(text)))

    def finish(self) -> Parts:
        """The text has ended: add what was held back."""
        parts = self._read_rest(*(("", "") if self._thoughts is None else self._thoughts.finish()))
        if self._calls is not None:
            parts.extend(self._calls.finish())
        return parts

    def _read_rest(self, thoughts: str, rest: str) -> Parts:
        parts = Parts([rest] if rest else []) if self._calls is None else self._calls.push(rest)
        if thoughts:
            parts.thoughts.append(thoughts)
        return parts
