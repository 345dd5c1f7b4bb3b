"""Settings of malloc and of torch's allocator; each in a process of its own, since they last."""

import errno
import mmap
import subprocess
import sys

import pytest

from roseinfer.runtime.memory import ask_for_huge_pages

READ_BACK = """
import ctypes
from roseinfer.runtime.memory import prefer_huge_pages

prefer_huge_pages()
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(getenv(b"THP_MEM_ALLOC_ENABLE").decode())
"""

COUNT_FAULTS = """
import ctypes, resource
from roseinfer.runtime.memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults_of_a_large_temporary():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    libc.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = [faults_of_a_large_temporary() for _ in range(3)][-1]
keep_freed_memory()
after = [faults_of_a_large_temporary() for _ in range(3)][-1]
print(before, after)
"""

CODE_IN_MEMORY = """
import re
from pathlib import Path

import numpy as np
from roseinfer.runtime.memory import drop_code


def kib_of_code():
    mappings = re.split("\\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
    return sum(int(re.search("Rss: *([0-9]+)", each)[1]) for each in mappings if re.match(r"\\S+ r-xp .*/", each))


matrix = np.array([[2.0, 1.0], [1.0, 3.0]])
solved = np.linalg.solve(matrix, matrix)
before = kib_of_code()
drop_code()
print(before, kib_of_code())
assert (np.linalg.solve(matrix, matrix) == solved).all()
"""


def output_of(script: str, env: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(("given", "expected"), [({}, "1"), ({"THP_MEM_ALLOC_ENABLE": "0"}, "0")])
def test_huge_pages_are_asked_for_unless_the_user_said_otherwise(given: dict[str, str], expected: str) -> None:
    assert output_of(READ_BACK, given) == expected


def test_a_temporary_of_a_step_is_cleared_by_the_system_once() -> None:
    before, after = map(int, output_of(COUNT_FAULTS, {}).split())
    assert before > 10
    assert after == 0


def test_code_that_ran_once_takes_no_memory_and_can_run_again() -> None:
    before, after = map(int, output_of(CODE_IN_MEMORY, {}).split())
    assert after < before / 2


class WithoutHugePages(mmap.mmap):
    """As under a kernel that was built without them."""

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_a_kernel_without_huge_pages_gives_ordinary_ones() -> None:
    ask_for_huge_pages(WithoutHugePages(-1, mmap.PAGESIZE))
