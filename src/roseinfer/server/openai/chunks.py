"""Answers in the form that completions and chat share: choices, usage, and a stream of chunks."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from roseinfer.errors import RoseinferError
from roseinfer.server.api.errors import error_body
from roseinfer.server.api.event_stream import event
from roseinfer.server.api.respond import Dialect
from roseinfer.server.openai.replies import CompletionTokensDetails, PromptTokensDetails, Reply, Usage
from roseinfer.server.openai.schema import NO_STREAM_OPTIONS, StreamOptions
from roseinfer.text.choice import Delta, TokenCounts

DONE = b"data: [DONE]\n\n"
NOTHING = b"{}"  # an empty payload


class ChunkDialect(Dialect):
    """Choices, each with one field for what was generated, and a chunk for each delta of a stream."""

    reply_object: ClassVar[str]
    reply_field: ClassVar[str]  # the field of an unstreamed choice that holds what was generated
    chunk_object: ClassVar[str]
    chunk_field: ClassVar[str]  # the field of a chunk's choice that holds its payload

    def __init__(self, options: StreamOptions = NO_STREAM_OPTIONS) -> None:
        self._options = options

    @abstractmethod
    def payload(self, delta: Delta) -> bytes:
        """What a chunk's choice holds, as JSON; `NOTHING` where the delta adds nothing."""

    @abstractmethod
    async def content(self, delta: Delta) -> object:
        """What an unstreamed choice holds, ready for JSON."""

    def finish_reason(self, delta: Delta) -> str | None:
        """How the choice ended, if it has, in OpenAI's words; called after `payload` or `content`."""
        return delta.finish_reason

    def first_frames(self) -> bytes:
        head = self.head
        self._template = ChunkTemplate(
            reply_id=head.reply_id,
            kind=self.chunk_object,
            created=head.created,
            model=head.model,
            field=self.chunk_field,
            num_choices=len(self.generation.choices),
            include_usage=self._options.include_usage,
        )
        return b""

    async def frames(self, delta: Delta) -> bytes:
        """Step 13."""
        logprobs = await delta.encode_logprobs()
        payload, choice = self.payload(delta), delta.choice
        usage = msgspec.json.encode(_usage(choice.counts)) if self._options.continuous_usage_stats else None
        return self._template.choice(choice.index, payload, logprobs, self.finish_reason(delta), usage)

    def last_frames(self, ledgers: list[dict[str, object]] | None) -> bytes:
        """Step 14."""
        frames = b"" if ledgers is None else self._template.ledger(msgspec.json.encode(ledgers))
        if self._options.include_usage:
            frames += self._template.usage(msgspec.json.encode(_usage(self.generation.counts)))
        return frames + DONE

    def failure_frames(self, error: RoseinferError, ledgers: list[dict[str, object]] | None) -> bytes:
        return event(error_body(error, ledgers))

    async def reply(self, deltas: Sequence[Delta], ledgers: list[dict[str, object]] | None) -> Reply:
        return Reply(
            id=self.head.reply_id,
            object=self.reply_object,
            created=self.head.created,
            model=self.head.model,
            choices=[
                {
                    "index": delta.choice.index,
                    self.reply_field: await self.content(delta),
                    "logprobs": await delta.encode_logprobs(),
                    "finish_reason": self.finish_reason(delta),
                }
                for delta in deltas
            ],
            usage=_usage(self.generation.counts),
            roseinfer_ledger=msgspec.UNSET if ledgers is None else ledgers,
        )


def _usage(counts: TokenCounts) -> Usage:
    return Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.generated,
        total_tokens=counts.prompt + counts.generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.cached),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=counts.reasoning),
    )


class ChunkTemplate:
    """Encodes what does not change in the chunks of a stream once; a chunk joins bytes.

    With many streams, encoding a dictionary for each chunk would take a good part of a step: docs/log.md, 2026-11-21.
    """

    def __init__(
        self,
        *,
        reply_id: str,
        kind: str,
        created: int,
        model: str,
        field: str,
        num_choices: int,
        include_usage: bool,
    ) -> None:
        head = msgspec.json.encode({"id": reply_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        name = msgspec.json.encode(field)
        self._heads = [self._head + b'{"index":%d,%b:' % (index, name) for index in range(num_choices)]
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._plain_tail = self._tail(b"null", None)

    def choice(
        self,
        index: int,
        payload: bytes,
        logprobs: bytes | None = None,
        finish_reason: str | None = None,
        usage: bytes | None = None,
    ) -> bytes:
        """A chunk of one choice, from JSON; empty if it would add neither payload, log-probabilities nor an end."""
        if logprobs is None and finish_reason is None:  # nearly all are
            if payload == NOTHING:
                return b""
            if usage is None:
                return self._heads[index] + payload + self._plain_tail
        return self._heads[index] + payload + self._tail(logprobs or b"null", finish_reason, usage)

    def _tail(self, logprobs: bytes, finish_reason: str | None, usage: bytes | None = None) -> bytes:
        end = self._end if usage is None else b'}],"usage":%b}\n\n' % usage
        return b',"logprobs":%b,"finish_reason":%b%b' % (logprobs, msgspec.json.encode(finish_reason), end)

    def ledger(self, ledgers: bytes) -> bytes:
        """The chunk with the ledgers of all choices, in JSON, and no choices."""
        return self._head + b'],"roseinfer_ledger":' + ledgers + self._end[2:]

    def usage(self, usage: bytes) -> bytes:
        """The chunk with the usage, in JSON, and no choices."""
        return self._head + b'],"usage":' + usage + b"}\n\n"
