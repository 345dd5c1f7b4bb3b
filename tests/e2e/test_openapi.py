"""A schema fuzzer reads /openapi.json of a real process and tries everything it says, and much that it does not say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import StartServer
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

# 400 answers also what no schema can say: fields that exclude each other, and a prompt that does not fit the context.
CONFIG = '[checks.positive_data_acceptance]\nexpected-statuses = ["2xx", "400", "404"]\n'


def fuzz(document: str, base_url: str, directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (directory / "schemathesis.toml").write_text(CONFIG)
    options = ["--checks", "all", "--max-examples", "15", "--seed", "1", "--no-color", "--url", base_url, *more]
    command = [sys.executable, "-m", "schemathesis.cli", "run", document, *options]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=110, check=False)


def served_document(server: Server) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(server.get("/openapi.json"))
    for name in ("CompletionBody", "ChatBody", "MessagesBody", "ResponseBody"):
        fields = document["components"]["schemas"][name]["properties"]
        for deadline in ("timeout_s", "queue_timeout_s"):  # one that passes is a 503 or a 504, and rightly
            del fields[deadline]
    return document


@pytest.mark.parametrize(
    "paths",
    [
        ["--include-path", "/v1/responses"],
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
