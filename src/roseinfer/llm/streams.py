"""The requests of an `LLM`, between the loop that runs them and the threads that wait for them. Knows no engine.

The loop's thread fills a stream; whoever submitted it empties it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue

from roseinfer.config.tree import shown
from roseinfer.errors import EngineError, RoseinferError, UnknownRequest
from roseinfer.messages import Request, SamplingParams, TokenLogprobs, check_value
from roseinfer.records import RequestTimeline
from roseinfer.text.choice import Choice, Delta

NUM_KEPT_TIMELINES = 4096

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Stream:
    """What was asked, what has come of it, and whether it is over."""

    prompt: str | list[int]
    params: SamplingParams
    cache_salt: str
    choice: Choice
    has_place: bool = False  # one of `max_inflight`, to be given back at its end
    is_aborted: bool = False
    is_finished: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its tokens, and maybe of some behind its end
    _deltas: SimpleQueue[Delta | RoseinferError | None] = field(default_factory=SimpleQueue)

    @property
    def timeline(self) -> RequestTimeline:
        return self.choice.timeline

    @property
    def request(self) -> Request:
        """What the engine is asked, once the prompt is token ids."""
        assert not isinstance(self.prompt, str)
        return Request(
            request_id=self.timeline.request_id,
            prompt_token_ids=self.prompt,
            params=self.params,
            cache_salt=self.cache_salt,
        )

    def put(self, delta: Delta) -> None:
        self._deltas.put(delta)

    def end(self, error: RoseinferError | None = None) -> None:
        """There is no more, because of `error` if there is one."""
        self._deltas.put(error)

    def take(self) -> Generator[Delta, None, None]:
        """Deltas as they come, each for one taker. At the end every taker hears of the error."""
        while isinstance(delta := self._deltas.get(), Delta):
            yield delta
        self._deltas.put(delta)
        if delta is not None:
            raise delta


class Streams:
    """Streams by the id of their request, until somebody took the last piece; then their timelines, for a while.

    Any thread but the loop's may ask; what it finds does not depend on what another one is removing.
    """

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._timelines: OrderedDict[str, RequestTimeline] = OrderedDict()  # of those that were removed

    def add(self, streams: Iterable[Stream]) -> None:
        self._streams.update((stream.timeline.request_id, stream) for stream in streams)

    def find(self, request_id: str) -> Stream:
        """Raises UnknownRequest for an id of none, or InvalidRequest for what is no id."""
        check_value(request_id, str, "request_id")
        stream = self._streams.get(request_id)
        if stream is None:
            message = f"There is no request {shown(request_id)} here, or what it generated has been taken already."
            raise UnknownRequest(message, param="request_id")
        return stream

    def remove(self, request_id: str) -> Stream | None:
        """The stream, if it was there. Raises InvalidRequest for what is no id."""
        check_value(request_id, str, "request_id")
        stream = self._streams.get(request_id)
        if stream is not None:
            self._timelines[request_id] = stream.timeline  # before it is gone there, so that it is always found
            while len(self._timelines) > NUM_KEPT_TIMELINES:
                self._timelines.popitem(last=False)
            self._streams.pop(request_id, None)
        return stream

    def timeline(self, request_id: str) -> RequestTimeline:
        """That of a stream, or of one that was removed and is not too long gone. Raises what `find` does."""
        try:
            return self.find(request_id).timeline
        except UnknownRequest:
            if (timeline := self._timelines.get(request_id)) is None:
                raise
            return timeline


def as_told(raised: BaseException | None, streams: Iterable[Stream]) -> RoseinferError | None:
    """What whoever waits is told: of a mistake of ours all that there is, as the cause of an EngineError.

    None for what is no mistake: nothing was raised, or the requests were cancelled. Where all of them have ended nobody
    waits, and it is logged instead.
    """
    if raised is None or isinstance(raised, asyncio.CancelledError):
        return None
    if all(stream.is_finished for stream in streams):
        _log.error("something failed when its requests had ended", exc_info=raised)
    if isinstance(raised, RoseinferError):
        return raised
    error = EngineError(f"The request met an unforeseen {type(raised).__name__}.")
    error.__cause__ = raised
    return error
