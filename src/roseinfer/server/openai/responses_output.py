"""Builds the output of a response: its items in their order, and the events that a stream has of each.

An item is opened, extended text by text, and closed; each has its events, in OpenAI's order. What does not change in
the events of an item's texts is encoded once, since there is one for each token.
"""

import secrets
from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar, Literal

import msgspec

from roseinfer.server.api.event_stream import event
from roseinfer.server.openai.responses_replies import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    Reasoning,
    ReasoningText,
    Status,
    SummaryText,
)
from roseinfer.text.answers.parts import CallPart, Parts


class EventWriter:
    """Encodes the events of one stream, which are numbered; of an answer that is not streamed there are none."""

    def __init__(self, *, is_streamed: bool) -> None:
        self._is_streamed = is_streamed
        self._num_events = 0

    def write(self, kind: str, /, **fields: object) -> bytes:
        return self.write_text(_head(kind, fields)) if self._is_streamed else b""

    def write_text(self, head: bytes, fields: bytes = b"") -> bytes:
        """An event that goes on after its head with more fields, each behind a comma."""
        if not self._is_streamed:
            return b""
        number, self._num_events = self._num_events, self._num_events + 1
        return b'%b%b,"sequence_number":%d}\n\n' % (head, fields, number)


def _head(kind: str, fields: dict[str, object]) -> bytes:
    """An event up to its last fields."""
    payload = msgspec.json.encode({"type": kind, **fields})
    return event(payload, kind)[:-3]


class OpenItem(ABC):
    """An item while its text comes."""

    prefix: ClassVar[str]  # of its id
    texts_kind: ClassVar[str]  # of the events that hold its text, without their last word

    def __init__(self, writer: EventWriter, index: int) -> None:
        self.writer = writer
        self.item_id = f"{self.prefix}_{secrets.token_hex(12)}"
        self.index = index
        self.place: dict[str, object] = {"item_id": self.item_id, "output_index": index}
        self.pieces: list[str] = []

    def open(self) -> bytes:
        """The events before its first text."""
        self._text_head = _head(f"{self.texts_kind}.delta", self.place)
        return self.writer.write("response.output_item.added", output_index=self.index, item=self.item("in_progress"))

    def extend(self, text: str, fields: bytes = b"") -> bytes:
        """The event of more text, with more fields of its own."""
        self.pieces.append(text)
        return self.writer.write_text(self._text_head, b',"delta":%b%b' % (msgspec.json.encode(text), fields))

    def close(self, status: Status) -> bytes:
        """The events behind its last text."""
        item = self.item(status)
        return self.writer.write("response.output_item.done", output_index=self.index, item=item)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @abstractmethod
    def item(self, status: Status) -> OutputItem:
        """The item with its text up to now; without content while it has none."""


class OpenMessage(OpenItem):
    """What the model says, with log-probabilities where they are asked for."""

    prefix = "msg"
    texts_kind = "response.output_text"

    def __init__(self, writer: EventWriter, index: int) -> None:
        super().__init__(writer, index)
        self.place["content_index"] = 0
        self._logprobs: list[bytes] = []

    def open(self) -> bytes:
        part = OutputText(text="")
        return super().open() + self.writer.write("response.content_part.added", **self.place, part=part)

    def extend(self, text: str, logprobs: bytes = b"") -> bytes:
        """`logprobs` are those of its tokens as JSON, with commas between them."""
        if logprobs:
            self._logprobs.append(logprobs)
        return super().extend(text, b',"logprobs":[%b]' % logprobs)

    def close(self, status: Status) -> bytes:
        part = self._part()
        text = {"text": part.text, "logprobs": part.logprobs}
        return (
            self.writer.write(f"{self.texts_kind}.done", **self.place, **text)
            + self.writer.write("response.content_part.done", **self.place, part=part)
            + super().close(status)
        )

    def _part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=msgspec.Raw(b"[%b]" % b",".join(self._logprobs)))

    def item(self, status: Status) -> OutputMessage:
        content = [] if status == "in_progress" else [self._part()]
        return OutputMessage(id=self.item_id, status=status, content=content)


class OpenReasoning(OpenItem):
    """The thoughts, and where a summary is asked for the same texts as that."""

    prefix = "rs"
    texts_kind = "response.reasoning_text"

    def __init__(self, writer: EventWriter, index: int, *, has_summary: bool, has_encrypted: bool) -> None:
        super().__init__(writer, index)
        self._encrypted: Literal[""] | None = "" if has_encrypted else None
        self._summary_place: dict[str, object] = {**self.place, "summary_index": 0}
        self.place["content_index"] = 0
        self._has_summary = has_summary
        self._summary_head = _head("response.reasoning_summary_text.delta", self._summary_place)

    def open(self) -> bytes:
        part = ReasoningText("")
        events = super().open() + self.writer.write("response.content_part.added", **self.place, part=part)
        return events + self._summary("part.added", part=SummaryText(""))

    def extend(self, text: str, fields: bytes = b"") -> bytes:
        events = super().extend(text, fields)
        if self._has_summary:
            events += self.writer.write_text(self._summary_head, b',"delta":' + msgspec.json.encode(text))
        return events

    def close(self, status: Status) -> bytes:
        text = self.text
        return (
            self.writer.write(f"{self.texts_kind}.done", **self.place, text=text)
            + self.writer.write("response.content_part.done", **self.place, part=ReasoningText(text))
            + self._summary("text.done", text=text)
            + self._summary("part.done", part=SummaryText(text))
            + super().close(status)
        )

    def _summary(self, event: str, **fields: object) -> bytes:
        if not self._has_summary:
            return b""
        return self.writer.write(f"response.reasoning_summary_{event}", **self._summary_place, **fields)

    def item(self, status: Status) -> Reasoning:
        content, summary = [ReasoningText(self.text)], [SummaryText(self.text)]
        return Reasoning(
            id=self.item_id,
            status=status,
            content=[] if status == "in_progress" else content,
            summary=[] if status == "in_progress" or not self._has_summary else summary,
            encrypted_content=self._encrypted,
        )


class OpenCall(OpenItem):
    """A call, of which the arguments come."""

    prefix = "fc"
    texts_kind = "response.function_call_arguments"

    def __init__(self, writer: EventWriter, index: int, part: CallPart) -> None:
        super().__init__(writer, index)
        self._call_id, self._name = part.call_id or "", part.name or ""

    def close(self, status: Status) -> bytes:
        done = {"name": self._name, "arguments": self.text}
        return self.writer.write(f"{self.texts_kind}.done", **self.place, **done) + super().close(status)

    def item(self, status: Status) -> OutputCall:
        arguments = self.text
        return OutputCall(id=self.item_id, status=status, call_id=self._call_id, name=self._name, arguments=arguments)


class Output:
    """The items of one answer. Each method returns the events of what it adds."""

    def __init__(self, writer: EventWriter, *, has_summary: bool, has_encrypted: bool) -> None:
        self.items: list[OutputItem] = []  # those that are closed
        self._writer = writer
        self._open_reasoning = partial(OpenReasoning, writer, has_summary=has_summary, has_encrypted=has_encrypted)
        self._open: OpenItem | None = None

    def add(self, parts: Parts, logprobs: bytes = b"") -> bytes:
        """Thoughts come before texts and calls; `logprobs` are those of the first text."""
        events = self._add_thoughts(parts.reasoning) if parts.thoughts else b""
        for part in parts.in_order():
            if isinstance(part, str):
                events, logprobs = events + self.add_text(part, logprobs), b""
            else:
                events += self._add_call(part)
        return events

    def add_text(self, text: str, logprobs: bytes = b"") -> bytes:
        if isinstance(self._open, OpenMessage):  # nearly always
            return self._open.extend(text, logprobs)
        message = OpenMessage(self._writer, self._next_index)
        return self._begin(message) + message.extend(text, logprobs)

    def add_logprobs(self, logprobs: bytes) -> bytes:
        """Of tokens that ended a message without being part of its text, such as those of a stop string."""
        return self._open.extend("", logprobs) if logprobs and isinstance(self._open, OpenMessage) else b""

    def _add_thoughts(self, text: str) -> bytes:
        if isinstance(self._open, OpenReasoning):
            return self._open.extend(text)
        thoughts = self._open_reasoning(self._next_index)
        return self._begin(thoughts) + thoughts.extend(text)

    def _add_call(self, part: CallPart) -> bytes:
        events = b""
        if part.call_id is not None:
            events = self._begin(OpenCall(self._writer, self._next_index, part))
        assert self._open is not None, "arguments follow the name of their call"
        return events + self._open.extend(part.arguments) if part.arguments else events

    @property
    def _next_index(self) -> int:
        return len(self.items) + (self._open is not None)

    def _begin(self, item: OpenItem) -> bytes:
        events = self._close("completed")
        self._open = item
        return events + item.open()

    def finish(self, status: Status) -> bytes:
        """Close the last item. A whole answer without text or calls is an empty message."""
        is_silent = isinstance(self._open, OpenReasoning | None) and all(isinstance(i, Reasoning) for i in self.items)
        events = (
            self._begin(OpenMessage(self._writer, self._next_index)) if is_silent and status == "completed" else b""
        )
        return events + self._close(status)

    def _close(self, status: Status) -> bytes:
        if (item := self._open) is None:
            return b""
        self._open = None
        self.items.append(item.item(status))
        return item.close(status)
