"""Answers in Anthropic's form: a message of blocks, whole or as a stream of events."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from roseinfer.errors import RoseinferError
from roseinfer.records import FinishReason
from roseinfer.server.anthropic.errors import error_body
from roseinfer.server.anthropic.replies import (
    MessageReply,
    MessageUsage,
    OutputTokensDetails,
    StopReason,
    TextBlockReply,
    ThinkingBlockReply,
    ToolUseBlockReply,
)
from roseinfer.server.api.event_stream import event
from roseinfer.server.api.respond import Dialect, Head
from roseinfer.text.answers.answer import AnswerParser
from roseinfer.text.answers.parts import CallPart, Parts
from roseinfer.text.choice import Delta, TokenCounts
from roseinfer.text.generation import Generation

Block = TextBlockReply | ThinkingBlockReply | ToolUseBlockReply
SIGNATURE = "unsigned"  # some clients send thoughts back only where they have a signature


def named_event(kind: str, **fields: object) -> bytes:
    """An event of a type, which is also its name: Anthropic's clients drop events without one."""
    return event(msgspec.json.encode({"type": kind, **fields}), kind)


PING, MESSAGE_STOP = named_event("ping"), named_event("message_stop")


class MessageDialect(Dialect):
    """One message; its stop reason counts `max_tokens`, and `parser` separates what is no text, where that may come."""

    id_prefix = "msg_"

    def __init__(
        self, max_tokens: int, parser: AnswerParser | None, request_id: str, *, shows_thoughts: bool = True
    ) -> None:
        self._max_tokens = max_tokens
        self._parser = parser
        self._request_id = request_id
        self._shows_thoughts = shows_thoughts

    def begin(self, head: Head, generation: Generation) -> None:
        super().begin(head, generation)
        self._blocks = BlockEvents(shows_thoughts=self._shows_thoughts)
        [self._choice] = generation.choices

    def first_frames(self) -> bytes:
        """How much of the prompt was cached is known at the end, and comes with the stop reason."""
        return named_event("message_start", message=self._message([], None, None))

    async def frames(self, delta: Delta) -> bytes:
        """Step 13."""
        blocks = self._blocks
        if self._parser is None:
            frames = blocks.text(delta.text) if delta.text else b""
        else:
            parts = self._parser.read(delta.text, is_last=delta.finish_reason is not None)
            frames = b"".join(map(blocks.parts, parts))
        if delta.finish_reason is not None:
            frames += (blocks.text("") if blocks.is_empty else b"") + blocks.close()
        return frames or (PING if delta.is_first else b"")

    def last_frames(self, ledgers: list[dict[str, object]] | None) -> bytes:
        """Step 14."""
        reason, sequence = self._ending()
        fields: dict[str, object] = {"usage": _usage(self._choice.counts)}
        fields |= {} if ledgers is None else {"roseinfer_ledger": ledgers}
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return named_event("message_delta", delta=delta, **fields) + MESSAGE_STOP

    def failure_frames(self, error: RoseinferError, ledgers: list[dict[str, object]] | None) -> bytes:
        return event(error_body(error, ledgers, request_id=self._request_id), "error")

    async def reply(self, deltas: Sequence[Delta], ledgers: list[dict[str, object]] | None) -> MessageReply:
        [delta] = deltas
        parts = Parts([delta.text]) if self._parser is None else await self._parser.read_whole(delta.text)
        message = self._message(list(self._blocks_in(parts)) or [TextBlockReply("")], *self._ending())
        message.roseinfer_ledger = msgspec.UNSET if ledgers is None else ledgers
        return message

    def _message(self, content: list[Block], reason: StopReason | None, sequence: str | None) -> MessageReply:
        return MessageReply(
            id=self.head.reply_id,
            type="message",
            role="assistant",
            model=self.head.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=_usage(self._choice.counts),
        )

    def _blocks_in(self, parts: Parts) -> Iterator[Block]:
        if parts.thoughts:
            yield ThinkingBlockReply(parts.reasoning if self._shows_thoughts else "", SIGNATURE)
        for part in parts.in_order():
            if isinstance(part, str):
                yield TextBlockReply(part)
            else:
                yield ToolUseBlockReply(_tool_use_id(part), part.name or "", _input(part.arguments))

    def _ending(self) -> tuple[StopReason, str | None]:
        """Why the message has ended, and the stop sequence if that is why."""
        choice = self._choice
        if choice.finish_reason is FinishReason.LENGTH:
            is_full = choice.num_tokens < self._max_tokens
            return ("model_context_window_exceeded" if is_full else "max_tokens"), None
        if self._parser is not None and self._parser.ends_with_calls:
            return "tool_use", None
        return ("end_turn" if choice.stop_string is None else "stop_sequence"), choice.stop_string


def _usage(counts: TokenCounts) -> MessageUsage:
    return MessageUsage(
        input_tokens=counts.prompt - counts.cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=counts.cached,
        output_tokens=counts.generated,
        output_tokens_details=OutputTokensDetails(counts.reasoning),
    )


def _tool_use_id(call: CallPart) -> str:
    return f"toolu_{(call.call_id or '').removeprefix('call_')}"


def _input(arguments: str) -> dict[str, Any]:
    """What the tool is called with; nothing where the end of the message has cut it, or the model wrote no JSON.

    The values stay as they were written: 1e400 is a number in JSON, and no float.
    """
    try:
        return msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {}


# Of each kind of block: what it begins with, the type of its deltas, and their field.
_KINDS: Mapping[str, tuple[Mapping[str, str], str, str]] = {
    "text": ({"text": ""}, "text_delta", "text"),
    "thinking": ({"thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "tool_use": ({}, "input_json_delta", "partial_json"),
}


class BlockEvents:
    """Writes the events of a message's blocks: one is open at a time, and they are numbered in their order.

    What does not change in the deltas of a block is encoded once; a delta joins bytes.
    """

    def __init__(self, *, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self._num_blocks = 0
        self._kind = ""  # of the open block
        self._delta_head = b""

    @property
    def is_empty(self) -> bool:
        """No block has been opened."""
        return self._num_blocks == 0

    def parts(self, parts: Parts) -> bytes:
        """What parts of the answer add."""
        frames = [self._think(parts.reasoning)] if parts.thoughts else []
        for part in parts.in_order():
            if isinstance(part, str):
                frames.append(self.text(part))
                continue
            if part.call_id is not None:
                frames.append(self._open("tool_use", id=_tool_use_id(part), name=part.name, input={}))
            if part.pieces:
                frames.append(self._delta(part.arguments))
        return b"".join(frames)

    def _think(self, thoughts: str) -> bytes:
        if self._shows_thoughts:
            return self._add("thinking", thoughts)
        return b"" if self._kind == "thinking" else self._open("thinking")

    def text(self, text: str) -> bytes:
        """A piece of text."""
        return self._add("text", text)

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if not self._kind:
            return b""
        signature = b""
        if self._kind == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signature = named_event("content_block_delta", index=self._num_blocks - 1, delta=delta)
        self._kind = ""
        return signature + named_event("content_block_stop", index=self._num_blocks - 1)

    def _add(self, kind: str, text: str) -> bytes:
        """Into the open block if it is of this kind, else into a new one."""
        return (b"" if self._kind == kind else self._open(kind)) + self._delta(text)

    def _open(self, kind: str, **fields: object) -> bytes:
        empty, delta_type, field = _KINDS[kind]
        closed, index = self.close(), self._num_blocks
        self._kind, self._num_blocks = kind, index + 1
        delta = f'{{"type":"content_block_delta","index":{index},"delta":{{"type":"{delta_type}","{field}":'
        self._delta_head = b"event: content_block_delta\ndata: " + delta.encode()
        block = {"type": kind, **empty, **fields}
        return closed + named_event("content_block_start", index=index, content_block=block)

    def _delta(self, text: str) -> bytes:
        return self._delta_head + msgspec.json.encode(text) + b"}}\n\n"
