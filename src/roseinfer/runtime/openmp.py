"""Tunes how long threads of an OpenMP team wait for work before they sleep. Imports no torch, which brings OpenMP."""

import ctypes
import sys

# Rounds of waiting, 40 to 140 cycles each on x86: longer than a step's own pauses, shorter than the host's part of it.
_NUM_ROUNDS = b"10000"


def prefer_short_waits() -> None:
    """Have GNU's OpenMP let a thread sleep some 100 microseconds after its last work, unless the user says otherwise.

    By default it waits for milliseconds, all that lies between two steps, on a core that a front end needs to send the
    step's tokens. OpenMP reads the variable when it is loaded; it is set past Python's copy of the environment.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    if libc.getenv(b"OMP_WAIT_POLICY") is None:
        libc.setenv(b"GOMP_SPINCOUNT", _NUM_ROUNDS, 0)  # 0: a value that is there stays
