"""What `LLM` answers with: one finished request as a whole. Knows no engine."""

from dataclasses import dataclass

from roseinfer.config.tree import shown
from roseinfer.messages import TokenLogprobs
from roseinfer.records import FinishReason, RequestTimeline


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole of one finished request. `text` ends before the stop string that ended it, if one did.

    `token_ids` hold also the token that ended the text. `logprobs` has an entry for each of them, natural logarithms,
    where `SamplingParams.num_logprobs` asked for it, and is None elsewhere.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    timeline: RequestTimeline
    logprobs: list[TokenLogprobs] | None = None

    def __repr__(self) -> str:
        """One line for a person, however long the text is; the stamps of its tokens would be pages."""
        facts = {
            "request_id": self.timeline.request_id,
            "text": self.text,
            "finish_reason": self.finish_reason.value,
            "num_prompt_tokens": self.timeline.num_prompt_tokens,
            "num_completion_tokens": len(self.token_ids),
        }
        return f"Completion({', '.join(f'{name}={shown(fact)}' for name, fact in facts.items())})"
