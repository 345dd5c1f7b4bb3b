"""What a piece of an answer's text adds to it: thoughts, texts and calls.

Texts that grow are lists of pieces, joined once: adding to a string copies it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallPart:
    """What a piece of text adds to one call: its id and name at first, then pieces of its arguments."""

    index: int
    pieces: list[str] = field(default_factory=list)
    call_id: str | None = None
    name: str | None = None
    num_texts: int = 0  # of its `Parts`, that came before it

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Parts:
    """What a piece of text adds to the answer: thoughts, and behind them texts and calls."""

    texts: list[str] = field(default_factory=list)
    calls: list[CallPart] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    def in_order(self) -> Iterator[str | CallPart]:
        """The texts and the calls as they came."""
        start = 0
        for call in self.calls:
            if text := "".join(self.texts[start : call.num_texts]):
                yield text
            yield call
            start = call.num_texts
        if text := "".join(self.texts[start:]):
            yield text

    def extend(self, later: "Parts") -> None:
        for part in later.calls:
            part.num_texts += len(self.texts)
            self.add_part(part)
        self.texts += later.texts
        self.thoughts += later.thoughts

    def add_part(self, part: CallPart) -> None:
        """Add a call, or arguments to the last one."""
        if self.calls and self.calls[-1].index == part.index:
            self.calls[-1].pieces += part.pieces
        else:
            self.calls.append(part)
