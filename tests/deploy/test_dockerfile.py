"""The Dockerfile read without a build: what it installs on other bases, the driver it asks for, where it listens."""

import re
import subprocess
from pathlib import Path

import pytest

from roseinfer.config.sources import build, gather
from tests.repo.tree import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
STUB = """#!/bin/sh
echo "$(basename "$0") $*" >> {record}
"""


def last_stage_command() -> str:
    """The shell command of the first RUN of the image that is kept."""
    found = re.search(r"^RUN ((?:.*\\\n)*.*)\n", TEXT.rpartition("\nFROM ")[2], re.MULTILINE)
    assert found
    return found[1].replace("\\\n", "")


@pytest.mark.parametrize(
    ("device", "has_compiler", "has_headers", "packages"),
    [
        ("cuda", False, True, "gcc libc6-dev"),  # the official image of Python
        ("cuda", True, False, "python3-dev"),  # a development image of CUDA on a distribution
        ("cuda", False, False, "gcc libc6-dev python3-dev"),  # a distribution as it is
        ("cuda", True, True, ""),
        ("cpu", False, False, ""),
    ],
)
def test_triton_finds_a_compiler_and_pythons_headers(
    tmp_path: Path, device: str, has_compiler: bool, has_headers: bool, packages: str
) -> None:
    programs, headers, record = tmp_path / "bin", tmp_path / "include", tmp_path / "record"
    programs.mkdir()
    headers.mkdir()
    if has_headers:
        (headers / "Python.h").touch()
    for name in ("apt-get", "groupadd", "useradd", "install", "rm", *["gcc"] * has_compiler):
        (programs / name).write_text(STUB.format(record=record))
    (programs / "python3").write_text(f"#!/bin/sh\necho {headers}\n")
    (programs / "basename").symlink_to("/usr/bin/basename")
    for program in programs.iterdir():
        program.chmod(0o755)
    environment = {"PATH": str(programs), "DEVICE": device}
    subprocess.run(["/bin/sh", "-ec", last_stage_command()], env=environment, cwd=tmp_path, check=True)
    done = record.read_text()
    assert "useradd --uid 10001" in done
    installed = re.findall(r"^apt-get install -y --no-install-recommends (.*)$", done, re.MULTILINE)
    assert installed == ([packages] if packages else [])


def test_a_driver_is_asked_for_that_serves_torchs_cuda() -> None:
    """An older one would fail at the first kernel; with the variable the node refuses the container and says why."""
    (needed,) = re.findall(r'^ARG REQUIRE_CUDA="cuda>=([\d.]+)"$', TEXT, re.MULTILINE)
    assert "\nENV NVIDIA_REQUIRE_CUDA=${REQUIRE_CUDA}\n" in TEXT.rpartition("\nFROM ")[2]
    page = (ROOT / "docs" / "container.md").read_text()
    assert f"`cuda>={needed}`" in page
    assert re.search(rf"CUDA {re.escape(needed)} of torch (\S+) needs driver (\d+) or newer", page)
    (pinned,) = re.findall(r"(?m)^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text())
    assert f"of torch {pinned} needs" in page, "another torch has another CUDA: look it up"


def test_the_server_listens_on_the_addresses_of_both_families() -> None:
    """0.0.0.0 has none of IPv6, and :: none of IPv4."""
    variables = dict(re.findall(r'(ROSEINFER_\w+)="?([^\s"]*)', TEXT))
    server = build(gather({}, variables, None)).config.server
    assert (server.host, server.ops_host) == ("", "")
