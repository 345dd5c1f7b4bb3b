"""Runs prompts through the engine and gives out their text: the one path that the HTTP endpoints and `LLM` share.

A `GenerationRequest` says what to generate. `build_requests` checks it and makes the engine's requests; a `Generation`
runs them and turns the engine's outputs into deltas of text, which an endpoint writes in its own form.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from roseinfer.engine.link.engine_client import EngineClient
from roseinfer.messages import EngineInfo, Request, SamplingParams, TokenOutput, check_request
from roseinfer.records import RequestTimeline
from roseinfer.text.choice import TEXT_ONLY, Choice, Delta, EncodedPrompt, OutputOptions, TokenCounts
from roseinfer.text.logprobs import check_prompt_logprobs, most_kept_tokens
from roseinfer.text.tokenizer.tokenizer import Tokenizer

NUM_SEEDS = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to generate: prompts, how tokens are sampled, and what of them becomes text."""

    prompts: Sequence[EncodedPrompt]
    params: SamplingParams  # of every sequence; without a seed each prompt draws one
    fits_context: bool = False  # generate as many tokens as the context leaves, where `params.max_tokens` are more
    n: int = 1  # choices of each prompt in the answer
    best_of: int = 1  # sequences generated of each prompt, at least `n`
    output: OutputOptions = TEXT_ONLY
    stream_interval: int | None = None  # tokens in a delta; None: each choice is read at its end
    cache_salt: str = ""
    client_salt: str = ""  # of it, what the client gave itself
    priority: int = 0
    deadline_ns: int | None = None  # monotonic clock: the engine ends the sequences then
    queue_deadline_ns: int | None = None  # or then, if it has not begun them
    max_tokens_name: str = "max_tokens"  # of the field, in errors

    def build_requests(self, info: EngineInfo, sequence_id: Callable[[int], str]) -> list[Request]:
        """One engine request for each sequence, those of a prompt side by side, called `sequence_id(index)`.

        Raises InvalidRequest that names the field, or PromptTooLong.
        """
        is_kept = self.stream_interval is None and self.output.columns is not None
        most_tokens = most_kept_tokens(
            len(self.prompts) * self.best_of,
            self.params.num_logprobs if is_kept else None,
            None if self.fits_context else self.params.max_tokens,
            self.max_tokens_name,
        )
        if self.params.num_prompt_logprobs is not None:
            num_tokens = sum(len(prompt.token_ids) for prompt in self.prompts) * self.best_of
            check_prompt_logprobs(num_tokens, self.params.num_prompt_logprobs)
        requests: list[Request] = []
        for prompt in self.prompts:
            params = self.params
            if self.fits_context:
                num_left = min(most_tokens, params.max_tokens, info.max_model_len - len(prompt.token_ids))
                params = msgspec.structs.replace(params, max_tokens=max(1, num_left))
            check_request(params, prompt.token_ids, info, prompt.name, self.max_tokens_name)
            seed = secrets.randbelow(NUM_SEEDS) if params.seed is None else params.seed
            for i in range(self.best_of):
                requests.append(
                    Request(
                        request_id=sequence_id(len(requests)),
                        prompt_token_ids=prompt.token_ids,
                        params=msgspec.structs.replace(params, seed=(seed + i) % NUM_SEEDS),
                        cache_salt=self.cache_salt,
                        client_salt=self.client_salt,
                        deadline_ns=self.deadline_ns,
                        queue_deadline_ns=self.queue_deadline_ns,
                        priority=self.priority,
                    )
                )
        return requests


class Generation:
    """The sequences of one request on their way through the engine.

    `timelines[i]`, which the caller has opened and will close, belongs to `requests[i]`. The caller reads batches of
    outputs and hands them back; closing `outputs` early aborts what has not finished:

        generation = Generation(wanted, requests, timelines, client, tokenizer)
        async with aclosing(generation.outputs) as batches:
            async for batch in batches:
                for delta in generation.pop_deltas(batch):
                    ...
    """

    def __init__(
        self,
        wanted: GenerationRequest,
        requests: Sequence[Request],
        timelines: Sequence[RequestTimeline],
        client: EngineClient,
        tokenizer: Tokenizer,
    ) -> None:
        self.choices = [
            Choice(i, tokenizer, timeline, wanted.output, wanted.prompts[i // wanted.best_of])
            for i, timeline in enumerate(timelines)
        ]
        is_streamed = wanted.stream_interval is not None or bool(wanted.output.stop)  # which may end the text anywhere
        self.outputs = client.generate(requests, timelines, is_streamed=is_streamed)  # reading it may raise EngineError
        self._wanted = wanted
        self._client = client
        self._by_id = {request.request_id: choice for request, choice in zip(requests, self.choices, strict=True)}
        self._num_left = len(requests)

    @property
    def is_over(self) -> bool:
        """Every choice has its finish reason; an abort after a stop string may not have reached the engine yet."""
        return self._num_left == 0

    @property
    def counts(self) -> TokenCounts:
        """The tokens up to now. A prompt counts once, however many choices it has."""
        of_choices = [choice.counts for choice in self.choices]
        of_prompts = of_choices[:: self._wanted.best_of]
        return TokenCounts(
            prompt=sum(counts.prompt for counts in of_prompts),
            cached=sum(counts.cached for counts in of_prompts),
            generated=sum(counts.generated for counts in of_choices),
            reasoning=sum(counts.reasoning for counts in of_choices),
        )

    def add_output(self, output: TokenOutput) -> Choice:
        """Give one output to its choice. Raises EngineError when the engine could not finish the sequence."""
        choice = self._by_id[output.request_id]
        was_finished = choice.finish_reason is not None
        choice.add_output(output)
        if self._wanted.stream_interval is not None:
            choice.note_due(self._wanted.stream_interval)
        if choice.finish_reason is not None and not was_finished:
            self._num_left -= 1
            if output.finish_reason is None:  # the stop string is in the text, which the engine does not know
                self._client.abort(output.request_id)
        return choice

    async def run(self) -> None:
        """Read all outputs. Raises what `add_output` does."""
        async with aclosing(self.outputs) as batches:
            async for batch in batches:
                for output in batch:
                    self.add_output(output)
                if self.is_over:
                    break

    def pop_deltas(self, batch: Iterable[TokenOutput]) -> list[Delta]:
        """What a batch of outputs makes due of a stream, one delta a choice. Raises what `add_output` does."""
        interval = self._wanted.stream_interval
        assert interval is not None, "only a stream has deltas before the end"
        choices = dict.fromkeys([self.add_output(output) for output in batch])
        return [choice.pop_delta() for choice in choices if choice.is_due(interval)]

    def best_choices(self) -> list[Choice]:
        """The answer's choices, once all are over: of each prompt the `n` with the highest mean log-probability."""
        n, best_of = self._wanted.n, self._wanted.best_of
        if n == best_of:
            return self.choices
        best: list[Choice] = []
        for first in range(0, len(self.choices), best_of):
            of_prompt = self.choices[first : first + best_of]
            best += sorted(of_prompt, key=lambda choice: -choice.mean_logprob)[:n]
        for index, choice in enumerate(best):
            choice.index = index
        return best
