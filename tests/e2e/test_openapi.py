"""A schema fuzzer reads /openapi.json of a real process and tries everything it says, and much that it does not say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import StartServer

pytestmark = pytest.mark.e2e

# 400 answers also what no schema can say: fields that exclude each other, and a prompt that does not fit the context.
CONFIG = '[checks.positive_data_acceptance]\nexpected-statuses = ["2xx", "400", "404"]\n'


def fuzz(document: str, base_url: str, directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (directory / "schemathesis.toml").write_text(CONFIG)
    options = ["--checks", "all", "--max-examples", "15", "--seed", "1", "--no-color", "--url", base_url, *more]
    command = [sys.executable, "-m", "schemathesis.cli", "run", document, *options]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=110, check=False)


def test_a_schema_fuzzer_finds_no_fault(start_server: StartServer, tmp_path: Path) -> None:
    """And does find one in a document that promises what is not so."""
    server = start_server("--model.max-model-len", "64")
    document = json.loads(server.get("/openapi.json"))
    for name in ("CompletionBody", "ChatBody", "MessagesBody", "ResponseBody"):
        fields = document["components"]["schemas"][name]["properties"]
        for deadline in ("timeout_s", "queue_timeout_s"):  # one that passes is a 503 or a 504, and rightly
            del fields[deadline]
    (tmp_path / "document.json").write_text(json.dumps(document))
    found = fuzz("document.json", server.url, tmp_path)
    assert found.returncode == 0, found.stdout
    assert "Coverage (in " in found.stdout
    assert "selected / 0 total" not in found.stdout
    assert "Traceback" not in server.log()
    properties = document["components"]["schemas"]["DetokenizeReply"]["properties"]
    properties["prompt"] = {"type": "integer"}
    (tmp_path / "wrong.json").write_text(json.dumps(document))
    assert fuzz("wrong.json", server.url, tmp_path, "--include-path", "/detokenize").returncode == 1
