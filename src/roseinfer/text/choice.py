"""Turns the engine's outputs for one sequence into text, and text that is due into deltas. Knows no wire format."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from roseinfer.errors import EngineError, EngineFailed, QueueTimeout, RequestTimeout, SequenceFailed
from roseinfer.messages import PromptLogprobs, TokenLogprobs, TokenOutput
from roseinfer.records import Arrival, FinishReason, RequestTimeline
from roseinfer.text.detokenizer import Detokenizer, text_offsets
from roseinfer.text.logprobs import Columns, ScoredToken, Scores
from roseinfer.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is told before what is generated."""

    token_ids: Sequence[int]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """How a sequence is told."""

    stop: tuple[str, ...] = ()
    includes_stop: bool = False
    columns: Columns | None = None  # of log-probabilities; None when nobody asked
    echo: Echo | None = None
    is_prompt_only: bool = False  # what is generated is left out
    spells_tags: bool = False  # of calls, also where the vocabulary marks them special
    waits_by: str = "queue_timeout_s"  # the field that says by when the engine must have begun


TEXT_ALONE = Telling()


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What has become due of one choice: joined in order, the deltas are the choice.

    A struct because there is one for each token: making a frozen dataclass takes five times as long.
    """

    choice: "Choice"
    text: str
    scores: Scores | None
    token_ids: list[int]  # with the token that ended the text, which has none of its own
    is_first: bool
    finish_reason: FinishReason | None
    arrival: Arrival | None  # of the token that made it due

    async def encode_scores(self) -> msgspec.Raw | None:
        """The log-probabilities as JSON, once; None when nobody asked."""
        return None if self.scores is None else await self.scores.encode()


class Choice:
    """One sequence of a reply."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, timeline: RequestTimeline, telling: Telling = TEXT_ALONE
    ) -> None:
        self.index = index
        self.timeline = timeline
        self.sum_logprobs = 0.0  # of its tokens, as far as the engine told
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._telling = telling
        text_bytes = tokenizer.tagged_text_bytes if telling.spells_tags else tokenizer.text_bytes
        self._detokenizer = Detokenizer(text_bytes, telling.stop, includes_stop=telling.includes_stop)
        self._num_echoed_chars = 0 if telling.echo is None else len(telling.echo.text)
        self._text = [] if telling.echo is None else [telling.echo.text]  # this and the next two: not told yet
        self._scores = self._no_scores()
        self._token_ids: list[int] = []
        self._num_told = 0  # tokens
        self._num_due = 0  # tokens when something became due; 0 while nothing is
        self._is_told = False  # the finish reason has gone out

    @property
    def num_tokens(self) -> int:
        """Delivered, up to and including the one that ended the text."""
        return self._num_told + len(self._token_ids)

    @property
    def mean_logprob(self) -> float:
        """Of a token; 0 without any."""
        return self.sum_logprobs / max(1, self.num_tokens)

    def take(self, output: TokenOutput) -> None:
        """Note one step's output. Raises EngineError when the engine did not bring the sequence to its end."""
        if output.times is not None:
            self.num_cached_tokens = output.times.num_cached_tokens
        if self.finish_reason is not None:
            return  # a stop string was found; what the engine did until it heard of that is not delivered
        if output.prompt_logprobs is not None and self._scores is not None:
            self._scores.add_prompt(self._score_prompt(output.prompt_logprobs))
        if self._telling.is_prompt_only:
            if output.finish_reason is not None:
                reason = FinishReason.LENGTH if output.finish_reason is FinishReason.STOP else output.finish_reason
                self._end(reason, output)
            return
        self.sum_logprobs += sum(max(MIN_LOGPROB, entry.logprob) for entry in output.logprobs or ())
        has_silent_end = output.stop_token_id is not None and not self._telling.includes_stop
        num_text_tokens = len(output.token_ids) - has_silent_end
        for position, token_id in enumerate(output.token_ids[:num_text_tokens]):
            if self._take_token(token_id, output.logprobs[position] if output.logprobs else None):
                return
        for position, token_id in enumerate(output.token_ids[num_text_tokens:], num_text_tokens):
            self._token_ids.append(token_id)
            if output.logprobs:
                offset = self._num_echoed_chars + self._detokenizer.num_chars
                self._score(token_id, offset, output.logprobs[position], is_end=True)
        if output.finish_reason is not None:
            self._end(output.finish_reason, output)

    def _take_token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Whether the token completed a stop string."""
        offset = self._num_echoed_chars + self._detokenizer.num_chars
        if text := self._detokenizer.push((token_id,)):
            self._text.append(text)
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._score(token_id, offset, logprobs)
        if self._detokenizer.stopped:
            self._finish(FinishReason.STOP)
        return self._detokenizer.stopped

    def _no_scores(self) -> Scores | None:
        return None if self._telling.columns is None else Scores(self._telling.columns)

    def _score(self, token_id: int, offset: int, logprobs: TokenLogprobs, *, is_end: bool = False) -> None:
        if self._scores is None:
            return
        top = self._likeliest(logprobs.top_token_ids, logprobs.top_logprobs)
        logprob = max(MIN_LOGPROB, logprobs.logprob)
        self._scores.add(ScoredToken(self._tokenizer.spell(token_id), offset, logprob, top, is_end))

    def _likeliest(self, token_ids: list[int], logprobs: list[float]) -> list[tuple[bytes, float]]:
        spell = self._tokenizer.spell
        return [(spell(i), max(MIN_LOGPROB, logprob)) for i, logprob in zip(token_ids, logprobs, strict=True)]

    def _score_prompt(self, logprobs: PromptLogprobs) -> Iterator[ScoredToken]:
        """One for each token of the prompt. Its tokens may not spell its text: a space, say, may stand before them."""
        echo = self._telling.echo
        assert echo is not None, "who scores a prompt tells it"
        spell = self._tokenizer.spell
        *offsets, num_chars = text_offsets(self._tokenizer.text_bytes, echo.token_ids)
        offsets = [max(0, offset - num_chars + len(echo.text)) for offset in offsets]
        yield ScoredToken(spell(echo.token_ids[0]), offsets[0], None, None)
        for token_id, offset, (logprob, ids, values) in zip(
            echo.token_ids[1:], offsets[1:], logprobs.entries(), strict=True
        ):
            top = self._likeliest(ids, values)
            yield ScoredToken(spell(token_id), offset, max(MIN_LOGPROB, logprob), top)

    def _end(self, reason: FinishReason, output: TokenOutput) -> None:
        if reason not in {FinishReason.STOP, FinishReason.LENGTH}:
            self.timeline.grammar_error = output.grammar_error
            raise self._failure(reason, output)
        if text := self._detokenizer.flush():
            self._text.append(text)
        self._finish(FinishReason.STOP if self._detokenizer.stopped else reason)

    def _failure(self, reason: FinishReason, output: TokenOutput) -> EngineError:
        has_begun = output.times is None or output.times.scheduled_ns > 0
        if reason is FinishReason.TIMEOUT and not has_begun:
            message = "The engine could not begin the request in the time it was given."
            return QueueTimeout(message, param=self._telling.waits_by)
        if reason is FinishReason.TIMEOUT:
            return RequestTimeout("The request ran past its deadline.", param="timeout_s")
        if output.grammar_error:
            return SequenceFailed("The grammar could not be followed any further.")
        if output.is_own_fault:
            message = "The request's parameters (penalties, biases, a grammar) leave no token that can come next."
            return SequenceFailed(message)
        if reason is FinishReason.ERROR:
            return SequenceFailed("The model could not compute this sequence.")
        return EngineFailed("The engine ended the request before it was complete.")

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = self.timeline.finish_reason = reason

    def is_due(self, interval: int) -> bool:
        """The first token is due at once, then every `interval` tokens that make text, and at the end what is left."""
        if self.finish_reason is not None:
            return not self._is_told
        if self._num_told == 0:
            return bool(self._token_ids)
        return len(self._token_ids) >= interval and bool(
            self._text or (self._scores is not None and self._scores.num_tokens)
        )

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
            scores=self._scores,
            token_ids=self._token_ids,
            is_first=self._num_told == 0,
            finish_reason=self.finish_reason,
            arrival=arrivals[(self._num_due or len(arrivals)) - 1] if arrivals else None,
        )
        self._num_told += len(self._token_ids)
        self._num_due = 0
        self._text, self._scores, self._token_ids = [], self._no_scores(), []
        self._is_told = self.finish_reason is not None
        return delta
