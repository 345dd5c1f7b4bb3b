"""One request of an `LLM`, between the loop that runs it and the threads that wait for it. Knows no engine.

The loop's thread fills it; whoever submitted it empties it.
"""

import asyncio
import logging
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue

from roseinfer.errors import EngineError, RoseinferError
from roseinfer.messages import Request, SamplingParams, TokenLogprobs
from roseinfer.records import RequestTimeline
from roseinfer.server.choice import Choice, Delta

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
