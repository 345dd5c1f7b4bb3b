"""Turns the engine's outputs for one sequence into text, and the text that is due into deltas."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from roseinfer.errors import EngineError, EngineFailed, PromptName, QueueTimeout, RequestTimeout, SequenceFailed
from roseinfer.messages import PromptLogprobs, TokenLogprobs, TokenOutput
from roseinfer.records import Arrival, FinishReason, RequestTimeline
from roseinfer.text.answers.reasoning import Reasoning, ReasoningCounter
from roseinfer.text.logprobs import Columns, EncodedLogprobs, ScoredToken
from roseinfer.text.tokenizer.detokenizer import Detokenizer, text_offsets
from roseinfer.text.tokenizer.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids, and what it is called in errors."""

    token_ids: list[int]
    name: PromptName
    echo: str | None = None  # its text, where the answer begins with it
    reasoning: Reasoning | None = None  # how thoughts come in the answer, where they may


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What of a sequence becomes text, and where the text ends."""

    stop: tuple[str, ...] = ()
    includes_stop: bool = False
    columns: Columns | None = None  # the form of log-probabilities; None: they are not encoded
    keeps_logprobs: bool = False  # in `Choice.logprobs`, as they come
    is_prompt_only: bool = False  # the generated text is left out
    spells_tags: bool = False  # of calls and thoughts, also where the vocabulary marks them special
    queue_timeout_name: str = "queue_timeout_s"  # the field to name when the engine could not begin in time


TEXT_ONLY = OutputOptions()


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens of a choice or of all, as the engine counted them."""

    prompt: int
    cached: int  # of the prompt, found in the engine's cache
    generated: int
    reasoning: int  # of those generated, thoughts and the tags around them


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What has become due of one choice. The choice is its deltas, joined in order.

    A struct because there is one for each token: making a frozen dataclass takes five times as long.
    """

    choice: "Choice"
    text: str
    logprobs: EncodedLogprobs | None
    token_ids: list[int]  # with the token that ended the text, which has none of its own
    is_first: bool
    finish_reason: FinishReason | None
    arrival: Arrival | None  # of the token that made it due

    async def encode_logprobs(self) -> msgspec.Raw | None:
        """The log-probabilities as JSON; None where none were asked for. Call it once."""
        return None if self.logprobs is None else await self.logprobs.encode()


class Choice:
    """One sequence of an answer. `prompt` is needed where it is echoed, or the answer may hold thoughts."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        timeline: RequestTimeline,
        options: OutputOptions = TEXT_ONLY,
        prompt: EncodedPrompt | None = None,
    ) -> None:
        self.index = index
        self.timeline = timeline
        self.sum_logprobs = 0.0  # of its tokens, where the engine computed them
        self.logprobs: list[TokenLogprobs] = []  # with `keeps_logprobs`
        self.num_cached_tokens = 0
        self.embedding = b""  # where the prompt is embedded
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._options = options
        self._prompt = prompt
        reasoning = None if prompt is None else prompt.reasoning
        self._counter = None if reasoning is None else ReasoningCounter(reasoning)
        spells_tags = options.spells_tags or reasoning is not None
        self._text_bytes = tokenizer.tagged_text_bytes if spells_tags else tokenizer.text_bytes
        self._detokenizer = Detokenizer(self._text_bytes, options.stop, includes_stop=options.includes_stop)
        echo = (prompt and prompt.echo) or ""
        self._num_echoed_chars = len(echo)
        self._text = [echo] if echo else []  # this and the next two: since the last delta
        self._encoded = self._new_encoded()
        self._token_ids: list[int] = []
        self._num_popped = 0  # tokens in deltas
        self._num_due = 0  # tokens when something became due; 0 while nothing is
        self._is_popped = False  # a delta has carried the finish reason

    @property
    def num_tokens(self) -> int:
        """Tokens up to and including the one that ended the text."""
        return self._num_popped + len(self._token_ids)

    @property
    def counts(self) -> TokenCounts:
        """Its tokens up to now."""
        num_prompt = 0 if self._prompt is None else len(self._prompt.token_ids)
        return TokenCounts(num_prompt, self.num_cached_tokens, self.num_tokens, self.timeline.num_reasoning_tokens)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._detokenizer.stop_string

    @property
    def mean_logprob(self) -> float:
        """Mean over its tokens; 0 without any."""
        return self.sum_logprobs / max(1, self.num_tokens)

    def add_output(self, output: TokenOutput) -> None:
        """Turn one output into text. Raises EngineError when the engine did not bring the sequence to its end."""
        if output.times is not None:
            self.num_cached_tokens = output.times.num_cached_tokens
        if self.finish_reason is not None:
            return  # a stop string was found; the engine has gone on until the abort reached it
        if output.embedding is not None:
            self.embedding = output.embedding
            self._finish(FinishReason.STOP)
            return
        if output.prompt_logprobs is not None and self._encoded is not None:
            self._encoded.add_prompt(self._score_prompt(output.prompt_logprobs))
        if self._options.is_prompt_only:
            if output.finish_reason is not None:
                reason = FinishReason.LENGTH if output.finish_reason is FinishReason.STOP else output.finish_reason
                self._flush_and_finish(reason, output)
            return
        has_silent_end = output.stop_token_id is not None and not self._options.includes_stop
        end = len(output.token_ids) - has_silent_end  # a token behind it has no text
        for position, token_id in enumerate(output.token_ids):
            logprobs = output.logprobs[position] if output.logprobs else None
            if logprobs is not None:
                self._keep_logprobs(logprobs)
            self._add_token(token_id, logprobs, position == end)
            if self._detokenizer.stopped:
                self._finish(FinishReason.STOP)
                return
        if output.finish_reason is not None:
            self._flush_and_finish(output.finish_reason, output)

    def _keep_logprobs(self, logprobs: TokenLogprobs) -> None:
        self.sum_logprobs += max(MIN_LOGPROB, logprobs.logprob)
        if self._options.keeps_logprobs:
            self.logprobs.append(logprobs)

    def _add_token(self, token_id: int, logprobs: TokenLogprobs | None, is_end: bool) -> None:
        offset = self._num_echoed_chars + self._detokenizer.num_chars
        if not is_end and (text := self._detokenizer.push((token_id,))):
            self._text.append(text)
        if self._counter is not None and not is_end:
            self._counter.push(self._text_bytes(token_id))
            self.timeline.num_reasoning_tokens = self._counter.num_tokens
        self._token_ids.append(token_id)
        if logprobs is not None and self._encoded is not None:
            top = self._likeliest(logprobs.top_token_ids, logprobs.top_logprobs)
            logprob = max(MIN_LOGPROB, logprobs.logprob)
            self._encoded.add_token(ScoredToken(self._tokenizer.spell(token_id), offset, logprob, top, is_end))

    def _new_encoded(self) -> EncodedLogprobs | None:
        return None if self._options.columns is None else EncodedLogprobs(self._options.columns)

    def _likeliest(self, token_ids: list[int], logprobs: list[float]) -> list[tuple[bytes, float]]:
        spell = self._tokenizer.spell
        return [(spell(i), max(MIN_LOGPROB, logprob)) for i, logprob in zip(token_ids, logprobs, strict=True)]

    def _score_prompt(self, logprobs: PromptLogprobs) -> Iterator[ScoredToken]:
        """One for each token of the prompt. Its tokens may not spell its text: a space, say, may stand before them."""
        prompt = self._prompt
        assert prompt is not None, "a scored prompt is echoed"
        spell, token_ids = self._tokenizer.spell, prompt.token_ids
        *offsets, num_chars = text_offsets(self._tokenizer.text_bytes, token_ids)
        offsets = [max(0, offset - num_chars + self._num_echoed_chars) for offset in offsets]
        yield ScoredToken(spell(token_ids[0]), offsets[0], None, None)
        for token_id, offset, (logprob, ids, values) in zip(
            token_ids[1:], offsets[1:], logprobs.entries(), strict=True
        ):
            top = self._likeliest(ids, values)
            yield ScoredToken(spell(token_id), offset, max(MIN_LOGPROB, logprob), top)

    def _flush_and_finish(self, reason: FinishReason, output: TokenOutput) -> None:
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
            return QueueTimeout(message, param=self._options.queue_timeout_name)
        if reason is FinishReason.TIMEOUT:
            return RequestTimeout("The request ran past its deadline, `timeout_s`.", param="timeout_s")
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
            return not self._is_popped
        if self._num_popped == 0:
            return bool(self._token_ids)
        return len(self._token_ids) >= interval and bool(
            self._text or (self._encoded is not None and self._encoded.num_tokens)
        )

    def note_due(self, interval: int) -> None:
        """Remember which token made the next delta due, if one did."""
        if not self._num_due and self.is_due(interval):
            self._num_due = self.num_tokens

    def pop_delta(self) -> Delta:
        """Everything since the last delta."""
        arrivals = self.timeline.arrivals
        delta = Delta(
            choice=self,
            text="".join(self._text),
            logprobs=self._encoded,
            token_ids=self._token_ids,
            is_first=self._num_popped == 0,
            finish_reason=self.finish_reason,
            arrival=arrivals[(self._num_due or len(arrivals)) - 1] if arrivals else None,
        )
        self._num_popped += len(self._token_ids)
        self._num_due = 0
        self._text, self._encoded, self._token_ids = [], self._new_encoded(), []
        self._is_popped = self.finish_reason is not None
        return delta
