"""The programs in the quickstart that need no server, as they stand, over the embedded model."""

import ast
import re
import subprocess
import sys

import pytest

from tests.repo.test_documents import PYTHON_BLOCK
from tests.repo.tree import ROOT

pytestmark = pytest.mark.e2e

PROGRAMS = [block for block in PYTHON_BLOCK.findall((ROOT / "docs" / "quickstart.md").read_text()) if "LLM(" in block]


def printed(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_quickstart_prints_what_the_model_says(program: str) -> None:
    assert printed(program).strip()


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
