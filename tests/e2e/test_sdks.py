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
from tests.conftest import require_tool, requires_all
from tests.repo.tree import ROOT

pytestmark = pytest.mark.e2e
PYTHON_SCRIPT, NPM_SCRIPT = ROOT / "tests" / "e2e" / "python_sdks.py", ROOT / "tests" / "e2e" / "npm_sdks.cjs"
PYTHON_CHECKS = re.findall(r"^def (check_\w+)", PYTHON_SCRIPT.read_text(), re.MULTILINE)
NPM_CHECKS = re.findall(r"^  async (check\w+)", NPM_SCRIPT.read_text(), re.MULTILINE)
CLIENTS, PACKAGES = ROOT / "build" / "clients-venv", ROOT / "build" / "npm" / "node_modules"


def require_installed(directory: Path) -> None:
    if not directory.is_dir():
        reason = f"there is no {directory.relative_to(ROOT)}; .ci/run sets it up"
        if requires_all():
            pytest.fail(reason)
        pytest.skip(reason)


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


def run_checks(*command: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What went wrong, by the name of the check."""
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    failures: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failures


@pytest.fixture(scope="module")
def python_failures(server: launcher.Server) -> dict[str, str]:
    require_installed(CLIENTS / "lib")
    python = str(CLIENTS / "bin" / "python")
    return run_checks(python, str(PYTHON_SCRIPT), server.url, *PYTHON_CHECKS, environment={"PYTHONPATH": ""})


@pytest.fixture(scope="module")
def npm_failures(server: launcher.Server) -> dict[str, str]:
    require_installed(PACKAGES / "ai")
    command = [require_tool("node"), str(NPM_SCRIPT), server.url, *NPM_CHECKS]
    return run_checks(*command, environment={"NODE_PATH": str(PACKAGES)})


@pytest.mark.parametrize("check", PYTHON_CHECKS)
def test_python(check: str, python_failures: dict[str, str]) -> None:
    assert check not in python_failures, python_failures[check]


@pytest.mark.parametrize("check", NPM_CHECKS)
def test_npm(check: str, npm_failures: dict[str, str]) -> None:
    assert check not in npm_failures, npm_failures[check]
