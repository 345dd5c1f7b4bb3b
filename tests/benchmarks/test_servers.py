"""Rivals on a GPU: where they are found, the command that starts one, and a row for one that is not there."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks import served, servers
from roseinfer.bench.load.launcher import LaunchFailed

MODEL, LOG = Path("M"), Path("log")


@pytest.fixture
def nothing_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(servers, "find_spec", lambda _: None)
    return tmp_path


def test_a_rival_is_looked_for_where_this_python_imports_and_on_path(
    nothing_on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert servers.python_of("vllm") is None
    program = nothing_on_path / "vllm"
    program.write_text("#!/opt/vllm/bin/python3.12\nimport vllm\n")
    program.chmod(0o755)
    assert servers.python_of("vllm") == "/opt/vllm/bin/python3.12"
    monkeypatch.setattr(servers, "find_spec", lambda name: name)
    assert servers.python_of("vllm") == sys.executable


@pytest.mark.parametrize("rival", servers.GPU_RIVALS)
def test_the_command_of_a_rival(rival: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(servers, "python_of", lambda _: "/opt/bin/python")
    monkeypatch.setattr(servers, "Server", lambda *given: started.append(given))
    servers.start_on_gpu(rival, MODEL, 1024, LOG)
    [(name, command, port, _, environment, _)] = started
    assert name == f"{rival} bfloat16"
    assert command[:2] == ["/opt/bin/python", "-m"]
    pairs = dict(zip(command[3::2], command[4::2], strict=True))
    assert {"M", "128", "1024", "0.2", "bfloat16", "127.0.0.1", str(port)} <= set(pairs.values())
    assert all(flag.startswith("--") for flag in pairs)
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PYTHONPATH"] == "", "its own packages, not ours"


@pytest.mark.usefixtures("nothing_on_path")
def test_rivals_that_are_not_installed_have_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchFailed, match="not installed"):
        servers.start_on_gpu("sglang", MODEL, 1024, LOG)

    def refused(*_: object) -> None:
        raise LaunchFailed("no GPU")

    monkeypatch.setattr(served, "start_roseinfer", refused)
    monkeypatch.setattr(served, "Worker", lambda name, *_: ExitStack())
    with ExitStack() as stack:
        entrants, absent = served.entrants_of(stack, MODEL, "bfloat16", "cuda", Path("none"), LOG)
    reasons = {row["name"]: row["error"] for row in absent}
    missing = dict.fromkeys(("vllm bfloat16", "sglang bfloat16"), "not installed")
    assert reasons == {"roseinfer bfloat16": "no GPU"} | missing
    assert len(entrants) == 1, "the engine alone"
    assert set(served.versions_of("cuda", Path("none")).values()) == {"not installed"}
