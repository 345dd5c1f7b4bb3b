"""A schema fuzzer reads /openapi.json of a real process and tries everything it says, and much that it does not say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from roseinfer.errors import InvalidRequest
from roseinfer.messages import MAX_INT32
from roseinfer.server.api.fields import ModelBody
from roseinfer.server.api.parsing import parse_body
from roseinfer.server.openapi import OPERATIONS, document
from tests.e2e.conftest import StartServer
from tests.e2e.server import Server
from tests.e2e.test_extremes import LEAST, needs_of
from tests.fuzz.extremes import Extremes
from tests.unit.server.harness import ScriptedEngine, engine_info, says, serving

pytestmark = pytest.mark.e2e

# 400 answers also what no schema can say: fields that exclude each other, and a prompt that does not fit the context.
CONFIG = '[checks.positive_data_acceptance]\nexpected-statuses = ["2xx", "400", "404"]\n'


def fuzz(document: str, base_url: str, directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (directory / "schemathesis.toml").write_text(CONFIG)
    options = ["--checks", "all", "--max-examples", "8", "--seed", "1", "--no-color", "--url", base_url, *more]
    command = [sys.executable, "-m", "schemathesis.cli", "run", document, *options]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=400, check=False)


def served_document(server: Server) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(server.get("/openapi.json"))
    for name in ("CompletionBody", "ChatBody", "MessagesBody", "ResponseBody", "EmbeddingsBody"):
        fields = document["components"]["schemas"][name]["properties"]
        for deadline in ("timeout_s", "queue_timeout_s"):  # one that passes is a 503 or a 504, and rightly
            del fields[deadline]
    for schema in document["components"]["schemas"].values():  # it cannot make objects by `if` and `then`; see below
        schema.pop("allOf", None)
    return document


@pytest.mark.timeout(600)  # a busy machine takes minutes
@pytest.mark.parametrize(
    "paths",
    [
        ["--include-path-regex", "^/v1/responses"],
        ["--include-path-regex", "^/v1/messages"],
        ["--exclude-path-regex", "^/v1/(responses|messages)"],
    ],
    ids=["responses", "messages", "others"],
)
def test_a_schema_fuzzer_finds_no_fault(start_server: StartServer, tmp_path: Path, paths: list[str]) -> None:
    server = start_server("--model.max-model-len", "32")  # most answers fill the context
    (tmp_path / "document.json").write_text(json.dumps(served_document(server)))
    found = fuzz("document.json", server.url, tmp_path, *paths)
    assert found.returncode == 0, found.stdout
    assert "Coverage (in " in found.stdout
    assert "selected / 0 total" not in found.stdout
    assert "Traceback" not in server.log()


def test_a_schema_fuzzer_finds_a_fault(start_server: StartServer, tmp_path: Path) -> None:
    """In a document that promises what is not so."""
    server = start_server("--model.max-model-len", "32")
    document = served_document(server)
    properties = document["components"]["schemas"]["DetokenizeReply"]["properties"]
    properties["prompt"] = {"type": "integer"}
    (tmp_path / "wrong.json").write_text(json.dumps(document))
    assert fuzz("wrong.json", server.url, tmp_path, "--include-path", "/detokenize").returncode == 1


BODIES = {operation.path: operation.body for operation in OPERATIONS if operation.body is not None}
BY_NAMES = (
    "`tools` has no function",
    "`tools` has two functions",
    "`functions` has two functions",
)  # no schema can say


@pytest.mark.parametrize(("path", "body_type"), BODIES.items())
def test_the_schema_promises_what_is_accepted(path: str, body_type: type[ModelBody]) -> None:
    """Each field at its extremes, but for bounds of the model."""
    info = engine_info(vocab_size=MAX_INT32 + 1, max_model_len=MAX_INT32)
    components = document(["m"], info, has_keys=False)["components"]
    schema = {"$ref": f"#/components/schemas/{body_type.__name__}"}
    promised = jsonschema_rs.Draft202012Validator({**schema, "components": components})
    extremes = Extremes(components["schemas"])
    fields = extremes.of_fields(schema)
    for name, value in ((field, value) for field, values in fields.items() for value in values):
        body = LEAST[path] | needs_of(path, name, fields) | {name: value}
        refusal = refusal_of(body, body_type)
        if refusal is None or not refusal.startswith(BY_NAMES):
            is_empty = name in ("prompt", "input") and value in ([], [[]])  # counted later
            assert promised.is_valid(body) == (refusal is None and not is_empty), (body, refusal)


def refusal_of(body: dict[str, Any], body_type: type[ModelBody]) -> str | None:
    try:
        parse_body(json.dumps(body).encode(), body_type)
    except InvalidRequest as error:
        return error.message
    return None


FUNCTIONS = {"tools": [{"type": "function", "name": "f"}]}
ALLOWED = {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": ["a", 1]}),
        ("/v1/completions", {"prompt": [[1], []]}),
        ("/v1/completions", {"stream_options": {}}),
        ("/v1/completions", {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [], "audio": {"id": "a"}}]}),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "a"}]}),
        ("/v1/chat/completions", {"top_logprobs": 1}),
        ("/v1/responses", {"input": []}),
        ("/v1/responses", {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
        ("/v1/responses", {"text": {"format": {"type": "json_object", "schema": {"type": "object"}}}}),
        ("/v1/responses", FUNCTIONS | {"tool_choice": ALLOWED | {"name": "f"}}),
        ("/v1/responses", FUNCTIONS | {"tool_choice": ALLOWED | {"type": "function", "name": "f"}}),
        ("/v1/messages", {"messages": []}),
        ("/v1/messages", {"messages": [{"role": "system", "content": "a"}]}),
        ("/tokenize", {"prompt": None}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"add_generation_prompt": False}),
    ],
    ids=str,
)
async def test_what_is_refused_is_not_promised(path: str, fields: dict[str, Any]) -> None:
    body = LEAST[path] | fields
    components = document(["m"], engine_info(), has_keys=False)["components"]
    schema = {"$ref": f"#/components/schemas/{BODIES[path].__name__}", "components": components}
    assert not jsonschema_rs.Draft202012Validator(schema).is_valid(body)
    async with serving(ScriptedEngine(says("a"))) as server:
        assert (await server.request("POST", path, json=body)).status == 400
