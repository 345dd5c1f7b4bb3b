"""`LLM`: generates text in a Python program, without a server.

An event loop in one background thread runs the engine's client; callers hand it requests and take pieces of text from
a queue. With the default transport the engine has its own process, so a load generator does not disturb what it
measures. Each request has a `RequestTimeline`; its `write_ns` are the moments when pieces became available here.
"""

import asyncio
import itertools
import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from roseinfer import wiring
from roseinfer.config.options import Config
from roseinfer.config.values import shown
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.errors import (
    EngineError,
    InvalidRequest,
    Overloaded,
    PromptName,
    RequestError,
    RoseinferError,
)
from roseinfer.llm.arguments import (
    Message,
    Prompt,
    as_prompt,
    as_prompts,
    as_stops,
    check_params,
    check_settings,
    with_text,
)
from roseinfer.llm.ends import close, close_in_the_end
from roseinfer.llm.streams import Stream, Streams, as_error
from roseinfer.messages import (
    Grammar,
    MinTokens,
    Pooling,
    SamplingParams,
    StartupProgress,
    TokenLogprobs,
    TokenOutput,
    check_text,
    check_value,
)
from roseinfer.observe.hub import Hub
from roseinfer.records import FinishReason, Observer, RequestTimeline
from roseinfer.runtime.loop_thread import LoopThread
from roseinfer.text.answers.reasoning import AS_THE_TEMPLATE_HAS_IT, Effort, Thinking
from roseinfer.text.choice import Delta, EncodedPrompt, OutputOptions
from roseinfer.text.conversation import Conversation, prepare_turn
from roseinfer.text.embeddings import embedding_params, finished
from roseinfer.text.generation import Generation, GenerationRequest
from roseinfer.text.grammar.checker import GrammarChecker, check_form
from roseinfer.text.templates import NO_VARIABLES, VARIABLES_FIELD
from roseinfer.text.text_model import TextModel
from roseinfer.text.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request. `text` ends before the stop string that ended it, if one did.

    `token_ids` include the token that ended the text. `logprobs` has an entry for each of them, natural logarithms,
    where `SamplingParams.num_logprobs` asked for it, and is None elsewhere. `reasoning` are the thoughts of a chat.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    timeline: RequestTimeline
    logprobs: list[TokenLogprobs] | None = None
    reasoning: str = ""
    embedding: bytes = b""  # as the engine pooled it, where `SamplingParams.pooling` asked for it

    def __repr__(self) -> str:
        """One line, however long the text is, without the timeline's stamps."""
        facts = {
            "request_id": self.timeline.request_id,
            "text": self.text,
            "finish_reason": self.finish_reason.value,
            "num_prompt_tokens": self.timeline.num_prompt_tokens,
            "num_completion_tokens": len(self.token_ids),
        }
        return f"Completion({', '.join(f'{name}={shown(fact)}' for name, fact in facts.items())})"


class LLM:
    """One model, ready to generate. A context manager; `close` stops the engine and joins every thread.

    `model` is a checkpoint directory or a Hugging Face id; without one `model.path` of the configuration holds, which
    is the embedded model by default. `submit` raises Overloaded while `max_inflight` requests are unfinished. With
    `tokenize_workers` = 0 a text prompt is tokenised inside `submit`; otherwise `submit` returns at once and so many
    are tokenised at a time. A grammar is checked inside `submit`, as a server checks it. Every id that `submit` returns
    must be given to `stream`, `stream_tokens`, `result` or `abort`. An argument of the wrong type or out of its range
    raises InvalidRequest that names it, in this constructor ConfigError. A call after `close` raises EngineDead.

    `config` is the configuration in use, `info` what the engine reported of itself, and `tokenizer` the checkpoint's.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: Config | None = None,
        observers: Sequence[Observer] = (),
        on_progress: Callable[[StartupProgress], None] = lambda _: None,
        tokenize_workers: int = 0,
        max_inflight: int | None = None,
    ) -> None:
        config = Config() if config is None else config
        check_settings(config, observers, on_progress, tokenize_workers=tokenize_workers, max_inflight=max_inflight)
        self.config = config if model is None else replace(config, model=replace(config.model, path=model))
        self._streams = Streams()
        self._tokenize_workers = tokenize_workers
        self._encoding = asyncio.Semaphore(tokenize_workers)
        self._places = None if max_inflight is None else threading.BoundedSemaphore(max_inflight)
        self._ids = map(f"llm-{uuid.uuid4().hex[:8]}-{{}}".format, itertools.count())  # no generator: threads share it
        self._client = wiring.build_client(self.config, Hub(observers))
        with ExitStack() as undo:
            self._loop = undo.enter_context(closing(LoopThread("llm")))
            used = undo.enter_context(ExitStack())  # requests use it, so it is closed after their end
            undo.callback(self._loop.stop, partial(_stop_engine, self._client))
            info = self.info = self._loop.call(self._client.start(on_progress))
            self._text_model = TextModel.loader(self.config)(Path(self.info.checkpoint_dir))
            self.tokenizer: Tokenizer = used.enter_context(closing(self._text_model.tokenizer))
            self._checker = used.enter_context(closing(GrammarChecker(self.config.structured, lambda: info)))
            self._undo = undo.pop_all()
        close_in_the_end(self, self._undo, self._loop, self._streams)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End running requests with reason abort, and stop the engine. Calls that wait for it raise EngineDead."""
        self._loop.check_can_wait()
        close(self._undo)

    # --- for callers, from any thread -------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` also those the model expects around a text."""
        check_text(text, "text")
        check_value(add_special_tokens, bool, "add_special_tokens")
        return self._encode([text], add_special_tokens=add_special_tokens)[0]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        cache_salt: str = "",
    ) -> str:
        """Start one request and return its id. Raises RequestError for one that cannot run, or Overloaded.

        Without `params` the model's own are taken. Without a seed in them the request gets a new one.
        """
        prompt = as_prompt(prompt, "prompt")
        wanted = self._new_request(params, stop, cache_salt)
        stream = self._new_stream(wanted.params)
        self._check_grammar(wanted.params)
        if self._places is not None:
            if not self._places.acquire(blocking=False):
                raise Overloaded("As many requests as allowed are unfinished.")
            stream.has_place = True
        try:
            if isinstance(prompt, str) and self._tokenize_workers:
                self._loop.begin(self._drive_text(stream, wanted, prompt))
            else:
                token_ids = self._encode([prompt])[0] if isinstance(prompt, str) else prompt
                encoded = EncodedPrompt(token_ids, PromptName("prompt", is_text=isinstance(prompt, str)))
                self._loop.begin(self._drive([stream], self._new_generation([stream], wanted, [encoded])))
        except BaseException:
            self._leave_place(stream)
            raise
        self._streams.add_streams([stream])
        return stream.timeline.request_id

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        cache_salt: str = "",
    ) -> list[Completion]:
        """Run all prompts, or a single one, as one batch and wait; nothing starts when one of them cannot run.

        `params` are as for `submit`: without a seed each prompt gets its own; a given one is for all of them.
        """
        wanted = self._new_request(params, stop, cache_salt)
        encoded = self._encode_prompts(prompts)
        if encoded:
            self._check_grammar(wanted.params)
        return self._complete(wanted, encoded)

    def _encode_prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[EncodedPrompt]:
        given = [as_prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(as_prompts(prompts))]
        texts = iter(self._encode([prompt for prompt in given if isinstance(prompt, str)]))
        return [
            EncodedPrompt(next(texts), PromptName(f"prompts[{i}]", is_text=True))
            if isinstance(prompt, str)
            else EncodedPrompt(prompt, PromptName(f"prompts[{i}]"))
            for i, prompt in enumerate(given)
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        cache_salt: str = "",
    ) -> list[npt.NDArray[np.float32]]:
        """The embeddings [dimensions] of all prompts, or of a single one, as one batch.

        `pooling` takes the hidden row of the last token or the mean of all rows; without it the checkpoint decides.
        Fewer `dimensions` than the model has are the first ones.
        """
        check_value(pooling, Pooling | None, "pooling")
        check_value(dimensions, Annotated[int, Meta(ge=1)] | None, "dimensions")
        wanted = self._new_request(embedding_params(self.info.embedding, pooling, dimensions), (), cache_salt)
        embedded = self._complete(wanted, self._encode_prompts(prompts))
        return [finished(each.embedding, self.info.embedding, dimensions) for each in embedded]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        cache_salt: str = "",
        variables: Mapping[str, Any] = NO_VARIABLES,
        thinking: Thinking = AS_THE_TEMPLATE_HAS_IT,
    ) -> Completion:
        """Generate the next turn of a conversation and wait. Thoughts are in `reasoning`, the rest is the `text`.

        Each message is a mapping as the model's chat template reads it, with `role` and `content`, which is a text or
        a list of parts `{"type": "text", "text": …}`. `variables` are those of the template, and go before what
        `thinking` says. A grammar applies behind the thoughts.
        """
        check_value(messages, Annotated[list[Message], Meta(min_length=1)], "messages")
        if not isinstance(thinking, Thinking):
            raise InvalidRequest(f"`thinking`: expected Thinking; got {shown(thinking)}.", param="thinking")
        check_value(thinking.effort, Effort | None, "thinking.effort")
        check_value(thinking.max_tokens, MinTokens | None, "thinking.max_tokens")
        check_value(variables, dict[str, Any], "variables")
        wanted = self._new_request(params, stop, cache_salt)
        check_value(msgspec.structs.asdict(wanted.params), SamplingParams)
        grammar = wanted.params.grammar
        conversation = Conversation(
            turns=lambda: [with_text(message) for message in messages],
            num_chars=sum(len(str(message)) for message in messages),
            form=None if grammar is None else (grammar, "grammar"),
            variables=variables,
            thinking=thinking,
        )
        most, tool_format = self.info.max_model_len, self.config.structured.tool_format
        try:
            turn = self._loop.call(prepare_turn(conversation, self._text_model, self._checker, tool_format, most))
        except RequestError as error:  # by the names of a server's body
            error.message = error.message.replace(VARIABLES_FIELD, "variables")
            error.param = error.param and error.param.replace(VARIABLES_FIELD, "variables")
            error.args = (error.message,)
            raise
        wanted = replace(wanted, params=msgspec.structs.replace(wanted.params, grammar=turn.grammar))
        [completion] = self._complete(wanted, [turn.prompt])
        parts = self._loop.call(turn.parser().read_whole(completion.text))
        return replace(completion, text=parts.content, reasoning=parts.reasoning)

    def _complete(self, wanted: GenerationRequest, prompts: Sequence[EncodedPrompt]) -> list[Completion]:
        """Run all prompts as one batch and wait."""
        streams = [self._new_stream(wanted.params) for _ in prompts]
        self._loop.begin(self._drive(streams, self._new_generation(streams, wanted, prompts)))
        self._streams.add_streams(streams)
        try:
            return [self.result(stream.timeline.request_id) for stream in streams]
        finally:
            for stream in streams:
                self.abort(stream.timeline.request_id)

    def stream(self, request_id: str) -> Iterator[str]:
        """Pieces of text as they come, once; leaving early aborts. Raises UnknownRequest at once, later EngineError."""
        return self._pieces(self._streams.find(request_id), lambda delta: delta.text)

    def stream_tokens(self, request_id: str) -> Iterator[list[int]]:
        """As `stream`, but the token ids of each piece, with the token that ended the text, which adds none."""
        return self._pieces(self._streams.find(request_id), lambda delta: delta.token_ids)

    def result(self, request_id: str) -> Completion:
        """Wait for the end. Raises what `stream` does; after an `abort` or `close` it returns what there was."""
        stream = self._streams.find(request_id)
        deltas, timeline = list(self._pieces(stream, lambda delta: delta)), stream.timeline
        assert timeline.finish_reason is not None, "a finished request has a reason"
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        logprobs = None if stream.logprobs is None else stream.logprobs[: len(token_ids)]
        return Completion(
            "".join(delta.text for delta in deltas),
            token_ids,
            timeline.finish_reason,
            timeline,
            logprobs,
            embedding=deltas[-1].choice.embedding if deltas else b"",
        )

    def abort(self, request_id: str) -> None:
        """End a request and forget its text. Unknown and finished ids are ignored."""
        stream = self._streams.remove(request_id)
        if stream is not None and not stream.is_finished:
            self._loop.post(self._abort, stream)

    def timeline(self, request_id: str) -> RequestTimeline:
        """The request's stamps so far. Raises UnknownRequest when some thousands of others have ended after it."""
        return self._streams.timeline(request_id)

    def _pieces(self, stream: Stream, piece_of: Callable[[Delta], T]) -> Iterator[T]:
        try:
            self._loop.check_can_wait()
            yield from filter(None, map(piece_of, stream.iter_deltas()))
        finally:
            self.abort(stream.timeline.request_id)

    def _new_request(
        self, params: SamplingParams | None, stop: str | Sequence[str], cache_salt: str
    ) -> GenerationRequest:
        """Without its prompts. Raises InvalidRequest for a value of the wrong type."""
        stops = as_stops(stop)
        check_params(params)
        check_text(cache_salt, "cache_salt")
        params = params or SamplingParams(**msgspec.structs.asdict(self.info.sampling_defaults))
        has_logprobs = params.num_logprobs is not None
        output = OutputOptions(stop=stops, keeps_logprobs=has_logprobs, spells_tags=params.grammar is not None)
        return GenerationRequest(
            prompts=(),
            params=params,
            output=output,
            stream_interval=self.config.server.stream_interval,
            cache_salt=cache_salt,
            client_salt=cache_salt,
        )

    def _new_stream(self, params: SamplingParams) -> Stream:
        now_ns = time.monotonic_ns()
        timeline = RequestTimeline(request_id=next(self._ids), recv_ns=now_ns, parsed_ns=now_ns, is_streamed=True)
        return Stream(timeline, logprobs=None if params.num_logprobs is None else [])

    def _check_grammar(self, params: SamplingParams) -> None:
        """Raises InvalidRequest for a grammar that does not compile; `check_request` refuses what is no Grammar."""
        if isinstance(params.grammar, Grammar):
            self._loop.call(check_form((params.grammar, "grammar"), self._checker))

    def _new_generation(
        self, streams: Sequence[Stream], wanted: GenerationRequest, prompts: Sequence[EncodedPrompt]
    ) -> Generation:
        """One stream for each prompt. Raises RequestError when the engine cannot run one."""
        wanted = replace(wanted, prompts=prompts)
        timelines = [stream.timeline for stream in streams]
        requests = wanted.build_requests(self.info, lambda index: timelines[index].request_id)
        for timeline in timelines:
            timeline.tokenized_ns = time.monotonic_ns()
        generation = Generation(wanted, requests, timelines, self._client, self.tokenizer)
        for stream, choice in zip(streams, generation.choices, strict=True):
            if stream.logprobs is not None:
                stream.logprobs = choice.logprobs
        return generation

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return self._loop.call(self.tokenizer.encode(texts, add_special_tokens=add_special_tokens))

    # --- on the loop ------------------------------------------------------------------------------------------------

    async def _drive(self, streams: Sequence[Stream], generation: Generation) -> None:
        with self._running(streams):
            await self._run(streams, generation)

    async def _drive_text(self, stream: Stream, wanted: GenerationRequest, text: str) -> None:
        with self._running([stream]):
            async with self._encoding:
                [token_ids] = await self.tokenizer.encode([text], add_special_tokens=True)
                prompt = EncodedPrompt(token_ids, PromptName("prompt", is_text=True))
                generation = self._new_generation([stream], wanted, [prompt])
            await self._run([stream], generation)

    @contextmanager
    def _running(self, streams: Sequence[Stream]) -> Iterator[None]:
        """Open the timelines, and in the end finish every stream that has no end yet, so that no caller waits."""
        for stream in streams:
            self._client.open_timeline(stream.timeline)
        try:
            yield
        finally:
            error = as_error(sys.exception(), streams)
            failure = FinishReason.REJECTED if isinstance(error, RequestError) else FinishReason.ERROR
            for stream in streams:
                self._finish(stream, FinishReason.ABORT if error is None else failure, error)

    async def _run(self, streams: Sequence[Stream], generation: Generation) -> None:
        aborted = [stream for stream in streams if stream.is_aborted]  # before the engine has their requests
        if len(aborted) == len(streams):
            return
        for stream in aborted:
            asyncio.get_running_loop().call_soon(self._abort, stream)  # when it has them
        by_id = {stream.timeline.request_id: stream for stream in streams}
        async with aclosing(generation.outputs) as batches:
            async for batch in batches:
                for output in batch:
                    self._route(by_id[output.request_id], generation, output)

    def _route(self, stream: Stream, generation: Generation, output: TokenOutput) -> None:
        try:
            choice = generation.add_output(output)
        except EngineError as error:  # of this sequence alone: the others go on
            self._finish(stream, FinishReason.ERROR, None if stream.is_aborted else error)
            return
        if choice.is_due(self.config.server.stream_interval):
            delta = choice.pop_delta()
            stream.deltas.put(delta)
            if delta.token_ids:
                stream.timeline.write_ns.append(time.monotonic_ns())
        if choice.finish_reason is not None:
            self._finish(stream, choice.finish_reason)

    def _abort(self, stream: Stream) -> None:
        stream.is_aborted = True
        self._client.abort(stream.timeline.request_id)

    def _finish(self, stream: Stream, reason: FinishReason, error: RoseinferError | None = None) -> None:
        if stream.is_finished:
            return
        stream.is_finished = True
        timeline = stream.timeline
        timeline.end_ns = time.monotonic_ns()
        if timeline.finish_reason is None:
            timeline.finish_reason = reason
        if error is not None:
            timeline.error_code = error.code or ""
        self._client.close_timeline(timeline)
        self._leave_place(stream)
        stream.deltas.put(error)

    def _leave_place(self, stream: Stream) -> None:
        if self._places is not None and stream.has_place:
            stream.has_place = False
            self._places.release()


async def _stop_engine(client: AsyncEngine) -> None:
    await client.close()
    await asyncio.get_running_loop().shutdown_default_executor()
