"""Turns what `/v1/models` answers into where to send a load, and with what. Sends nothing itself."""

from typing import NamedTuple

import msgspec

from roseinfer.errors import ConfigError

UNKNOWN_VOCAB_SIZE = 256  # of a server that does not say: ids below it are in every vocabulary


class Endpoint(NamedTuple):
    """Where a server listens, and what it serves."""

    url: str
    api_key: str
    model: str
    max_model_len: int
    vocab_size: int
    takes_salt: bool = False  # it is ours: another server may refuse a request with a field that it does not know

    @property
    def headers(self) -> dict[str, str]:
        """Of every request of a load: the ledger of where its time went is asked for."""
        return {"Content-Type": "application/json", "x-roseinfer-ledger": "1", **authorization(self.api_key)}


class _Model(msgspec.Struct):
    id: str
    max_model_len: int = 0
    vocab_size: int = 0


class _Models(msgspec.Struct):
    data: list[_Model]


def base_of(url: str) -> str:
    """Without the `/v1` with which clients of OpenAI are given it."""
    return url.rstrip("/").removesuffix("/v1")


def authorization(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def read_models(url: str, api_key: str, body: bytes) -> Endpoint:
    """The first model of the answer. Raises ConfigError when there is none."""
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError):
        models = []
    if not models:
        raise ConfigError(f"{url}/v1/models names no model", param="--url")
    model = models[0]
    vocab_size = model.vocab_size or UNKNOWN_VOCAB_SIZE  # which only we tell
    return Endpoint(url, api_key, model.id, model.max_model_len, vocab_size, takes_salt=bool(model.vocab_size))
