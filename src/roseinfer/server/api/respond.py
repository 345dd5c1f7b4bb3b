"""Answers a generation request, streamed or whole, in the form of an endpoint: its `Dialect`.

All endpoints take this one path (steps 5, 6 and 12–14 of docs/architecture.md).
"""

import asyncio
import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import msgspec
from aiohttp import web

from roseinfer.errors import InvalidRequest, RoseinferError
from roseinfer.messages import MAX_TOKENS, Grammar, SamplingDefaults, SamplingParams
from roseinfer.records import Delivery
from roseinfer.server.api import event_stream as sse
from roseinfer.server.api.fields import MAX_PROMPT_TOKENS, SamplingBody
from roseinfer.server.connection.connection import is_behind
from roseinfer.server.exchange import EXCHANGE, Exchange, server_timing
from roseinfer.server.service import SERVICE, Service
from roseinfer.text.choice import Delta, EncodedPrompt, OutputOptions
from roseinfer.text.generation import NUM_SEEDS, Generation, GenerationRequest
from roseinfer.text.logprobs import ScoredToken
from roseinfer.text.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Head:
    """What stands at the head of an answer."""

    reply_id: str
    created: int  # Unix seconds
    model: str


class Dialect(ABC):
    """The form in which one endpoint answers one request. It gets every delta once, in order."""

    id_prefix: ClassVar[str]
    head: Head
    generation: Generation

    def begin(self, head: Head, generation: Generation) -> None:
        """Begin an answer, streamed or whole."""
        self.head, self.generation = head, generation

    def columns(self, scored: Sequence[ScoredToken]) -> Mapping[str, Sequence[object] | None]:
        """The columns of log-probabilities, ready for JSON."""
        raise NotImplementedError("this endpoint has no log-probabilities")

    def first_frames(self) -> bytes:
        """What a stream holds before the first delta, as server-sent events."""
        return b""

    @abstractmethod
    async def frames(self, delta: Delta) -> bytes:
        """What a delta adds to a stream; empty where that is nothing."""

    @abstractmethod
    def last_frames(self, ledgers: list[dict[str, object]] | None) -> bytes:
        """What a stream ends with; `ledgers` where the client asked for them."""

    @abstractmethod
    def failure_frames(self, error: RoseinferError, ledgers: list[dict[str, object]] | None) -> bytes:
        """What a stream ends with that failed."""

    @abstractmethod
    async def reply(self, deltas: Sequence[Delta], ledgers: list[dict[str, object]] | None) -> object:
        """The whole answer, ready for JSON; each delta is all of a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one body asks for, with its prompts as tokens."""

    body: SamplingBody
    prompts: list[EncodedPrompt]
    max_tokens: int | None  # None: as many as the context leaves; 0: only the prompt is in the answer
    fits_context: bool = False  # as many as the context leaves, where `max_tokens` are more
    num_logprobs: int | None
    n: int = 1  # choices of each prompt in the answer
    best_of: int = 1  # sequences of each prompt, of which the best `n` are in the answer
    grammar: Grammar | None = None
    reads_calls: bool = False  # from the text
    max_tokens_name: str = "max_tokens"  # in errors


async def respond(request: web.Request, job: Job, dialect: Dialect) -> web.StreamResponse:
    """Run the job and answer. Raises RequestError before the engine has the request, EngineError after."""
    service, exchange = request.app[SERVICE], request[EXCHANGE]
    wanted = generation_request(job, dialect, service)
    if job.body.stream:
        wanted = replace(wanted, stream_interval=job.body.stream_interval or service.config.stream_interval)
    generation = submit(wanted, service, exchange, is_streamed=job.body.stream)
    exchange.reply_id = f"{dialect.id_prefix}{secrets.token_hex(12)}"
    exchange.failure_frames = dialect.failure_frames
    model = job.body.model or service.model_names[0]
    dialect.begin(Head(exchange.reply_id, int(time.time()), model), generation)
    reply = _Reply(dialect, generation, service, exchange)
    return await (reply.stream(request) if job.body.stream else reply.whole(request))


def submit(wanted: GenerationRequest, service: Service, exchange: Exchange, *, is_streamed: bool) -> Generation:
    """Steps 5 and 6, by the exchange's deadlines and its caller's cache. Raises InvalidRequest or Overloaded."""
    wanted = replace(
        wanted,
        output=replace(wanted.output, queue_timeout_name=exchange.waits_by),
        cache_salt=exchange.cache_salt(wanted.cache_salt),
        deadline_ns=exchange.deadline_ns,
        queue_deadline_ns=exchange.queue_deadline_ns,
    )
    first = exchange.timelines[0]
    first.tokenized_ns, first.num_prompt_tokens = time.monotonic_ns(), len(wanted.prompts[0].token_ids)
    requests = wanted.build_requests(service.client.info, exchange.sequence_id)
    service.admit_sequences(requests)
    exchange.submit([len(r.prompt_token_ids) for r in requests], is_streamed=is_streamed)
    return Generation(wanted, requests, exchange.timelines, service.client, service.text_model.tokenizer)


def _check_prompt_tokens(job: Job) -> None:
    """Raise InvalidRequest where prompts are too long for the number of sequences, each of which has its own copy."""
    if (num_tokens := sum(len(prompt.token_ids) for prompt in job.prompts) * job.best_of) > MAX_PROMPT_TOKENS:
        name = "n" if job.best_of == job.n else "best_of"
        message = f"`{name}`: the prompts of all sequences have {num_tokens} tokens; {MAX_PROMPT_TOKENS} is the limit."
        raise InvalidRequest(message, param=name)


def generation_request(job: Job, dialect: Dialect, served: ServedModel) -> GenerationRequest:
    """Step 5 for a whole answer, without deadlines. Raises InvalidRequest: prompts too long for their sequences."""
    _check_prompt_tokens(job)
    body = job.body
    return GenerationRequest(
        prompts=job.prompts,
        params=_params(job, served.client.info.sampling_defaults),
        fits_context=job.fits_context or job.max_tokens is None,
        n=job.n,
        best_of=job.best_of,
        output=OutputOptions(
            stop=body.stop_strings,
            includes_stop=body.include_stop_str_in_output,
            columns=None if job.num_logprobs is None else dialect.columns,
            is_prompt_only=job.max_tokens == 0,
            spells_tags=job.reads_calls or job.grammar is not None,
        ),
        cache_salt=body.cache_salt,
        client_salt=body.cache_salt,
        priority=body.priority,
        max_tokens_name=job.max_tokens_name,
    )


def _params(job: Job, defaults: SamplingDefaults) -> SamplingParams:
    """As the body asks; the prompts of a body share a seed that it leaves out."""
    body = job.body
    return SamplingParams(
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_k=defaults.top_k if body.top_k is None else max(0, body.top_k),
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        max_tokens=MAX_TOKENS if job.max_tokens is None else max(1, job.max_tokens),
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        seed=secrets.randbelow(NUM_SEEDS) if body.seed is None else body.seed % NUM_SEEDS,
        num_logprobs=0 if job.num_logprobs is None and job.best_of > job.n else job.num_logprobs,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias,
        num_prompt_logprobs=job.num_logprobs if job.prompts[0].echo is not None else None,
        grammar=job.grammar,
    )


class _Reply:
    """Writes a generation to the client in the form of a dialect."""

    def __init__(self, dialect: Dialect, generation: Generation, service: Service, exchange: Exchange) -> None:
        self._dialect = dialect
        self._generation = generation
        self._exchange = exchange
        self._observer = service.observer
        self._keepalive_interval_s = service.config.keepalive_interval_s
        self._opening = asyncio.Lock()  # the status line goes out once, with a comment or with the first event

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """The status line waits for the first output; from then on, one write for all that a step made due."""
        generation, dialect = self._generation, self._dialect
        first = dialect.first_frames()
        beacon = sse.Beacon(self._keepalive_interval_s, partial(self._keep_alive, request))
        try:
            async with aclosing(generation.outputs) as batches:
                async for batch in batches:
                    resumed_ns = time.monotonic_ns()
                    deltas = generation.pop_deltas(batch)
                    frames = [await dialect.frames(delta) for delta in deltas]
                    written = [delta for delta, frame in zip(deltas, frames, strict=True) if frame]
                    if generation.is_over and not self._exchange.wants_ledgers:
                        frames.append(dialect.last_frames(None))
                    content = b"".join(frames)
                    if not content:
                        continue
                    content, first = sse.escape_line_ends(first + content), b""
                    stream = self._exchange.stream or await self._open(request)
                    encoded_ns, was_paused = time.monotonic_ns(), is_behind(request, len(content))
                    beacon.last_s = encoded_ns / 1e9
                    await stream.write(content)
                    was_paused = was_paused or is_behind(request)
                    self._note_write(written, resumed_ns, encoded_ns, was_paused=was_paused)
                    if generation.is_over:
                        break
        finally:
            await beacon.stop()
        if self._exchange.wants_ledgers:  # in a write of their own: no token waits for them
            last = first + dialect.last_frames(await self._exchange.fetch_ledgers())
            stream = self._exchange.stream or await self._open(request)  # its tokens may have made no frame
            await stream.write(sse.escape_line_ends(last))
        await stream.write_eof()
        return stream

    async def _open(self, request: web.Request) -> web.StreamResponse:
        """Send the status line, unless a comment did so already."""
        exchange = self._exchange
        async with self._opening:
            if exchange.stream is None:
                exchange.stream = await sse.open_stream(request, await exchange.opening_timing())
        return exchange.stream

    async def _keep_alive(self, request: web.Request) -> None:
        if not is_behind(request):  # else it is the client that is silent
            with contextlib.suppress(ConnectionError):  # the handler meets it itself
                await (await self._open(request)).write(sse.COMMENT)

    async def whole(self, request: web.Request) -> web.StreamResponse:
        """Read the outputs to the end and answer with one JSON object."""
        generation, exchange = self._generation, self._exchange
        await generation.run()
        resumed_ns = time.monotonic_ns()
        deltas = [choice.pop_delta() for choice in generation.best_choices()]
        ledgers = await exchange.fetch_ledgers()
        content = msgspec.json.encode(await self._dialect.reply(deltas, ledgers))
        response = web.Response(body=content, content_type="application/json", headers=server_timing(ledgers))
        exchange.stream = response
        encoded_ns = time.monotonic_ns()
        await response.prepare(request)
        await response.write_eof()
        self._note_write(deltas, resumed_ns, encoded_ns, was_paused=is_behind(request))
        return response

    def _note_write(self, deltas: Iterable[Delta], resumed_ns: int, encoded_ns: int, *, was_paused: bool) -> None:
        """Report to the observers that these deltas have been written."""
        written_ns = time.monotonic_ns()
        for delta in deltas:
            timeline = delta.choice.timeline
            if delta.token_ids and delta.arrival is not None:
                index = len(timeline.write_ns)
                timeline.write_ns.append(written_ns)
                delivery = Delivery(delta.arrival, resumed_ns, encoded_ns, written_ns, was_paused, index)
                self._observer.on_write(timeline, delivery)
