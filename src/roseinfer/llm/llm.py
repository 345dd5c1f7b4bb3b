"""The engine for programs with threads: turns prompts into text without a server. Knows no HTTP and no torch.

An event loop in one background thread hosts the `AsyncEngine`; callers hand it requests and take pieces of text from
a queue. With the default transport the engine has its own process, so a load generator does not disturb what it
measures. Each request has a `RequestTimeline`; its `write_ns` are the moments when pieces became available here.
"""

import asyncio
import itertools
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from roseinfer import wiring
from roseinfer.config.tree import Config
from roseinfer.errors import EngineError, Overloaded, PromptName, RequestError, RoseinferError
from roseinfer.llm.arguments import Prompt, as_prompt, as_prompts, as_stops, check_params, check_settings
from roseinfer.llm.completion import Completion
from roseinfer.llm.streams import Stream, Streams, as_told
from roseinfer.messages import (
    EngineInfo,
    Grammar,
    Request,
    SamplingParams,
    StartupProgress,
    TokenOutput,
    check_request,
    check_text,
    check_value,
)
from roseinfer.records import FinishReason, Observer, RequestTimeline
from roseinfer.runtime.loop_thread import LoopThread
from roseinfer.text.choice import Choice, Delta, Telling
from roseinfer.text.grammar.checker import GrammarChecker
from roseinfer.text.tokenizer import Tokenizer

T = TypeVar("T")


class LLM:
    """One model, ready to generate. A context manager; `close` stops the engine and joins every thread.

    `model` is a checkpoint directory or a Hugging Face id; without one the configuration's `model.path` holds, which
    is the embedded model by default. `max_inflight` bounds what `submit` lets in: past it Overloaded is raised. With
    `tokenize_workers` = 0 a text prompt is tokenised inside `submit`; otherwise `submit` returns at once and so many
    are tokenised at a time. A grammar is checked inside `submit`, as a server checks it. Every id that `submit` returns
    must be given to `stream`, `stream_tokens`, `result` or `abort`. An argument of the wrong type or out of its range
    is an InvalidRequest that names it, and one of this constructor a ConfigError. What is begun after `close` raises
    EngineDead.

    `config` is what it runs with, `info` what became of it, and `tokenizer` that of the checkpoint.
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
        check_settings(config, observers, tokenize_workers=tokenize_workers, max_inflight=max_inflight)
        self.config = config if model is None else replace(config, model=replace(config.model, path=model))
        self._streams = Streams()
        self._tokenize_workers = tokenize_workers
        self._encoding = asyncio.Semaphore(tokenize_workers)
        self._places = None if max_inflight is None else threading.BoundedSemaphore(max_inflight)
        self._ids = map(f"llm-{uuid.uuid4().hex[:8]}-{{}}".format, itertools.count())  # no generator: threads share it
        self._client = wiring.build_client(self.config, observers)
        with ExitStack() as undo:
            self._loop = undo.enter_context(closing(LoopThread("llm")))
            used = undo.enter_context(ExitStack())  # by requests, so it is closed when those have ended
            undo.callback(self._loop.stop, self._stop_engine)
            self.info: EngineInfo = self._loop.call(self._client.start(on_progress))
            self.tokenizer = used.enter_context(closing(Tokenizer.load(Path(self.info.checkpoint_dir))))
            self._checker = used.enter_context(closing(GrammarChecker(self.config.structured, lambda: self.info)))
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is running with reason abort, stop the engine, join the thread.

        Calls that wait for an answer raise EngineDead. Only the first call does anything; a later one returns at once.
        """
        if self._loop.shut():
            self._undo.close()

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

        Without `params` the model's own are taken. Without a seed in them the request is given a new one.
        """
        stream = self._new_stream(prompt, params, stop, cache_salt, "prompt")
        self._check_grammar(stream.params)
        if self._places is not None:
            if not self._places.acquire(blocking=False):
                raise Overloaded("As many requests as allowed are unfinished.")
            stream.has_place = True
        try:
            if not isinstance(stream.prompt, str):
                self._give_tokens(stream, stream.prompt)
            elif not self._tokenize_workers:
                self._give_tokens(stream, self._encode([stream.prompt])[0])
            self._start([stream])
        except BaseException:
            self._leave_place(stream)
            raise
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

        `params` are as for `submit`: without a seed each prompt is given its own; one that is given is for all of them.
        """
        streams = [
            self._new_stream(prompt, params, stop, cache_salt, f"prompts[{i}]")
            for i, prompt in enumerate(as_prompts(prompts))
        ]
        for stream in streams[:1]:  # they share it
            self._check_grammar(stream.params)
        encoded = iter(self._encode([stream.prompt for stream in streams if isinstance(stream.prompt, str)]))
        for i, stream in enumerate(streams):
            token_ids = next(encoded) if isinstance(stream.prompt, str) else stream.prompt
            self._give_tokens(stream, token_ids, f"prompts[{i}]")
        self._start(streams)
        try:
            return [self.result(stream.timeline.request_id) for stream in streams]
        finally:
            for stream in streams:
                self.abort(stream.timeline.request_id)

    def stream(self, request_id: str) -> Iterator[str]:
        """Pieces of text as they come, which can be had once; leaving early aborts the request.

        Raises UnknownRequest at once for an id that is none or whose pieces were taken, and, while it goes on,
        EngineError when the engine could not finish it.
        """
        return self._pieces(self._streams.find(request_id), lambda delta: delta.text)

    def stream_tokens(self, request_id: str) -> Iterator[list[int]]:
        """As `stream`, but the token ids of each piece, with the one that ended the text, which has no text."""
        return self._pieces(self._streams.find(request_id), lambda delta: delta.token_ids)

    def result(self, request_id: str) -> Completion:
        """Wait for the end. Raises what `stream` does.

        Where another thread ends it meanwhile, by `abort` or `close`, it holds what there was, and its reason is abort.
        """
        stream = self._streams.find(request_id)
        deltas, timeline = list(self._pieces(stream, lambda delta: delta)), stream.timeline
        assert timeline.finish_reason is not None, "a finished request has a reason"
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        logprobs = None if stream.params.num_logprobs is None else stream.logprobs[: len(token_ids)]
        return Completion(
            "".join(delta.text for delta in deltas), token_ids, timeline.finish_reason, timeline, logprobs
        )

    def abort(self, request_id: str) -> None:
        """End a request and forget its text. Unknown and finished ids are ignored."""
        stream = self._streams.remove(request_id)
        if stream is not None and not stream.is_finished:
            self._loop.post(self._abort, stream)

    def timeline(self, request_id: str) -> RequestTimeline:
        """The stamps so far; when it has ended, until some thousands more have. Then raises UnknownRequest."""
        return self._streams.timeline(request_id)

    def _pieces(self, stream: Stream, piece_of: Callable[[Delta], T]) -> Iterator[T]:
        try:
            yield from filter(None, map(piece_of, stream.take()))
        finally:
            self.abort(stream.timeline.request_id)

    def _new_stream(
        self, prompt: Prompt, params: SamplingParams | None, stop: str | Sequence[str], cache_salt: str, name: str
    ) -> Stream:
        """What can be said of it without its tokens and without waiting is checked; the prompt is called `name`."""
        prompt, stops = as_prompt(prompt, name), as_stops(stop)
        check_params(params)
        check_text(cache_salt, "cache_salt")
        now_ns = time.monotonic_ns()
        timeline = RequestTimeline(request_id=next(self._ids), recv_ns=now_ns, parsed_ns=now_ns, is_streamed=True)
        params = params or SamplingParams(**msgspec.structs.asdict(self.info.sampling_defaults))
        telling = Telling(stop=stops, spells_tags=params.grammar is not None)
        choice = Choice(0, self.tokenizer, timeline, telling)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        return Stream(prompt, params, cache_salt, choice)

    def _check_grammar(self, params: SamplingParams) -> None:
        """Raises InvalidRequest for one that does not compile; for what is no Grammar `check_request` does."""

        async def check(grammar: Grammar) -> None:
            await asyncio.wrap_future(self._checker.check(grammar, "grammar"))

        if isinstance(params.grammar, Grammar):
            self._loop.call(check(params.grammar))

    def _give_tokens(self, stream: Stream, token_ids: list[int], name: str = "prompt") -> None:
        """Raises RequestError when it cannot run with these; then the prompt is called `name`."""
        stream.prompt = token_ids
        check_request(stream.params, token_ids, self.info, PromptName(name))
        stream.timeline.tokenized_ns = time.monotonic_ns()

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return self._loop.call(self.tokenizer.encode(texts, add_special_tokens=add_special_tokens))

    def _start(self, streams: Sequence[Stream]) -> None:
        self._loop.begin(self._drive(streams))
        self._streams.add(streams)

    # --- on the loop ------------------------------------------------------------------------------------------------

    async def _drive(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            self._client.open_timeline(stream.timeline)
        by_id = {stream.timeline.request_id: stream for stream in streams}
        try:
            pairs = [(await self._request(stream), stream) for stream in streams]
            wanted = [(request, stream.timeline) for request, stream in pairs if not stream.is_aborted]
            requests, timelines = [request for request, _ in wanted], [timeline for _, timeline in wanted]
            async with aclosing(self._client.generate(requests, timelines)) as steps:
                async for outputs in steps:
                    for output in outputs:
                        self._route(by_id[output.request_id], output)
        finally:  # whatever happened, nobody waits for ever
            error = as_told(sys.exception(), streams)
            failure = FinishReason.REJECTED if isinstance(error, RequestError) else FinishReason.ERROR
            for stream in streams:
                self._finish(stream, FinishReason.ABORT if error is None else failure, error)

    async def _request(self, stream: Stream) -> Request:
        if isinstance(stream.prompt, str):
            async with self._encoding:
                [token_ids] = await self.tokenizer.encode([stream.prompt], add_special_tokens=True)
                self._give_tokens(stream, token_ids)
        return stream.request

    def _route(self, stream: Stream, output: TokenOutput) -> None:
        if stream.is_finished:  # it ended at a stop string; the engine's last word on it comes later
            return
        choice = stream.choice
        try:
            choice.take(output)
        except EngineError as error:
            self._finish(stream, FinishReason.ERROR, None if stream.is_aborted else error)
            return
        stream.logprobs += output.logprobs or ()
        if choice.is_due(self.config.server.stream_interval):
            delta = choice.pop()
            stream.put(delta)
            if delta.token_ids:
                stream.timeline.write_ns.append(time.monotonic_ns())
        if choice.finish_reason is not None:
            if output.finish_reason is None:  # the stop is in the text, which the engine does not know
                self._client.abort(output.request_id)
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
        stream.end(error)

    def _leave_place(self, stream: Stream) -> None:
        if self._places is not None and stream.has_place:
            stream.has_place = False
            self._places.release()

    async def _stop_engine(self) -> None:
        await self._client.close()
        await asyncio.get_running_loop().shutdown_default_executor()
