"""Every error has a status, a code, a body that OpenAI's clients read, and a line in docs/http-api.md."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from roseinfer.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    MethodNotAllowed,
    MissingField,
    NotReady,
    NotText,
    Overloaded,
    RequestError,
    RoseinferError,
    UnknownField,
)
from roseinfer.server.middleware import error_response
from roseinfer.server.openapi import document
from tests.unit.server.harness import engine_info

ROOT = Path(__file__).parents[3]
GROUPS = {RoseinferError, RequestError, CapacityError, EngineError, ConfigError}  # never sent, or without a meaning


def descendants(error: type[RoseinferError]) -> Iterator[type[RoseinferError]]:
    yield error
    for child in error.__subclasses__():
        yield from descendants(child)


FOR_THE_LOG = {UnknownField, MissingField, NotText}  # which tells them apart; to a client they are an InvalidRequest
SENT = [error for error in descendants(RoseinferError) if error not in GROUPS | FOR_THE_LOG]


@pytest.mark.parametrize(
    ("message", "param", "told"),
    [
        (
            "Expected `integer` >= 1, got 0",
            "scheduler.max_num_seqs",
            "scheduler.max_num_seqs: Expected `integer` >= 1, got 0",
        ),
        ("`max_inflight`: Expected `integer` >= 1.", "max_inflight", "max_inflight: Expected `integer` >= 1."),
        ("`server.port` is taken.", None, "`server.port` is taken."),
    ],
)
def test_a_value_given_at_start_is_named_in_the_traceback(message: str, param: str | None, told: str) -> None:
    error = ConfigError(message, param=param)
    assert (str(error), error.message) == (told, message)


@pytest.mark.parametrize("error", SENT, ids=lambda error: error.__name__)
def test_every_error_has_a_body_and_a_row_in_the_docs(error: type[RoseinferError]) -> None:
    response = error_response(error("It went wrong."))
    assert response.status == error.status >= 400
    assert isinstance(response.body, bytes)
    body = json.loads(response.body)["error"]
    assert body == {"message": "It went wrong.", "type": error.error_type, "param": None, "code": error.code}
    assert body["code"]
    assert ("Retry-After" in response.headers) == (error.status in {429, 503})
    meaning = (inspect.getdoc(error) or "").split("\n\n")[0].replace("\n", " ")
    row = f"| {error.status} | `{error.error_type}` | `{error.code}` | {meaning} |"
    assert row in (ROOT / "docs" / "http-api.md").read_text()


def test_an_error_of_a_request_is_4xx_and_one_of_ours_5xx() -> None:
    assert {error.status // 100 for error in SENT if issubclass(error, RequestError)} == {4}
    assert {error.status // 100 for error in SENT if issubclass(error, EngineError)} == {5}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_document_lists_whatever_an_engine_may_fail_with(path: str) -> None:
    responses = document(("scripted",), engine_info(), has_keys=False)["paths"][path]["post"]["responses"]
    for error in EngineError.__subclasses__():
        assert f"`{error.code}`" in responses[str(error.status)]["description"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"])
def test_the_document_says_where_one_more_long_body_may_be_too_many(path: str) -> None:
    responses = document(("scripted",), engine_info(), has_keys=False)["paths"][path]["post"]["responses"]
    assert f"`{Overloaded.code}`" in responses[str(Overloaded.status)]["description"]
    assert "Retry-After" in responses[str(Overloaded.status)]["headers"]


def test_what_an_error_carries() -> None:
    assert error_response(NotReady("Later.", retry_after_s=9)).headers["Retry-After"] == "9"
    assert error_response(MethodNotAllowed("No.")).status == 405
    nameless = error_response(RoseinferError("Unforeseen."))
    assert isinstance(nameless.body, bytes)
    assert (nameless.status, json.loads(nameless.body)["error"]["code"]) == (500, "internal_error")
