"""How long a team's threads wait, in a process of its own: OpenMP reads it once."""

import os
import subprocess
import sys

import pytest

READ_BACK = """
import ctypes
from roseinfer.runtime.openmp import prefer_short_waits

prefer_short_waits()
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(getenv(b"GOMP_SPINCOUNT"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="set on Linux alone")
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "b'10000'"),
        ({"GOMP_SPINCOUNT": "7"}, "b'7'"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_what_the_user_sets_stays(given: dict[str, str], found: str) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    done = subprocess.run(
        [sys.executable, "-c", READ_BACK], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == found
