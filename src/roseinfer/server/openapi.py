"""Generates /openapi.json, an OpenAPI 3.1 document, from the request and reply structs and the error tree.

What a field may hold is written once, in the annotation that also validates it. The model's name and the sizes of its
vocabulary and context are filled in. Relations between fields are beside the code that checks them, but for those that
are beyond a schema, such as that a prompt and its completion fit into the context: they are in docs/http-api.md.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from roseinfer import __version__, errors
from roseinfer.messages import EngineInfo
from roseinfer.server.anthropic import replies as anthropic
from roseinfer.server.anthropic.schema import CountBody, MessagesBody
from roseinfer.server.api.fields import ModelBody, Related, Schema
from roseinfer.server.api.unserved import Unserved
from roseinfer.server.middleware import PROBE_PATHS
from roseinfer.server.openai import replies, responses_replies
from roseinfer.server.openai.chat_schema import ChatBody
from roseinfer.server.openai.embeddings import EmbeddingsBody
from roseinfer.server.openai.responses_schema import InputTokensBody, ResponseBody
from roseinfer.server.openai.schema import CompletionBody
from roseinfer.server.openai.tokenize import DetokenizeBody, TokenizeBody
from roseinfer.server.service import SERVICE

_REF = "#/components/schemas/{name}"
_REFERENCE = re.compile(_REF.format(name='([^"]+)'))

_ANY = (errors.MalformedRequest, errors.UnmetExpectation, errors.HeadTooLarge)  # whatever the path
_KEYED = (*_ANY, errors.Unauthorized)
_BODY = (*_KEYED, errors.InvalidRequest, errors.UnknownModel, errors.BodyTimeout, errors.BodyTooLarge, errors.NotJSON)
_TEXT = (*_BODY, errors.NotReady, errors.Overloaded)  # one more long body may be too many
_TOKENS = (
    *_TEXT,
    errors.PromptTooLong,
    errors.RequestAborted,
    errors.EngineFailed,
    errors.SequenceFailed,
    errors.EngineDead,
    errors.RequestTimeout,
    errors.QueueTimeout,
)


class Operation(NamedTuple):
    """One method of one path: what goes in, what comes out, what can go wrong."""

    method: str
    path: str
    summary: str
    reply: type[msgspec.Struct] | str  # or a media type
    failures: Sequence[type[errors.RoseinferError]]
    body: type[ModelBody] | None = None
    is_streamed: bool = False
    error: type[msgspec.Struct] = replies.ErrorReply
    unready: type[msgspec.Struct] | None = None  # what a 503 answers that is no error
    is_list: bool = False  # the answer has several of `reply`


OPERATIONS = (
    Operation(
        "post",
        "/v1/completions",
        "Continue prompts",
        replies.CompletionReply,
        _TOKENS,
        CompletionBody,
        is_streamed=True,
    ),
    Operation(
        "post",
        "/v1/completions/render",
        "The token ids of such prompts",
        replies.RenderReply,
        (*_TEXT, errors.PromptTooLong),
        CompletionBody,
        is_list=True,
    ),
    Operation("post", "/v1/chat/completions", "The next turn", replies.ChatReply, _TOKENS, ChatBody, is_streamed=True),
    Operation(
        "post",
        "/v1/chat/completions/render",
        "The token ids of such a prompt",
        replies.RenderReply,
        (*_TEXT, errors.PromptTooLong),
        ChatBody,
    ),
    Operation(
        "post",
        "/v1/responses",
        "The next items",
        responses_replies.ResponseReply,
        _TOKENS,
        ResponseBody,
        is_streamed=True,
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "How many tokens the prompt would have",
        responses_replies.InputTokensReply,
        _TEXT,
        InputTokensBody,
    ),
    Operation("post", "/v1/embeddings", "Texts as vectors", replies.EmbeddingsReply, _TOKENS, EmbeddingsBody),
    Operation(
        "post",
        "/v1/messages",
        "The next turn, as Anthropic has it",
        anthropic.MessageReply,
        _TOKENS,
        MessagesBody,
        is_streamed=True,
        error=anthropic.MessageErrorReply,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "How many tokens the prompt would have",
        anthropic.CountReply,
        _TEXT,
        CountBody,
        error=anthropic.MessageErrorReply,
    ),
    Operation("get", "/v1/models", "The models that are served", replies.ModelList, (*_KEYED, errors.NotReady)),
    Operation(
        "get",
        "/v1/models/{id}",
        "One of them",
        replies.ModelCard,
        (*_KEYED, errors.NotReady, errors.UnknownModel, errors.UnknownRoute),
    ),
    Operation(
        "post",
        "/v1/requests/{id}/abort",
        "End a request that is being answered",
        replies.AbortReply,
        (*_KEYED, errors.InvalidRequest, errors.BodyTimeout, errors.UnknownRequest, errors.UnknownRoute),
    ),
    Operation("post", "/tokenize", "Text into token ids", replies.TokenizeReply, _TEXT, TokenizeBody),
    Operation("post", "/detokenize", "Token ids into text", replies.DetokenizeReply, _TEXT, DetokenizeBody),
    Operation("get", "/openapi.json", "This document", "application/json", (*_KEYED, errors.NotReady)),
    Operation("get", "/load", "Requests for tokens in flight, and the predicted wait", replies.LoadReply, _KEYED),
    Operation("get", "/version", "The version of roseinfer", replies.VersionReply, _KEYED),
    Operation("get", "/metrics", "Series for Prometheus", "text/plain", _KEYED),
    Operation("get", "/metrics/load", "The gauges of the load alone", "text/plain", _KEYED),
    *(
        Operation("get", path, summary, replies.ProbeReply, _ANY, unready=replies.ProbeReply)
        for path, summary in (
            ("/livez", "Is it alive"),
            ("/readyz", "Can it serve now"),
            ("/health", "The same as /readyz"),
            ("/ping", "The same, as SageMaker asks it"),
            ("/startupz", "Was it ever ready"),
        )
    ),
)


async def handle(request: web.Request) -> web.Response:
    """GET /openapi.json. Raises NotReady before the model is known."""
    service = request.app[SERVICE]
    content = msgspec.json.encode(
        document(service.model_names, service.client.info, has_keys=service.api_keys is not None)
    )
    return web.Response(body=content, content_type="application/json")


def document(model_names: Sequence[str], info: EngineInfo, *, has_keys: bool) -> Schema:
    """The whole document."""
    bodies = list(dict.fromkeys(operation.body for operation in OPERATIONS if operation.body is not None))
    answers = [operation.reply for operation in OPERATIONS if not isinstance(operation.reply, str)]
    failures = dict.fromkeys(operation.error for operation in OPERATIONS)
    _, components = msgspec.json.schema_components([*bodies, *answers, *failures], ref_template=_REF)
    for body in bodies:
        _accept_what_is_accepted(components, body)
    _fill_in(components, model_names, info)
    _relate(components)
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, has_keys=has_keys)
    schemes = _KEY_SCHEMES if has_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "roseinfer",
            "version": __version__,
            "description": "The APIs of OpenAI and Anthropic for one model. docs/http-api.md says what no schema can.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": schemes},
    }


def _accept_what_is_accepted(components: dict[str, Schema], body: type[ModelBody]) -> None:
    """Add null where a field may be left out, and fields that are accepted with values that ask for nothing."""
    for name in _structs_within(components, body.__name__):
        schema = components[name]
        required = schema.get("required", ())
        for field, value in schema["properties"].items():
            if field not in required:
                schema["properties"][field] = _or_null(value)
    for field, unserved in body.unserved.items():
        components[body.__name__]["properties"].setdefault(field, _schema_of(unserved))


def _schema_of(unserved: Unserved) -> Schema:
    if unserved.is_ignored:
        return {"description": "No effect."}
    return {"enum": [*unserved.neutral, None], "description": "Accepted only with a value that asks for nothing."}


def _structs_within(components: dict[str, Schema], name: str) -> list[str]:
    """The names of the body and of its parts, in all of which a field may be null."""
    names = [name]
    for known in names:  # and for those that are added to it meanwhile
        found = _REFERENCE.findall(msgspec.json.encode(components[known]).decode())
        names += dict.fromkeys(inner for inner in found if inner not in names)
    return names


def _or_null(schema: Schema) -> Schema:
    """The schema, or null; it may have been widened before."""
    choices = schema.get("anyOf", [schema])
    if any(choice.get("type") == "null" for choice in choices):
        return schema
    outer: Schema = {key: schema[key] for key in ("description", "default") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in outer}
    return {"anyOf": [*(inner.get("anyOf") or [inner]), {"type": "null"}], **outer}


def _relate(components: dict[str, Schema]) -> None:
    """Add which fields of a body, or of a part of one, need or exclude others."""
    kinds = Related.__subclasses__()
    for kind in kinds:  # and for those that are added to them meanwhile
        kinds += kind.__subclasses__()
        if kind.relations and kind.__name__ in components:
            components[kind.__name__]["allOf"] = list(kind.relations)


def _fill_in(components: dict[str, Schema], model_names: Sequence[str], info: EngineInfo) -> None:
    for name, schema in components.items():
        properties = schema.get("properties", {})
        if "model" not in properties or schema.get("additionalProperties", True):
            continue  # it is no body
        properties["model"] = {"enum": [*model_names, None], "description": properties["model"]["description"]}
        if name in {CountBody.__name__, InputTokensBody.__name__}:
            continue  # the engine does not get it
        for field, value in properties.items():
            if field in {"prompt", "input", "tokens", "stop_token_ids"}:
                _bound_integers(value, info.vocab_size - 1)
            elif field in {"max_tokens", "max_completion_tokens", "min_tokens"} and name != MessagesBody.__name__:
                _bound_integers(value, info.max_model_len)


def _bound_integers(schema: Any, maximum: int) -> None:
    """Lower the maximum of every integer within."""
    if isinstance(schema, list):
        for part in schema:
            _bound_integers(part, maximum)
    elif isinstance(schema, dict):
        if schema.get("type") == "integer" and "minimum" in schema:
            schema["maximum"] = maximum
        for part in schema.values():
            _bound_integers(part, maximum)


def _operation(operation: Operation, *, has_keys: bool) -> Schema:
    described: Schema = {
        "operationId": f"{operation.method}{operation.path}".translate(str.maketrans("/{}.", "____")),
        "summary": operation.summary,
        "responses": _responses(operation),
    }
    if parameters := [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in parameters
        ]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json_of(operation.body)}
    if has_keys and operation.path not in PROBE_PATHS:
        described["security"] = [{scheme: []} for scheme in _KEY_SCHEMES]
    return described


def _responses(operation: Operation) -> Schema:
    if isinstance(operation.reply, str):
        content: Schema = {operation.reply: {"schema": {"type": "string"}} if "text" in operation.reply else {}}
    else:
        content = _json_of(operation.reply, is_list=operation.is_list)
    if operation.is_streamed:
        content["text/event-stream"] = {}
    responses: Schema = {"200": {"description": "Done.", "content": content, "headers": _HEADERS}}
    by_status = attrgetter("status")
    for status, failures in groupby(sorted(operation.failures, key=by_status), by_status):
        codes = ", ".join(sorted({f"`{failure.code}`" for failure in failures}))
        headers = _HEADERS | (_RETRY if status in {429, 503} else {})
        responses[str(status)] = {
            "description": f"With the code {codes}.",
            "content": _json_of(operation.error),
            "headers": headers,
        }
    if operation.unready is not None:
        responses["503"] = {"description": "Not so.", "content": _json_of(operation.unready), "headers": _HEADERS}
    return responses


_KEY_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_HEADERS = {"X-Request-Id": {"schema": {"type": "string"}}}
_RETRY = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}


def _json_of(struct: type[msgspec.Struct], *, is_list: bool = False) -> Schema:
    schema: Schema = {"$ref": _REF.format(name=struct.__name__)}
    return {"application/json": {"schema": {"type": "array", "items": schema} if is_list else schema}}
