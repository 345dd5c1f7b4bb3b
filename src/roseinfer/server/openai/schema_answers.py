"""Turns results and errors into the JSON of OpenAI's answers. Knows no tokens, and nothing of requests."""

from typing import Any

import msgspec

from roseinfer.errors import RoseinferError

MAX_ERROR_CHARS = 400


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Counted by the engine. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Reply(msgspec.Struct):
    """An unstreamed answer; `object` is `text_completion` or `chat.completion`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage
    roseinfer_ledger: list[Any] | msgspec.UnsetType = msgspec.UNSET  # of each choice, when asked for


def server_timing(ledgers: list[dict[str, object]]) -> str:
    """The header Server-Timing (https://www.w3.org/TR/server-timing/): the parts of the first ledger in ms."""
    parts = ledgers[0]["parts_ns"]
    assert isinstance(parts, dict)
    return ", ".join(f"{name};dur={duration / 1e6:.3f}" for name, duration in parts.items())


def error_body(error: RoseinferError, ledgers: list[dict[str, object]] | None = None) -> bytes:
    """`{"error": {message, type, param, code}}`, as OpenAI's clients read it; never longer than a line or two.

    Beside it stands where the time went, for clients that asked.

    Header bytes that are no UTF-8 reach us as lone surrogates, which JSON cannot hold: they are told as escapes.
    """

    def told(text: str) -> str:
        return text[:MAX_ERROR_CHARS].encode("utf-8", "backslashreplace").decode()

    fields = {
        "message": told(error.message),
        "type": error.error_type,
        "param": None if error.param is None else told(error.param),
        "code": error.public_code,
    }
    return msgspec.json.encode({"error": fields} | ({} if ledgers is None else {"roseinfer_ledger": ledgers}))
