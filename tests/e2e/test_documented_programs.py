"""The programs in the quickstart, as they stand, over the embedded model; clients ask the server of the tests."""

import ast
import re
import subprocess
import sys

import pytest

from tests.conftest import require_path
from tests.e2e.server import Server
from tests.e2e.test_sdks import CLIENTS_PYTHON
from tests.repo.test_documents import PYTHON_BLOCK
from tests.repo.tree import ROOT

pytestmark = pytest.mark.e2e

BLOCKS = PYTHON_BLOCK.findall((ROOT / "docs" / "quickstart.md").read_text())
PROGRAMS = [block for block in BLOCKS if "LLM(" in block]
CLIENTS = [block for block in BLOCKS if "http://localhost:8000" in block]


def printed(program: str, python: str = sys.executable) -> str:
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_quickstart_prints_what_the_model_says(program: str) -> None:
    assert printed(program).strip()


@pytest.mark.parametrize("program", CLIENTS, ids=range(len(CLIENTS)))
def test_a_client_of_the_quickstart_prints_what_the_server_answers(program: str, server: Server) -> None:
    python = str(require_path(CLIENTS_PYTHON))
    assert printed(program.replace("http://localhost:8000", server.url), python).strip()


def test_the_quickstart_shows_how_to_read_log_probabilities() -> None:
    [program] = [program for program in PROGRAMS if "num_logprobs" in program]
    lines = printed(program).splitlines()
    assert 1 <= len(lines) <= 8, "it may end by itself"
    for line in lines:
        found = re.fullmatch(
            r"""(?P<token>['"].*['"]): (?P<logprob>-?\d+\.\d\d), rank (?P<rank>\d+); likeliest (.+)""", line
        )
        assert found is not None, line
        assert float(found["logprob"]) <= 0
        assert len(ast.literal_eval(found[4])) == 3
        assert (found["token"] in found[4]) or int(found["rank"]) > 3, line
