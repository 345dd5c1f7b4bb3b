"""What `roseinfer bench` prints, line by line. For tests of its commands."""

import shlex

import pytest

from roseinfer.cli.main import main


def report_of(capsys: pytest.CaptureFixture[str], command: str) -> list[str]:
    assert main(["bench", *shlex.split(command)]) == 0
    return capsys.readouterr().out.splitlines()


def value(lines: list[str], name: str) -> str:
    [found] = [line.removeprefix(f"{name}: ") for line in lines if line.startswith(f"{name}: ")]
    return found
