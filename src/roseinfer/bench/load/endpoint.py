"""Where a load is sent, and the headers and bodies of its requests."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from roseinfer.bench.load.plan import Segment, Tokens
from roseinfer.config.api_keys import read_keys
from roseinfer.errors import ConfigError

UNKNOWN_VOCAB_SIZE = 256  # of a server that does not report one: ids below it are in every vocabulary

# Common words, each one token with the space before it in most vocabularies: what chat messages are made of.
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with", "at", "be"),
    *("this", "have", "from", "or", "one", "had", "by", "but", "not", "what", "all", "were", "we", "when"),
    *("your", "can"),
)


class Endpoint(NamedTuple):
    """Where a server listens, and what it serves."""

    url: str
    api_key: str = ""
    model: str = ""
    max_model_len: int = 0  # 0: unknown
    vocab_size: int = UNKNOWN_VOCAB_SIZE
    takes_salt: bool = False  # it is roseinfer: another server may refuse a request with a field that it does not know

    def headers(self, request_id: str, intended_s: float, *, asks_ledger: bool = True) -> dict[str, str]:
        """Of a request that is due at a moment of Unix time. The ledger reports where its time in the server went."""
        headers = {"Content-Type": "application/json", "x-request-id": request_id, **authorization(self.api_key)}
        headers["x-roseinfer-intended-time"] = f"{intended_s:.6f}"
        return {**headers, "x-roseinfer-ledger": "1"} if asks_ledger else headers


class _Model(msgspec.Struct):
    id: str
    max_model_len: int = 0
    vocab_size: int = 0  # only roseinfer reports it


class _Models(msgspec.Struct):
    data: list[_Model]


def base_of(url: str) -> str:
    """Without the `/v1` at the end of the URL that clients of OpenAI are configured with."""
    return url.rstrip("/").removesuffix("/v1")


def authorization(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def key_in(file: Path | None) -> str:
    """The first API key of a file; empty without a file. Raises ConfigError."""
    return "" if file is None else read_keys(file, "--api-key-file")[0].key


def read_models(url: str, api_key: str, body: bytes) -> Endpoint:
    """The endpoint of the first model in an answer of `/v1/models`. Raises ConfigError when there is none."""
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError):
        models = []
    if not models:
        raise ConfigError(f"{url}/v1/models names no model", param="--url")
    model = models[0]
    vocab_size = model.vocab_size or UNKNOWN_VOCAB_SIZE
    return Endpoint(url, api_key, model.id, model.max_model_len, vocab_size, takes_salt=bool(model.vocab_size))


class RequestForm(NamedTuple):
    """What all requests of a load have in common. Without `stream_interval` the server's holds."""

    endpoint: Endpoint
    tokens: Tokens
    is_chat: bool
    ignore_eos: bool
    stream_interval: int | None
    cache_salt: str

    @classmethod
    def of(
        cls, endpoint: Endpoint, seed: int, *, is_chat: bool, ignore_eos: bool, stream_interval: int | None
    ) -> "RequestForm":
        """With a new cache salt where the server takes one, so that no run finds prompts of another one cached."""
        salt = f"bench-{os.getpid()}-{time.time_ns():x}" if endpoint.takes_salt else ""
        return cls(endpoint, Tokens(seed, endpoint.vocab_size), is_chat, ignore_eos, stream_interval, salt)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def encode(self, segments: Sequence[Segment], max_tokens: int) -> bytes:
        """The body of one request: token ids, or for chat as many words, to which the template adds tokens."""
        token_ids = self.tokens.of(segments)
        body: dict[str, object] = {
            "model": self.endpoint.model,
            "temperature": 0,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.stream_interval is not None:
            body["stream_interval"] = self.stream_interval
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        if self.is_chat:
            content = " ".join(_WORDS[token_id % len(_WORDS)] for token_id in token_ids)
            body |= {"messages": [{"role": "user", "content": content}], "max_completion_tokens": max_tokens}
        else:
            body |= {"prompt": token_ids, "max_tokens": max_tokens}
        return msgspec.json.encode(body)
