"""Answers a generation request, streamed or whole, in the form of an endpoint: its `Dialect`.

Both endpoints take this one path (steps 5, 6 and 12–14 of docs/architecture.md).
"""

import asyncio
import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import msgspec
from aiohttp import web

from roseinfer.messages import Grammar, SamplingDefaults, SamplingParams
from roseinfer.records import Delivery
from roseinfer.server.api import event_stream as sse
from roseinfer.server.connection.connection import is_behind
from roseinfer.server.exchange import EXCHANGE, Exchange
from roseinfer.server.openai.replies import CompletionTokensDetails, PromptTokensDetails, Reply, Usage, server_timing
from roseinfer.server.openai.schema import GenerationBody, StreamOptions
from roseinfer.server.service import SERVICE, Service
from roseinfer.text.choice import Delta, EncodedPrompt, OutputOptions
from roseinfer.text.generation import NUM_SEEDS, Generation, GenerationRequest
from roseinfer.text.logprobs import ScoredToken


class Dialect(ABC):
    """The form in which one endpoint answers."""

    id_prefix: ClassVar[str]
    reply_object: ClassVar[str]
    reply_field: ClassVar[str]  # the field of an unstreamed choice that holds what was generated
    chunk_object: ClassVar[str]
    chunk_field: ClassVar[str]  # the field of a chunk's choice that holds its payload

    @abstractmethod
    def payload(self, delta: Delta) -> bytes:
        """What a chunk's choice holds, as JSON; `sse.NOTHING` where the delta adds nothing."""

    @abstractmethod
    def columns(self, scored: Sequence[ScoredToken]) -> Mapping[str, Sequence[object] | None]:
        """The columns of log-probabilities, ready for JSON."""

    @abstractmethod
    async def content(self, delta: Delta) -> object:
        """What an unstreamed choice holds, ready for JSON."""

    def finish_reason(self, delta: Delta) -> str | None:
        """How the choice ended, if it has, in OpenAI's words; called after `payload` or `content`."""
        return delta.finish_reason

    async def choice(self, delta: Delta) -> dict[str, object]:
        """A choice of an unstreamed reply, ready for JSON."""
        return {
            "index": delta.choice.index,
            self.reply_field: await self.content(delta),
            "logprobs": await delta.encode_logprobs(),
            "finish_reason": self.finish_reason(delta),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one body asks for, with its prompts as tokens."""

    body: GenerationBody
    prompts: list[EncodedPrompt]
    max_tokens: int | None  # None: as many as the context leaves; 0: only the prompt is in the answer
    num_logprobs: int | None
    best_of: int  # sequences of each prompt, of which the best `n` are in the answer
    grammar: Grammar | None = None
    reads_calls: bool = False  # from the text
    max_tokens_name: str = "max_tokens"  # in errors


async def respond(request: web.Request, job: Job, dialect: Dialect) -> web.StreamResponse:
    """Run the job and answer. Raises RequestError before the engine has the request, EngineError after."""
    service, exchange = request.app[SERVICE], request[EXCHANGE]
    first = exchange.timelines[0]
    first.tokenized_ns, first.num_prompt_tokens = time.monotonic_ns(), len(job.prompts[0].token_ids)
    wanted = _generation_request(job, dialect, service, exchange)
    requests = wanted.build_requests(service.client.info, exchange.sequence_id)
    service.admit_sequences(requests)
    exchange.submit([len(r.prompt_token_ids) for r in requests], is_streamed=job.body.stream)
    tokenizer = service.text_model.tokenizer
    generation = Generation(wanted, requests, exchange.timelines, service.client, tokenizer)
    reply = _Reply(dialect, generation, service, exchange, job.body.stream_options)
    return await (reply.stream(request) if job.body.stream else reply.whole(request))


def _generation_request(job: Job, dialect: Dialect, service: Service, exchange: Exchange) -> GenerationRequest:
    """Step 5."""
    body = job.body
    return GenerationRequest(
        prompts=job.prompts,
        params=_params(job, service.client.info.sampling_defaults),
        fills_context=job.max_tokens is None,
        n=body.n,
        best_of=job.best_of,
        output=OutputOptions(
            stop=body.stop_strings,
            includes_stop=body.include_stop_str_in_output,
            columns=None if job.num_logprobs is None else dialect.columns,
            is_prompt_only=job.max_tokens == 0,
            spells_tags=job.reads_calls or job.grammar is not None,
            queue_timeout_name=exchange.waits_by,
        ),
        stream_interval=(body.stream_interval or service.config.stream_interval) if body.stream else None,
        cache_salt=exchange.cache_salt(body.cache_salt),
        priority=body.priority,
        deadline_ns=exchange.deadline_ns,
        queue_deadline_ns=exchange.queue_deadline_ns,
        max_tokens_name=job.max_tokens_name,
    )


def _params(job: Job, defaults: SamplingDefaults) -> SamplingParams:
    """As the body asks; the prompts of a body share a seed that it leaves out."""
    body = job.body
    return SamplingParams(
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_k=defaults.top_k if body.top_k is None else body.top_k,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        max_tokens=job.max_tokens or 1,
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        seed=secrets.randbelow(NUM_SEEDS) if body.seed is None else body.seed % NUM_SEEDS,
        num_logprobs=0 if job.num_logprobs is None and job.best_of > body.n else job.num_logprobs,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias,
        num_prompt_logprobs=job.num_logprobs if job.prompts[0].echo is not None else None,
        grammar=job.grammar,
    )


class _Reply:
    """Writes a generation to the client in the form of a dialect."""

    def __init__(
        self, dialect: Dialect, generation: Generation, service: Service, exchange: Exchange, options: StreamOptions
    ) -> None:
        self._dialect = dialect
        self._generation = generation
        self._exchange = exchange
        self._model_name = service.model_name
        self._observer = service.observer
        self._keepalive_interval_s = service.config.keepalive_interval_s
        self._options = options
        self._id = exchange.reply_id = f"{dialect.id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._opening = asyncio.Lock()  # the status line goes out once, with a comment or with the first event

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """The status line waits for the first output; from then on, one write for all that a step made due."""
        generation, template = self._generation, self._template()
        beacon = sse.Beacon(self._keepalive_interval_s, partial(self._keep_alive, request))
        try:
            async with aclosing(generation.outputs) as batches:
                async for batch in batches:
                    resumed_ns = time.monotonic_ns()
                    deltas = generation.pop_deltas(batch)
                    frames = [self._frame(template, delta, await delta.encode_logprobs()) for delta in deltas]
                    written = [delta for delta, frame in zip(deltas, frames, strict=True) if frame]
                    content = b"".join(frames) + (self._last_frames(template) if generation.is_over else b"")
                    if not content:
                        continue
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
        await stream.write_eof()
        return stream

    async def _open(self, request: web.Request) -> web.StreamResponse:
        """Send the status line, unless a comment did so already."""
        exchange = self._exchange
        async with self._opening:
            if exchange.stream is None:
                headers = {"Server-Timing": server_timing(exchange.ledgers())} if exchange.wants_ledger else {}
                exchange.stream = await sse.open_stream(request, headers)
        return exchange.stream

    async def _keep_alive(self, request: web.Request) -> None:
        if not is_behind(request):  # else it is the client that is silent
            with contextlib.suppress(ConnectionError):  # the handler meets it itself
                await (await self._open(request)).write(sse.COMMENT)

    async def whole(self, request: web.Request) -> web.StreamResponse:
        """Read the outputs to the end and answer with one JSON object."""
        generation, exchange = self._generation, self._exchange
        async with aclosing(generation.outputs) as batches:
            async for batch in batches:
                for output in batch:
                    generation.add_output(output)
                if generation.is_over:
                    break
        resumed_ns = time.monotonic_ns()
        deltas = [choice.pop_delta() for choice in generation.best_choices()]
        reply = Reply(
            id=self._id,
            object=self._dialect.reply_object,
            created=self._created,
            model=self._model_name,
            choices=[await self._dialect.choice(delta) for delta in deltas],
            usage=self._usage(),
        )
        headers = {}
        if exchange.wants_ledger:
            reply.roseinfer_ledger = ledgers = exchange.ledgers()
            headers = {"Server-Timing": server_timing(ledgers)}
        response = web.Response(body=msgspec.json.encode(reply), content_type="application/json", headers=headers)
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

    def _usage(self) -> Usage:
        whole = self._generation
        return _usage_of(
            whole.num_prompt_tokens, whole.num_generated_tokens, whole.num_cached_tokens, whole.num_reasoning_tokens
        )

    def _template(self) -> sse.ChunkTemplate:
        return sse.ChunkTemplate(
            reply_id=self._id,
            kind=self._dialect.chunk_object,
            created=self._created,
            model=self._model_name,
            field=self._dialect.chunk_field,
            num_choices=len(self._generation.choices),
            include_usage=self._options.include_usage,
        )

    def _frame(self, template: sse.ChunkTemplate, delta: Delta, logprobs: bytes | None) -> bytes:
        """Step 13."""
        payload, choice, usage = self._dialect.payload(delta), delta.choice, None
        if self._options.continuous_usage_stats:
            num_prompt = choice.timeline.num_prompt_tokens
            of_choice = _usage_of(num_prompt, choice.num_tokens, choice.num_cached_tokens, choice.num_reasoning_tokens)
            usage = msgspec.json.encode(of_choice)
        return template.choice(choice.index, payload, logprobs, self._dialect.finish_reason(delta), usage)

    def _last_frames(self, template: sse.ChunkTemplate) -> bytes:
        """Step 14."""
        frames = b""
        if self._exchange.wants_ledger:
            frames += template.ledger(msgspec.json.encode(self._exchange.ledgers()))
        if self._options.include_usage:
            frames += template.usage(msgspec.json.encode(self._usage()))
        return frames + sse.DONE


def _usage_of(num_prompt: int, num_generated: int, num_cached: int, num_reasoning: int) -> Usage:
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning),
    )
