"""Bounds of how many log-probabilities an answer may hold: those of prompts, and what is kept until an answer's end."""

import sys

from roseinfer.errors import InvalidRequest
from roseinfer.server.openai.schema import MAX_KEPT_SCORES, MAX_PROMPT_SCORES


def check_prompt_scores(num_tokens: int, num_logprobs: int) -> None:
    """Raise InvalidRequest where so many tokens of prompts, counted for each sequence, have too many."""
    num_scores = num_tokens * (num_logprobs + 1)
    if num_scores > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"`logprobs`: the prompts would have {num_scores} log-probabilities, and {MAX_PROMPT_SCORES} fit into "
            "an answer; send fewer prompts at once.",
            param="logprobs",
        )


def most_tokens(num_sequences: int, num_logprobs: int | None, max_tokens: int | None, name: str) -> int:
    """That each sequence of an answer which is kept until its end may generate; without scores as many as there are.

    Raises InvalidRequest where `max_tokens`, the field `name`, asks for more.
    """
    if num_logprobs is None:
        return sys.maxsize
    most = max(1, MAX_KEPT_SCORES // (num_sequences * (num_logprobs + 1)))
    if max_tokens is not None and max_tokens > most:
        raise InvalidRequest(
            f"`{name}`: an answer that is not streamed holds, with so many log-probabilities, at most {most} tokens of "
            f"each of {num_sequences} sequences, and {max_tokens} are asked for.",
            param=name,
        )
    return most
