"""What can be wrong at the start is told in one line that names it, with exit code 2 and no traceback."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import roseinfer

pytestmark = pytest.mark.e2e
DEMO = Path(roseinfer.__file__).parent / "demo"


def run(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "roseinfer", *arguments]
    return subprocess.run(command, input=stdin, text=True, capture_output=True, timeout=60, check=False)


def assert_one_line(result: "subprocess.CompletedProcess[str]", *words: str) -> None:
    *progress, line = result.stderr.splitlines()  # loading that takes more than a second says so
    assert result.returncode == 2, result.stderr
    assert line.startswith("roseinfer: ")
    assert all(word in line for word in words), line
    assert not any(word in told for told in progress for word in ("Traceback", "rror"))


def test_a_bad_flag() -> None:
    assert_one_line(run("serve", "--port", "eighty"), "--port")
    assert_one_line(run("serve", "--prot", "80"), "--prot")
    assert_one_line(run("serve", "--scheduler.max-num-seqs", "0"), "max_num_seqs", ">= 1")


def test_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert_one_line(run("serve", "--port", str(taken.getsockname()[1]), "--ops-port", "0"), "server.port")


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    assert_one_line(run("serve", "--model", str(tmp_path / "none"), "--port", "0", "--ops-port", "0"), "model.path")
    assert_one_line(run("generate", "x", "--model", str(tmp_path)), "model.path", "config.json")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_serves_ends_it_as_later(number: signal.Signals, tmp_path: Path) -> None:
    """The configuration is a pipe, so the signal comes while it is read."""
    config = tmp_path / "config.yaml"
    os.mkfifo(config)
    command = [sys.executable, "-m", "roseinfer", "serve", "--config", str(config)]
    with subprocess.Popen(command) as server, config.open("w"):  # which is open once it reads
        server.send_signal(number)
        assert server.wait(30) == 0


def test_a_truncated_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    shutil.copytree(DEMO, checkpoint)
    weights = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert_one_line(run("generate", "x", "--model", str(checkpoint)), "model.path", "model.safetensors")


def test_generate_prints_the_same_text_each_time() -> None:
    first = run("generate", "The scheduler", "--max-tokens", "12")
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip()
    assert run("generate", "-", "--max-tokens", "12", stdin="The scheduler").stdout == first.stdout


def test_chat_answers_clears_and_leaves() -> None:
    result = run("chat", "--max-tokens", "8", stdin="Hello\n/clear\nHello\n/exit\n")
    assert result.returncode == 0, result.stderr


def test_files_in_the_current_directory_are_not_imported(tmp_path: Path) -> None:
    for name in ("safetensors", "queue", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')")
    command = [str(Path(sys.executable).parent / "roseinfer"), "generate", "x", "--max-tokens", "2"]
    result = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_a_number_that_is_none() -> None:
    assert_one_line(run("serve", "--engine.step-timeout-s", "inf"), "engine.step_timeout_s", "finite")


def test_a_folder_for_captures_that_cannot_be_written() -> None:
    assert_one_line(run("serve", "--observe.capture-dir", "/proc/none"), "observe.capture_dir", "cannot be written")


def test_a_host_that_is_no_name() -> None:
    assert_one_line(run("serve", "--host", "a..b", "--port", "0", "--ops-port", "0"), "server.host")
