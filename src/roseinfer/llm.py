"""The engine for programs with threads: turns prompts into text without a server. Knows no HTTP and no torch.

An event loop in one background thread hosts the `AsyncEngine`; callers hand it requests and take pieces of text from
a queue. With the default transport the engine has its own process, so a load generator does not disturb what it
measures. Each request has a `RequestTimeline`; its `write_ns` are the moments when pieces became available here.
"""

import asyncio
import itertools
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import ExitStack, aclosing, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from roseinfer import wiring
from roseinfer.completion import Completion
from roseinfer.config import Config
from roseinfer.errors import EngineDead, EngineError, InvalidRequest, Overloaded, RequestError, RoseinferError
from roseinfer.grammar.checker import GrammarChecker
from roseinfer.messages import EngineInfo, Grammar, Request, SamplingParams, StartupProgress, TokenOutput, check_request
from roseinfer.prompts import Prompt, as_prompts, as_token_ids
from roseinfer.records import FinishReason, Observer, RequestTimeline
from roseinfer.server.choice import Choice, Delta, Telling
from roseinfer.server.tokenizer import Tokenizer

NUM_KEPT_TIMELINES = 4096

T = TypeVar("T")


@dataclass(slots=True)
class _Stream:
    """One request on its way. The loop's thread fills `deltas`; whoever submitted it empties them."""

    prompt: Prompt
    params: SamplingParams
    cache_salt: str
    choice: Choice
    has_place: bool = False  # one of `max_inflight`, to be given back at its end
    deltas: SimpleQueue[Delta | RoseinferError | None] = field(default_factory=SimpleQueue)
    is_aborted: bool = False
    is_finished: bool = False

    @property
    def timeline(self) -> RequestTimeline:
        return self.choice.timeline


class LLM:
    """One model, ready to generate. A context manager; `close` stops the engine and joins every thread.

    `model` is a checkpoint directory or a Hugging Face id; without one the configuration's `model.path` holds, which
    is the embedded model by default. `max_inflight` bounds what `submit` lets in: past it Overloaded is raised. With
    `tokenize_workers` = 0 a text prompt is tokenised inside `submit`; otherwise `submit` returns at once and so many
    are tokenised at a time. A grammar is checked inside `submit`, as a server checks it. Every id that `submit` returns
    must be given to `stream`, `stream_tokens`, `result` or `abort`.
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
        config = config or Config()
        self.config = config if model is None else replace(config, model=replace(config.model, path=model))
        self._streams: dict[str, _Stream] = {}  # until their last piece is taken; touched by callers' threads only
        self._timelines: OrderedDict[str, RequestTimeline] = OrderedDict()  # of the streams that have left
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokenize_workers = tokenize_workers
        self._encoding = asyncio.Semaphore(tokenize_workers)
        self._places = None if max_inflight is None else threading.BoundedSemaphore(max_inflight)
        self._ids = (f"llm-{uuid.uuid4().hex[:8]}-{i}" for i in itertools.count())
        self._client = wiring.build_client(self.config, observers)
        self._loop = asyncio.new_event_loop()
        with ExitStack() as undo:
            thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
            thread.start()
            undo.callback(self._end_loop, thread)
            undo.callback(lambda: self._call(self._stop()))
            self.info: EngineInfo = self._call(self._client.start(on_progress))
            self.tokenizer = undo.enter_context(closing(Tokenizer.load(Path(self.info.checkpoint_dir))))
            self._checker = undo.enter_context(closing(GrammarChecker(self.config.structured, lambda: self.info)))
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what is running with reason abort, stop the engine, join the thread. Idempotent."""
        self._undo.close()

    # --- for callers, from any thread -------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` also those the model expects around a text."""
        return self._call(self.tokenizer.encode([text], add_special_tokens=add_special_tokens))[0]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        cache_salt: str = "",
    ) -> str:
        """Start one request and return its id. Raises RequestError for one that cannot run, or Overloaded."""
        stream = self._new_stream(prompt, params, stop, cache_salt)
        if self._places is not None:
            if not self._places.acquire(blocking=False):
                raise Overloaded("As many requests as allowed are unfinished.")
            stream.has_place = True
        try:
            if not isinstance(prompt, str) or not self._tokenize_workers:
                self._check(stream, self.encode(prompt) if isinstance(prompt, str) else prompt)
        except BaseException:
            self._leave_place(stream)
            raise
        self._start([stream])
        return stream.timeline.request_id

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        cache_salt: str = "",
    ) -> list[Completion]:
        """Run all prompts, or a single one, as one batch and wait; nothing starts when one of them cannot run."""
        streams = [self._new_stream(prompt, params, stop, cache_salt) for prompt in as_prompts(prompts)]
        texts = [stream.prompt for stream in streams if isinstance(stream.prompt, str)]
        encoded = iter(self._call(self.tokenizer.encode(texts, add_special_tokens=True)))
        for i, stream in enumerate(streams):
            self._check(stream, next(encoded) if isinstance(stream.prompt, str) else stream.prompt, f"prompts[{i}]")
        self._start(streams)
        try:
            return [self.result(stream.timeline.request_id) for stream in streams]
        finally:
            for stream in streams:
                self.abort(stream.timeline.request_id)

    def stream(self, request_id: str) -> Iterator[str]:
        """Pieces of text as they come; leaving early aborts the request, an unknown id ends at once.

        Raises EngineError when the engine could not finish it.
        """
        with closing(self._take_deltas(request_id)) as deltas:
            for delta in deltas:
                if delta.text:
                    yield delta.text

    def stream_tokens(self, request_id: str) -> Iterator[list[int]]:
        """As `stream`, but the token ids of each piece."""
        with closing(self._take_deltas(request_id)) as deltas:
            for delta in deltas:
                if delta.token_ids:
                    yield delta.token_ids

    def result(self, request_id: str) -> Completion:
        """Wait for the end. Raises KeyError for an unknown id, EngineError when the engine could not finish it."""
        timeline = self._streams[request_id].timeline
        deltas = list(self._take_deltas(request_id))
        assert timeline.finish_reason is not None, "a finished request has a reason"
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        return Completion("".join(delta.text for delta in deltas), token_ids, timeline.finish_reason, timeline)

    def abort(self, request_id: str) -> None:
        """End a request and forget its text. Unknown and finished ids are ignored."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        self._timelines[request_id] = stream.timeline
        while len(self._timelines) > NUM_KEPT_TIMELINES:
            self._timelines.popitem(last=False)
        if not stream.is_finished:
            self._loop.call_soon_threadsafe(self._abort, stream)

    def timeline(self, request_id: str) -> RequestTimeline:
        """The stamps so far; kept for the last `NUM_KEPT_TIMELINES` finished requests. Raises KeyError otherwise."""
        stream = self._streams.get(request_id)
        return self._timelines[request_id] if stream is None else stream.timeline

    def _take_deltas(self, request_id: str) -> Generator[Delta, None, None]:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        try:
            while (delta := stream.deltas.get()) is not None:
                if isinstance(delta, RoseinferError):
                    raise delta
                yield delta
        finally:
            self.abort(request_id)

    def _new_stream(
        self, prompt: Prompt, params: SamplingParams | None, stop: str | Sequence[str], cache_salt: str
    ) -> _Stream:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(stops):
            raise InvalidRequest("`stop` holds an empty text.", param="stop")
        try:
            cache_salt.encode()
        except UnicodeEncodeError:  # it could not go to the engine, and nobody would hear why
            raise InvalidRequest("`cache_salt` cannot be encoded in UTF-8.", param="cache_salt") from None
        now_ns = time.monotonic_ns()
        timeline = RequestTimeline(request_id=next(self._ids), recv_ns=now_ns, parsed_ns=now_ns, is_streamed=True)
        choice = Choice(0, self.tokenizer, timeline, Telling(stop=stops))
        params = params or SamplingParams(**msgspec.structs.asdict(self.info.sampling_defaults))
        if isinstance(params.grammar, Grammar):  # what else it may be, `check_request` tells
            self._checker.check(params.grammar, "grammar").result()
        return _Stream(prompt, params, cache_salt, choice)

    def _check(self, stream: _Stream, token_ids: Sequence[int], name: str = "prompt") -> None:
        """Give the stream its token ids. Raises RequestError when it cannot run."""
        stream.prompt = as_token_ids(token_ids, name)
        check_request(stream.params, stream.prompt, self.info, name)
        stream.timeline.tokenized_ns = time.monotonic_ns()

    def _start(self, streams: Sequence[_Stream]) -> None:
        self._streams.update((stream.timeline.request_id, stream) for stream in streams)
        self._loop.call_soon_threadsafe(self._launch, streams)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop and wait; an interrupt of the waiting thread cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # --- on the loop ------------------------------------------------------------------------------------------------

    def _launch(self, streams: Sequence[_Stream]) -> None:
        for stream in streams:
            self._client.open_timeline(stream.timeline)
        task = self._loop.create_task(self._drive(streams))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drive(self, streams: Sequence[_Stream]) -> None:
        by_id = {stream.timeline.request_id: stream for stream in streams}
        try:
            pairs = [(await self._request(stream), stream) for stream in streams]
            wanted = [(request, stream.timeline) for request, stream in pairs if not stream.is_aborted]
            requests, timelines = [request for request, _ in wanted], [timeline for _, timeline in wanted]
            async with aclosing(self._client.generate(requests, timelines)) as steps:
                async for outputs in steps:
                    for output in outputs:
                        self._route(by_id[output.request_id], output)
        except RoseinferError as error:
            reason = FinishReason.REJECTED if isinstance(error, RequestError) else FinishReason.ERROR
            for stream in streams:
                self._finish(stream, reason, error)
        finally:
            for stream in streams:
                self._finish(stream, FinishReason.ABORT)

    async def _request(self, stream: _Stream) -> Request:
        if isinstance(stream.prompt, str):
            async with self._encoding:
                [token_ids] = await self.tokenizer.encode([stream.prompt], add_special_tokens=True)
                self._check(stream, token_ids)
        assert not isinstance(stream.prompt, str)
        return Request(
            request_id=stream.timeline.request_id,
            prompt_token_ids=list(stream.prompt),
            params=stream.params,
            cache_salt=stream.cache_salt,
        )

    def _route(self, stream: _Stream, output: TokenOutput) -> None:
        if stream.is_finished:  # it ended at a stop string; the engine's last word on it comes later
            return
        choice = stream.choice
        try:
            choice.take(output)
        except EngineError as error:
            self._finish(stream, FinishReason.ERROR, None if stream.is_aborted else error)
            return
        if choice.is_due(self.config.server.stream_interval):
            delta = choice.pop()
            stream.deltas.put(delta)
            if delta.token_ids:
                stream.timeline.write_ns.append(time.monotonic_ns())
        if choice.finish_reason is not None:
            if output.finish_reason is None:  # the stop is in the text, which the engine does not know
                self._client.abort(output.request_id)
            self._finish(stream, choice.finish_reason)

    def _abort(self, stream: _Stream) -> None:
        stream.is_aborted = True
        self._client.abort(stream.timeline.request_id)

    def _finish(self, stream: _Stream, reason: FinishReason, error: RoseinferError | None = None) -> None:
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

    def _leave_place(self, stream: _Stream) -> None:
        if self._places is not None and stream.has_place:
            stream.has_place = False
            self._places.release()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()
        await self._loop.shutdown_default_executor()

    def _end_loop(self, thread: threading.Thread) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join()
        self._loop.close()
        for stream in self._streams.values():
            if not stream.is_finished:  # submitted so late that the loop never saw it
                stream.deltas.put(EngineDead("The engine was stopped."))
