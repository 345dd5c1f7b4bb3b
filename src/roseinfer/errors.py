"""Every error that roseinfer raises on purpose, with its HTTP status.

    RoseinferError
    ├── ConfigError      at start only; exit code 2; names the value
    ├── RequestError     4xx: the caller can fix it
    ├── CapacityError    429 and 503: the caller may come back; carries retry_after_s
    └── EngineError      5xx: ours

`server/middleware.py` turns any of them into the error body of the API that was asked, OpenAI's or Anthropic's.
"""

from dataclasses import dataclass


class RoseinferError(Exception):
    """The root. `message` is one sentence that is safe to show to a client."""

    status: int = 500
    error_type: str = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def reason(self) -> str:
        """The message without the name that it begins with, for a line that has named `param` already."""
        return self.message.removeprefix(f"`{self.param}`").lstrip(": ") if self.param is not None else self.message

    @property
    def public_code(self) -> str:
        """The code for clients, metrics and the log; an error without one was not foreseen."""
        return self.code or "internal_error"


class ConfigError(RoseinferError):
    """A value given at start cannot be used. `param` is its path in the configuration tree, such as `server.port`."""

    def __str__(self) -> str:
        """As the command line prints it: most messages do not name the value."""
        return self.message if self.param is None else f"{self.param}: {self.reason}"


class RequestError(RoseinferError):
    """The request cannot be served as it is; sending it again unchanged will fail again."""

    status = 400
    error_type = "invalid_request_error"


class InvalidRequest(RequestError):
    """A field of the body is missing, unknown, of the wrong type or out of range."""

    code = "invalid_value"


class UnknownField(InvalidRequest):
    """A field of the body is unknown."""


class MissingField(InvalidRequest):
    """A field of the body is missing."""


class NotText(InvalidRequest):
    """A part of a conversation is no text; `part` is where it is, and `kind` its type."""

    def __init__(self, message: str, *, param: str | None = None, part: str = "", kind: str = "") -> None:
        super().__init__(message, param=param)
        self.part = part
        self.kind = kind


class MalformedRequest(RequestError):
    """The bytes are no HTTP request, or one in a form that is not supported."""

    code = "malformed_request"


class UnmetExpectation(MalformedRequest):
    """The header `Expect` asks for something else than `100-continue`."""

    status = 417


class PromptTooLong(RequestError):
    """Prompt and requested completion do not fit into the model's context."""

    code = "context_length_exceeded"

    @staticmethod
    def limit(max_model_len: int) -> str:
        """How a message begins, as OpenAI's and vLLM's do.

        Agents that know the error by these words, among them all that use LiteLLM, then shorten the conversation.
        """
        return f"This model's maximum context length is {max_model_len} tokens"

    def __init__(
        self, message: str, *, param: str | None = None, num_tokens: int | None = None, max_model_len: int = 0
    ) -> None:
        """`num_tokens` are the prompt's, where they are known."""
        super().__init__(message, param=param)
        self.num_tokens = num_tokens
        self.most_tokens = max_model_len - 1  # that a prompt may have, so that one can be generated


class Unauthorized(RequestError):
    """The API key is missing or is not one of the configured ones."""

    status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"

    def __init__(self, message: str, *, challenge: str = "Bearer") -> None:
        super().__init__(message)
        self.challenge = challenge  # WWW-Authenticate: how the key may be given


class CrossSite(RequestError):
    """A browser asks in the name of another site."""

    status = 403
    code = "cross_site"


class UnknownModel(RequestError):
    """`model` names something this server does not serve."""

    status = 404
    code = "model_not_found"


class UnknownRequest(RequestError):
    """No request with this id is in flight, nor remembered by the flight recorder."""

    status = 404
    code = "request_not_found"


class UnknownRoute(RequestError):
    """There is nothing at this path."""

    status = 404
    code = "unknown_route"


class MethodNotAllowed(RequestError):
    """The path exists, but not for this method; `Allow` lists those that it has."""

    status = 405
    code = "method_not_allowed"


class BodyTimeout(RequestError):
    """The body did not arrive within `server.body_timeout_s`."""

    status = 408
    code = "body_timeout"


class SlowReader(RequestError):
    """The client read its stream so slowly that too much output waited for it."""

    status = 408
    code = "slow_reader"


class Conflict(RequestError):
    """The operation is running already, and only one may run at a time."""

    status = 409
    code = "conflict"


class BodyTooLarge(RequestError):
    """The body is longer than `server.max_body_bytes`."""

    status = 413
    code = "body_too_large"


class NotJSON(RequestError):
    """The content type is not JSON, or the body is compressed."""

    status = 415
    code = "unsupported_media_type"


class HeadTooLarge(RequestError):
    """The request line or a header is too long, or there are too many headers."""

    status = 431
    code = "head_too_large"


class RequestAborted(RequestError):
    """Another request with the same key aborted this one."""

    status = 499  # nginx's: unlike 408, 409 and 5xx, no client sends the same again by itself
    code = "aborted"


class CapacityError(RoseinferError):
    """The request is sound, but the server has no room for it now."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(CapacityError):
    """`server.max_inflight` HTTP requests are served already, each counted once whatever its prompts and `n`; or
    the limit of tokens, of seconds of waiting, or of bytes of bodies is reached.
    """

    status = 429
    error_type = "rate_limit_error"
    code = "overloaded"


class NotReady(CapacityError):
    """The server is starting or draining."""

    status = 503
    error_type = "service_unavailable"
    code = "not_ready"


class EngineError(RoseinferError):
    """The engine could not finish a request that it had accepted."""

    code = "engine_error"


class EngineFailed(EngineError):
    """A step raised, so the state of the device is unknown."""

    code = "engine_failed"


class SequenceFailed(EngineError):
    """The model computed no finite number for the sequence, or its parameters failed; others are not affected."""

    code = "sequence_failed"


class EngineDead(EngineError):
    """The engine's process or thread has ended."""

    status = 503
    code = "engine_dead"


class RequestTimeout(EngineError):
    """The request ran past its deadline, `timeout_s`."""

    status = 504
    error_type = "timeout_error"
    code = "timeout"


class QueueTimeout(RequestTimeout):
    """The engine had not begun the request by the sooner of its deadlines, `param`; nothing was computed for it."""

    status = 503
    code = "queue_timeout"
    retry_after_s = 1  # until the queue estimate sets it


@dataclass(frozen=True, slots=True)
class PromptName:
    """The field at fault where a prompt is, and the fields whose text is part of the prompt."""

    param: str
    beside: tuple[str, ...] = ()
    is_text: bool = False  # and its tokens are the tokenizer's

    def __str__(self) -> str:
        others = " and ".join(f"`{name}`" for name in self.beside)
        return f"`{self.param}` with {others}" if others else f"`{self.param}`"
