"""SDKs, agent frameworks and tools that others wrote, against a server whose model says what a test wants.

The checks are functions of `python_sdks.py` and `npm_sdks.cjs`, which run in environments of their own, each once.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from roseinfer.bench.load import launcher
from roseinfer.bench.load.launcher import free_port
from tests.conftest import require_path, require_tool
from tests.e2e.test_clients import PACKAGES
from tests.repo.tree import ROOT

pytestmark = pytest.mark.e2e
PYTHON_SCRIPT, NPM_SCRIPT = ROOT / "tests" / "e2e" / "python_sdks.py", ROOT / "tests" / "e2e" / "npm_sdks.cjs"
LITELLM_CHECK = "check_litellm"
PYTHON_CHECKS = re.findall(r"^(?:async )?def (check_\w+)", PYTHON_SCRIPT.read_text(), re.MULTILINE)
PYTHON_CHECKS.remove(LITELLM_CHECK)
NPM_CHECKS = re.findall(r"^  async (check\w+)", NPM_SCRIPT.read_text(), re.MULTILINE)
TOML_BLOCK = re.compile(r"```toml\n(.*?)```", re.DOTALL)
CLIENTS_PYTHON = ROOT / "build" / "clients-venv" / "bin" / "python"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[launcher.Server]:
    directory, port = tmp_path_factory.mktemp("scripted"), free_port()
    options = ["serve", "--port", str(port), "--ops-port", "0"]
    command = [sys.executable, "-m", "tests.e2e.scripted_model", str(directory), *options]
    server = launcher.Server(command, port, directory / "log")
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def litellm(server: launcher.Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[launcher.Server]:
    """LiteLLM's proxy, which takes a quarter of a minute to start; the check that needs it waits."""
    require_path(CLIENTS_PYTHON)
    directory, port = tmp_path_factory.mktemp("litellm"), free_port()
    models = {
        "as-vllm": ("hosted_vllm/scripted", f"{server.url}/v1"),
        "as-anthropic": ("anthropic/scripted", server.url),
    }
    entries = [
        {"model_name": name, "litellm_params": {"model": model, "api_base": url, "api_key": "unused"}}
        for name, (model, url) in models.items()
    ]
    (directory / "config.yaml").write_text(json.dumps({"model_list": entries}))
    options = ["--config", str(directory / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    environment = {"LITELLM_MASTER_KEY": "sk-unused", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [str(CLIENTS_PYTHON.with_name("litellm")), *options]
    proxy = launcher.Server(command, port, directory / "log", environment=os.environ | environment | {"PYTHONPATH": ""})
    try:
        yield proxy
    finally:
        proxy.stop()


def run_checks(*command: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What went wrong, by the name of the check."""
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    failures: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failures


def run_python_checks(server: launcher.Server, litellm: launcher.Server, *names: str) -> dict[str, str]:
    command = [str(CLIENTS_PYTHON), str(PYTHON_SCRIPT), server.url, litellm.url, *names]
    return run_checks(*command, environment={"PYTHONPATH": ""})


@pytest.fixture(scope="module")
def python_failures(server: launcher.Server, litellm: launcher.Server) -> dict[str, str]:
    return run_python_checks(server, litellm, *PYTHON_CHECKS)


@pytest.fixture(scope="module")
def npm_failures(server: launcher.Server) -> dict[str, str]:
    require_path(PACKAGES / "ai")
    command = [require_tool("node"), str(NPM_SCRIPT), server.url, *NPM_CHECKS]
    return run_checks(*command, environment={"NODE_PATH": str(PACKAGES)})


@pytest.mark.parametrize("check", PYTHON_CHECKS)
def test_python(check: str, python_failures: dict[str, str]) -> None:
    assert check not in python_failures, python_failures[check]


def test_litellm(server: launcher.Server, litellm: launcher.Server) -> None:
    assert run_python_checks(server, litellm, LITELLM_CHECK) == {}


@pytest.mark.parametrize("check", NPM_CHECKS)
def test_npm(check: str, npm_failures: dict[str, str]) -> None:
    assert check not in npm_failures, npm_failures[check]


def test_codex_reads_a_file_and_answers(server: launcher.Server, tmp_path: Path) -> None:
    """A coding agent's whole loop, through Responses, with all the tools and instructions that it brings."""
    require_path(PACKAGES / "@openai" / "codex")
    (tmp_path / ".codex").mkdir()
    [documented] = TOML_BLOCK.findall((ROOT / "docs" / "quickstart.md").read_text())
    config = documented.replace("http://localhost:8000", server.url).replace("roseinfer-demo", "scripted")
    offline = ("check_for_update_on_startup = false\n", "[analytics]\nenabled = false\n")
    (tmp_path / ".codex" / "config.toml").write_text(config.join(offline))
    (tmp_path / "note.txt").write_text("sunny")
    call = {"name": "exec_command", "arguments": {"cmd": "cat note.txt"}}
    replies = [f"<think>\nI read it.\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call>", "It is sunny."]
    options = ["exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    done = subprocess.run(
        [require_tool("node"), str(PACKAGES / ".bin" / "codex"), *options, f"Say: {json.dumps(replies)}"],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["text"] for item in items if item["type"] == "reasoning"] == ["I read it."]
    assert [item["aggregated_output"] for item in items if item["type"] == "command_execution"] == ["sunny"]
    assert items[-1]["text"] == "It is sunny."
    assert events[-1]["usage"]["reasoning_output_tokens"] > 0
