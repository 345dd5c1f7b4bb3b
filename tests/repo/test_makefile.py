"""What `make` would do, without doing it: who only wants to serve does not wait for the packages of the tests."""

import os
import re
import shutil
import subprocess

import pytest

from tests.repo.tree import ROOT

SERVING, ALL = "-e .", "-e '.[test,dev]'"


def installed_by(verb: str) -> list[str]:
    """What pip would be given to install from here, in order, if there were no .venv yet."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("there is no make")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = [make, "--always-make", "--dry-run", verb]
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    return re.findall(r"pip install .*-c constraints\.txt (.+)$", told, re.MULTILINE)


@pytest.mark.parametrize("verb", ["serve", "bench-streaming"])
def test_to_serve_nothing_is_installed_for_tests(verb: str) -> None:
    assert installed_by(verb) == [SERVING]


@pytest.mark.parametrize("verb", ["setup", "test", "loadtest"])
def test_other_verbs_add_to_what_serving_needs(verb: str) -> None:
    assert installed_by(verb) == [SERVING, ALL]
