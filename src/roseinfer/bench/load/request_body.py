"""Turns token ids into the body of an OpenAI request. Knows no schedule and sends nothing."""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from roseinfer.bench.load.endpoint import Endpoint

# Common words, each one token with the space before it in most vocabularies: what chat messages are made of.
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with", "at", "be"),
    *("this", "have", "from", "or", "one", "had", "by", "but", "not", "what", "all", "were", "we", "when"),
    *("your", "can"),
)


def fresh_salt(endpoint: Endpoint) -> str:
    """A cache salt that no run had before, of whatever command; empty where the server takes none.

    With it a run finds nothing in the server's prefix cache but what it has put there itself.
    """
    return f"bench-{os.getpid()}-{time.time_ns():x}" if endpoint.takes_salt else ""


class RequestForm(NamedTuple):
    """What all requests of a load have in common. Without `stream_interval` the server's holds."""

    is_chat: bool
    ignore_eos: bool
    stream_interval: int | None
    cache_salt: str = ""  # of `fresh_salt`

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, model: str, token_ids: Sequence[int], max_tokens: int) -> dict[str, object]:
        """Token ids for completions, so that lengths are exact; as many words for chat, to which the template adds."""
        body: dict[str, object] = {
            "model": model,
            "temperature": 0,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.stream_interval is not None:
            body["stream_interval"] = self.stream_interval
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        if not self.is_chat:
            return {**body, "prompt": list(token_ids), "max_tokens": max_tokens}
        content = " ".join(_WORDS[token_id % len(_WORDS)] for token_id in token_ids)
        return {**body, "messages": [{"role": "user", "content": content}], "max_completion_tokens": max_tokens}
