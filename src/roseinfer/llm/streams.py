"""The requests of an `LLM` that run: what they have generated, and where it is found by their ids."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue

from roseinfer.config.values import shown
from roseinfer.errors import EngineError, RoseinferError, UnknownRequest
from roseinfer.messages import TokenLogprobs, check_value
from roseinfer.records import RequestTimeline
from roseinfer.text.choice import Delta

NUM_KEPT_TIMELINES = 4096

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Stream:
    """One request: the queue of what it has generated, and how far it is."""

    timeline: RequestTimeline
    logprobs: list[TokenLogprobs] | None = None  # of its tokens, and maybe of some behind its end
    has_place: bool = False  # one of `max_inflight`, given back at its end
    is_aborted: bool = False
    is_finished: bool = False
    # Behind the last delta is the end: an error, which readers raise, or None.
    deltas: SimpleQueue[Delta | RoseinferError | None] = field(default_factory=SimpleQueue)

    def iter_deltas(self) -> Generator[Delta, None, None]:
        """Deltas as they come, each to one reader. At the end every reader raises the error."""
        while isinstance(delta := self.deltas.get(), Delta):
            yield delta
        self.deltas.put(delta)
        if delta is not None:
            raise delta


class Streams:
    """Streams by the id of their request, until the last piece is read; then their timelines, for a while.

    Any thread may call any method; what it finds does not depend on what another thread is removing.
    """

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._timelines: OrderedDict[str, RequestTimeline] = OrderedDict()  # of removed streams

    def add_streams(self, streams: Iterable[Stream]) -> None:
        self._streams.update((stream.timeline.request_id, stream) for stream in streams)

    def find(self, request_id: str) -> Stream:
        """Raises UnknownRequest for an id without a stream, or InvalidRequest for what is no id."""
        check_value(request_id, str, "request_id")
        stream = self._streams.get(request_id)
        if stream is None:
            message = f"There is no request {shown(request_id)} here, or what it generated has been taken already."
            raise UnknownRequest(message, param="request_id")
        return stream

    def remove(self, request_id: str) -> Stream | None:
        """Remove the stream and return it, if there is one. Raises InvalidRequest for what is no id."""
        check_value(request_id, str, "request_id")
        stream = self._streams.get(request_id)
        if stream is not None:
            self._timelines[request_id] = stream.timeline  # first, so that the timeline is found at any moment
            while len(self._timelines) > NUM_KEPT_TIMELINES:
                self._timelines.popitem(last=False)
            self._streams.pop(request_id, None)
        return stream

    def end_all(self, error: RoseinferError) -> None:
        """Have all readers raise the error behind what there is."""
        for stream in self._streams.values():
            stream.deltas.put(error)

    def timeline(self, request_id: str) -> RequestTimeline:
        """The timeline of a stream, or of one removed not too long ago. Raises what `find` does."""
        try:
            return self.find(request_id).timeline
        except UnknownRequest:
            if (timeline := self._timelines.get(request_id)) is None:
                raise
            return timeline


def as_error(raised: BaseException | None, streams: Iterable[Stream]) -> RoseinferError | None:
    """The error for the callers of the streams: an unforeseen one is the cause of an EngineError; None without one.

    Where all streams have ended, no caller is left to raise it, so it is logged.
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
