"""Turns the engine's outputs for one sequence into text, and text that is due into deltas. Knows no wire format."""

from dataclasses import dataclass

import msgspec

from roseinfer.errors import EngineError, EngineFailed, QueueTimeout, RequestTimeout
from roseinfer.messages import TokenLogprobs, TokenOutput
from roseinfer.records import Arrival, EngineTimes, FinishReason, RequestTimeline
from roseinfer.server.detokenizer import Detokenizer
from roseinfer.server.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the text with its log-probability and the likeliest tokens in its place, likeliest first."""

    token: bytes
    offset: int  # characters of the text before it
    logprob: float
    top: list[tuple[bytes, float]]


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What has become due of one choice: joined in order, the deltas are the choice.

    A struct because there is one for each token: making a frozen dataclass takes five times as long.
    """

    choice: "Choice"
    text: str
    scored: list[ScoredToken]
    token_ids: list[int]  # with the token that ended the text, which has none of its own
    is_first: bool
    finish_reason: FinishReason | None
    arrival: Arrival | None  # of the token that made it due


class Choice:
    """One sequence of a reply."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, stop: tuple[str, ...], wants_logprobs: bool, timeline: RequestTimeline
    ) -> None:
        self.index = index
        self.wants_logprobs = wants_logprobs
        self.timeline = timeline
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer.text_bytes, stop)
        self._text: list[str] = []  # this and the next two: what has not been told
        self._scored: list[ScoredToken] = []
        self._token_ids: list[int] = []
        self._num_told = 0  # tokens
        self._num_due = 0  # tokens when something became due; 0 while nothing is
        self._is_told = False  # the finish reason has gone out

    @property
    def num_tokens(self) -> int:
        """Delivered, up to and including the one that ended the text."""
        return self._num_told + len(self._token_ids)

    def take(self, output: TokenOutput) -> None:
        """Note one step's output. Raises EngineError when the engine did not bring the sequence to its end."""
        if output.times is not None:
            self.num_cached_tokens = output.times.num_cached_tokens
        if self.finish_reason is not None:
            return  # a stop string was found; what the engine did until it heard of that is not delivered
        num_text_tokens = len(output.token_ids) - (output.stop_token_id is not None)
        for position, token_id in enumerate(output.token_ids[:num_text_tokens]):
            if self._take_token(token_id, output.logprobs[position] if output.logprobs else None):
                return
        self._token_ids += output.token_ids[num_text_tokens:]
        if output.finish_reason is not None:
            self._end(output.finish_reason, output.times)

    def _take_token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Whether the token completed a stop string."""
        offset = self._detokenizer.num_chars
        if text := self._detokenizer.push((token_id,)):
            self._text.append(text)
        self._token_ids.append(token_id)
        if self.wants_logprobs and logprobs is not None:
            self._scored.append(self._score(token_id, offset, logprobs))
        if self._detokenizer.stopped:
            self._finish(FinishReason.STOP)
        return self._detokenizer.stopped

    def _score(self, token_id: int, offset: int, logprobs: TokenLogprobs) -> ScoredToken:
        spell = self._tokenizer.spell
        top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        return ScoredToken(
            token=spell(token_id),
            offset=offset,
            logprob=max(MIN_LOGPROB, logprobs.logprob),
            top=[(spell(other), max(MIN_LOGPROB, logprob)) for other, logprob in top],
        )

    def _end(self, reason: FinishReason, times: EngineTimes | None) -> None:
        if reason not in {FinishReason.STOP, FinishReason.LENGTH}:
            raise _failure(reason, has_begun=times is None or times.scheduled_ns > 0)
        if text := self._detokenizer.flush():
            self._text.append(text)
        self._finish(FinishReason.STOP if self._detokenizer.stopped else reason)

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = self.timeline.finish_reason = reason

    def is_due(self, interval: int) -> bool:
        """The first token is due at once, then every `interval` tokens that make text, and at the end what is left."""
        if self.finish_reason is not None:
            return not self._is_told
        if self._num_told == 0:
            return bool(self._token_ids)
        return len(self._token_ids) >= interval and bool(self._text or self._scored)

    def note_due(self, interval: int) -> None:
        """Remember the token that makes what is left due, if it does."""
        if not self._num_due and self.is_due(interval):
            self._num_due = self.num_tokens

    def pop(self) -> Delta:
        """Everything that has not been told yet."""
        arrivals = self.timeline.arrivals
        delta = Delta(
            choice=self,
            text="".join(self._text),
            scored=self._scored,
            token_ids=self._token_ids,
            is_first=self._num_told == 0,
            finish_reason=self.finish_reason,
            arrival=arrivals[(self._num_due or len(arrivals)) - 1] if arrivals else None,
        )
        self._num_told += len(self._token_ids)
        self._num_due = 0
        self._text, self._scored, self._token_ids = [], [], []
        self._is_told = self.finish_reason is not None
        return delta


def _failure(reason: FinishReason, *, has_begun: bool) -> EngineError:
    if reason is FinishReason.TIMEOUT and not has_begun:
        return QueueTimeout("The engine could not begin the request in the time it was given.", param="queue_timeout_s")
    if reason is FinishReason.TIMEOUT:
        return RequestTimeout("The request ran past its deadline.", param="timeout_s")
    if reason is FinishReason.ERROR:
        return EngineFailed("The engine could not compute this sequence.")
    return EngineFailed("The engine ended the request before it was complete.")
