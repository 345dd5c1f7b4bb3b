"""Turns validated prompts into engine requests, and the engine's outputs into a reply, streamed or whole.

Both endpoints walk this one path (steps 5, 6 and 12–14 of docs/architecture.md); what they say differently is a
`Dialect`. Knows no field of a body but those they share.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web

from roseinfer.errors import PromptName
from roseinfer.messages import Grammar, Request, SamplingDefaults, SamplingParams, TokenOutput, check_request
from roseinfer.records import Delivery
from roseinfer.server.connection.connection import is_behind
from roseinfer.server.exchange import EXCHANGE, Exchange
from roseinfer.server.openai import event_stream as sse
from roseinfer.server.openai.schema import GenerationBody
from roseinfer.server.openai.schema_answers import PromptTokensDetails, Reply, Usage, server_timing
from roseinfer.server.openai.score_limits import most_tokens
from roseinfer.server.service import SERVICE, Service
from roseinfer.text.choice import Choice, Delta, Echo, Telling
from roseinfer.text.logprobs import Columns, ScoredToken

_SEEDS = 2**63


class Dialect(Protocol):
    """What one endpoint says in its own words."""

    id_prefix: str
    reply_object: str  # of an unstreamed reply
    chunk_object: str
    chunk_field: str  # what a chunk's choice carries its payload under

    def payload(self, delta: Delta) -> bytes:
        """What a chunk's choice carries, as JSON; `sse.NOTHING` where the delta has nothing to tell."""

    def scores(self, scored: Sequence[ScoredToken]) -> Mapping[str, Sequence[object] | None]:
        """The columns of log-probabilities, ready for JSON."""

    def finish_reason(self, delta: Delta) -> str | None:
        """How the choice ended, if it has, in OpenAI's words; asked for after `payload`."""

    async def choice(self, delta: Delta, logprobs: msgspec.Raw | None) -> object:
        """A choice of an unstreamed reply, ready for JSON; read in pieces where reading takes long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one body asks for, with its prompts as tokens."""

    body: GenerationBody
    prompts: list[list[int]]
    prompt_names: list[PromptName]
    max_tokens: int | None  # None: as many as the context leaves; 0: the prompt alone is told
    num_logprobs: int | None
    num_sequences: int  # of each prompt; the best `n` are told
    echoes: list[Echo] | None = None  # of each prompt, where it is told too
    grammar: Grammar | None = None
    reads_calls: bool = False  # from the text
    limit_name: str = "max_tokens"  # what that is called in an error


async def respond(request: web.Request, job: Job, dialect: Dialect) -> web.StreamResponse:
    """Run the job and tell the client. Raises RequestError before the engine hears of it, EngineError after."""
    service, exchange = request.app[SERVICE], request[EXCHANGE]
    first = exchange.timelines[0]
    first.tokenized_ns, first.num_prompt_tokens = time.monotonic_ns(), len(job.prompts[0])
    requests = _requests(job, service, exchange)
    service.admit_sequences(requests)
    exchange.submit([len(r.prompt_token_ids) for r in requests], is_streamed=job.body.stream)
    generation = Generation(job, dialect.scores, requests, service, exchange)
    reply = _Reply(dialect, service.model_name, generation)
    return await (reply.stream(request) if job.body.stream else reply.whole(request))


def _requests(job: Job, service: Service, exchange: Exchange) -> list[Request]:
    """Step 5: as many for each prompt as are asked for, all validated. Raises InvalidRequest or PromptTooLong."""
    body, info = job.body, service.client.info
    seed = secrets.randbelow(_SEEDS) if body.seed is None else body.seed
    limits = _limits(body, exchange)
    requests: list[Request] = []
    kept = None if body.stream else job.num_logprobs
    most = most_tokens(len(job.prompts) * job.num_sequences, kept, job.max_tokens, job.limit_name)
    for name, prompt in zip(job.prompt_names, job.prompts, strict=True):
        params = _params(job, info.sampling_defaults, min(most, info.max_model_len - len(prompt)))
        check_request(params, prompt, info, name, job.limit_name)
        for i in range(job.num_sequences):
            request_id = exchange.sequence_id(len(requests))
            seeded = msgspec.structs.replace(params, seed=(seed + i) % _SEEDS)
            requests.append(Request(request_id=request_id, prompt_token_ids=prompt, params=seeded, **limits))
    return requests


def _limits(body: GenerationBody, exchange: Exchange) -> dict[str, Any]:
    """Of a request: with whom it shares prefixes, how soon its turn comes, and by when it must begin and end."""
    return {
        "cache_salt": exchange.cache_salt(body.cache_salt),
        "deadline_ns": exchange.deadline_ns,
        "queue_deadline_ns": exchange.queue_deadline_ns,
        "priority": body.priority,
    }


def _params(job: Job, defaults: SamplingDefaults, num_left: int) -> SamplingParams:
    """As the body asks, but for the seed; without a `max_tokens` all that the context leaves."""
    body = job.body
    return SamplingParams(
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_k=defaults.top_k if body.top_k is None else body.top_k,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        max_tokens=max(1, num_left if job.max_tokens is None else job.max_tokens),
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        num_logprobs=0 if job.num_logprobs is None and job.num_sequences > body.n else job.num_logprobs,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias,
        num_prompt_logprobs=None if job.echoes is None else job.num_logprobs,
        grammar=job.grammar,
    )


def _telling(job: Job, columns: Columns, prompt_index: int, waits_by: str) -> Telling:
    return Telling(
        stop=job.body.stop_strings,
        includes_stop=job.body.include_stop_str_in_output,
        columns=None if job.num_logprobs is None else columns,
        echo=None if job.echoes is None else job.echoes[prompt_index],
        is_prompt_only=job.max_tokens == 0,
        spells_tags=job.reads_calls or job.grammar is not None,
        waits_by=waits_by,
    )


class Generation:
    """The sequences of one exchange, on their way through the engine."""

    def __init__(
        self, job: Job, scores: Columns, requests: list[Request], service: Service, exchange: Exchange
    ) -> None:
        body, tokenizer = job.body, service.text_model.tokenizer
        self.exchange = exchange
        self.include_usage = body.stream_options.include_usage
        tellings = [_telling(job, scores, prompt_index, exchange.waits_by) for prompt_index in range(len(job.prompts))]
        self.choices = [
            Choice(i, tokenizer, timeline, tellings[i // job.num_sequences])
            for i, timeline in enumerate(exchange.timelines)
        ]
        self.outputs = service.client.generate(requests, exchange.timelines)
        self.keepalive_interval_s = service.config.keepalive_interval_s
        self._interval = body.stream_interval or service.config.stream_interval
        self._is_streamed = body.stream
        self._by_id = {r.request_id: choice for r, choice in zip(requests, self.choices, strict=True)}
        self._num_left = len(requests)
        self._num_prompt_tokens = sum(map(len, job.prompts))
        self._num_told, self._num_sequences = body.n, job.num_sequences  # of each prompt
        self._client, self._observer = service.client, service.observer

    @property
    def is_over(self) -> bool:
        """Every choice has its finish reason; the engine may not have heard of a stop string yet."""
        return self._num_left == 0

    def take(self, outputs: Iterable[TokenOutput]) -> None:
        """Step 12. Raises EngineError when the engine could not finish a sequence."""
        for output in outputs:
            choice = self._by_id[output.request_id]
            was_finished = choice.finish_reason is not None
            choice.take(output)
            if self._is_streamed:
                choice.note_due(self._interval)
            if choice.finish_reason is not None and not was_finished:
                self._num_left -= 1
                if output.finish_reason is None:  # the stop is in the text, which the engine does not know
                    self._client.abort(output.request_id)

    def due(self, outputs: Iterable[TokenOutput]) -> list[Delta]:
        """What these outputs made due, in their order."""
        choices = dict.fromkeys(self._by_id[output.request_id] for output in outputs)
        return [choice.pop() for choice in choices if choice.is_due(self._interval)]

    def best(self) -> list[Choice]:
        """The choices to tell when all are over: of each prompt the likeliest by the token, if there are more."""
        if self._num_sequences == self._num_told:
            return self.choices
        best: list[Choice] = []
        for first in range(0, len(self.choices), self._num_sequences):
            of_prompt = self.choices[first : first + self._num_sequences]
            best += sorted(of_prompt, key=lambda choice: -choice.mean_logprob)[: self._num_told]
        for index, choice in enumerate(best):
            choice.index = index
        return best

    def note_write(self, deltas: Iterable[Delta], resumed_ns: int, encoded_ns: int, *, was_paused: bool) -> None:
        """The write of these deltas has returned."""
        written_ns = time.monotonic_ns()
        for delta in deltas:
            timeline = delta.choice.timeline
            if delta.token_ids and delta.arrival is not None:
                index = len(timeline.write_ns)
                timeline.write_ns.append(written_ns)
                delivery = Delivery(delta.arrival, resumed_ns, encoded_ns, written_ns, was_paused, index)
                self._observer.on_write(timeline, delivery)

    def usage(self) -> Usage:
        num_generated = sum(choice.num_tokens for choice in self.choices)
        num_cached = sum(choice.num_cached_tokens for choice in self.choices[:: self._num_sequences])
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=num_generated,
            total_tokens=self._num_prompt_tokens + num_generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        )


class _Reply:
    """Tells a generation to the client in the words of a dialect."""

    def __init__(self, dialect: Dialect, model_name: str, generation: Generation) -> None:
        self._dialect = dialect
        self._model_name = model_name
        self._generation = generation
        self._id = generation.exchange.reply_id = f"{dialect.id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._wants_ledger = generation.exchange.wants_ledger
        self._opening = asyncio.Lock()  # the status line goes out once, whoever is first

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """The status line waits for the first output; from then on, one write for all that a step made due."""
        generation, template = self._generation, self._template()
        beacon = sse.Beacon(generation.keepalive_interval_s, partial(self._keep_alive, request))
        try:
            async with aclosing(generation.outputs) as batches:
                async for outputs in batches:
                    resumed_ns = time.monotonic_ns()
                    generation.take(outputs)
                    deltas = generation.due(outputs)
                    frames = [self._frame(template, delta, await delta.encode_scores()) for delta in deltas]
                    told = [delta for delta, frame in zip(deltas, frames, strict=True) if frame]
                    content = b"".join(frames) + (self._last_frames(template) if generation.is_over else b"")
                    if not content:
                        continue
                    stream = generation.exchange.stream or await self._open(request)
                    encoded_ns, was_paused = time.monotonic_ns(), is_behind(request, len(content))
                    beacon.last_s = encoded_ns / 1e9
                    await stream.write(content)
                    was_paused = was_paused or is_behind(request)
                    generation.note_write(told, resumed_ns, encoded_ns, was_paused=was_paused)
                    if generation.is_over:
                        break
        finally:
            await beacon.stop()
        await stream.write_eof()
        return stream

    async def _open(self, request: web.Request) -> web.StreamResponse:
        """Send the status line, unless a comment did so already."""
        exchange = self._generation.exchange
        async with self._opening:
            if exchange.stream is None:
                headers = self._timing(exchange.ledgers()) if self._wants_ledger else {}
                exchange.stream = await sse.open_stream(request, headers)
        return exchange.stream

    async def _keep_alive(self, request: web.Request) -> None:
        if not is_behind(request):  # else it is the client that is silent
            with contextlib.suppress(ConnectionError):  # the handler hears of that itself
                await (await self._open(request)).write(sse.COMMENT)

    async def whole(self, request: web.Request) -> web.StreamResponse:
        """The same walk, told at its end."""
        generation = self._generation
        async with aclosing(generation.outputs) as batches:
            async for outputs in batches:
                generation.take(outputs)
                if generation.is_over:
                    break
        resumed_ns = time.monotonic_ns()
        deltas = [choice.pop() for choice in generation.best()]
        reply = Reply(
            id=self._id,
            object=self._dialect.reply_object,
            created=self._created,
            model=self._model_name,
            choices=[await self._dialect.choice(delta, await delta.encode_scores()) for delta in deltas],
            usage=generation.usage(),
        )
        headers = {}
        if self._wants_ledger:
            reply.roseinfer_ledger = ledgers = generation.exchange.ledgers()
            headers = self._timing(ledgers)
        response = web.Response(body=msgspec.json.encode(reply), content_type="application/json", headers=headers)
        generation.exchange.stream = response
        encoded_ns = time.monotonic_ns()
        await response.prepare(request)
        await response.write_eof()
        generation.note_write(deltas, resumed_ns, encoded_ns, was_paused=is_behind(request))
        return response

    def _template(self) -> sse.ChunkTemplate:
        return sse.ChunkTemplate(
            reply_id=self._id,
            kind=self._dialect.chunk_object,
            created=self._created,
            model=self._model_name,
            field=self._dialect.chunk_field,
            num_choices=len(self._generation.choices),
            include_usage=self._generation.include_usage,
        )

    def _frame(self, template: sse.ChunkTemplate, delta: Delta, logprobs: bytes | None) -> bytes:
        """Step 13."""
        payload = self._dialect.payload(delta)
        return template.choice(delta.choice.index, payload, logprobs, self._dialect.finish_reason(delta))

    def _last_frames(self, template: sse.ChunkTemplate) -> bytes:
        """Step 14."""
        frames = b""
        if self._wants_ledger:
            frames += template.ledger(msgspec.json.encode(self._generation.exchange.ledgers()))
        if self._generation.include_usage:
            frames += template.usage(msgspec.json.encode(self._generation.usage()))
        return frames + sse.DONE

    def _timing(self, ledgers: list[dict[str, object]]) -> dict[str, str]:
        return {"Server-Timing": server_timing(ledgers)}
