"""Clients that others wrote, as their users run them, on a server with a key and room for one request at a time."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.conftest import require_path, require_tool
from tests.e2e.server import PATIENCE_S, Server, running

pytestmark = pytest.mark.e2e
MODEL = "roseinfer-demo"
KEY = "sk-of-the-clients"
PROMPT = "The scheduler decides which sequences"
PACKAGES = Path(__file__).parents[2] / "build" / "npm" / "node_modules"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("clients")
    (directory / "keys").write_text(f"clients {KEY}\n")
    options = ("--api-key-file", str(directory / "keys"), "--server.max-inflight", "1")
    with running(directory / "log", *options) as server:
        yield server


def is_idle(server: Server) -> bool:
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        lines = response.read().decode().splitlines()
    gauges = ("http_inflight_streams", "num_requests_running", "num_requests_waiting")
    wanted = tuple(f"roseinfer_{name}{{" for name in gauges)
    values = [line.rpartition(" ")[2] for line in lines if line.startswith(wanted)]
    assert len(values) == len(wanted), values
    return all(float(value) == 0 for value in values)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(server: Server) -> Iterator[None]:
    """Whatever a client did, cancellations included, soon nothing of it is left in the engine."""
    yield
    while not is_idle(server):
        pass


# --- npm ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdk(server: Server) -> dict[str, Any]:
    """What the npm SDK saw, call by call."""
    node = require_tool("node")
    require_path(PACKAGES / "openai")
    command = [node, str(Path(__file__).with_name("openai_sdk.cjs")), f"{server.url}/v1", KEY, MODEL]
    environment = os.environ | {"NODE_PATH": str(PACKAGES)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, Any] = json.loads(done.stdout)
    return outcomes


def test_npm_models(sdk: dict[str, Any]) -> None:
    assert sdk["models"] == [MODEL]
    assert sdk["model"] == MODEL


@pytest.mark.parametrize("endpoint", ["completion", "chat"])
def test_npm_streamed_is_not_streamed(sdk: dict[str, Any], endpoint: str) -> None:
    whole, stream = sdk[endpoint], sdk[f"{endpoint}Stream"]
    assert whole["text"]
    assert whole["usage"]["completion_tokens"] > 0
    assert {**stream, "usage": _counts(stream)} == {**whole, "usage": _counts(whole)}


def _counts(outcome: dict[str, Any]) -> list[int]:
    return [outcome["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]


@pytest.mark.parametrize(
    ("call", "name", "status", "code", "param"),
    [
        ("badValue", "BadRequestError", 400, "invalid_value", "temperature"),
        ("tooLong", "BadRequestError", 400, "context_length_exceeded", "max_tokens"),
        ("badModel", "NotFoundError", 404, "model_not_found", "model"),
        ("badKey", "AuthenticationError", 401, "invalid_api_key", None),
    ],
)
def test_npm_errors_are_typed(
    sdk: dict[str, Any], call: str, name: str, status: int, code: str, param: str | None
) -> None:
    error = sdk[call]
    assert (error["name"], error["status"], error["code"], error["param"]) == (name, status, code, param)


def test_npm_comes_back_after_429(sdk: dict[str, Any]) -> None:
    outcome = sdk["retried"]
    *refused, last = outcome["attempts"]
    assert refused
    assert all(status == 429 and int(retry_after) >= 1 for status, retry_after in refused)
    assert last[0] == 200
    assert outcome["text"] == sdk["completion"]["text"]


def test_npm_leaves_a_stream(sdk: dict[str, Any]) -> None:
    assert sdk["cancelled"] == {"chunks": 3}


# --- Python ---------------------------------------------------------------------------------------------------------


def test_python_comes_back_after_429_and_leaves_a_stream(server: Server) -> None:
    attempts: list[Any] = []

    def note(response: Any) -> None:
        attempts.append(response)
        if response.status_code == 429:
            stream.close()

    with (
        openai.DefaultHttpxClient(event_hooks={"response": [note]}) as transport,
        OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as holder,
        OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=5, http_client=transport) as sdk,
    ):
        stream = holder.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        answer = sdk.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4)
    assert answer.choices[0].text
    *refused, served = attempts
    assert refused
    assert all(response.status_code == 429 and int(response.headers["Retry-After"]) >= 1 for response in refused)
    assert served.status_code == 200


def test_a_wrong_key_is_a_typed_error_in_python(server: Server) -> None:
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as sdk,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        sdk.models.list()
    assert caught.value.code == "invalid_api_key"


def test_python_aborts_from_elsewhere(server: Server) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as sdk:
        stream = sdk.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(iter(stream))
        path = f"/v1/requests/{first.id}/abort"
        status, aborted = server.post(path, b"", Authorization=f"Bearer {KEY}")
        assert (status, aborted["aborted"]) == (200, True)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
    assert caught.value.code == "aborted"


# --- llm, a command-line client ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm_directory(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's directory of `llm`, with this server's models, as its documentation has them configured."""
    directory = tmp_path_factory.mktemp("llm")
    base = f"api_base: {server.url}/v1\n  api_key_name: clients\n"
    (directory / "extra-openai-models.yaml").write_text(
        f"- model_id: rose\n  model_name: {MODEL}\n  {base}"
        f"- model_id: rose-text\n  model_name: {MODEL}\n  {base}  completion: true\n"
        f"- model_id: rose-wrong\n  model_name: gpt-5\n  {base}"
    )
    (directory / "keys.json").write_text(json.dumps({"clients": KEY}))
    return directory


def ask_llm(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LLM_USER_PATH": str(directory)}
    command = [sys.executable, "-m", "llm", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("model", ["rose", "rose-text"])
def test_llm_streams_what_it_gets_whole(llm_directory: Path, model: str) -> None:
    options = ["-m", model, PROMPT, "--no-log", "-o", "max_tokens", "12", "-o", "temperature", "0"]
    streamed, whole = (ask_llm(llm_directory, *options, *more) for more in ([], ["--no-stream"]))
    assert (streamed.returncode, whole.returncode) == (0, 0), streamed.stderr + whole.stderr
    assert streamed.stdout == whole.stdout != ""


def test_llm_says_what_the_server_said(llm_directory: Path) -> None:
    wrong = ask_llm(llm_directory, "-m", "rose-wrong", PROMPT, "--no-log")
    assert wrong.returncode != 0
    assert "does not exist here" in wrong.stderr
