"""Encodes errors as OpenAI's clients read them: the form of every path without one of its own."""

import msgspec

from roseinfer.errors import RoseinferError

MAX_ERROR_CHARS = 400


def printable(text: str) -> str:
    """At most a line or two. Header bytes that are no UTF-8 arrive as lone surrogates, which become escapes."""
    return text[:MAX_ERROR_CHARS].encode("utf-8", "backslashreplace").decode()


def error_body(error: RoseinferError, ledgers: list[dict[str, object]] | None = None) -> bytes:
    """`{"error": {message, type, param, code}}`, and the ledgers of a client that asked for them."""
    fields = {
        "message": printable(error.message),
        "type": error.error_type,
        "param": None if error.param is None else printable(error.param),
        "code": error.public_code,
    }
    return msgspec.json.encode({"error": fields} | ({} if ledgers is None else {"roseinfer_ledger": ledgers}))
