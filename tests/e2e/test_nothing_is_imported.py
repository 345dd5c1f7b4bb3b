"""A server that is ready has imported what it needs: an import holds every stream up, for tens of milliseconds."""

from typing import Any

import pytest

from tests.e2e.conftest import StartServer

pytestmark = pytest.mark.e2e
SAY_HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 60, "temperature": 0.7, "frequency_penalty": 0.5}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 1, "echo": True, "logprobs": 3}),
    ("/v1/chat/completions", {**SAY_HELLO, "logprobs": True, "top_logprobs": 3}),
    ("/v1/chat/completions", {**SAY_HELLO, "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {**SAY_HELLO, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/completions", {"prompt": "long " * 40_000}),
    ("/tokenize", {"prompt": "hello"}),
]
PAGES = ["/v1/models", "/metrics", "/metrics/load", "/openapi.json"]


def test_no_request_imports_anything(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # each import is a line on stderr, the engine's too
    server = start_server()
    before = server.log_path.stat().st_size
    statuses = [server.post(path, body)[0] for path, body in BODIES] + [server.status(path) for path in PAGES]
    assert statuses == [200, 200, 200, 200, 200, 400, 200] + [200] * len(PAGES)
    load = server.get("/metrics/load")
    assert 'roseinfer_engine_up{model_name="' in load
    assert "_bucket" not in load
    log = server.log_path.read_text()
    assert "import time:" in log[:before]
    assert [line for line in log[before:].splitlines() if line.startswith("import time:")] == []
