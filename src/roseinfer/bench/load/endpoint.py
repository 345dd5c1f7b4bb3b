"""Where a load is sent, what serves there, and the headers and bodies of its requests."""

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from roseinfer.bench.load.plan import Segment, Tokens
from roseinfer.config.api_keys import read_keys
from roseinfer.errors import ConfigError
from roseinfer.observe.logs import escape

GET_TIMEOUT_S = 10.0
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


def find_endpoint(url: str, api_key: str, param: str = "--url") -> Endpoint:
    """The server at `url`, with `/v1` at its end or without. Raises ConfigError when there is none."""
    url = base_of(url)
    return read_models(url, api_key, get(f"{url}/v1/models", api_key, param))


def get(url: str, api_key: str, param: str, timeout_s: float = GET_TIMEOUT_S) -> bytes:
    """The body of a GET. Raises ConfigError when nothing answers or the answer is another status than 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the load: without a proxy
    try:
        request = urllib.request.Request(url, headers=authorization(api_key))  # noqa: S310 - http or https
        with opener.open(request, timeout=timeout_s) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        problem = error.read().decode(errors="replace")[:200]
        raise ConfigError(f"{url} answers {error.code}: {problem}", param=param) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        problem = (isinstance(reason, OSError) and reason.strerror) or f"{type(reason).__name__} {reason}"
        raise ConfigError(f"nothing answers at {url}: {escape(problem[:200])}", param=param) from None


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
