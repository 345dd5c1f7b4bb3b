"""POST /v1/responses: generates the next items of a conversation, of which nothing is stored.

The handler is steps 2–6 and 12–14 of docs/architecture.md, in that order.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from math import inf
from typing import Any, Literal

import msgspec
from aiohttp import web

from roseinfer.errors import RoseinferError
from roseinfer.messages import SamplingDefaults
from roseinfer.records import Api, FinishReason
from roseinfer.server.api.errors import printable
from roseinfer.server.api.parsing import read_body
from roseinfer.server.api.respond import Dialect, Head, Job, respond
from roseinfer.server.exchange import generates_tokens
from roseinfer.server.openai.replies import scored_token
from roseinfer.server.openai.responses_output import EventWriter, Output
from roseinfer.server.openai.responses_replies import (
    IncompleteDetails,
    InputTokensReply,
    ResponseError,
    ResponseReply,
    ResponseUsage,
)
from roseinfer.server.openai.responses_schema import ENCRYPTED, LOGPROBS, ChosenTools, InputTokensBody, ResponseBody
from roseinfer.server.service import SERVICE
from roseinfer.text.answers.answer import AnswerParser
from roseinfer.text.answers.parts import Parts
from roseinfer.text.choice import Delta
from roseinfer.text.conversation import Conversation
from roseinfer.text.generation import Generation
from roseinfer.text.logprobs import ScoredToken
from roseinfer.text.served_model import ServedModel
from roseinfer.text.turns import Turn, join_turns


@generates_tokens(Api.RESPONSES)
async def create_response(request: web.Request) -> web.StreamResponse:
    """Read the body (2), make a prompt of its items (3, 4), and run it (5, 6, 12–14)."""
    body = await read_body(request, ResponseBody)
    return await respond(request, *await prepare(body, request.app[SERVICE]))


async def prepare(body: ResponseBody, served: ServedModel) -> tuple[Job, "ResponseDialect"]:
    """What to run, and the form of its answer. Raises RequestError."""
    turn = await served.prepare_turn(_conversation(body))
    job = Job(
        body=body,
        prompts=[turn.prompt],
        max_tokens=body.max_output_tokens,
        fits_context=True,
        num_logprobs=body.top_logprobs if LOGPROBS in body.include else None,
        grammar=turn.grammar,
        reads_calls=turn.tool_use is not None,
        max_tokens_name="max_output_tokens",
    )
    parser = turn.parser() if turn.has_parts else None
    return job, ResponseDialect(body, parser, served.client.info.sampling_defaults)


async def count_input_tokens(request: web.Request) -> web.Response:
    """POST /v1/responses/input_tokens: how long the prompt of a response would be."""
    body = await read_body(request, InputTokensBody)
    prompt = await request.app[SERVICE].encode_conversation(_conversation(body))
    content = msgspec.json.encode(InputTokensReply(len(prompt.token_ids)))
    return web.Response(body=content, content_type="application/json")


def _conversation(body: ResponseBody) -> Conversation:
    choice = body.function_choice
    return Conversation(
        turns=partial(_turns, body),
        num_chars=len(body.instructions or "") + sum(item.num_chars + 1 for item in body.items),
        functions=choice.functions,
        must_call=choice.mode == "required",
        is_parallel=body.parallel_tool_calls and not body.names_one_function,
        form=body.form(),
        variables=body.chat_template_kwargs,
        thinking=body.wanted_thinking,
        field="input",
        folds=True,
    )


def _turns(body: ResponseBody) -> Iterator[Turn]:
    """The instructions and the items as turns."""
    head = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    yield from join_turns([*head, *(item.for_template() for item in body.items)])


class ResponseDialect(Dialect):
    """A response with its items, or the events that tell how they come."""

    id_prefix = "resp_"

    def __init__(self, body: ResponseBody, parser: AnswerParser | None, defaults: SamplingDefaults) -> None:
        self._body = body
        self._parser = parser
        self._defaults = defaults
        # Where tokens begin whose text has not come yet, and their log-probabilities as JSON.
        self._scored: deque[tuple[int, bytes]] = deque()
        self._num_scored = 0  # tokens that left it
        self._num_chars = 0  # of the text that the parser has read
        self._status: Literal["completed", "incomplete"] = "completed"
        self._is_full = False  # ended by the limit of its tokens

    def begin(self, head: Head, generation: Generation) -> None:
        super().begin(head, generation)
        self._writer = EventWriter(is_streamed=self._body.stream)
        has_encrypted = ENCRYPTED in self._body.include
        self._output = Output(self._writer, has_summary=self._body.summary is not None, has_encrypted=has_encrypted)
        self._response = self._new_response()

    def columns(self, scored: Sequence[ScoredToken]) -> dict[str, list[Any] | None]:
        """Keeps them until their text comes; thoughts and calls have none in the answer."""
        self._scored += [(t.offset, msgspec.json.encode(scored_token(t))) for t in scored if not t.is_end]
        return {}

    def _pop_logprobs(self, delta: Delta, end: float = inf) -> bytes:
        """Those of all tokens behind the thoughts since the last text that begin before this character."""
        first, popped = self._num_scored, []
        while self._scored and self._scored[0][0] < end:
            popped.append(self._scored.popleft()[1])
        self._num_scored += len(popped)
        return b",".join(popped[max(0, delta.choice.counts.reasoning - first) :])

    def _parse(self, delta: Delta) -> Iterator[Parts]:
        """The parts of a delta; token by token where those have log-probabilities, so that each part has its own."""
        text, is_last = delta.text, delta.finish_reason is not None
        if self._parser is None:
            self._num_chars += len(text)
            yield Parts([text] if text else [])
            return
        begin = self._num_chars
        new = takewhile(lambda start: start > begin, (start for start, _ in reversed(self._scored)))
        for start in [*reversed([*new]), begin + len(text)]:
            piece = text[self._num_chars - begin : start - begin]
            self._num_chars += len(piece)
            yield from self._parser.read(piece, is_last=False)
        if is_last:
            yield self._parser.finish()

    def _read(self, delta: Delta) -> Iterator[bytes]:
        """The events of a delta, piece by piece. Call it once for each delta."""
        output, is_last = self._output, delta.finish_reason is not None
        for parts in self._parse(delta):
            has_logprobs = self._scored and (parts.texts or parts.calls)
            yield output.add(parts, self._pop_logprobs(delta, self._num_chars) if has_logprobs else b"")
        if is_last:
            yield output.add_logprobs(self._pop_logprobs(delta))
            is_cut = self._parser is not None and self._parser.is_cut  # by a stop string, amid arguments
            is_whole = delta.finish_reason is FinishReason.STOP and not is_cut
            self._status = "completed" if is_whole else "incomplete"
            self._is_full = delta.finish_reason is FinishReason.LENGTH
            yield output.finish(self._status)

    def first_frames(self) -> bytes:
        """They leave with the first frames behind them."""
        self._first = b"".join(
            self._writer.write(f"response.{kind}", response=self._response) for kind in ("created", "in_progress")
        )
        return self._first

    async def frames(self, delta: Delta) -> bytes:
        """Step 13."""
        if self._parser is None and delta.finish_reason is None and not self._scored:  # nearly all are
            frames = self._output.add_text(delta.text) if delta.text else b""
        else:
            frames = b"".join(self._read(delta))
        if frames:
            self._first = b""
        return frames

    def last_frames(self, ledgers: list[dict[str, object]] | None) -> bytes:
        """Step 14."""
        return self._writer.write(f"response.{self._status}", response=self._ended(ledgers))

    def failure_frames(self, error: RoseinferError, ledgers: list[dict[str, object]] | None) -> bytes:
        """The end of what came, an `error` in the two forms that clients read, and the response, which some await."""
        ending = self._output.finish("incomplete")
        detail = {"code": error.public_code, "message": printable(error.message), "param": error.param}
        failed = msgspec.structs.replace(
            self._response,
            status="failed",
            error=ResponseError("server_error", printable(error.message)),
            output=self._output.items,
            usage=ResponseUsage.of(self.generation.counts),
            roseinfer_ledger=msgspec.UNSET if ledgers is None else ledgers,
        )
        return (
            self._first
            + ending
            + self._writer.write("error", **detail, error={"type": error.error_type, **detail})
            + self._writer.write("response.failed", response=failed)
        )

    async def reply(self, deltas: Sequence[Delta], ledgers: list[dict[str, object]] | None) -> ResponseReply:
        """Reads the whole text in pieces, between which the event loop runs."""
        for _ in self._read(deltas[0]):
            await asyncio.sleep(0)
        return self._ended(ledgers)

    def _ended(self, ledgers: list[dict[str, object]] | None) -> ResponseReply:
        return msgspec.structs.replace(
            self._response,
            status=self._status,
            completed_at=int(time.time()) if self._status == "completed" else None,
            incomplete_details=IncompleteDetails("max_output_tokens") if self._is_full else None,
            output=self._output.items,
            usage=ResponseUsage.of(self.generation.counts),
            roseinfer_ledger=msgspec.UNSET if ledgers is None else ledgers,
        )

    def _new_response(self) -> ResponseReply:
        """The response as it begins, with what the body asked for."""
        body, defaults = self._body, self._defaults
        text_format = {name: value for name, value in _fields(body.text.format).items() if value is not None}
        return ResponseReply(
            id=self.head.reply_id,
            created_at=self.head.created,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.head.model,
            parallel_tool_calls=body.parallel_tool_calls,
            prompt_cache_key=body.prompt_cache_key or None,
            reasoning={"effort": body.reasoning.effort, "summary": body.summary},
            safety_identifier=body.safety_identifier or None,
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            text={"format": text_format} | ({"verbosity": body.text.verbosity} if body.text.verbosity else {}),
            tool_choice="auto" if body.tool_choice is None else _chosen(body.tool_choice),
            tools=[_fields(tool) for tool in body.tools if tool.type == "function"],
            top_logprobs=body.top_logprobs,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            truncation=body.truncation,
            user=body.user or None,
            metadata=body.metadata or {},
        )


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(struct)
    return fields


def _chosen(choice: str | ChosenTools) -> str | dict[str, Any]:
    """The choice with the fields of its type alone, which clients compare with what they know."""
    if isinstance(choice, str):
        return choice
    names = ("type", "name") if choice.type == "function" else ("type", "mode", "tools")
    return {name: value for name, value in _fields(choice).items() if name in names}
