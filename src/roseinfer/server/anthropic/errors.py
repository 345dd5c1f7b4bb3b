"""Encodes errors as Anthropic's clients read them."""

import re
from functools import partial

import msgspec
from aiohttp import web

from roseinfer.errors import NotText, PromptTooLong, RoseinferError
from roseinfer.server.api.errors import printable
from roseinfer.server.exchange import Failure
from roseinfer.server.middleware import REQUEST_ID

PATH = "/v1/messages"  # with which the paths of this API begin

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OF_RESULT = re.compile(r"(\.content\[\d+\])(?=\.content\[)")  # a block that holds blocks
# Their tool runners then send the whole conversation, instead of what has come since the last answer.
_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


def error_form(request_id: str) -> Failure:
    """The form of the errors of one request."""
    return partial(error_body, request_id=request_id)


def error_body(error: RoseinferError, ledgers: list[dict[str, object]] | None, *, request_id: str) -> bytes:
    """`{"type": "error", "error": {type, message}, "request_id"}`, and the ledgers of a client that asked for them."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    fields: dict[str, object] = {"type": kind, "message": printable(_message(error))}
    if error.param in _DETAILS:
        fields["details"] = _DETAILS[error.param]
    body: dict[str, object] = {"type": "error", "error": fields, "request_id": request_id}
    return msgspec.json.encode(body | ({} if ledgers is None else {"roseinfer_ledger": ledgers}))


def _message(error: RoseinferError) -> str:
    """In Anthropic's words, by which Claude Code makes a conversation shorter, or sends it again without an image."""
    if isinstance(error, NotText):
        part = _OF_RESULT.sub(r"\1.tool_result", error.part)
        return f"`{part}.{error.kind}`: Only text content is supported."
    if isinstance(error, PromptTooLong) and error.num_tokens is not None:
        return f"prompt is too long: {error.num_tokens} tokens > {error.most_tokens} maximum. {error.message}"
    return error.message


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request's id under Anthropic's name for it."""
    if request.path.startswith(PATH):
        response.headers["request-id"] = request[REQUEST_ID]
